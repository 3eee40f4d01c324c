# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""``LSHDPAccelerator``: accelerate's ``Accelerator`` on machines of different speed."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from accelerate_lshdp.accelerator.accumulation import Accumulation
from accelerate_lshdp.accelerator.automatic_placement import place_model
from accelerate_lshdp.accelerator.backward import Backward
from accelerate_lshdp.accelerator.creation import created
from accelerate_lshdp.accelerator.ddp_options import refuse_ddp_options
from accelerate_lshdp.accelerator.held_gradients import refuse_to_clip_parts
from accelerate_lshdp.accelerator.loader_context import SessionLoaderContext
from accelerate_lshdp.accelerator.metrics import gather, gather_metrics, meet, on_carried_tensors
from accelerate_lshdp.accelerator.model_checks import checked
from accelerate_lshdp.accelerator.model_export import fits_one_file, full_state, write_weights
from accelerate_lshdp.accelerator.optimizer_steps import OptimizerSteps, PreparedOptimizer
from accelerate_lshdp.accelerator.other_engines import (
    refuse_other_engines,
    switch_off_other_engines,
)
from accelerate_lshdp.accelerator.plan_resolution import AUTO, BatchKeywords, resolve_plan
from accelerate_lshdp.accelerator.plugin import LSDPPlugin
from accelerate_lshdp.accelerator.process_groups import meet_other_devices
from accelerate_lshdp.accelerator.run_checkpoints import layout_of, load_run, save_run
from accelerate_lshdp.accelerator.run_total import keeps_plan_total
from accelerate_lshdp.accelerator.schedule_notice import warn_of_schedule
from accelerate_lshdp.accelerator.session import Session
from accelerate_lshdp.accelerator.start_notices import choose_precision, warn_of_options_without_effect
from accelerate_lshdp.accelerator.state_keeper import state_keeper
from accelerate_lshdp.accelerator.step_logs import step_logs
from accelerate_lshdp.accelerator.step_statistics import StepStatistics
from accelerate_lshdp.checkpoint.run_state import (
    LoadedCheckpoint,
    NodeLayout,
    load_models,
)
from accelerate_lshdp.data.place import MicroBatchPlace
from accelerate_lshdp.data.prepare import prepare_loader, skip_first_batches
from accelerate_lshdp.data.weighting import LossWeighting, require_known_labels
from accelerate_lshdp.documents.placement import ModelPlacement
from accelerate_lshdp.documents.plan import Plan, Strategy
from accelerate_lshdp.engine.batch_norm import allow_single_values
from accelerate_lshdp.engine.clipping import clip_grad_norm, clip_grad_value
from accelerate_lshdp.engine.fused_steps import fuse_steps
from accelerate_lshdp.engine.module_state import parameters_of
from accelerate_lshdp.engine.policies import Mechanism, ShardingPolicies
from accelerate_lshdp.engine.prepared import PreparedModel
from accelerate_lshdp.engine.scaler import ShardedGradScaler
from accelerate_lshdp.planning.online.rebalancing import Decision
from accelerate_lshdp.runtime.agreement import raise_on_all_ranks
from accelerate_lshdp.runtime.backend import prepare_environment, refuse_single_process_state
from accelerate_lshdp.runtime.failures import failures_explained
from accelerate_lshdp.runtime.forking import install_safe_forks
from accelerate_lshdp.runtime.groups import meets_on_hosts
from accelerate_lshdp.runtime.launched_devices import group_exists
from accelerate_lshdp.runtime.parent_death import end_with_launcher
from accelerate_lshdp.runtime.shutdown import install_clean_exit
from accelerate_lshdp.runtime.topology import Topology


logger = get_logger(__name__)


