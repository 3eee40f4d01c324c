# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`SingleRankTrainer`: trains micro-batches on one rank with the engine's mechanisms, as if it were a node of its own.

Nothing travels between ranks, so measured times are those of this rank only, and a rank that fails leaves no other one
waiting. The costs of a strategy on the rank itself (streaming from host memory, buckets) are part of the times.
World-sharded strategies gather over the network, so they are measured with all parameters on the rank.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import send_to_device

from accelerate_lshdp.documents.strategy import Gathered, Strategy
from accelerate_lshdp.engine.flow import Flow
from accelerate_lshdp.engine.fused_steps import fuse_steps
from accelerate_lshdp.engine.placement import Placement
from accelerate_lshdp.engine.policies import Mechanism, resolve_policies
from accelerate_lshdp.engine.step_groups import StepGroups
from accelerate_lshdp.engine.wire.reduction import GradientReduction
from accelerate_lshdp.profiling.subject import Subject, copy_container
from accelerate_lshdp.runtime.cpu_binding import apply_thread_share
from accelerate_lshdp.runtime.topology import Topology
from accelerate_lshdp.runtime.wait_clock import WaitClock


if TYPE_CHECKING:
    from accelerate_lshdp.profiling.process import ProfiledProcess


class SingleRankTrainer:
    """Trains micro-batches on this rank, without other ranks.

    Making one is collective over all ranks (it makes process groups); its methods are not.

    Args:
        accelerator: gives device, rank and precision.
        strategy: the strategy to measure.
        units: as for ``LSDPPlugin``; None: those of the accelerator.
        bucket_megabytes: as for ``LSDPPlugin``.
        reducing_ranks: number of ranks that sum a bucket between nodes in a real run; it decides the size of
            buckets.
        reduction: gets the gradient buckets of synchronised backwards; None: there are no buckets.
        clock: seconds, monotonic, for the time that this rank waits for others.
    """

    def __init__(
        self,
        accelerator: ProfiledProcess,
        strategy: Strategy,
        *,
        units: Sequence[str] | None,
        bucket_megabytes: float | None,
        reducing_ranks: int,
        reduction: GradientReduction | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.accelerator = accelerator
        self.device = accelerator.device
        self.clock = WaitClock(clock)
        options = accelerator.lsdp_plugin
        reshard = options.reshard_after_forward
        if strategy.traits.gathered is not Gathered.EACH_PASS:
            reshard = False  # parameters stay on the device between forward and backward
        self.policies = resolve_policies(
            strategy.on_one_rank,  # no collectives in the forward and backward
            Topology(accelerator.process_index, (1,) * accelerator.num_processes),
            device_type=self.device.type,
            mixed_precision=accelerator.mixed_precision,
            reshard_after_forward=reshard,
            pin_memory=options.pin_memory,
            # What FSDP2 itself takes is part of the world-sharded strategies' time.
            intra_node="collectives" if strategy.is_world_sharded else options.intra_node,
        )
        # Memory that is streamed is made by each rank alone, when it gets there.
        alone = self.policies.mechanism is Mechanism.STREAMED
        self._placement = Placement(
            self.policies,
            Topology(0, (1,)) if alone else Topology(accelerator.process_index, (1,) * accelerator.num_processes),
            device=self.device,
            clock=self.clock,
            communication=options.communication,
            units=options.units if units is None else tuple(units),
            prefetch=options.prefetch,
            bucket_bytes=None if bucket_megabytes is None else int(bucket_megabytes * 1e6),
            reduction=reduction,
            reducing_ranks=reducing_ranks,
            # Where there is memory beside what is measured, a run keeps them.
            keeps_gradients=False,
        )
        if self.policies.is_sharded and accelerator.num_processes > 1:
            # Made here, where all ranks are, and kept: `build` then needs no other rank.
            self._placement.groups.of_partition(self.policies.shard_groups, accelerator.process_index)

    def build(self, subject: Subject) -> None:
        """Places the model as the strategy says, and gives the optimizer the parameters that replace its own.

        Args:
            subject: the user's model and optimizer; both are changed.
        """
        self._subject = subject
        self.model = subject.model.train()
        # An offloaded model stays on the host; its units are brought to the device one by one.
        if not self.policies.starts_on_host:
            self.model.to(self.device)
        # Sharding replaces parameters by others of the same name; the optimizer still holds the old ones.
        before = dict(self.model.named_parameters(remove_duplicate=False))
        self._prepared = self._placement.arrange(self.model)
        if self.device.type != "cpu" and self.policies.is_offloaded:
            apply_thread_share()  # as a run does
        after = dict(self.model.named_parameters(remove_duplicate=False))
        replaced = {id(parameter): after[name] for name, parameter in before.items() if name in after}
        for group in subject.optimizer.param_groups:
            group["params"] = [replaced.get(id(parameter), parameter) for parameter in group["params"]]
        if self.device.type == "cpu" or self.policies.mechanism is Mechanism.STREAMED:
            fuse_steps(subject.optimizer, self.policies.is_sharded)  # as a run does

    def to_device(self, batch: Any) -> Any:
        """A copy of the batch on the device."""
        return send_to_device(copy_container(batch), self.device)

    def train(self, batch: Any, *, synchronise: bool = False) -> None:
        """Runs forward and backward of a micro-batch that is on the device; its gradients are added to existing ones.

        Args:
            batch: as `to_device` returned it.
            synchronise: hand the gradient buckets to `reduction`, as the last micro-batch of a step does.

        Raises:
            ValueError: the loss is no tensor with one element that depends on the parameters.
        """
        # The forward is inside, too. Out of memory, for one: the next attempt must not find a backward that has begun.
        with Flow([self._prepared]) as flow:
            loss = self._loss(copy_container(batch))
            self._prepared.synchronise_next = (
                synchronise  # after the forward, which sets it for a training of all ranks
            )
            flow.begin()
            loss.backward()
            flow.deliver([self._prepared])
            flow.finish([self._prepared])

    def _loss(self, batch: Any) -> torch.Tensor:
        # Units cast what they compute with by themselves, as in training.
        casts = contextlib.nullcontext() if self.policies.casts_itself else self.accelerator.autocast()
        with casts:
            loss = self._subject.loss(self.model, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            found = f"of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
            raise ValueError(
                f"found a loss that is {found}, expected a tensor with one element that depends on the parameters"
            )
        return loss

    def step(self) -> None:
        """Makes one optimizer step with the present gradients."""
        self._prepared.before_step()
        optimizer = self._subject.optimizer
        hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
        groups = StepGroups(optimizer, may_bound_memory=not any(hooks))  # those of the script may look at the groups
        try:
            optimizer.step()
        finally:
            groups.restore()
        self._prepared.after_step()

    def drop_gradients(self) -> None:
        """Drops all gradients, as ``optimizer.zero_grad()`` does."""
        for parameter in self._prepared.trainable_parameters():
            parameter.grad = None

    def recover(self) -> None:
        """Frees the memory of a micro-batch that was too large."""
        self.drop_gradients()
        gc.collect()  # tracebacks and autograd graphs form cycles that hold tensors
        if self.device.type != "cpu":
            torch.get_device_module(self.device).empty_cache()

    def synchronise(self) -> None:
        """Waits until the device has completed all queued work."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize(self.device)
