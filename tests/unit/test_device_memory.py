# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The largest micro-batch that should fit a device, from what was in use."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerate_lshdp.accelerator.device_memory import USABLE, DeviceMemory, MemoryReading


CUDA = torch.device("cuda", 0)


def test_a_cpu_has_no_known_limit() -> None:
    assert DeviceMemory(torch.device("cpu")).largest_micro_batch(8) == 0


def test_nothing_trained_says_nothing() -> None:
    assert DeviceMemory(CUDA, lambda: MemoryReading(100, 50, 10)).largest_micro_batch(0) == 0


@given(
    total=st.integers(10_000, 10**9),
    resident=st.floats(0, 0.8),
    per_sample=st.integers(1, 1000),
    trained=st.integers(1, 8),
)
def test_what_it_says_fits(total: int, resident: float, per_sample: int, trained: int) -> None:
    now = int(resident * total)
    memory = DeviceMemory(CUDA, lambda: MemoryReading(total, now + per_sample * trained, now))
    largest = memory.largest_micro_batch(trained)
    assert largest >= trained
    if largest > trained:
        assert now + largest * per_sample <= USABLE * total
        assert now + (largest + 2) * per_sample > USABLE * total


def test_a_smaller_batch_later_does_not_look_hungrier() -> None:
    """The peak is that of the largest batch since the start, so it is divided by that."""
    memory = DeviceMemory(CUDA, lambda: MemoryReading(total=1000, peak=400, now=100))
    first = memory.largest_micro_batch(10)
    assert memory.largest_micro_batch(2) == first == pytest.approx((USABLE * 1000 - 100) / 30, abs=1)


def test_a_peak_that_the_script_resets_is_not_forgotten() -> None:
    """Scripts that log the peak of each step reset it: then it is that of a smaller batch than the largest."""
    readings = iter([MemoryReading(total=1000, peak=400, now=100), MemoryReading(total=1000, peak=160, now=100)])
    memory = DeviceMemory(CUDA, lambda: next(readings))
    first = memory.largest_micro_batch(10)
    assert memory.largest_micro_batch(2) == first
