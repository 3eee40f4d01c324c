# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The process of each of the two ranks of ``accelerate-lshdp quickstart``: measures, plans, trains twice, reports.

Both trainings run in one launch and take turns, epoch by epoch, so that other programs slow both of them alike.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader

from accelerate_lshdp import LSHDPAccelerator, Plan
from accelerate_lshdp.cli.progress import progress
from accelerate_lshdp.cli.quickstart import SLOWED_RANK
from accelerate_lshdp.cli.quickstart_data import IMAGE_SIZE, DigitImages, load_digit_images
from accelerate_lshdp.documents.atomic_files import write_atomically
from accelerate_lshdp.planning import BatchSizes, RankProfile, plan_fixed_total
from accelerate_lshdp.planning.proofs.plan import verify_plan
from accelerate_lshdp.profiling import Profile, ProfilingOptions, Slowdown, Subject, profile_ranks


LEARNING_RATE = 5e-4
EVALUATION_BATCH_SIZE = 32
# Without dropout, so that two runs on the same samples draw the same loss curve. The four patches of a digit are its
# quarters: smaller ones learn much more slowly from 1,500 images.
MODEL = {
    "image_size": IMAGE_SIZE,
    "patch_size": 16,
    "num_channels": 1,
    "hidden_size": 160,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "intermediate_size": 640,
    "num_labels": 10,
}


def main(argv: list[str] | None = None) -> None:
    """Runs one rank of the quickstart; rank 0 writes ``lshdp_plan.json`` and ``results.json``."""
    arguments = _parse(argv)
    # Its warning that the plan's batch sizes replace the loaders' is the point here, and is shown in the table.
    logging.getLogger("accelerate_lshdp.data.loader").setLevel(logging.ERROR)
    train_images, held_out = load_digit_images()
    world = 2
    accelerator = LSHDPAccelerator(plan=Plan.equal(strategy="ddp"))
    slowdown = arguments.slowdown if accelerator.process_index == SLOWED_RANK else 1.0

    with progress(accelerator.is_main_process) as advance_to:
        profile = _measure(accelerator, train_images, arguments, slowdown, advance_to)
        ranks = profile.rank_profiles()
        each = equal_share(arguments.total_batch_size, ranks)
        if each * world < arguments.total_batch_size:
            accelerator.print(
                f"This machine has no memory for batches of {arguments.total_batch_size} samples a step; both"
                f" trainings take {each * world}."
            )
        plan = _make_plan(profile, plan_fixed_total(ranks, each * world))
        verify_plan(plan)

        equal = LSHDPAccelerator(plan=Plan.from_batch_sizes([each] * world, strategy="ddp"))
        planned = LSHDPAccelerator(plan=plan)
        runs = {
            "ddp_equal": _Run.begin(equal, train_images, held_out, arguments.seed, slowdown),
            "lshdp": _Run.begin(planned, train_images, held_out, arguments.seed, slowdown),
        }
        # Epoch by epoch in turns: both have the same global batches, hence equally long epochs.
        while any(len(run.losses) < arguments.steps for run in runs.values()):
            for run in runs.values():
                for _ in run.train_epoch(arguments.steps):
                    done = sum(len(run.losses) for run in runs.values())
                    advance_to("training with equal and with planned batches", done, arguments.steps * len(runs))
        results = {name: run.results(arguments.slowdown) for name, run in runs.items()}

    if accelerator.is_main_process:
        plan.save(arguments.output_dir / "lshdp_plan.json")
        text = json.dumps(results, indent=2, allow_nan=False) + "\n"
        write_atomically(arguments.output_dir / "results.json", text)


def equal_share(total_batch_size: int, ranks: Sequence[RankProfile]) -> int:
    """Samples of each rank in an equal split of the wanted total, or of the largest total that all ranks can do."""
    return min(total_batch_size // len(ranks), *(rank.largest_micro_batch for rank in ranks))


def share_of_the_faster(total_batch_size: int, slowdown: float) -> int:
    """Samples of the faster of two ranks in a split by speed alone: the size that a profile has to reach."""
    return min(math.ceil(total_batch_size * slowdown / (1 + slowdown)), total_batch_size - 1)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="accelerate_lshdp.cli.quickstart_worker")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--slowdown", type=float, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--total-batch-size", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    return parser.parse_args(argv)


