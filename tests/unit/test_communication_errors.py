# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Failed collectives are explained, other errors left alone; every group waits as long as the user allowed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from accelerate_lshdp.runtime.failures import CommunicationError, failures_explained, follows_another
from accelerate_lshdp.runtime.groups import ProcessGroups, new_group, world_timeout
from accelerate_lshdp.runtime.wait_clock import WaitClock


@pytest.fixture
def impatient_world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=7))
    yield
    dist.destroy_process_group()


def test_all_groups_have_the_time_out_of_the_world(impatient_world: None) -> None:
    def timeout_of(group: dist.ProcessGroup) -> timedelta:
        return group._get_backend(group._device_types[0]).options._timeout

    assert world_timeout() == timedelta(seconds=7)
    groups = [new_group(), new_group([0]), new_group(backend="gloo"), ProcessGroups().of_partition([[0]], 0)]
    assert [timeout_of(group) for group in groups] == [timedelta(seconds=7)] * 4
    # Why `new_group` exists: if this fails, torch has come to do it by itself.
    assert timeout_of(dist.new_group([0])) == timedelta(minutes=30)


@pytest.mark.parametrize(
    ("text", "explained"),
    [
        (
            "Read error [10.0.0.2]:17121: Connection reset by peer",
            "connection to another rank was lost",
        ),
        ("[pair.cc:553] Connection closed by peer [10.0.0.2]:40633.", "connection to another rank was lost"),
        ("writev [10.0.0.2]:1: Broken pipe", "connection to another rank was lost"),
        ("Read error [10.0.0.2]:17121: No route to host", "another node cannot be reached"),
        (
            "Timed out waiting 6000ms for recv operation",
            "did not answer in time: .*InitProcessGroupKwargs",
        ),
        ("Application timeout caused pair closure", "did not answer in time"),
    ],
)
def test_failed_collectives_are_explained(text: str, explained: str) -> None:
    with pytest.raises(CommunicationError, match=explained) as caught, WaitClock().waiting():
        raise RuntimeError(text)
    assert text in str(caught.value) and str(caught.value.__cause__) == text
    with pytest.raises(CommunicationError) as again, failures_explained():
        raise caught.value
    assert again.value is caught.value  # once is enough


class OwnError(RuntimeError):
    pass


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), OwnError("timed out"), ValueError("timed out")], ids=repr
)
def test_other_errors_are_left_alone(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, failures_explained():
        raise error
    assert caught.value is error


def raised(raises: Callable[[], None]) -> BaseException:
    with pytest.raises(RuntimeError) as caught:
        raises()
    return caught.value


def test_failures_that_follow_from_a_lost_rank_are_known() -> None:
    def of_a_script() -> None:
        try:
            raise CommunicationError("lost")
        except CommunicationError:
            raise RuntimeError("could not log this step")  # noqa: B904

    def unexplained() -> None:
        raise RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")

    def own() -> None:
        raise RuntimeError("the connection to the tracker timed out")

    assert follows_another(CommunicationError("lost"))
    assert follows_another(raised(of_a_script)) and follows_another(raised(unexplained))
    assert not follows_another(raised(own))
    circle = ValueError("first")
    circle.__cause__ = ValueError("second")
    circle.__cause__.__cause__ = circle
    assert not follows_another(circle)
