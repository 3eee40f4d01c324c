# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Which micro-batches a rank measures, on ranks whose memory and speed are formulas; and what memory there is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerate_lshdp.profiling.memory import ResidentMeter, free_in_control_group
from accelerate_lshdp.profiling.probing import (
    MEMORY_MARGIN,
    NothingFits,
    OutOfMemory,
    SearchLimits,
    SizeSearch,
    Trial,
    find_sizes,
    probe_sizes,
    with_margin,
)


@pytest.mark.parametrize(
    ("largest", "sizes"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8]), (63, [1, 2, 4, 8, 16, 32, 63])]
)
def test_sizes_to_probe(largest: int, sizes: list[int]) -> None:
    assert probe_sizes(largest) == sizes


def test_no_size_to_probe() -> None:
    with pytest.raises(ValueError, match="found a largest micro-batch of 0"):
        probe_sizes(0)


class Rank:
    """Time and memory are functions of the micro-batch; above ``capacity`` samples the device is out of memory."""

    def __init__(
        self,
        *,
        seconds: Callable[[int], float] = lambda size: 0.001 * size,
        memory: Callable[[int], int] = lambda size: 1000 + 100 * size,
        capacity: int = 10**9,
        samples: int = 10**9,
        budget: float = 1e9,
        **limits: Any,
    ) -> None:
        self.seconds, self.memory, self.capacity, self.samples = seconds, memory, capacity, samples
        self.budget = budget
        self.tried: list[int] = []
        self.limits = SearchLimits(
            lambda wanted: min(wanted, samples), lambda: self.budget, base_bytes=memory(0), **limits
        )

    def attempt(self, size: int) -> Trial:
        self.tried.append(size)
        self.budget -= 2 * self.seconds(size)
        if size > self.capacity:
            raise OutOfMemory
        return Trial(self.seconds(size), self.memory(size))

    def find(self) -> SizeSearch:
        return find_sizes(self.attempt, self.limits)


def test_sizes_double_up_to_what_was_asked_for() -> None:
    rank = Rank(max_batch=100)
    found = rank.find()
    assert rank.tried == [1, 2, 4, 8, 16, 32, 64, 100] == list(found.trials)
    assert found.limited_by == "request"
    assert found.trials[64] == Trial(0.064, 7400)


def test_the_data_may_end_first() -> None:
    found = Rank(max_batch=100, samples=13).find()
    assert list(found.trials) == [1, 2, 4, 8, 13] and found.limited_by == "data"
    assert list(Rank(samples=1).find().trials) == [1]
    with pytest.raises(NothingFits, match="no sample in the data set"):
        Rank(samples=0).find()


@pytest.mark.parametrize("capacity", [1, 2, 3, 7, 8, 100, 1000])
def test_running_out_of_memory_is_no_failure(capacity: int) -> None:
    """Without a limit in bytes, as the memory of a device may be cut up."""
    rank = Rank(capacity=capacity)
    found = rank.find()
    largest = max(found.trials)
    assert found.limited_by == "memory"
    assert capacity * (1 - 1 / 16) <= largest <= capacity
    assert list(found.trials) == [2**power for power in range(20) if 2**power < largest] + [largest]


def test_one_sample_that_does_not_fit_is_a_failure() -> None:
    with pytest.raises(NothingFits, match="one sample does not fit the memory"):
        Rank(capacity=0).find()
    with pytest.raises(NothingFits, match="needs 1155 bytes .5% margin included., but the memory limit is 1150"):
        Rank(memory_bytes=1150).find()


@settings(deadline=None, max_examples=300)
@given(
    fixed=st.integers(1, 10**6),
    each=st.integers(0, 10**5),
    limit=st.integers(1, 10**8),
    max_batch=st.integers(1, 5000),
)
def test_a_memory_limit_is_kept_in_every_trial(fixed: int, each: int, limit: int, max_batch: int) -> None:
    rank = Rank(memory=lambda size: fixed + each * size, memory_bytes=limit, max_batch=max_batch)
    if with_margin(fixed + each) > limit:
        with pytest.raises(NothingFits):
            rank.find()
        return
    found = rank.find()
    # Not one micro-batch was tried that would have exceeded the limit.
    assert all(with_margin(fixed + each * size) <= limit for size in rank.tried)
    # And what fits is found, but for the last steps that are not worth their time.
    fitting = max_batch if each == 0 else min(max_batch, int((limit / (1 + MEMORY_MARGIN) - fixed) / each))
    assert max(found.trials) >= fitting * (1 - 1 / 16) - 1
    assert found.limited_by == "request" if max(found.trials) == max_batch else found.limited_by == "memory"


def test_memory_that_grows_faster_than_before_is_caught() -> None:
    """Above 20 samples a second buffer is needed: the prediction is wrong, and the limit is kept all the same."""
    rank = Rank(memory=lambda size: 1000 + 100 * size + (4000 if size > 20 else 0), memory_bytes=7000)
    found = rank.find()
    assert 32 in rank.tried and max(found.trials) <= 20 and found.limited_by == "memory"
    assert 16 <= max(found.trials)