def build_model(seed: int, slowdown: float) -> nn.Module:
    """The quickstart's small ViT with weights from `seed`, slowed by `slowdown` on this rank.

    All modules that compute are slowed; the loss is not.
    """
    from transformers import ViTConfig, ViTForImageClassification

    set_seed(seed)
    model = ViTForImageClassification(ViTConfig(**MODEL)).train()
    if slowdown > 1:
        Slowdown([model.vit.embeddings, *model.vit.layers, model.vit.layernorm, model.classifier], slowdown)
    return model


def _measure(
    accelerator: LSHDPAccelerator,
    images: DigitImages,
    arguments: argparse.Namespace,
    slowdown: float,
    advance_to: Callable[[str, float, float], None],
) -> Profile:
    """The profile of both ranks; the same value on both (collective)."""
    model = build_model(arguments.seed, slowdown)
    subject = Subject(model, DataLoader(images, batch_size=1), make_optimizer(model))
    options = ProfilingOptions(
        seconds=arguments.seconds,
        strategy="lsdp",
        max_batch=arguments.total_batch_size - 1,  # the other rank has at least one sample
        # Without it a busy machine would measure too little to train the wanted total, or to plan by speed.
        needed_batch=share_of_the_faster(arguments.total_batch_size, arguments.slowdown),
    )
    return profile_ranks(subject, options, accelerator, on_progress=advance_to)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all runs."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def _make_plan(profile: Profile, sizes: BatchSizes) -> Plan:
    return Plan.from_batch_sizes(
        sizes.batch_sizes,
        strategy=profile.strategy,
        profile=profile.to_dict(),
        predicted={
            "step_seconds": sizes.step_seconds,
            "compute_seconds": sizes.rank_seconds,
            "idle_fraction": sizes.idle_fraction,
        },
        certificate=sizes.certificate,
    )


@dataclass
class _Run:
    """One of the two trainings: an ordinary accelerate script, whose accelerator has the plan."""

    accelerator: LSHDPAccelerator
    model: nn.Module
    optimizer: Any
    train_loader: Any
    held_out_loader: Any
    losses: list[torch.Tensor] = field(default_factory=list)  # of this rank, summed over its samples

    @classmethod
    def begin(
        cls, accelerator: LSHDPAccelerator, train: DigitImages, held_out: DigitImages, seed: int, slowdown: float
    ) -> _Run:
        model = build_model(seed, slowdown)
        optimizer = make_optimizer(model)
        # What a script would write for equal batches; the plan replaces it.
        own_batch_size = accelerator.plan.total_batch_size // accelerator.num_processes
        train_loader = DataLoader(train, batch_size=own_batch_size, shuffle=True, drop_last=True)
        held_out_loader = DataLoader(held_out, batch_size=EVALUATION_BATCH_SIZE)
        set_seed(seed)  # decides the order of the samples
        return cls(accelerator, *accelerator.prepare(model, optimizer, train_loader, held_out_loader))

    def train_epoch(self, most_steps: int) -> Iterator[None]:
        """Trains for an epoch, or up to ``most_steps`` steps in all; yields after each."""
        if len(self.losses) >= most_steps:
            return
        self.model.train()
        for batch in self.train_loader:
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            # The sum over this rank's samples, in float64: sums of ranks with other shares then agree to rounding.
            self.losses.append(loss.detach().double() * len(batch["labels"]))
            yield
            if len(self.losses) >= most_steps:
                return

    def results(self, slowdown: float) -> dict[str, Any]:
        """The entry of this run in ``results.json`` (collective)."""
        plan, statistics = self.accelerator.plan, self.accelerator.step_statistics
        losses = self.accelerator.reduce(torch.stack(self.losses), reduction="sum") / plan.total_batch_size
        return {
            "strategy": str(plan.strategy),
            "batch_sizes": plan.batch_sizes,
            "step_seconds": statistics.seconds,
            "idle_fraction": statistics.idle_fraction,
            "samples_per_second": statistics.samples_per_second,
            "compute_seconds": list(statistics.compute_seconds),
            "wait_seconds": list(statistics.wait_seconds),
            "losses": losses.tolist(),
            "accuracy": self._accuracy(),
            "emulation": {"rank": SLOWED_RANK, "slowdown": slowdown},
        }

    def _accuracy(self) -> float:
        """The fraction of the held-out images that the model classifies correctly (collective)."""
        self.model.eval()
        correct = []
        for batch in self.held_out_loader:
            with torch.no_grad():
                predictions = self.model(pixel_values=batch["pixel_values"]).logits.argmax(dim=-1)
            correct.append(self.accelerator.gather_for_metrics(predictions == batch["labels"]))
        return torch.cat(correct).double().mean().item()


if __name__ == "__main__":
    main()
