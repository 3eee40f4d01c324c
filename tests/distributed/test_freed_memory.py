# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What was trained and is no longer needed goes: a second training in a process finds the memory of the first."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.utils.data import DataLoader
from training_cases import CASES, collate, make_optimizer

from accelerate_lshdp import LSHDPAccelerator, Plan


def tensor_bytes() -> int:
    """Of all tensors that Python can reach."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if isinstance(found, torch.Tensor) and found.device.type == "cpu"]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def train_and_drop(strategy: str, dtype: str, sizes: tuple[int, ...]) -> tuple[int, int, int]:
    """Bytes of tensors before a training, in it and after it."""
    case = CASES["vit"]
    before = tensor_bytes()
    plan = Plan.from_batch_sizes(sizes, strategy=strategy, communication_dtype=dtype)
    accelerator = LSHDPAccelerator(plan=plan)
    model = case.model()
    optimizer = make_optimizer(model, 1e-3, 0.0)
    loader = DataLoader(case.dataset(2 * plan.total_batch_size, torch.float32), batch_size=2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(case.loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    del batch
    trained = tensor_bytes()
    accelerator.free_memory()
    del accelerator, model, optimizer, loader
    return before, trained, tensor_bytes()


@pytest.mark.parametrize(
    ("strategy", "dtype", "nodes"),
    [
        ("ddp", "fp32", (1, 1)),
        ("ddp", "int8", (1, 1)),
        ("ddp", "fp32", (2,)),
        ("lsdp", "fp32", (2,)),
        ("lsdp", "powersgd", (1, 1)),
        ("fsdp", "fp32", (1, 1)),
        ("zero2", "fp32", (1, 1)),
    ],
)
def test_a_training_that_is_dropped_leaves_no_tensors(workers, strategy, dtype, nodes):
    for before, trained, after in workers(2).run(train_and_drop, strategy, dtype, (2, 3), nodes=nodes):
        assert trained > before + 10_000  # else it would show nothing
        assert after <= before + 0.02 * (trained - before)