def test_sizes_end_where_measuring_them_would_take_too_long() -> None:
    # Trials are two micro-batches, then every size is measured three times; 0.25 s a sample as on a third of a core.
    rank = Rank(seconds=lambda size: 0.25 * size, budget=42.0)
    found = rank.find()
    assert found.limited_by == "time"
    spent = 2 * sum(0.25 * size for size in rank.tried) + 3 * sum(0.25 * size for size in found.trials)
    assert 42.0 * 0.8 < spent <= 42.0
    assert list(found.trials)[:5] == [1, 2, 4, 8, 16]


def test_a_size_that_is_needed_is_measured_whatever_time_that_takes() -> None:
    """Memory and the data limit it all the same."""
    rank = Rank(seconds=lambda size: 0.25 * size, budget=1.0, needed_batch=12)
    found = rank.find()
    assert list(found.trials) == [1, 2, 4, 8, 12] and found.limited_by == "time"
    assert max(Rank(seconds=lambda size: 0.25 * size, budget=1.0).find().trials) < 4
    # Also where it is hardly more than the size before.
    assert list(Rank(seconds=lambda size: 0.25 * size, budget=1.0, needed_batch=33).find().trials)[-2:] == [32, 33]
    assert max(Rank(samples=10, budget=1.0, needed_batch=12).find().trials) == 10
    assert max(Rank(memory_bytes=2000, budget=1.0, needed_batch=12).find().trials) == 9
    assert max(Rank(max_batch=6, budget=1.0, needed_batch=12).find().trials) == 6


def test_short_micro_batches_are_counted_with_what_a_measurement_lasts() -> None:
    found = Rank(seconds=lambda size: 1e-6, budget=3 * 0.25 * 4.5).find()
    assert list(found.trials) == [1, 2, 4, 8] and found.limited_by == "time"


def test_one_sample_is_measured_however_long_it_takes() -> None:
    found = Rank(seconds=lambda size: 100.0 * size, budget=1.0).find()
    assert list(found.trials) == [1] and found.limited_by == "time"


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_the_resident_peak_sees_a_tensor_that_is_gone() -> None:
    meter = ResidentMeter()
    meter.restart()
    before = meter.peak()
    tensor = torch.ones(50_000_000)
    del tensor
    assert meter.peak() - before > 150e6
    if meter.restarts:
        meter.restart()
        assert meter.peak() - before < 50e6


def test_where_the_peak_cannot_be_restarted_it_is_that_of_the_process(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("VmHWM:\t1 kB\n")
    (tmp_path / "clear_refs").mkdir()  # cannot be written to
    meter = ResidentMeter(tmp_path)
    assert not meter.restarts
    meter.restart()
    assert meter.peak() > 50e6  # this process, with torch


def test_what_a_rank_may_use_is_its_share_of_what_is_free() -> None:
    meter = ResidentMeter()
    alone, shared = meter.default_limit(1), meter.default_limit(4)
    assert 0 < shared < alone


def test_limits_of_control_groups(tmp_path: Path) -> None:
    process, root = tmp_path / "process", tmp_path / "groups"
    for folder in (process, root / "memory" / "mine", root / "ours"):
        folder.mkdir(parents=True)
    assert free_in_control_group(root, process) is None
    (process / "cgroup").write_text("5:cpu,cpuacct:/fast\n4:memory:/mine\n0::/ours\n")
    assert free_in_control_group(root, process) is None
    (root / "memory" / "mine" / "memory.limit_in_bytes").write_text("9000\n")
    (root / "memory" / "mine" / "memory.usage_in_bytes").write_text("2000\n")
    (root / "ours" / "memory.max").write_text("max\n")
    (root / "ours" / "memory.current").write_text("7\n")
    assert free_in_control_group(root, process) == 7000
    (root / "ours" / "memory.max").write_text("5007\n")
    assert free_in_control_group(root, process) == 5000
    # Files that are only kept in memory can be dropped.
    (root / "ours" / "memory.stat").write_text("anon 1\ninactive_file 300\n")
    assert free_in_control_group(root, process) == 5300


def test_limits_of_groups_around_the_own_one(tmp_path: Path) -> None:
    """As of a slice of systemd, or a pod: its limit holds for all groups inside it."""
    root, process = tmp_path / "sys", tmp_path / "proc"
    slice_, own = root / "user.slice", root / "user.slice" / "session.scope"
    own.mkdir(parents=True)
    process.mkdir()
    (process / "cgroup").write_text("0::/user.slice/session.scope\n")
    (own / "memory.max").write_text("max\n")
    (slice_ / "memory.max").write_text("9000\n")
    (slice_ / "memory.current").write_text("2000\n")
    assert free_in_control_group(root, process) == 7000
    (own / "memory.max").write_text("3000\n")
    (own / "memory.current").write_text("1000\n")
    assert free_in_control_group(root, process) == 2000
