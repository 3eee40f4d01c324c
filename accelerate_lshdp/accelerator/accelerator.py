"""``LSHDPAccelerator``: accelerate's ``Accelerator`` on machines of different speed."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.logging import get_logger
from torch import nn

from accelerate_lshdp.accelerator.accumulation_windows import AccumulationWindows
from accelerate_lshdp.accelerator.automatic_sizes import AutomaticSizes
from accelerate_lshdp.accelerator.checkpointing import Checkpointing
from accelerate_lshdp.accelerator.creation import created
from accelerate_lshdp.accelerator.ddp_options import ddp_options_without_effect, refuse_ddp_options
from accelerate_lshdp.accelerator.loader_context import AcceleratorLoaderContext
from accelerate_lshdp.accelerator.losses.finding import LossFinder
from accelerate_lshdp.accelerator.metrics import Collecting
from accelerate_lshdp.accelerator.other_engines import (
    fsdp_choices_without_effect,
    refuse_other_engines,
    switch_off_other_engines,
)
from accelerate_lshdp.accelerator.plugin import LSDPPlugin
from accelerate_lshdp.accelerator.preparing import Preparing
from accelerate_lshdp.accelerator.ranks_in_step import RankStep
from accelerate_lshdp.accelerator.run_total import RunTotal, keeps_plan_total, sizes_at_start
from accelerate_lshdp.accelerator.settings import BatchKeywords, resolve_plan
from accelerate_lshdp.accelerator.step_statistics import StepStatistics, StepTimer
from accelerate_lshdp.accelerator.stepping import Stepping
from accelerate_lshdp.accelerator.unstepped_gradients import UnsteppedGradients
from accelerate_lshdp.data.batch_tracker import BatchTracker
from accelerate_lshdp.data.place import MicroBatchPlace
from accelerate_lshdp.data.prepare import skip_first_batches
from accelerate_lshdp.data.tokens import LabelCounter
from accelerate_lshdp.data.weighting import LossWeighting
from accelerate_lshdp.documents.plan import Plan, Strategy
from accelerate_lshdp.engine.placement import Placement
from accelerate_lshdp.engine.policies import ShardingPolicies
from accelerate_lshdp.engine.prepared import PreparedModel
from accelerate_lshdp.engine.scaler import ShardedGradScaler
from accelerate_lshdp.planning.online.rebalancing import Decision
from accelerate_lshdp.runtime.agreement import raise_on_all_ranks
from accelerate_lshdp.runtime.backend import prepare_environment, refuse_single_process_state
from accelerate_lshdp.runtime.failures import failures_explained
from accelerate_lshdp.runtime.forking import install_safe_forks
from accelerate_lshdp.runtime.option_advice import option_advice
from accelerate_lshdp.runtime.parent_death import end_with_launcher
from accelerate_lshdp.runtime.shutdown import install_clean_exit
from accelerate_lshdp.runtime.step_exchange import StepExchange
from accelerate_lshdp.runtime.topology import Topology
from accelerate_lshdp.runtime.wait_clock import WaitClock


logger = get_logger(__name__)


class LSHDPAccelerator(Preparing, Stepping, Collecting, Checkpointing, Accelerator):
    """An ``Accelerator`` whose ranks may have batches of different size and whose parameters stay on their node.

    User code between ``prepare`` and the end of training is ordinary accelerate code.

    Args:
        plan: a plan or the path of one; None: from ``ACCELERATE_LSHDP_PLAN``, or equal batches if that is not set.
        lsdp_plugin: options; what it leaves open comes from the plan, the environment (``LSDP_*``) or defaults.
        batch_sizes: one batch size, or (micro-batch size, accumulation steps), a rank; instead of ``plan``. Or
            ``"auto"``: the run finds them itself while it trains, from the plan's sizes or an equal split on.
        total_batch_size: samples in a global batch, for ``batch_sizes="auto"``.
        rebalance_every: optimizer steps between two looks at automatic sizes, once they have settled. Default 10.
        dead_band: the share of the step time that new automatic sizes have to gain. Default 0.03.
        trust_checkpoint: whether registered objects that JSON and tensors cannot hold are pickled into checkpoints,
            and unpickled from them. Only load such checkpoints from people whom you would let run code.
        *args, **kwargs: as for ``accelerate.Accelerator``; plugins of other engines are refused.

    Raises:
        RuntimeError: on all ranks, if plan, options or nodes are wrong on any of them or differ between them.
    """

    #: Whether the script asked for ``accelerate.Accelerator``, which the shim replaced.
    stands_for_accelerator = False

    def __init__(
        self,
        *args: Any,
        plan: Plan | str | os.PathLike[str] | None = None,
        lsdp_plugin: LSDPPlugin | None = None,
        batch_sizes: Sequence[Any] | str | None = None,
        total_batch_size: int | None = None,
        rebalance_every: int | None = None,
        dead_band: float | None = None,
        trust_checkpoint: bool = False,
        **kwargs: Any,
    ) -> None:
        if prepare_environment():
            kwargs.setdefault("cpu", True)
        # On GPUs this is left of a config file for FSDP; its plugin has no part here.
        os.environ.pop("ACCELERATE_USE_FSDP", None)
        refuse_single_process_state()
        error: Exception | None = None
        keeps_total = False
        try:
            refuse_other_engines(kwargs)
            refuse_ddp_options(kwargs.get("kwargs_handlers"))
            keeps_total = keeps_plan_total()
            keywords = BatchKeywords(batch_sizes, total_batch_size, rebalance_every, dead_band)
            self.plan, self.lsdp_plugin = resolve_plan(plan, keywords, lsdp_plugin or LSDPPlugin())
            self._choose_precision(kwargs)
        except (ValueError, OSError) as found:
            error = found
            # Only to meet the other ranks and to raise there.
            kwargs = {name: kwargs[name] for name in ("cpu", "kwargs_handlers") if name in kwargs}
            switch_off_other_engines()
        super().__init__(*args, **kwargs)
        end_with_launcher()
        install_clean_exit()
        install_safe_forks()
        created()
        self._raise_everywhere(error)
        self.trust_checkpoint = trust_checkpoint
        self._agree(keeps_total)
        counts = [steps for _, steps in self.plan.micro_batches or ()]
        self._clock = WaitClock()
        self._exchange = StepExchange(
            self.process_index, self.num_processes, self._clock, counts if len(set(counts)) > 1 else None
        )
        self._timer = StepTimer(self.device, self._clock)
        self._tracker = BatchTracker()
        self._windows = AccumulationWindows()
        self._rank_step = RankStep()
        self._unstepped = UnsteppedGradients()
        self._loader_context = AcceleratorLoaderContext(self)
        self._prepared: list[PreparedModel] = []
        self._new_parameters: dict[int, tuple[weakref.ref, nn.Parameter]] = {}
        self._hidden: list[tuple[nn.Parameter, Any]] = []  # gradients that another rank of the node uses
        self._evaluation_depth = 0
        self._window_tokens: float | None = None
        self.loss_findings: dict[str, dict[str, Any]] = {"loop": {}}  # what losses were found to be, for checkpoints
        self._losses: LossFinder | None = None
        self._choose_weighting()
        options = self.lsdp_plugin
        self._placement = Placement(
            self.policies,
            self.topology,
            device=self.device,
            clock=self._clock,
            communication=options.communication,
            units=options.units,
            prefetch=options.prefetch,
            bucket_bytes=None if options.bucket_megabytes is None else int(options.bucket_megabytes * 1e6),
        )
        if self.scaler is not None and self.policies.is_sharded:
            scaling = self.scaler_handler.to_kwargs() if self.scaler_handler is not None else {}
            self.scaler = ShardedGradScaler(self.device.type, **scaling)

    def _choose_weighting(self) -> None:
        """Decides who says by how much losses count."""
        weighting, counter = self.lsdp_plugin.loss_weighting, self.lsdp_plugin.token_counter
        if weighting is LossWeighting.TOKENS and counter is not None:
            self._loader_context.token_counter = counter
        elif weighting in (LossWeighting.AUTO, LossWeighting.TOKENS):
            labels = LabelCounter(of_steps=weighting is LossWeighting.TOKENS)
            self._losses = LossFinder(self._exchange, labels, self.loss_findings["loop"])
            alone = self.num_processes == 1 and not self.plan.has_accumulation
            if alone and weighting is LossWeighting.AUTO:
                self._losses.idle = True
            else:
                self._loader_context.token_counter = labels

    @contextlib.contextmanager
    def weighting_left_to_caller(self) -> Iterator[None]:
        """Inside, losses are not looked at: a caller says by how much each counts (``counting_losses``)."""
        counter, self._loader_context.token_counter = self._loader_context.token_counter, None
        idle = self._losses is None or self._losses.idle
        if self._losses is not None:
            self._losses.idle = True
        try:
            yield
        finally:
            self._loader_context.token_counter = counter
            if self._losses is not None:
                self._losses.idle = idle

    def _choose_precision(self, kwargs: dict[str, Any]) -> None:
        wanted = self.lsdp_plugin.mixed_precision
        given = kwargs.get("mixed_precision")
        if wanted is not None and given is not None and str(given) != wanted:
            raise ValueError(
                f"mixed_precision={str(given)!r} contradicts {option_advice('mixed_precision', wanted)}; give only one"
            )
        if wanted is not None:
            kwargs["mixed_precision"] = wanted

    def _raise_everywhere(self, error: Exception | None) -> None:
        if self.num_processes > 1:
            raise_on_all_ranks(error)
        elif error is not None:
            raise error

    def _agree(self, keeps_total: bool) -> None:
        """Checks that all ranks were told the same and that it fits the nodes (collective)."""
        error: Exception | None = None
        self._sizing: AutomaticSizes | None = None
        self.topology = Topology(0, (1,))
        try:
            self.topology = Topology.discover(self.process_index, self.num_processes)
            self.policies: ShardingPolicies = self.lsdp_plugin.policies(
                self.topology, device_type=self.device.type, mixed_precision=self.mixed_precision
            )
            plan = self.plan if self.plan.automatic is None else sizes_at_start(self.plan, self.num_processes)
            plan.check(self.num_processes, self.policies.shard_groups, self.topology.node_sizes)
            if plan.automatic is not None:
                self._sizing = AutomaticSizes(plan, self.device)
            if not self.plan.leaves_total_open:
                self.plan = plan
        except (ValueError, RuntimeError) as found:
            error = found
        self._raise_everywhere(error)
        options = self.lsdp_plugin
        sizes = "of its loaders" if self.plan.batch is None else self.plan.batch_sizes
        told = f"strategy {self.plan.strategy}, batch sizes {sizes}, plan {self.plan.digest()[:16]}, nodes "
        told += f"{self.topology.node_sizes}, units {options.units}, weighting {options.loss_weighting}, "
        told += f"buckets {options.bucket_megabytes}, intra-node {options.intra_node}, "
        told += f"precision {self.mixed_precision}"
        if self._sizing is not None:
            told += f", measured curves {self._sizing.curves}"
        if self.stands_for_accelerator:
            told += f", total of the plan kept: {keeps_total}"
        self.check_agreement(told, "the plan and the options (LSDPPlugin, LSDP_* variables)")
        if self.plan.leaves_total_open:
            self._sizing = None  # made to be checked; the total comes with the first batch that is trained
        self.plan_digest = self.plan.digest()
        """Of what was told, whatever the run finds later."""
        self.run_total = RunTotal(self, self.stands_for_accelerator, keeps_total)
        if self.policies.notice:
            logger.warning(self.policies.notice)
        if unused := fsdp_choices_without_effect():
            logger.warning(
                f"the FSDP settings {', '.join(unused)} have no effect: the strategy {self.plan.strategy} of the plan "
                f"places the parameters. Choose the units by {option_advice('units')}, the checkpointing in the model"
            )
        if unused := ddp_options_without_effect([self.ddp_handler]):
            logger.warning(
                f"DistributedDataParallelKwargs({', '.join(unused)}) has no effect: torch's DDP is not used. The size "
                f"of gradient buckets is {option_advice('bucket_megabytes')}"
            )

    def check_agreement(
        self, digest: str, what: str, advice: str = "Give all nodes the same files and options"
    ) -> None:
        """Raises RuntimeError on all ranks if ``digest`` differs between them (collective).

        Args:
            digest: of this rank.
            what: names it in the message.
            advice: what is to be done if ranks differ.
        """
        if self.num_processes == 1:
            return
        everyone: list[str | None] = [None] * self.num_processes
        with failures_explained():
            dist.all_gather_object(everyone, digest)
        if len(set(everyone)) > 1:
            found = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(everyone))
            raise RuntimeError(f"the ranks do not agree on {what}. {found}. {advice}")

    @property
    def strategy(self) -> Strategy:
        return self.plan.strategy

    @property
    def step_statistics(self) -> StepStatistics | None:
        """Medians over the last steps: seconds, compute and wait of every rank; None before the first step."""
        return self._timer.statistics()

    @property
    def batch_size_decisions(self) -> list[Decision]:
        """How automatic batch sizes changed, oldest first: when, from what to what, and why. Empty with fixed ones."""
        return [] if self._sizing is None else list(self._sizing.rebalancer.decisions)

    def _rebalance(self) -> None:
        decision = self._sizing.step_ended()
        if decision is not None:
            self.plan = self.plan.with_batch(self._sizing.batch)
            logger.info(f"step {self.completed_steps}, {decision}")

    @property
    def batch_place(self) -> MicroBatchPlace | None:
        """Where the batch that is being worked on stands in its epoch, global batch and optimizer step.

        ``samples`` are those of this rank that count (0 for a repeated one), ``total_samples`` those of all ranks.
        None before the first training batch, and for batches of no prepared loader.
        """
        return self._tracker.current

    def places_of(self, batches: Sequence[Any]) -> list[MicroBatchPlace]:
        """The places of training batches that a caller has fetched, in order; none for those of an evaluation pass."""
        return self._tracker.places_of(batches)

    def choose_batch(self, batch: Any) -> None:
        """Says which batch the next ``accumulate`` trains, for callers whose models are given copies of it."""
        self._tracker.choose(batch)

    # Evaluation

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Passes begun inside are evaluation passes, whatever mode the models are in."""
        self._evaluation_depth += 1
        try:
            yield
        finally:
            self._evaluation_depth -= 1

    @property
    def is_evaluating(self) -> bool:
        """Whether a pass that begins now is an evaluation pass: no prepared model with an optimizer is training."""
        return self._evaluation_depth > 0 or not any(model.training for model in self._trained_models())

    def _trained_models(self) -> list[nn.Module]:
        """Prepared models that a prepared optimizer updates."""
        updated = {
            id(p) for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]
        }
        return [p.module for p in self._prepared if any(id(w) in updated for w in p.trainable_parameters())]

    def skip_first_batches(self, dataloader: Any, num_batches: int | None = None) -> Any:
        """A loader for one pass that leaves out the first batches.

        Args:
            dataloader: a prepared loader.
            num_batches: number of this rank's batches; None: up to the position that ``load_state`` restored.
        """
        return skip_first_batches(dataloader, num_batches)

    def free_memory(self, *objects: Any) -> Any:
        self._prepared.clear()
        self._unstepped.clear()
        self._windows = AccumulationWindows()
        self._new_parameters.clear()
        return super().free_memory(*objects)
