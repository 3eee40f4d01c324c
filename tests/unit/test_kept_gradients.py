# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Whether a device is taken to have the memory for gradients between micro-batches."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from accelerate_lshdp.engine.stores.streamed.kept_gradients import MARGIN, KeptGradients


DEVICE = torch.device("meta")
GRADIENTS = 400  # bytes


class Memory:
    """The memory of a device, as its module tells of it."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self.total, self.fraction = 10_000, 1.0

    def use(self, at_most: int, then: int) -> None:
        self.peak, self.now = max(self.peak, at_most), then

    def module(self) -> SimpleNamespace:
        return SimpleNamespace(
            max_memory_allocated=lambda device: self.peak,
            memory_allocated=lambda device: self.now,
            memory_reserved=lambda device: 0,
            mem_get_info=lambda device: (self.total, self.total),
            get_per_process_memory_fraction=lambda device: self.fraction,
        )


@pytest.fixture
def memory() -> Iterator[Memory]:
    used = Memory()
    nobody = mock.patch("accelerate_lshdp.engine.stores.streamed.kept_gradients._everyone", weakref.WeakSet())
    with nobody, mock.patch("torch.get_device_module", lambda device: used.module()):
        yield used


def of_model() -> KeptGradients:
    return KeptGradients([torch.nn.Parameter(torch.zeros(GRADIENTS // 4))], DEVICE, arriving=None)


def keep(kept: KeptGradients) -> None:
    kept.keep(0, torch.zeros(GRADIENTS // 4))


def room_for(memory: Memory, size: int) -> None:
    """Gives the device just enough for so many bytes."""
    memory.total = math.ceil(size / (1 - MARGIN))


def test_what_was_in_use_is_left_for_the_next_time(memory: Memory) -> None:
    kept = of_model()
    memory.use(1000, then=100)
    kept.look()
    room_for(memory, 1000 + GRADIENTS)
    assert kept.fit()
    room_for(memory, 999 + GRADIENTS)
    assert not kept.fit()


def test_sums_that_were_kept_count_once(memory: Memory) -> None:
    kept = of_model()
    memory.use(1000, then=100)
    kept.look()
    keep(kept)
    kept.look()
    memory.use(1000 + GRADIENTS, then=100 + GRADIENTS)
    kept.look()
    room_for(memory, 1000 + GRADIENTS)
    assert kept.fit()


def test_a_peak_without_sums_counts_whole_although_they_were_kept_at_other_times(memory: Memory) -> None:
    kept = of_model()
    memory.use(1000, then=100)
    kept.look()
    keep(kept)
    kept.look()
    kept.drop()
    kept.look()
    memory.use(1000 + GRADIENTS, then=100)  # the first micro-batch of a step, which is a larger one
    kept.look()
    room_for(memory, 1000 + GRADIENTS)
    assert not kept.fit()


def test_a_script_may_begin_a_new_peak(memory: Memory) -> None:
    kept = of_model()
    memory.use(1000, then=100)
    kept.look()
    memory.peak = memory.now
    kept.look()
    room_for(memory, 999 + GRADIENTS)
    assert not kept.fit()


def test_models_on_one_device_share_its_memory(memory: Memory) -> None:
    one, other = of_model(), of_model()
    room_for(memory, 2 * GRADIENTS - 1)
    assert one.fit() and not other.fit()
    one.give_up()
    assert other.fit() and not one.fit()


def test_the_share_of_a_process_is_kept(memory: Memory) -> None:
    kept = of_model()
    room_for(memory, GRADIENTS)
    assert kept.fit()
    memory.fraction = 0.5
    assert not kept.fit()


def test_a_device_that_tells_nothing_keeps_nothing() -> None:
    with mock.patch("torch.get_device_module", lambda device: SimpleNamespace()):
        kept = of_model()
        kept.look()
        assert not kept.fit()
