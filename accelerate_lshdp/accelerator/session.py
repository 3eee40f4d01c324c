# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`Session`: what is in force in one training process, and its only writer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate.logging import get_logger
from torch import nn

from accelerate_lshdp.accelerator.accumulation_windows import AccumulationWindows
from accelerate_lshdp.accelerator.automatic_sizes import AutomaticSizes
from accelerate_lshdp.accelerator.held_gradients import HeldGradients
from accelerate_lshdp.accelerator.loss_shares import LossShares
from accelerate_lshdp.accelerator.plugin import LSDPPlugin
from accelerate_lshdp.accelerator.ranks_in_step import RankStep
from accelerate_lshdp.accelerator.run_total import RunTotal, equal_sizes, sizes_at_start
from accelerate_lshdp.accelerator.state_keeping import StateKeeping
from accelerate_lshdp.accelerator.step_statistics import StepTimer
from accelerate_lshdp.accelerator.unstepped_gradients import UnsteppedGradients
from accelerate_lshdp.accelerator.watch import watch_of
from accelerate_lshdp.data.batch_tracker import BatchTracker
from accelerate_lshdp.data.cut import GlobalBatchCut
from accelerate_lshdp.data.script_total import script_total
from accelerate_lshdp.data.yielded_batches import TrackedBatch
from accelerate_lshdp.documents.placement import ModelPlacement
from accelerate_lshdp.documents.plan import Batch, Plan, Strategy
from accelerate_lshdp.engine.attachments import Attachments
from accelerate_lshdp.engine.engine import Engine
from accelerate_lshdp.engine.placement import Placement
from accelerate_lshdp.engine.policies import ShardingPolicies
from accelerate_lshdp.runtime import stop_requests
from accelerate_lshdp.runtime.agreement import raise_on_all_ranks
from accelerate_lshdp.runtime.failures import failures_explained
from accelerate_lshdp.runtime.groups import meets_on_hosts
from accelerate_lshdp.runtime.step_exchange import RankReport, StepExchange
from accelerate_lshdp.runtime.topology import Topology
from accelerate_lshdp.runtime.wait_clock import WaitClock


logger = get_logger(__name__)


