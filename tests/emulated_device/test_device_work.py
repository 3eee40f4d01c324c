# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Copies, events and operators of the emulated device: what they give and count, and what the host waits for."""

from __future__ import annotations

from collections.abc import Callable

import pytest


pytestmark = [
    pytest.mark.compiler,
    pytest.mark.slow,
    pytest.mark.timeout(300),  # the first test builds the device
]

OnDevice = Callable[..., list]
RATE = 5 * 2**20  # so that a copy of 1 MiB takes 0.2 s


@pytest.mark.parametrize(
    ("directions", "seconds"),
    [
        (("to device",), 0.2),
        (("to host", "to host"), 0.4),
        (("to device", "to device"), 0.4),
        (("to device", "to host"), 0.2),
    ],
    ids=["one", "two to host", "two to device", "one each way"],
)
def test_each_direction_has_a_copy_engine(on_device: OnDevice, directions: tuple, seconds: float) -> None:
    (found,) = on_device("device_programs", "seconds_of_copies", directions, RATE)
    assert seconds <= found < seconds + 0.19


def test_counts_of_copies(on_device: OnDevice) -> None:
    (counts,) = on_device("device_programs", "counted_copies")
    assert counts["to_device_bytes"] == 2000
    assert counts["to_host_bytes"] == 1000
    assert counts["pageable_copies"] == 2
    assert counts["items"] == 1
    # Two pageable copies, one item, and the wait at the end.
    assert counts["host_synchronisations"] == 4


def test_copies_of_other_layouts(on_device: OnDevice) -> None:
    assert on_device("device_programs", "copies_of_other_layouts") == [True]


def test_targets_of_copies_hold_no_numbers(on_device: OnDevice) -> None:
    assert on_device("device_programs", "values_under_way") == [(True, True)]


def test_events(on_device: OnDevice) -> None:
    (found,) = on_device("device_programs", "event_times")
    assert found["before"] == (False, False)
    assert found["after"] == (True, True)
    assert 100 <= found["ms"] < 200


def test_host_is_ahead_of_the_device(on_device: OnDevice) -> None:
    (seconds,) = on_device("device_programs", "host_is_ahead")
    assert seconds < 0.2


def test_error_of_a_kernel_is_raised_where_the_host_waits(on_device: OnDevice) -> None:
    (message,) = on_device("device_programs", "error_of_a_kernel")
    assert "work on a stream of the emulated device has failed" in message
    assert "index out of range" in message


def test_what_is_wrong_at_once_is_refused_at_once(on_device: OnDevice) -> None:
    (messages,) = on_device("device_programs", "refusals")
    assert "must match the size" in messages[0]
    assert "Expected all tensors to be on the same device" in messages[1]
    assert "must match the size" in messages[2]


def test_the_host_waits_for_unknown_shapes(on_device: OnDevice) -> None:
    assert on_device("device_programs", "unknown_shapes") == [([1, 3], {"aten::nonzero": 1}, 1)]


@pytest.mark.parametrize("is_slow", [False, True], ids=["fast", "slow"])
def test_training_is_that_of_the_cpu(on_device: OnDevice, is_slow: bool) -> None:
    (result,) = on_device("device_programs", "training", is_slow)
    difference, races, waited = result
    assert difference < 1e-5
    assert races == []
    assert waited == {}


def test_random_numbers_follow_the_seed(on_device: OnDevice) -> None:
    assert on_device("device_programs", "random_numbers") == [True]


def test_data_of_a_parameter_moves_it(on_device: OnDevice) -> None:
    assert on_device("device_programs", "moved_parameter") == ["emulated:0 emulated:0 6.0"]


def test_autocast(on_device: OnDevice) -> None:
    assert on_device("device_programs", "autocast_results") == [("torch.bfloat16", "torch.float32", 0.0)]
