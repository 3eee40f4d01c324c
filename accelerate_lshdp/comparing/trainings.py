# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""An ordinary accelerate script with `LSHDPAccelerator`, whose plan decides how it is divided."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accelerate_lshdp import LSHDPAccelerator, Plan
from accelerate_lshdp.comparing.formats import without_exact_steps
from accelerate_lshdp.comparing.timeline import Timeline
from accelerate_lshdp.documents.placement import ModelPlacement


class Training:
    """One training, step by step.

    Args:
        plan: strategy, format and batch sizes.
        model: not prepared.
        make_optimizer: from the model's parameters.
        samples: the data set, in the order in which it is trained.
        timeline: told what happens in a step.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        make_optimizer: Callable[[Any], torch.optim.Optimizer],
        samples: Dataset,
        timeline: Timeline,
    ) -> None:
        # It says that the plan's sizes replace the loader's, which is the point here.
        logging.getLogger("accelerate_lshdp.data.loader").setLevel(logging.ERROR)
        self.accelerator = LSHDPAccelerator(plan=plan)
        self.timeline = timeline
        timeline.note_waits(self.accelerator.session.timer.clock)
        loader = DataLoader(samples, batch_size=8, drop_last=True)
        prepared = self.accelerator.prepare(model, make_optimizer(model.parameters()), loader)
        self.model, self.optimizer, self.loader = prepared
        self._batches = self._endless()

    def step(self) -> tuple[float, int]:
        """One optimizer step; returns this rank's loss, the mean over its samples, and their number."""
        losses, samples, stepped = [], 0, False
        while not stepped:  # a plan may say several micro-batches
            with self.timeline.span("data"):
                batch = next(self._batches)
            with self.accelerator.accumulate(self.model):
                with self.timeline.span("forward"):
                    loss = self.model(**batch).loss
                with self.timeline.span("backward"):
                    self.accelerator.backward(loss)
                with self.timeline.span("optimizer"):
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                losses.append(loss.item())
                samples += len(batch["labels"])
                stepped = self.accelerator.sync_gradients
        return sum(losses) / len(losses), samples

    def batch_sizes(self) -> list[int]:
        """Samples of each rank in the last global batch."""
        return list(self.accelerator.batch_place.cut.sizes)

    def statistics(self) -> dict[str, Any]:
        """Medians over the last steps, one entry a rank."""
        statistics = self.accelerator.step_statistics
        return {
            "compute_seconds": list(statistics.compute_seconds),
            "wait_seconds": list(statistics.wait_seconds),
            "optimizer_seconds": list(statistics.optimizer_seconds),
            "idle_fraction": statistics.idle_fraction,
        }

    def close(self) -> None:
        """Gives the memory back."""
        self._batches.close()
        self.accelerator.free_memory()

    def _endless(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield from self.loader


def make_plan(
    strategy: str,
    communication_dtype: str,
    micro_batches: Sequence[tuple[int, int]],
    automatic: bool = False,
    placement: Mapping[str, Any] | None = None,
) -> Plan:
    """The plan of a case.

    Args:
        strategy: the engine's.
        communication_dtype: the format of gradients.
        micro_batches: (size, accumulation steps) of each rank.
        automatic: whether the training goes on from there by itself.
        placement: of single units, as in a plan file; None: all are kept as the strategy says.
    """
    if automatic:
        total = sum(size * steps for size, steps in micro_batches)
        return Plan.auto(
            total,
            strategy=strategy,
            communication_dtype=communication_dtype,
            **without_exact_steps(communication_dtype),
        )
    return Plan.from_batch_sizes(
        [tuple(entry) for entry in micro_batches],
        strategy=strategy,
        allow_unequal_accumulation=True,
        communication_dtype=communication_dtype,
        placement=None if placement is None else ModelPlacement.read(placement),
        **without_exact_steps(communication_dtype),
    )
