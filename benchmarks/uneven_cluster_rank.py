# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""One rank of `uneven_cluster.py`: an ordinary training on real images, step by step as the driver says.

Everything here is collective: the driver calls the same method on all ranks. Several trainings can be open at once and
take turns; each has its own accelerator, model and pass over the data.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import set_seed
from laboratory.speed_check import CheckedRank, SpeedCheck
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator, Plan
from accelerate_lshdp.cli.quickstart_data import DigitImages, load_digit_images
from accelerate_lshdp.comparing.rank_processes import serve
from accelerate_lshdp.profiling import Slowdown


LEARNING_RATE = 1e-4
# The gradient of a key bias is zero but for rounding. With Adam's usual 1e-8 the optimizer makes steps of that noise,
# which no two exact runs share.
ADAM_EPS = 1e-6


@dataclass
class Training:
    """An ordinary accelerate script, whose plan decides how it is divided."""

    accelerator: LSHDPAccelerator
    model: nn.Module
    optimizer: Any
    loader: Any
    batches: Iterator[dict[str, torch.Tensor]] | None = None

    def step(self) -> tuple[float, list[int]]:
        """One optimizer step; returns its wall seconds, loading included, and the batch sizes of all ranks."""
        if self.batches is None:
            self.batches = self._endless()
        begun = time.perf_counter()
        stepped = False
        while not stepped:  # a plan may say several micro-batches
            batch = next(self.batches)
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(**batch).loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
                stepped = self.accelerator.sync_gradients
        seconds = time.perf_counter() - begun
        return seconds, list(self.accelerator.batch_place.cut.sizes)

    def _endless(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield from self.loader


class Rank:
    """What the driver can ask of a rank."""

    def build(self, *, model: dict[str, Any], strategy: str, bucket_megabytes: float, emulated: bool) -> dict:
        """Imports, loads and joins the others; says what is run."""
        from transformers import ViTConfig, ViTForImageClassification

        # It says that the plan's sizes replace the loaders', which is the point here.
        logging.getLogger("accelerate_lshdp.data.loader").setLevel(logging.ERROR)
        self.config = ViTConfig(**model)
        self.strategy = strategy
        self.bucket_megabytes = bucket_megabytes
        self.emulated = emulated
        self.slowdown_factor = 1.0
        self.slowdowns: dict[str, Slowdown] = {}
        self.trainings: dict[str, Training] = {}
        small = load_digit_images()[0]
        pixels = nn.functional.interpolate(small.images, size=self.config.image_size, mode="bilinear")
        self.images = DigitImages(pixels, small.labels)
        self.accelerator = self._accelerator(plan=Plan.equal(strategy=strategy))
        names = ("torch", "accelerate", "transformers")
        with torch.device("meta"):
            parameters = sum(p.numel() for p in ViTForImageClassification(self.config).parameters())
        return {
            "rank": self.accelerator.process_index,
            "parameters": parameters,
            "images": len(self.images),
            "versions": {
                "python": platform.python_version(),
                **{name: __import__(name).__version__ for name in names},
            },
        }

    def set_emulated_share(self, *, shares: list[float]) -> None:
        """Where quotas cannot be had: works at the speed of such a share of a core."""
        self.slowdown_factor = 1 / shares[self.accelerator.process_index]
        for slowdown in self.slowdowns.values():
            slowdown.factor = self.slowdown_factor

    # Profiling

    def prepare_profile(self, *, seed: int) -> None:
        """Builds what is profiled, so that the time of profiling is that of `profile_ranks`."""
        from accelerate_lshdp.profiling import Subject

        model = self._model("profile", seed)
        loader = DataLoader(self.images, batch_size=8, shuffle=True, drop_last=True)
        self.subject = Subject(model, loader, self._optimizer(model))

    def profile(self, *, seconds: float, max_batch: int, total: int) -> dict[str, Any]:
        """One profiling run; returns the profile as JSON values and the wall seconds of the whole call."""
        from accelerate_lshdp.profiling import ProfilingOptions, profile_ranks

        options = ProfilingOptions(
            seconds=seconds,
            strategy=self.strategy,
            max_batch=max_batch,
            total_batch_size=total,
            bucket_megabytes=self.bucket_megabytes,
        )
        self.accelerator.wait_for_everyone()
        begun = time.perf_counter()
        profile = profile_ranks(self.subject, options, self.accelerator)
        wall_seconds = time.perf_counter() - begun
        del self.subject
        self.slowdowns.pop("profile", None)
        return {"wall_seconds": wall_seconds, "profile": profile.to_dict()}

    # Training

    def begin(self, *, name: str, seed: int, batch_sizes: Any, total_batch_size: int | None = None) -> None:
        """Prepares a training: one (micro-batch size, accumulation steps) a rank, or "auto" and the total."""
        if batch_sizes == "auto":
            accelerator = self._accelerator(batch_sizes="auto", total_batch_size=total_batch_size)
        else:
            plan = Plan.from_batch_sizes(batch_sizes, strategy=self.strategy, allow_unequal_accumulation=True)
            accelerator = self._accelerator(plan=plan)
        model = self._model(name, seed)
        loader = DataLoader(self.images, batch_size=8, shuffle=True, drop_last=True)
        set_seed(seed)  # decides the order of the samples
        prepared = accelerator.prepare(model, self._optimizer(model), loader)
        self.trainings[name] = Training(accelerator, *prepared)

    def train(self, *, name: str, steps: int) -> list[tuple[float, list[int]]]:
        """Steps of one training: seconds and batch sizes of each."""
        training = self.trainings[name]
        self.accelerator.wait_for_everyone()
        return [training.step() for _ in range(steps)]

    def prepare_check(self, *, sizes: list[int], seed: int) -> None:
        """Builds what `check_speed` trains: a plain model with a micro-batch of each rank's size."""
        self.speed_check = SpeedCheck(
            self._model("check", seed), None, self.images, sizes[self.accelerator.process_index]
        )

    def check_speed(self) -> CheckedRank:
        """A step without communication; see `SpeedCheck.run`."""
        self.accelerator.wait_for_everyone()
        return self.speed_check.run()

    def statistics(self, *, name: str) -> dict[str, Any]:
        """Medians over the steps so far."""
        statistics = self.trainings[name].accelerator.step_statistics
        return {
            "step_seconds": statistics.seconds,
            "compute_seconds": list(statistics.compute_seconds),
            "wait_seconds": list(statistics.wait_seconds),
            "idle_fraction": statistics.idle_fraction,
        }

    def decisions(self, *, name: str) -> list[dict[str, Any]]:
        """What an automatic training decided."""
        return [decision.to_dict() for decision in self.trainings[name].accelerator.batch_size_decisions]

    def difference(self, *, name: str, other: str) -> float:
        """||p - q|| / ||q|| over all parameters of two trainings."""
        difference = magnitude = 0.0
        pairs = zip(self.trainings[name].model.parameters(), self.trainings[other].model.parameters(), strict=True)
        for one, reference in pairs:
            one, reference = _whole(one), _whole(reference)
            difference += (one - reference).square().sum().item()
            magnitude += reference.square().sum().item()
        return (difference / magnitude) ** 0.5

    def end(self, *, name: str) -> None:
        """Forgets a training."""
        training = self.trainings.pop(name)
        training.batches = None
        training.accelerator.free_memory()
        self.slowdowns.pop(name, None)

    def _accelerator(self, **options: Any) -> LSHDPAccelerator:
        plugin = LSDPPlugin(strategy=self.strategy, bucket_megabytes=self.bucket_megabytes)
        return LSHDPAccelerator(lsdp_plugin=plugin, **options)

    def _model(self, name: str, seed: int) -> nn.Module:
        from transformers import ViTForImageClassification

        set_seed(seed)
        model = ViTForImageClassification(self.config).train()
        if self.emulated:
            pieces = [model.vit.embeddings, *model.vit.layers, model.vit.layernorm, model.classifier]
            self.slowdowns[name] = Slowdown(pieces, self.slowdown_factor)
        return model

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=ADAM_EPS)


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return whole.detach().double()


if __name__ == "__main__":
    serve(Rank())
