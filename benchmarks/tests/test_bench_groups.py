# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What is measured before training leaves no process groups behind, whose threads would disturb what follows."""

from __future__ import annotations

import pytest
import torch
from laboratory.formats import measure_format
from laboratory.message_delay import message_delay_seconds
from laboratory.overheads import inside_seconds_per_byte
from torch.distributed.distributed_c10d import _world

from accelerate_lshdp.engine.wire.reduction import TimedAllGather, TimedReduceScatter
from accelerate_lshdp.runtime.wait_clock import WaitClock


def count_groups(what: str) -> tuple[int, int]:
    """Groups before and after something is measured."""
    before = len(_world.pg_map)
    if what == "delay":
        message_delay_seconds(1000, [(0, 1, 2)])
    elif what == "inside":
        clock = WaitClock()
        inside_seconds_per_byte(1000, [(0, 1), (2,)], TimedAllGather(clock), TimedReduceScatter(clock))
    else:
        measure_format(what, [torch.Size((64, 64))])
    return before, len(_world.pg_map)


@pytest.mark.parametrize("what", [pytest.param("delay", marks=pytest.mark.slow), "inside", "fp32", "int8", "powersgd"])
def test_measuring_leaves_no_groups(workers, what):
    for before, after in workers(3).run(count_groups, what):
        assert after == before
