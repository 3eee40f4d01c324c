# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""CPU ranks look at the C library's heap as gradients come, and before each unit that is gathered."""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils.data import DataLoader
from training_cases import CASES, collate, make_optimizer

from accelerate_lshdp import LSHDPAccelerator, Plan
from accelerate_lshdp.engine.prepared import PreparedModel
from accelerate_lshdp.runtime.heap_bound import HeapBound


def count_looks(strategy: str, tuned: bool) -> tuple[int, int, int] | None:
    """Looks in a forward and in a backward, and the number of parameters; None if nothing looks."""
    if tuned:
        os.environ["MALLOC_TRIM_THRESHOLD_"] = "131072"
    try:
        case = CASES["vit"]
        accelerator = LSHDPAccelerator(plan=Plan.from_batch_sizes((2, 3), strategy=strategy))
        model = case.model()
        optimizer = make_optimizer(model, 1e-3, 0.0)
        loader = DataLoader(case.dataset(5, torch.float32), batch_size=5, collate_fn=collate)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    finally:
        os.environ.pop("MALLOC_TRIM_THRESHOLD_", None)
    heap = PreparedModel.of(model).state.heap
    if heap is None:
        return None
    looks = []
    heap.check = lambda: looks.append(None)
    try:
        loss = case.loss(model, next(iter(loader)))
        in_forward = len(looks)
        accelerator.backward(loss)
        optimizer.step()
        return in_forward, len(looks) - in_forward, len(list(model.parameters()))
    finally:
        del heap.check
        accelerator.free_memory()


@pytest.mark.skipif(not HeapBound.is_possible(), reason="only the heap of glibc, from 2.33 on, is bounded")
@pytest.mark.parametrize("strategy", ["ddp", "lsdp", "fsdp"])
def test_gradients_and_gathered_units_are_looked_at(workers, strategy):
    for in_forward, in_backward, parameters in workers(2).run(count_looks, strategy, False, nodes=(1, 1)):
        assert in_backward >= parameters
        assert (in_forward > 1) is (strategy == "fsdp")


def test_a_tuned_c_library_is_left_alone(workers):
    assert workers(2).run(count_looks, "ddp", True, nodes=(1, 1)) == [None, None]
