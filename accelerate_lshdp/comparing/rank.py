# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""One rank of a comparison: does what the driver says (`rank_processes.serve`).

Everything here is collective: the driver calls the same method on all ranks. Several trainings can be open at once and
take turns. What only some cases need is imported when they begin: it counts in the memory of a process.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate_lshdp.comparing import models, peers, samples
from accelerate_lshdp.comparing.rank_processes import serve
from accelerate_lshdp.comparing.timeline import Timeline
from accelerate_lshdp.runtime.cpu_memory import give_back_freed_memory, keep_freed_memory


# The gradient of a key bias is zero but for rounding. With Adam's usual 1e-8 the optimizer makes steps of that noise,
# which no two exact runs share.
ADAM_EPS = 1e-6


class Rank:
    """The methods that the driver can call on a rank."""

    def build(
        self,
        *,
        model: Mapping[str, Any],
        seed: int,
        learning_rate: float,
        timeout_seconds: float,
        several_clocks: bool = False,
    ) -> dict[str, Any]:
        """Loads the data and joins the others.

        Args:
            model: see `models.build_model`.
            timeout_seconds: of a collective.
            several_clocks: whether ranks are on several machines, whose clocks count from different moments.

        Returns:
            parameters: their number; units: bytes of each block's, by name; samples: digest of the data.
        """
        self.device = torch.device("cpu")
        if os.environ.get("ACCELERATE_USE_CPU") != "true":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        backend = "gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
        self.model = model
        self.seed = seed
        self.learning_rate = learning_rate
        self.several_clocks = several_clocks
        self.turns_begun: dict[str, float] = {}
        self.trainings: dict[str, Any] = {}
        self.timelines: dict[str, Timeline] = {}
        self.samples = samples.load_samples(model, seed)
        parameters, units = models.measure(model)
        return {"parameters": parameters, "units": units, "samples": self.samples.digest()}

    # Profiling

    def prepare_profile(self) -> None:
        """Builds what is profiled."""
        from torch.utils.data import DataLoader

        from accelerate_lshdp import LSHDPAccelerator, Plan
        from accelerate_lshdp.profiling import Subject

        self.profiling = LSHDPAccelerator(plan=Plan.equal())
        model = self._model("profile")
        self.subject = Subject(model, DataLoader(self.samples, batch_size=8), self._optimizer(model.parameters()))

    def profile(self, *, seconds: float, max_batch: int, needed_batch: int, total: int) -> dict[str, Any]:
        """One profiling run; returns the profile as JSON values."""
        from accelerate_lshdp.profiling import ProfilingOptions, profile_ranks

        options = ProfilingOptions(
            seconds=seconds,
            strategy=self.profiling.strategy,
            max_batch=max_batch,
            needed_batch=needed_batch,
            total_batch_size=total,
        )
        profile = profile_ranks(self.subject, options, self.profiling)
        self.bucket_bytes = list(profile.bucket_bytes)
        del self.subject
        return profile.to_dict()

    def wire_bytes(self, *, names: list[str]) -> dict[str, float]:
        """The bytes of all gradients of the model in each format."""
        from accelerate_lshdp.comparing.formats import model_wire_bytes

        shapes = self._shapes()
        return {name: model_wire_bytes(name, shapes) for name in names}

    # Training

    def begin(
        self,
        *,
        name: str,
        strategy: str,
        is_peer: bool,
        communication_dtype: str,
        micro_batches: list[tuple[int, int]],
        ranks_per_node: int,
        automatic: bool = False,
        placement: dict[str, Any] | None = None,
    ) -> None:
        """Prepares a training.

        Args:
            name: for the other methods.
            strategy: one of `peers.wrap`, or the engine's.
            micro_batches: (size, accumulation steps) of each rank.
            ranks_per_node: of all nodes; only peers need it.
            automatic: whether the training finds its batch sizes itself, from these on.
            placement: of the model's units, as in a plan; None: as the strategy says.
        """
        timeline = self.timelines[name] = Timeline()
        model = self._model(name)
        if is_peer:
            model = model.to(self.device)
            wrapped = peers.wrap(strategy, model, models.blocks_of(model), ranks_per_node)
            size = micro_batches[0][0]
            optimizer = self._optimizer(wrapped.parameters())
            self.trainings[name] = peers.PeerTraining(
                wrapped, optimizer, self.samples, size, timeline.span, self.device
            )
            self._set_aside()
            return
        from accelerate_lshdp.comparing.trainings import Training, make_plan

        plan = make_plan(strategy, communication_dtype, micro_batches, automatic, placement)
        self.trainings[name] = Training(plan, model, self._optimizer, self.samples, timeline)
        self._set_aside()

    def _set_aside(self) -> None:
        """Python's collector does not look through the trainings that wait for their turn while another one trains."""
        gc.unfreeze()
        gc.collect()
        gc.freeze()

    def train(self, *, name: str, steps: int) -> list[tuple[float, float, int]]:
        """Steps of one training: wall seconds (loading included), this rank's loss and its samples in each."""
        training, timeline = self.trainings[name], self.timelines[name]
        if self.device.type == "cpu" and not isinstance(training, peers.PeerTraining):
            # Said of the whole process, in which trainings of several strategies take turns.
            keep_freed_memory(gathers=training.accelerator.policies.is_sharded)
        dist.barrier()
        self.turns_begun[name] = time.monotonic()
        done = []
        for _ in range(steps):
            timeline.begin_step()
            begun = time.monotonic()
            loss, samples = training.step()
            done.append((time.monotonic() - begun, loss, samples))
        return done

    def batch_sizes(self, *, name: str) -> list[int]:
        """Samples of each rank in the last step of a training of the engine."""
        return self.trainings[name].batch_sizes()

    def statistics(self, *, name: str) -> dict[str, Any] | None:
        """Medians over the steps so far; None for peers, which do not measure themselves."""
        training = self.trainings[name]
        return None if isinstance(training, peers.PeerTraining) else training.statistics()

    def timeline(self, *, name: str) -> list[dict[str, Any]]:
        """The events of the last step.

        Their times are this machine's. Where ranks have several clocks, they count from the beginning of the last
        turn, which all ranks begin together.
        """
        zero = self.turns_begun[name] if self.several_clocks else 0.0
        events = self.timelines[name].events
        return [{**event, "begin": event["begin"] - zero, "end": event["end"] - zero} for event in events]

    def end(self, *, name: str) -> None:
        """Forgets a training."""
        training = self.trainings.pop(name, None)
        if training is not None and not isinstance(training, peers.PeerTraining):
            training.close()
        self.timelines.pop(name, None)
        del training
        self._set_aside()
        give_back_freed_memory()  # other processes' trainings begin next

    def forget_groups(self) -> None:
        """After a training that failed: what comes next must not meet what is left of its messages."""
        from accelerate_lshdp.runtime.groups import ProcessGroups

        ProcessGroups.forget()

    def peak_bytes(self) -> int:
        """The largest resident size of this process so far."""
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024

    def _shapes(self) -> list[torch.Size]:
        """The shapes of the model's parameters."""
        with torch.device("meta"):
            return [parameter.shape for parameter in models.build_model(self.model, self.seed).parameters()]

    def _model(self, name: str) -> nn.Module:
        """A new model for what the driver calls by a name."""
        return models.build_model(self.model, self.seed)

    def _optimizer(self, parameters: Any, fused: bool | None = None) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.learning_rate, eps=ADAM_EPS, fused=fused)


def main(rank: Rank) -> None:
    """Serves the driver until it is gone, with as many threads as it said."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    serve(rank)


if __name__ == "__main__":
    main(Rank())
