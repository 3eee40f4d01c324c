# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""One rank of a benchmark: does what the driver says (`rank_processes.serve`).

Everything here is collective: the driver calls the same method on all ranks. Several trainings can be open at once and
take turns. What only some cases need is imported when they begin: it counts in the memory of a process.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate_lshdp.benchmarking import models, peers, samples
from accelerate_lshdp.benchmarking.rank_processes import serve
from accelerate_lshdp.benchmarking.speed_check import CheckedRank, SpeedCheck
from accelerate_lshdp.benchmarking.timeline import Timeline


# The gradient of a key bias is zero but for rounding. With Adam's usual 1e-8 the optimizer makes steps of that noise,
# which no two exact runs share.
ADAM_EPS = 1e-6


class Rank:
    """What the driver can ask of a rank."""

    def build(
        self, *, model: Mapping[str, Any], seed: int, learning_rate: float, emulated: bool, timeout_seconds: float
    ) -> dict[str, Any]:
        """Loads the data and joins the others; returns the number of parameters, and the bytes of each block's.

        Args:
            model: see `models.build_model`.
            emulated: whether speeds are emulated by sleeping (`set_slowdown`).
            timeout_seconds: of a collective.
        """
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_seconds))
        self.model = model
        self.seed = seed
        self.learning_rate = learning_rate
        self.emulated = emulated
        self.slowdown_factor = 1.0
        self.slowdowns: dict[str, Any] = {}
        self.trainings: dict[str, Any] = {}
        self.timelines: dict[str, Timeline] = {}
        self.speed_check: Any = None
        self.samples = samples.load_samples(model, seed)
        parameters, unit_bytes = models.measure(model)
        return {"parameters": parameters, "unit_bytes": unit_bytes}

    def set_slowdown(self, *, factors: list[float]) -> None:
        """Where CPU shares cannot be had: forward and backward take so many times as long."""
        self.slowdown_factor = factors[dist.get_rank()]
        for slowdown in self.slowdowns.values():
            slowdown.factor = self.slowdown_factor

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
        self.slowdowns.pop("profile", None)
        return profile.to_dict()

    def measure_network(self, *, seconds: float) -> dict[str, Any]:
        """The network as it now is, in the form of a profile's section."""
        from accelerate_lshdp.profiling.network import measure_network

        topology, device = self.profiling.topology, self.profiling.device
        network = measure_network(
            topology, device, self.bucket_bytes, seconds, clock=time.perf_counter, on_progress=lambda spent: None
        )
        return network.to_dict()

    def measure_message_delay(self) -> float:
        """See `message_delay`: for the engine's buckets, between one rank of each node if that goes."""
        from accelerate_lshdp.benchmarking.message_delay import message_delay_seconds

        nodes = self.profiling.topology.node_groups
        partners = list(zip(*nodes, strict=True)) if len(set(map(len, nodes))) == 1 else [range(dist.get_world_size())]
        return message_delay_seconds(max(self.bucket_bytes), partners)

    def measure_formats(self, *, names: list[str]) -> dict[str, Any]:
        """What each format sends, and takes of this rank's processor; collective over all ranks.

        Returns:
            By format: points ((bytes of gradients, CPU seconds)), the wire_share of those messages, and the wire_bytes
            of the whole model.
        """
        from accelerate_lshdp.benchmarking.formats import measure_format

        with torch.device("meta"):
            shapes = [parameter.shape for parameter in models.build_model(self.model, self.seed).parameters()]
        return {name: measure_format(name, shapes) for name in names}

    def measure_overheads(self, *, is_peer: bool, node_sizes: list[int]) -> dict[str, float]:
        """What FSDP2 takes of this rank's processor beside computing and sending; collective over all ranks.

        Args:
            is_peer: whether these are the processes of plain PyTorch.
            node_sizes: how many of the ranks, in their order, are on each node.
        """
        from accelerate_lshdp.benchmarking import overheads

        ranks = iter(range(dist.get_world_size()))
        nodes = [list(islice(ranks, size)) for size in node_sizes]
        _, unit_bytes = models.measure(self.model)
        with torch.device("meta"):
            count = len(list(models.build_model(self.model, self.seed).parameters()))
        fused = None if is_peer else True  # as the engine does it on CPUs
        return {
            "copy_seconds_per_byte": overheads.copy_seconds_per_byte(max(unit_bytes), len(unit_bytes)),
            "inside_seconds_per_byte": overheads.inside_seconds_per_byte(max(unit_bytes), nodes),
            "seconds_per_unit": self._seconds_per_unit(),
            "optimizer_seconds": overheads.sharded_step_seconds(count, partial(self._optimizer, fused=fused)),
        }

    def _seconds_per_unit(self) -> float:
        from torch.utils.data import DataLoader

        from accelerate_lshdp.benchmarking.overheads import seconds_per_unit

        plain, sharded = (models.build_model(models.narrowed(self.model), self.seed) for _ in range(2))
        blocks = models.blocks_of(sharded)
        batch = next(iter(DataLoader(self.samples, batch_size=1)))
        return seconds_per_unit(plain, peers.wrap("torch_fsdp", sharded, blocks, 1), len(blocks), batch)

    def check_speed(self, *, sizes: list[int], is_peer: bool) -> CheckedRank:
        """A step of a plain model without communication; see `speed_check.SpeedCheck.run`."""
        if self.speed_check is None:
            model = self._model("speed check")
            optimizer = self._optimizer(model.parameters()) if is_peer else None
            self.speed_check = SpeedCheck(model, optimizer, self.samples, sizes[dist.get_rank()])
            self._set_aside()
        dist.barrier()
        return self.speed_check.run()

    def uses_shared_memory(self) -> bool:
        """Whether node-sharded strategies exchange through shared memory inside this node."""
        from accelerate_lshdp.documents.plan import Strategy
        from accelerate_lshdp.engine.policies import Mechanism, choose_mechanism

        mechanism = choose_mechanism(Strategy.LSDP, self.profiling.topology, "cpu", "auto")
        return mechanism is Mechanism.NODE_SHARED

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
    ) -> None:
        """Prepares a training.

        Args:
            name: for the other methods.
            strategy: one of `peers.wrap`, or the engine's.
            micro_batches: (size, accumulation steps) of each rank.
            ranks_per_node: of all nodes; only peers need it.
        """
        timeline = self.timelines[name] = Timeline()
        model = self._model(name)
        if is_peer:
            wrapped = peers.wrap(strategy, model, models.blocks_of(model), ranks_per_node)
            size = micro_batches[0][0]
            optimizer = self._optimizer(wrapped.parameters())
            self.trainings[name] = peers.PeerTraining(wrapped, optimizer, self.samples, size, timeline.span)
            self._set_aside()
            return
        from accelerate_lshdp.benchmarking.trainings import Training, make_plan

        plan = make_plan(strategy, communication_dtype, micro_batches)
        self.trainings[name] = Training(plan, model, self._optimizer, self.samples, timeline)
        self._set_aside()

    def _set_aside(self) -> None:
        """Python's collector does not look through the trainings that wait for their turn while another one trains."""
        gc.unfreeze()
        gc.collect()
        gc.freeze()

    def train(self, *, name: str, steps: int) -> list[tuple[float, float]]:
        """Steps of one training: wall seconds (loading included) and this rank's loss of each."""
        training, timeline = self.trainings[name], self.timelines[name]
        dist.barrier()
        done = []
        for _ in range(steps):
            timeline.begin_step()
            begun = time.monotonic()
            loss = training.step()
            done.append((time.monotonic() - begun, loss))
        return done

    def statistics(self, *, name: str) -> dict[str, Any] | None:
        """Medians over the steps so far; None for peers, which do not measure themselves."""
        training = self.trainings[name]
        return None if isinstance(training, peers.PeerTraining) else training.statistics()

    def timeline(self, *, name: str) -> list[dict[str, Any]]:
        """The events of the last step."""
        return self.timelines[name].events

    def end(self, *, name: str) -> None:
        """Forgets a training."""
        training = self.trainings.pop(name, None)
        if training is not None and not isinstance(training, peers.PeerTraining):
            training.close()
        self.timelines.pop(name, None)
        self.slowdowns.pop(name, None)
        del training
        self._set_aside()
        _give_back_memory()

    def forget_groups(self) -> None:
        """After a training that failed: what comes next must not meet what is left of its messages."""
        from accelerate_lshdp.runtime.groups import ProcessGroups

        ProcessGroups.forget()

    # What the kernel counts

    def loopback_bytes(self) -> int:
        """What was sent inside this node so far."""
        return sent_bytes("lo", Path("/proc/self/net/dev").read_text())

    def peak_bytes(self) -> int:
        """The largest resident size of this process so far."""
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024

    def _model(self, name: str) -> nn.Module:
        model = models.build_model(self.model, self.seed)
        if self.emulated:
            from accelerate_lshdp.profiling import Slowdown

            self.slowdowns[name] = Slowdown(models.blocks_of(model), self.slowdown_factor)
        return model

    def _optimizer(self, parameters: Any, fused: bool | None = None) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.learning_rate, eps=ADAM_EPS, fused=fused)


def _give_back_memory() -> None:
    """Gives free memory back to the system: the allocator keeps it, and other processes' trainings begin next."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc
    if trim is not None:
        trim(0)


def sent_bytes(interface: str, counters: str) -> int:
    """Bytes that an interface has sent, from the text of /proc/net/dev."""
    for line in counters.splitlines():
        name, _, values = line.partition(":")
        if name.strip() == interface:
            return int(values.split()[8])
    raise ValueError(f"found no interface {interface} in /proc/net/dev, expected it in every network namespace")


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    serve(Rank())