class LSHDPAccelerator(Accelerator):
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
        placement: where each unit of the model keeps its parameters, as the section of a plan has it; instead of the
            plan's. The strategy is ``osdp`` then. Or ``"auto"``: `prepare` measures the model and the machines, and
            places each block where it is best; it needs the model and its training loader in one call.
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
        placement: ModelPlacement | Mapping[str, Any] | str | None = None,
        trust_checkpoint: bool = False,
        **kwargs: Any,
    ) -> None:
        on_cpu = prepare_environment()
        if on_cpu:
            kwargs.setdefault("cpu", True)
        # On GPUs this is left of a config file for FSDP; its plugin has no part here.
        os.environ.pop("ACCELERATE_USE_FSDP", None)
        refuse_single_process_state()
        # Before anything that may fail on one node alone: such an error is told to the others in these groups.
        meet_other_devices(on_cpu or bool(kwargs.get("cpu")), kwargs)
        error: Exception | None = None
        keeps_total = False
        try:
            refuse_other_engines(kwargs)
            refuse_ddp_options(kwargs.get("kwargs_handlers"))
            keeps_total = keeps_plan_total()
            keywords = BatchKeywords(batch_sizes, total_batch_size, rebalance_every, dead_band)
            plan, options = resolve_plan(plan, keywords, lsdp_plugin or LSDPPlugin(), placement)
            choose_precision(options, kwargs)
        except (ValueError, OSError) as found:
            error = found
            # Only to meet the other ranks and to raise there.
            kwargs = {name: kwargs[name] for name in ("cpu", "kwargs_handlers") if name in kwargs}
            switch_off_other_engines()
        super().__init__(*args, **kwargs)
        group_exists()
        end_with_launcher()
        install_clean_exit()
        install_safe_forks()
        created()
        if error is not None and self.num_processes == 1:
            raise error
        if self.num_processes > 1:
            raise_on_all_ranks(error)
        self.trust_checkpoint = trust_checkpoint
        self.session = Session(
            self.process_index,
            self.num_processes,
            self.device,
            plan,
            options,
            mixed_precision=self.mixed_precision,
            unmodified=self.stands_for_accelerator,
            keeps_total=keeps_total,
            split_batches=self.split_batches,
            finds_placement=options.placement == AUTO,
        )
        self.session.optimizers = self._optimizers
        self.session.keeper = state_keeper()
        self._logged_steps = 0
        self._accumulation = Accumulation(self.session, self.gradient_state)
        self._backward = Backward(self.session, self._accumulation)
        self._optimizer_steps = OptimizerSteps(self.session)
        self._loader_context = SessionLoaderContext(self.session, self.gradient_state)
        warn_of_options_without_effect(self.strategy, self.ddp_handler)
        if not self.session.finds_placement:
            self._adapt_to_policies()

    def _adapt_to_policies(self) -> None:
        """Says what the policies mean for the user, and scales the losses of sharded models in fp16."""
        if self.policies.notice:
            logger.warning(self.policies.notice)
        if self.scaler is not None and self.policies.casts_itself:
            scaling = self.scaler_handler.to_kwargs() if self.scaler_handler is not None else {}
            self.scaler = ShardedGradScaler(self.device.type, **scaling)

    # What is in force

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        device = self.state.device
        # accelerate numbers the CPU among several ranks ("cpu:1"). There is only one: batches that go there would be
        # copied, and files could not be read to it (`torch.load(map_location=...)`).
        return torch.device("cpu") if device.type == "cpu" else device

    @property
    def plan(self) -> Plan:
        """The plan, with the batch sizes that are in force."""
        return self.session.plan

    @property
    def lsdp_plugin(self) -> LSDPPlugin:
        """The options, with every field filled in."""
        return self.session.options

    @property
    def strategy(self) -> Strategy:
        return self.session.strategy

    @property
    def topology(self) -> Topology:
        """Nodes and ranks."""
        return self.session.topology

    @property
    def policies(self) -> ShardingPolicies:
        """What the strategy means on these nodes."""
        return self.session.policies

    @property
    def completed_steps(self) -> int:
        """Optimizer steps done, in this run and those it continues."""
        return self.session.completed_steps

    @completed_steps.setter
    def completed_steps(self, steps: int) -> None:
        self.session.completed_steps = steps

    @property
    def samples_seen(self) -> int:
        """Samples of the global batches of these steps."""
        return self.session.samples_seen

    @samples_seen.setter
    def samples_seen(self, samples: int) -> None:
        self.session.samples_seen = samples

    @property
    def step_statistics(self) -> StepStatistics | None:
        """Medians over the last steps: seconds, compute and wait of every rank; None before the first step."""
        return self.session.timer.statistics()

    def log(self, values: dict, step: int | None = None, log_kwargs: dict | None = None) -> None:
        """Logs values as accelerate does and, if steps were made since the last log, where their time went.

        The figures are those of a Trainer's logs: medians over the last steps, as ``step_seconds`` and
        ``wait_seconds/rank_1``. A value of the script's with such a name stays.
        """
        if self._logged_steps != (made := self.session.rank_step.optimizer_steps):
            self._logged_steps = made
            values = {**step_logs(self.step_statistics, self.batch_place), **values}
        super().log(values, step=step, log_kwargs=log_kwargs)

    def stop_on_signals(self) -> None:
        """SIGTERM and SIGUSR1 from now on set `stop_requested` on all ranks, instead of ending this process.

        One that comes ten seconds later ends it all the same. For loops of the script's own, in the main thread; a
        Trainer does it itself, if it saves checkpoints.
        """
        self.session.stop_requests.watch()

    @property
    def stop_requested(self) -> bool:
        """Whether a rank has been told to end, the same on all ranks after the last backward of every step.

        Save and leave the loop after the optimizer's step in which it becomes true: all ranks are at the same step.
        """
        return self.session.stop_requests.agreed != 0

    @property
    def continues_run(self) -> bool:
        """Whether this is an elastic run whose ranks were started again, as nodes have come or gone.

        Then call `load_state` before the first step, with the folder of the script's checkpoints: it continues from
        the state that ranks have kept in memory, or from the newest checkpoint if none could keep it. Where there is
        none of either, it changes nothing and returns ``step`` 0.
        """
        return self.session.keeper is not None and self.session.keeper.continues_run

    @property
    def batch_size_decisions(self) -> list[Decision]:
        """How automatic batch sizes changed, oldest first: when, from what to what, and why. Empty with fixed ones."""
        sizing = self.session.sizing
        return [] if sizing is None else list(sizing.rebalancer.decisions)

    @property
    def batch_place(self) -> MicroBatchPlace | None:
        """Where the batch that is being worked on stands in its epoch, global batch and optimizer step.

        ``samples`` are those of this rank that count (0 for a repeated one), ``total_samples`` those of all ranks.
        None before the first training batch, and for batches of no prepared loader.
        """
        return self.session.tracker.current

    @property
    def node_layout(self) -> NodeLayout:
        """Where this process stands among the nodes, for checkpoints."""
        return layout_of(self.session)

    @property
    def step(self) -> int:
        """Micro-batches accumulated so far: accelerate's own counter."""
        return self._accumulation.step

    @step.setter
    def step(self, step: int) -> None:
        # accelerate's constructor sets it to 0 before there is an accumulation, which begins with 0, too.
        if "_accumulation" in vars(self):
            self._accumulation.step = step

    def check_agreement(
        self, digest: str, what: str, advice: str = "Give all nodes the same files and options"
    ) -> None:
        """Raises RuntimeError on all ranks if ``digest`` differs between them: see `Session.check_agreement`."""
        self.session.check_agreement(digest, what, advice)

    # Objects

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        if self.session.finds_placement:
            place_model(self.session, self, args, self._dataloaders)
            if not self.session.finds_placement:
                self._adapt_to_policies()
        result = super().prepare(*args, device_placement=device_placement)
        warned_later = self.plan.batch is None or self.session.total.follows_script
        if self._schedulers and self.num_processes > 1 and not (warned_later or self.split_batches):
            warn_of_schedule(self.session, args, self.gradient_accumulation_steps)
        return result

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        engine = self.session.engine
        known = PreparedModel.of(model)
        if known is not None:
            known = engine.take_back(known, evaluation_mode)
        trains = any(parameter.requires_grad for parameter in parameters_of(model))
        if evaluation_mode or not trains or known is not None:
            self._accumulation.watch_inputs(model)
            return super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)
        if self.session.finds_placement:
            raise RuntimeError(
                'found prepare_model with placement="auto", expected `prepare` with the model and its training loader,'
                " by whose samples the model is measured"
            )
        model = checked(self.session, model, self.state.dynamo_plugin.backend)
        before = dict(model.named_parameters(remove_duplicate=False))
        if self.policies.casts_itself:
            # Units that differ are moved one by one: those of the host may not fit the device together.
            if not (self.policies.starts_on_host or self.policies.of_stores):
                model = model.to(self.device)
            if model not in self._models:  # it may have been prepared for evaluation before
                self._models.append(model)
            model._is_accelerate_prepared = True
        else:
            model = super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)
        prepared = engine.place(model, before)
        self._accumulation.watch_inputs(model)
        if self.num_processes > 1:
            trains_several = self._loader_context.trains_several_samples
            prepared.attachments.add(*allow_single_values(model, trains_several, logger.warning_once))
        if len(engine.models) > 1:
            # By the policies, not by this model: another one may be sharded where this one is not.
            self.session.exchange.make_model_groups(self.policies.shard_groups if self.policies.is_sharded else None)
        self.session.take_optimizers(
            [optimizer.optimizer for optimizer in self._optimizers], prepared.trainable_parameters()
        )
        prepared.on_training_forward = self.session.on_forward
        if self.session.keeper is not None:
            self.session.keeper.follow(self)
        if self.lsdp_plugin.loss_weighting is LossWeighting.TOKENS and self.lsdp_plugin.token_counter is None:
            require_known_labels(model)
        if self.session.losses.finder is not None:
            self.session.losses.finder.watch(prepared)
        return model

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        if isinstance(optimizer, PreparedOptimizer) and not self._optimizer_steps.follows(optimizer.optimizer):
            optimizer = optimizer.optimizer  # another accelerator's: it gets a wrapper of this one
        if not getattr(optimizer, "_is_accelerate_prepared", False):
            # After free_memory scripts prepare the same one again.
            known = self._optimizer_steps.follows(optimizer)
            parameters = [] if known else [p for group in optimizer.param_groups for p in group["params"]]
            self.session.take_optimizers([optimizer], parameters)
            if not known:
                on_host = self.device.type == "cpu" or self.policies.mechanism is Mechanism.STREAMED
                if on_host and not optimizer.state:
                    fuse_steps(optimizer, self.policies.is_sharded)
                self._optimizer_steps.follow(optimizer)
        prepared = super().prepare_optimizer(optimizer, device_placement=device_placement)
        if type(prepared) is AcceleratedOptimizer:
            prepared.__class__ = PreparedOptimizer  # accelerate leaves no choice of the class that it makes
        return prepared

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        if getattr(data_loader, "_is_accelerate_prepared", False):
            if data_loader not in self._dataloaders:
                self._dataloaders.append(data_loader)
            return data_loader
        self._loader_context.agree_on_seed(self.dataloader_config.data_seed)
        prepared = prepare_loader(
            data_loader,
            self._loader_context,
            device=self.device,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
            split_batches=self.split_batches,
            even_batches=self.even_batches,
            dispatch_batches=self.dispatch_batches,
            rng_types=list(self.rng_types),
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=self.use_seedable_sampler,
        )
        self._dataloaders.append(prepared)
        return prepared

    def skip_first_batches(self, dataloader: Any, num_batches: int | None = None) -> Any:
        """A loader for one pass that leaves out the first batches.

        Args:
            dataloader: a prepared loader.
            num_batches: number of this rank's batches; None: up to the position that ``load_state`` restored.
        """
        return skip_first_batches(dataloader, num_batches)

    def free_memory(self, *objects: Any) -> Any:
        """Forgets all that was prepared, until it is prepared again, by this accelerator or another one.

        Models that FSDP2 has sharded stay so: only this accelerator can train them.
        """
        self.session.free_models()
        objects = super().free_memory(*objects)
        self.session.optimizers = self._optimizers  # accelerate has made another list
        return objects

    # Steps

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        return self._accumulation.block(models)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for prepared in PreparedModel.within(model):
                stack.enter_context(prepared.no_sync())
            yield

    @staticmethod
    @contextlib.contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        for prepared in PreparedModel.within(model):
            prepared.synchronise_next = True
        yield

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Does nothing: with prepared loaders all ranks make the same number of steps."""
        if even_batches is not None:
            warnings.warn("join_uneven_inputs(even_batches=...) has no effect with LSHDPAccelerator", stacklevel=3)
        yield

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Adds this loss's share to the gradients; after the last call of a step ``.grad`` is final on all ranks.

        Args:
            loss: this rank's loss, a mean over its own micro-batch (see ``LSDPPlugin.loss_weighting``).
            **kwargs: for ``Tensor.backward``.

        Raises:
            RuntimeError: in an evaluation pass, or outside ``accumulate`` when the plan has accumulation; or another
                accelerator has prepared a model since.
        """
        steps = self.gradient_accumulation_steps
        self._backward.run(loss, kwargs, accumulation_steps=steps, scaler=self.scaler)

    @failures_explained()
    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clips the joint norm of all gradients, wherever their shards are (collective); returns the norm before.

        Between the micro-batches of a global batch it does nothing, as ``optimizer.step()`` does, and returns 0.

        Raises:
            RuntimeError: between the global batches of an optimizer step, whose gradients are not summed over ranks.
        """
        if self.session.tracker.within_global_batch:
            return torch.zeros((), device=self.device)  # to clip parts would not be to clip their sum
        gradients = self._gradients_to_clip(parameters)
        return clip_grad_norm(gradients, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamps every element of the gradients to [-clip_value, clip_value]; see `clip_grad_norm_`."""
        if self.session.tracker.within_global_batch:
            return
        clip_grad_value(self._gradients_to_clip(parameters), clip_value)

    def _gradients_to_clip(self, parameters: Any) -> list[torch.Tensor]:
        """Parameters whose gradients a script clips now, as the optimizer steps them."""
        stepped = self.session.engine.as_stepped(_as_list(parameters))
        if self.num_processes > 1:
            refuse_to_clip_parts(self.session.engine.models, stepped)
        self.unscale_gradients()
        return stepped

    def counting_losses(
        self, share: float, see: Callable[[torch.Tensor], None] | None = None
    ) -> AbstractContextManager[None]:
        """Losses inside count by this share in their step, instead of that of their batch; shares of ranks are summed.

        For callers that know what their losses are means over, such as the Trainer; ``see`` is called with each loss.
        """
        return self.session.losses.given(share, see)

    def weighting_left_to_caller(self) -> AbstractContextManager[None]:
        """Inside, losses are not looked at: a caller says by how much each counts (``counting_losses``)."""
        return self.session.losses.left_to_caller()

    def places_of(self, batches: Sequence[Any]) -> list[MicroBatchPlace]:
        """The places of training batches that a caller has fetched, in order; none for those of an evaluation pass."""
        return self.session.tracker.places_of(batches)

    def choose_batch(self, batch: Any) -> None:
        """Says which batch the next ``accumulate`` trains, for callers whose models are given copies of it."""
        self.session.tracker.choose(batch)

    # Evaluation, metrics

    def evaluation(self) -> AbstractContextManager[None]:
        """Passes begun inside are evaluation passes, whatever mode the models are in."""
        return self.session.evaluation()

    @property
    def is_evaluating(self) -> bool:
        """Whether a pass that begins now is an evaluation pass: no prepared model with an optimizer is training."""
        return self.session.is_evaluating

    @failures_explained()
    def gather(self, tensor: Any) -> Any:
        """Concatenates tensors of all ranks along the first dimension, whose size may differ between ranks."""
        if self.num_processes > 1:
            return gather(self.session, tensor)
        meet(self.session, "gather")
        return super().gather(tensor)

    @failures_explained()
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gathers, without the samples that were only repeated to give every rank a batch."""
        loader = self.gradient_state.active_dataloader
        # Without a loader in a pass the batch was fetched ahead.
        trains = loader is None or not getattr(loader, "is_evaluating", True)
        place = self.session.tracker.place_at_hand(input_data) if trains else None
        if place is None or self.num_processes == 1:
            return super().gather_for_metrics(input_data, use_gather_object=use_gather_object)
        return gather_metrics(self.session, place, input_data, use_gather_object)

    @failures_explained()
    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        meet(self.session, "reduce")
        reduce = super().reduce
        return on_carried_tensors(tensor, lambda own: reduce(own, reduction, scale))

    @failures_explained()
    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        meet(self.session, "pad_across_processes")
        pad = super().pad_across_processes
        return on_carried_tensors(tensor, lambda own: pad(own, dim, pad_index, pad_first))

    @failures_explained()
    def wait_for_everyone(self) -> None:
        meet(self.session, "wait_for_everyone")
        if self.num_processes > 1 and meets_on_hosts():
            dist.barrier()  # accelerate would ask for one of the devices
        else:
            super().wait_for_everyone()

    # Checkpoints

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **unknown: Any
    ) -> str:
        """Writes a checkpoint that is complete on every node (collective).

        Tensors are in safetensors, everything else in JSON. The folder gets its final name when it is complete on all
        nodes; an older one of that name is replaced as a whole. Any number of ranks, under any plan and strategy, can
        continue from it.

        Hooks of ``register_save_state_pre_hook`` are called before anything is written; what they write into the
        folder that they get becomes a part of this node's checkpoint. A model whose state dict they take out of
        their list is not saved. Under strategies that shard a model, the state dicts are full on one rank of each
        node, which holds all models at once for that, and empty on the others.

        Args:
            output_dir: the checkpoint's folder, on each node; may be left out with automatic checkpoint naming.
            safe_serialization: has to stay True, there is no other format.

        Returns:
            The folder.

        Raises:
            RuntimeError: on all ranks, if a rank cannot write, or is between two micro-batches of a step.
            ValueError: arguments that have no meaning here.
        """
        if not safe_serialization or unknown:
            raise ValueError(
                f"save_state got safe_serialization={safe_serialization} and {sorted(unknown)}; checkpoints are "
                "always safetensors and JSON, and there is nothing else to choose"
            )
        return save_run(self, self.session, output_dir, self.trust_checkpoint)

    def load_state(
        self, input_dir: str | os.PathLike[str] | None = None, load_kwargs: dict | None = None, **unknown: Any
    ) -> LoadedCheckpoint:
        """Continues from the newest checkpoint that is complete on some node (collective).

        Under the same plan and number of ranks the run goes on bit for bit as if it had not stopped; under another
        plan, strategy or number of ranks with the same remaining samples. Loaders get their position back:
        ``skip_first_batches(loader)`` without a number goes on there.

        Gradients and the step that they are of are forgotten, so all ranks may go on from here after an error that all
        have caught. In a loop over a loader, call it between two steps.

        Hooks of ``register_load_state_pre_hook`` are called before anything is restored; a model that they take out of
        their list is not restored.

        Args:
            input_dir: a checkpoint or a folder of checkpoints; may be left out with automatic checkpoint naming.
            load_kwargs: has to be empty.

        Returns:
            What the checkpoint says: step, samples seen, whether the plan is the same.

        Raises:
            RuntimeError: on all ranks, if there is no complete checkpoint on any node or it does not fit this run.
            ValueError: arguments that have no meaning here.
        """
        if load_kwargs or unknown:
            raise ValueError(
                f"load_state got {sorted({**(load_kwargs or {}), **unknown})}, which have no meaning here"
            )
        if input_dir is None and not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError("load_state needs an input_dir, unless automatic_checkpoint_naming is on")
        return load_run(self, self.session, input_dir, self.trust_checkpoint)

    def load_models(self, input_dir: str | os.PathLike[str]) -> None:
        """Gives the prepared models the parameters and buffers of a checkpoint, and changes nothing else (collective).

        Raises:
            RuntimeError: on all ranks, if there is no complete checkpoint on any node or its models are others.
        """
        self.session.engine.give_up_failed_steps()
        load_models(input_dir, [self.unwrap_model(model) for model in self._models], self.node_layout)
        self.session.engine.parameters_loaded()

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """The full, unsharded state on the CPU of one rank a node; empty on the other ranks of sharded strategies."""
        if not self.policies.is_sharded:
            return super().get_state_dict(model, unwrap)
        return full_state(self.session, self.unwrap_model(model))

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Writes weights that plain ``from_pretrained`` loads, on the main process (collective if they are sharded).

        With ``ProjectConfiguration(save_on_each_node=True)`` every node writes its own. A model of at most
        ``max_shard_size`` is written tensor by tensor, without a full copy in memory.
        """
        model = self.unwrap_model(model)
        if not safe_serialization or not fits_one_file(model, max_shard_size):
            return super().save_model(model, save_directory, max_shard_size, safe_serialization)
        on_each_node = self.project_configuration.save_on_each_node
        writes = self.is_local_main_process if on_each_node else self.is_main_process
        write_weights(self.session, model, save_directory, writes)


def _as_list(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
