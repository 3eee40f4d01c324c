# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What computing adds to messages is measured where they travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from accelerate_lshdp.benchmarking import message_delay


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


def test_it_is_what_each_message_takes_longer(workers: Any) -> None:
    for found, sizes, computed in workers(4).run(measured_with, 0.25, 1.05, timeout=60):
        assert found == (1.05 - 0.25) / (2 * message_delay._BUCKETS)  # two messages an all-reduce of two ranks
        assert set(sizes) == {2} and computed == [False, True] * (len(computed) // 2)
    assert [found for found, *_ in workers(4).run(measured_with, 0.5, 0.4, timeout=60)] == [0.0] * 4