class Session:
    """The plan and options of a run, agreed on by all ranks, and how far this process has come with it.

    Making one is collective.

    Args:
        rank: of this process.
        world_size: number of ranks.
        device: where the forward runs.
        plan: as keywords and the environment make it.
        options: with every field filled in.
        mixed_precision: ``no``, ``bf16`` or ``fp16``.
        unmodified: whether the script asked for accelerate's own class, and knows nothing of a plan.
        keeps_total: whether such a script is meant for the plan's total all the same.
        split_batches: whether the batch size of the script's loaders is that of all ranks together.
        finds_placement: whether the run places the blocks of its model itself, when that is prepared.

    Raises:
        RuntimeError: on all ranks, if what they were told differs between them or does not fit the nodes.

    Attributes:
        plan: with the batch sizes that are in force.
        plan_digest: of the plan as all ranks were told it, with the placement, and whatever sizes the run finds later.
        finds_placement: whether the blocks of the model have no place yet.
        policies: what the strategy means on these nodes.
        total: how many samples global batches have.
        sizing: finds the batch sizes; None: they are fixed.
        engine: the models that are trained.
        exchange: what ranks tell each other in every step.
        tracker: which batch the script is working on.
        windows: what is accumulated for an optimizer step.
        held_gradients: of the micro-batches of a global batch that goes on.
        rank_step: what this rank has trained since ranks told each other last.
        unstepped: gradients that an optimizer is still to step with.
        losses: by how much each loss counts.
        timer: how long steps take.
        attachments: hooks on models that are not trained.
        was_freed: whether all models were forgotten, by ``free_memory``.
        optimizers: those that are prepared, in accelerate's wrappers.
        stop_requests: signals that ask for an end of the training.
        keeper: of the state of an elastic run; None: it is none.
        out_of_step: what ranks told when one of them failed in its backward, so that the step cannot be made.
        seed: shuffling starts from it; agreed on by all ranks when a loader is prepared.
        training_passes: the loaders with a training pass in progress; twice, if one has two.
        newest_cut: how the newest global batch was cut.
        completed_steps: optimizer steps done, in this run and those it continues.
        samples_seen: samples of the global batches of these steps.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        plan: Plan,
        options: LSDPPlugin,
        *,
        mixed_precision: str,
        unmodified: bool,
        keeps_total: bool,
        split_batches: bool,
        finds_placement: bool = False,
    ) -> None:
        self.finds_placement = finds_placement
        self._most_samples: int | None = None
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.plan = plan
        self.options = options
        self.sizing: AutomaticSizes | None = None
        self.policies: ShardingPolicies
        self.topology = Topology(0, (1,))
        self._fit_to_nodes(mixed_precision)
        text = self._agreed_text(mixed_precision)
        if unmodified:
            text += f", total of the plan kept: {keeps_total}"
        self.check_agreement(text, "the plan and the options (LSDPPlugin, LSDP_* variables)")
        if self.plan.leaves_total_open:
            self.sizing = None  # made to be checked; the total comes with the first batch that is trained
        self.plan_digest = self.plan.digest()
        self.total = RunTotal(self.plan, unmodified=unmodified, kept=keeps_total, split_batches=split_batches)
        clock = WaitClock()
        counts = [steps for _, steps in self.plan.micro_batches or ()]
        self.exchange = StepExchange(rank, world_size, clock, counts if len(set(counts)) > 1 else None)
        self._clock = clock
        self.timer = StepTimer(device, clock)
        self.tracker = BatchTracker()
        self.losses = LossShares(options, self.exchange, divided=world_size > 1 or self.plan.has_accumulation)
        self.engine = self._make_engine()
        self.attachments = Attachments()
        self.stop_requests = stop_requests.of_process
        self.watch = watch_of(self.topology, self.plan, self.timer.statistics)
        self.keeper: StateKeeping | None = None
        self.was_freed = False
        self.optimizers: Sequence[Any] = ()
        self.unstepped = UnsteppedGradients()
        self.forget_step()
        self.seed = 0
        self.training_passes: list[Any] = []
        self.newest_cut: GlobalBatchCut | None = None
        self.completed_steps = 0
        self.samples_seen = 0
        self._evaluation_depth = 0

    def _make_engine(self) -> Engine:
        options = self.options
        return Engine(
            Placement(
                self.policies,
                self.topology,
                device=self.device,
                clock=self._clock,
                communication=options.communication,
                units=options.units,
                placement=self.plan.placement,
                prefetch=options.prefetch,
                bucket_bytes=None if options.bucket_megabytes is None else int(options.bucket_megabytes * 1e6),
            )
        )

    def place(self, placement: ModelPlacement, batch: Batch | None, most_samples: int, mixed_precision: str) -> None:
        """Takes the placement that the run has found, before any model is prepared (collective).

        Args:
            placement: the same on all ranks.
            batch: the sizes that go with it. None: they stay.
            most_samples: the largest micro-batch of this rank that its memory has room for with this placement.
            mixed_precision: of the accelerator.
        """
        self.plan = self.plan.with_placement(placement)
        if batch is not None:
            self.plan = self.plan.with_batch(batch)
        self._most_samples = most_samples
        self._fit_to_nodes(mixed_precision)
        if self.plan.leaves_total_open:
            self.sizing = None  # as in the beginning
        self.plan_digest = self.plan.digest()
        self.engine = self._make_engine()
        self.finds_placement = False

    def _fit_to_nodes(self, mixed_precision: str) -> None:
        """Resolves what the plan means on these nodes, or raises on all ranks (collective)."""
        error: Exception | None = None
        try:
            self.topology = Topology.discover(self.rank, self.world_size, device_type=self.device.type)
            self._check_that_devices_meet(mixed_precision)
            self.policies = self.options.policies(
                self.topology,
                device_type=self.device.type,
                mixed_precision=mixed_precision,
                placement=self.plan.placement,
            )
            plan = self.plan if self.plan.automatic is None else sizes_at_start(self.plan, self.world_size)
            plan.check(self.world_size, self.policies.shard_groups, self.topology.node_sizes)
            if plan.automatic is not None:
                self.sizing = AutomaticSizes(plan, self.device, self._most_samples)
            if not self.plan.leaves_total_open:
                self.plan = plan
        except (ValueError, RuntimeError) as found:
            error = found
        self.raise_everywhere(error)

    def _check_that_devices_meet(self, mixed_precision: str) -> None:
        """Checks that nodes with different types of devices can exchange gradients.

        Raises:
            ValueError: they cannot.
        """
        if not self.topology.mixes_devices:
            return
        found = f"found nodes with devices of types {', '.join(self.topology.device_types)}"
        if not meets_on_hosts():
            raise ValueError(
                f"{found} and process groups over {dist.get_backend_config()}, expected gloo on all ranks: different "
                "devices meet in host memory. Make the accelerator before any process group, or that group over gloo"
            )
        if mixed_precision == "fp16":
            raise ValueError(
                f"{found} and fp16, expected bf16 or no mixed precision: processors do not scale losses, so gradients "
                "of devices would be larger than theirs"
            )
        if self.finds_placement:
            raise ValueError(
                f"{found} and a placement that the run is to find, expected strategy lsdp: gradients of different "
                "devices meet in host memory"
            )

    def _agreed_text(self, mixed_precision: str) -> str:
        """Everything in which ranks have to agree, as text."""
        options = self.options
        sizes = "of its loaders" if self.plan.batch is None else self.plan.batch_sizes
        text = f"strategy {self.plan.strategy}, batch sizes {sizes}, plan {self.plan.digest()[:16]}, nodes "
        text += f"{self.topology.node_sizes}, units {options.units}, weighting {options.loss_weighting}, "
        text += f"buckets {options.bucket_megabytes}, intra-node {options.intra_node}, "
        text += f"precision {mixed_precision}, placement found by the run: {self.finds_placement}"
        if self.sizing is not None:
            text += f", measured curves {self.sizing.curves}"
        return text

    def raise_everywhere(self, error: Exception | None) -> None:
        """Raises RuntimeError on all ranks if ``error`` is not None on one of them (collective); alone, the error."""
        if self.world_size > 1:
            raise_on_all_ranks(error)
        elif error is not None:
            raise error

    def check_agreement(
        self, digest: str, what: str, advice: str = "Give all nodes the same files and options"
    ) -> None:
        """Raises RuntimeError on all ranks if ``digest`` differs between them (collective).

        Args:
            digest: of this rank.
            what: names it in the message.
            advice: what is to be done if ranks differ.
        """
        if self.world_size == 1:
            return
        if hasattr(self, "engine"):  # the first agreement comes before there is any
            self.engine.collective_begins()
        everyone: list[str | None] = [None] * self.world_size
        with failures_explained():
            dist.all_gather_object(everyone, digest)
        if len(set(everyone)) > 1:
            found = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(everyone))
            raise RuntimeError(f"the ranks do not agree on {what}. {found}. {advice}")

    @property
    def strategy(self) -> Strategy:
        return self.plan.strategy

    def take_optimizers(self, optimizers: Sequence[torch.optim.Optimizer], new: Sequence[torch.Tensor]) -> None:
        """Gives optimizers the parameters as they have been placed, and checks that they can update them (collective).

        Args:
            optimizers: some may have been checked, and have stepped, before.
            new: parameters that they have not been checked with.

        Raises:
            RuntimeError: on all ranks, if one cannot; of one rank alone the error itself.
        """
        error: Exception | None = None
        try:
            for optimizer in optimizers:
                notice = self.engine.take_optimizer(optimizer, new)
                if notice is not None:
                    logger.warning_once(notice)
        except ValueError as found:
            error = found
        self.raise_everywhere(error)

    # Passes

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Passes begun inside are evaluation passes, whatever mode the models are in."""
        self._evaluation_depth += 1
        try:
            yield
        finally:
            self._evaluation_depth -= 1

    @property
    def within_evaluation(self) -> bool:
        """Whether an `evaluation` is open."""
        return self._evaluation_depth > 0

    @property
    def is_evaluating(self) -> bool:
        """Whether a pass that begins now is an evaluation pass: no prepared model with an optimizer is training."""
        return self.within_evaluation or not any(model.training for model in self.trained_models())

    def trained_models(self) -> list[nn.Module]:
        """Prepared models that a prepared optimizer updates."""
        updated = {id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}
        return [p.module for p in self.engine.models if any(id(w) in updated for w in p.trainable_parameters())]

    # Sizes

    def settle_total(self, total: int) -> None:
        """Gives a plan without a total this one, and lets the run find the sizes from now on."""
        if not self.plan.leaves_total_open:
            return
        self.plan = self.plan.with_total(equal_sizes(self.plan, total, self.world_size))
        self.sizing = AutomaticSizes(self.plan, self.device, self._most_samples)
        self.sizing.join(self.training_passes)
        self.total.settle()
        logger.info(f"global batches have {total} samples, the script's; the run finds how to divide them")

    def settle_total_like(self, saved: Plan, loaders: Sequence[Any]) -> None:
        """Gives a plan without a total that of a checkpoint, if a prepared loader still makes it."""
        if not self.plan.leaves_total_open or saved.automatic is None or saved.batch is None:
            return
        if saved.total_batch_size in {script_total(loader._source, self.world_size) for loader in loaders}:
            self.settle_total(saved.total_batch_size)

    def take_sizes(self) -> None:
        """The sizes that were decided last are in force from now on."""
        self.plan = self.plan.with_batch(self.sizing.batch)

    # Steps

    @property
    def on_forward(self) -> Callable[[], None]:
        """What is to be called when a forward of a model in training begins; it does not keep this session alive."""
        timer, keeper = self.timer, self.keeper
        if keeper is None:
            return timer.forward_begins

        def begins() -> None:
            timer.forward_begins()
            keeper.forward_begins()

        return begins

    def step_begins(self) -> None:
        """An optimizer is about to change parameters."""
        self.timer.optimizer_begins()
        if self.keeper is not None:
            self.keeper.step_begins()

    def batch_trained(self, batch: TrackedBatch) -> None:
        """A backward of a batch was made, for the first time."""
        place, loader = batch.place, batch.loader()
        if loader is not None:
            loader.batch_trained(place, batch.reading)
        if place.ends_global_batch:
            self.rank_step.trained([place])
            self.timer.samples += place.total_samples
            self.samples_seen += place.total_samples
            if self.sizing is not None:
                self.sizing.global_batch_trained(place)

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has changed parameters."""
        self.timer.step_ends()
        self.rank_step.optimizer_steps += 1
        self.gradients_used(optimizer)
        self.engine.after_step()
        is_first = bool(self.optimizers) and optimizer is self.optimizers[0].optimizer
        self.completed_steps += is_first
        decision = None if self.sizing is None else self.sizing.step_ended()
        if decision is not None:
            self.take_sizes()
            logger.info(f"step {self.completed_steps}, {decision}")
        if self.watch is not None and is_first:
            place = self.tracker.current
            self.watch.stepped(self.samples_seen, () if place is None else place.cut.sizes, decision)
        if self.keeper is not None:
            self.keeper.step_ends()

    def gradients_used(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped, or left out its step for gradients that have overflowed: they are of the past."""
        self.unstepped.step_ended(optimizer)
        self.held_gradients.stepped(optimizer)

    def forget_step(self) -> None:
        """Forgets the step that ranks were in, whose gradients are dropped.

        After an error that was caught they may have made different steps, and would be out of step for ever.
        """
        self.unstepped.clear()
        self.windows = AccumulationWindows()
        self.held_gradients = HeldGradients()
        self.rank_step = RankStep()
        self.tracker.problem = None
        self.out_of_step: Sequence[RankReport] | None = None

    def free_models(self) -> None:
        """Forgets all models and their step; how many steps were made stays. Another session may take the models."""
        self.was_freed = True
        self.engine.release()
        self.attachments.remove()
        self.unstepped.clear()
        self.windows = AccumulationWindows()
        self.held_gradients = HeldGradients()
