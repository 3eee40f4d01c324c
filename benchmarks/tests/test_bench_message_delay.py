# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What computing adds to messages is measured where they travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from laboratory import message_delay


def measured_with(alone: float, beside: float) -> tuple[float, list[int], list[bool]]:
    """With exchanges that take so long as they say; also the sizes of their groups, and which ones computed."""
    sizes, computed, seconds = [], [], message_delay._seconds

    def pretended(buffers: Sequence[torch.Tensor], group: dist.ProcessGroup, *, computes: bool) -> float:
        assert seconds(buffers, group, computes=computes) > 0
        sizes.append(group.size())
        computed.append(computes)
        return beside if computes else alone

    message_delay._seconds = pretended
    try:
        return message_delay.message_delay_seconds(4096, [(0, 2), (1, 3)]), sizes, computed
    finally:
        message_delay._seconds = seconds


@pytest.mark.slow
def test_it_is_what_each_message_takes_longer(workers: Any) -> None:
    for found, sizes, computed in workers(4).run(measured_with, 0.25, 1.05, timeout=60):
        assert found == (1.05 - 0.25) / (2 * message_delay._BUCKETS)  # two messages an all-reduce of two ranks
        assert set(sizes) == {2} and computed == [False, True] * (len(computed) // 2)
    assert [found for found, *_ in workers(4).run(measured_with, 0.5, 0.4, timeout=60)] == [0.0] * 4


@pytest.mark.parametrize("computes", [False, True])
def test_two_messages_are_on_their_way_and_are_looked_at_between_computations(
    computes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    class Work:
        def __init__(self, name: str) -> None:
            self.name, self.looks = name, 0

        def is_completed(self) -> bool:
            self.looks += 1
            events.append("look")
            return self.looks > 2

        def wait(self) -> None:
            events.append(f"end {self.name}")

    def start(buffer: torch.Tensor, **options: Any) -> Work:
        events.append(f"begin {int(buffer)}")
        return Work(str(int(buffer)))

    monkeypatch.setattr(message_delay.dist, "all_reduce", start)
    monkeypatch.setattr(message_delay.dist, "barrier", lambda: None)
    message_delay._seconds([torch.tensor(float(place)) for place in range(3)], None, computes=computes)
    begun_and_ended = [event for event in events if event != "look"]
    assert begun_and_ended[:5] == ["begin 0", "begin 1", "end 0", "begin 2", "end 0"]
    assert events.count("look") == (3 + 1 + 3 + 3 if computes else 0)
