# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""One rank on an emulated node: what `accelerate_lshdp.comparing.rank` does, and what predictions need.

As there, everything is collective, and imported when it is needed: it counts in the memory of a process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate_lshdp.comparing import models, peers
from accelerate_lshdp.comparing.rank import Rank, main
from laboratory.speed_check import CheckedRank, SpeedCheck


class EmulatedRank(Rank):
    """The methods that the laboratory's driver can call on a rank."""

    def build(self, *, emulated: bool, **options: Any) -> dict[str, Any]:
        """As `Rank.build`.

        Args:
            emulated: whether speeds are emulated by sleeping (`set_slowdown`).
            options: of `Rank.build`.
        """
        self.emulated = emulated
        self.slowdown_factor = 1.0
        self.slowdowns: dict[str, Any] = {}
        self.speed_check: SpeedCheck | None = None
        return super().build(**options)

    def set_slowdown(self, *, factors: list[float]) -> None:
        """Where CPU shares cannot be had: forward and backward take so many times as long."""
        self.slowdown_factor = factors[dist.get_rank()]
        for slowdown in self.slowdowns.values():
            slowdown.factor = self.slowdown_factor

    def profile(self, **options: Any) -> dict[str, Any]:
        """As `Rank.profile`."""
        profile = super().profile(**options)
        self.slowdowns.pop("profile", None)
        return profile

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
        from laboratory.message_delay import message_delay_seconds

        nodes = self.profiling.topology.node_groups
        partners = list(zip(*nodes, strict=True)) if len(set(map(len, nodes))) == 1 else [range(dist.get_world_size())]
        return message_delay_seconds(max(self.bucket_bytes), partners)

    def measure_formats(self, *, names: list[str]) -> dict[str, Any]:
        """What each format sends, and takes of this rank's processor; collective over all ranks.

        Returns:
            By format: points ((bytes of gradients, CPU seconds)), the wire_share of those messages, and the wire_bytes
            of the whole model.
        """
        from laboratory.formats import measure_format

        shapes = self._shapes()
        return {name: measure_format(name, shapes) for name in names}

    def measure_overheads(self, *, is_peer: bool, node_sizes: list[int]) -> dict[str, float]:
        """What FSDP2 takes of this rank's processor beside computing and sending; collective over all ranks.

        Args:
            is_peer: whether these are the processes of plain PyTorch.
            node_sizes: how many of the ranks, in their order, are on each node.
        """
        from accelerate_lshdp.engine.wire.reduction import TimedAllGather, TimedReduceScatter
        from accelerate_lshdp.runtime.cpu_memory import give_back_freed_memory, keep_freed_memory
        from accelerate_lshdp.runtime.wait_clock import WaitClock
        from laboratory import overheads

        clock = WaitClock()
        exchanges = (_all_gather, _reduce_scatter) if is_peer else (TimedAllGather(clock), TimedReduceScatter(clock))
        if not is_peer:
            # As in trainings that gather units. They have fresh processes, or their turns say it anew.
            keep_freed_memory(gathers=True)
            # Else what was freed before is taken again, and the kernel need not clear new pages for every unit.
            give_back_freed_memory()
        ranks = iter(range(dist.get_world_size()))
        nodes = [list(islice(ranks, size)) for size in node_sizes]
        _, units = models.measure(self.model)
        unit_bytes = list(units.values())
        count = len(self._shapes())
        fused = None if is_peer else True  # as the engine does it on CPUs
        return {
            "inside_seconds_per_byte": overheads.inside_seconds_per_byte(max(unit_bytes), nodes, *exchanges),
            "seconds_per_unit": self._seconds_per_unit(),
            "optimizer_seconds": overheads.sharded_step_seconds(count, partial(self._optimizer, fused=fused)),
            "sharding_seconds": self._sharding_seconds(is_peer),  # the last one, as it lets all freed memory stay
        }

    def _sharding_seconds(self, is_peer: bool) -> float:
        """What a forward and backward of one sample takes more where all units are gathered and reduced."""
        from accelerate_lshdp.comparing.trainings import Training, make_plan
        from accelerate_lshdp.runtime.cpu_memory import give_back_freed_memory, keep_freed_memory
        from laboratory.overheads import ComputingSeconds, step_seconds

        def peer(wrap: Callable[[nn.Module], nn.Module], spent: ComputingSeconds) -> peers.PeerTraining:
            model = wrap(models.build_model(self.model, self.seed))
            optimizer = self._optimizer(model.parameters())
            return peers.PeerTraining(model, optimizer, self.samples, 1, spent.span, torch.device("cpu"))

        spent = ComputingSeconds()
        if is_peer:
            wrapped = peer(lambda model: peers.wrap("torch_fsdp", model, models.blocks_of(model), 1), spent)
            together = step_seconds(wrapped.step, spent)
            del wrapped
        else:
            plan = make_plan("fsdp", "fp32", [(1, 1)] * dist.get_world_size())
            model = models.build_model(self.model, self.seed)
            training = Training(plan, model, self._optimizer, self.samples, spent)
            together = step_seconds(training.step, spent)
            training.close()
            del training, model
            keep_freed_memory(gathers=False)  # as where ranks are profiled
        give_back_freed_memory()
        return max(0.0, together - step_seconds(peer(lambda model: model, spent).step, spent))

    def _seconds_per_unit(self) -> float:
        from torch.utils.data import DataLoader

        from laboratory.overheads import seconds_per_unit

        plain, sharded = (models.build_model(models.narrowed(self.model), self.seed) for _ in range(2))
        blocks = models.blocks_of(sharded)
        batch = next(iter(DataLoader(self.samples, batch_size=1)))
        return seconds_per_unit(plain, peers.wrap("torch_fsdp", sharded, blocks, 1), len(blocks), batch)

    def check_speed(self, *, sizes: list[int], is_peer: bool) -> CheckedRank:
        """A step of a plain model without communication; see `speed_check.SpeedCheck.run`."""
        size = sizes[dist.get_rank()]
        if self.speed_check is None or self.speed_check.size != size:  # nodes may have other speeds later
            model = self._model("speed check")
            optimizer = self._optimizer(model.parameters()) if is_peer else None
            self.speed_check = SpeedCheck(model, optimizer, self.samples, size)
            self._set_aside()
        dist.barrier()
        return self.speed_check.run()

    def uses_shared_memory(self) -> bool:
        """Whether node-sharded strategies exchange through shared memory inside this node."""
        from accelerate_lshdp.documents.plan import Strategy
        from accelerate_lshdp.engine.policies import Mechanism, choose_mechanism

        mechanism = choose_mechanism(Strategy.LSDP, self.profiling.topology, "cpu", "auto")
        return mechanism is Mechanism.NODE_SHARED

    def end(self, *, name: str) -> None:
        """As `Rank.end`."""
        self.slowdowns.pop(name, None)
        super().end(name=name)

    def loopback_bytes(self) -> int:
        """What was sent inside this node so far."""
        return sent_bytes("lo", Path("/proc/self/net/dev").read_text())

    def _model(self, name: str) -> nn.Module:
        model = super()._model(name)
        if self.emulated:
            from accelerate_lshdp.profiling import Slowdown

            self.slowdowns[name] = Slowdown(models.blocks_of(model), self.slowdown_factor)
        return model


def _all_gather(output: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """The backend's own, which plain FSDP2 takes; likewise `_reduce_scatter`."""
    dist.all_gather_into_tensor(output, part, group=group)


def _reduce_scatter(output: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup, op: dist.ReduceOp) -> None:
    dist.reduce_scatter_tensor(output, whole, op=op, group=group)


def sent_bytes(interface: str, counters: str) -> int:
    """Bytes that an interface has sent, from the text of /proc/net/dev."""
    for line in counters.splitlines():
        name, _, values = line.partition(":")
        if name.strip() == interface:
            return int(values.split()[8])
    raise ValueError(f"found no interface {interface} in /proc/net/dev, expected it in every network namespace")


if __name__ == "__main__":
    main(EmulatedRank())
