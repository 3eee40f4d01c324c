# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Forwards that no backward follows leave nothing behind, as without this package: some evaluations forget no_grad."""

from __future__ import annotations

import gc
import weakref

import torch
from test_loss_finding import collate, make_tagger, tagged_rows
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import DataLoader

from accelerate_lshdp import LSHDPAccelerator, Plan


class _Saved:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()  # an output that is saved would keep its own graph


def kept_activations() -> list[int]:
    """How many are alive after each forward of which nothing is kept."""
    accelerator = LSHDPAccelerator(plan=Plan.from_batch_sizes([3, 1], strategy="ddp"))
    model = make_tagger("labels")
    loader = DataLoader(tagged_rows(24), batch_size=2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    model.train()
    saved: list[weakref.ref] = []

    def pack(tensor: torch.Tensor) -> _Saved:
        kept = _Saved(tensor)
        saved.append(weakref.ref(kept))
        return kept

    alive = []
    for number, batch in enumerate(loader):
        if number < 3:
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            continue
        with saved_tensors_hooks(pack, lambda kept: kept.tensor):
            model(**batch)
        gc.collect()
        alive.append(sum(reference() is not None for reference in saved))
    assert saved
    return alive


def test_activations_of_a_forward_are_freed_with_its_output(workers):
    for alive in workers(2).run(kept_activations, nodes=(1, 1)):
        assert alive == [0] * 3
