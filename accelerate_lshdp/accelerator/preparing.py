"""What ``prepare`` does with models, optimizers and loaders."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DynamoBackend
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate_lshdp.accelerator.optimizer_steps import PreparedOptimizer, StepHook
from accelerate_lshdp.accelerator.plugin import BatchNormMode
from accelerate_lshdp.accelerator.unstepped_gradients import parameters_of
from accelerate_lshdp.data.prepare import prepare_loader
from accelerate_lshdp.data.weighting import LossWeighting, require_known_labels
from accelerate_lshdp.engine.batch_norm import allow_single_values
from accelerate_lshdp.engine.fused_steps import fuse_steps
from accelerate_lshdp.engine.module_state import unmark
from accelerate_lshdp.engine.policies import Mechanism
from accelerate_lshdp.engine.prepared import PreparedModel
from accelerate_lshdp.engine.shared_parameters import refuse_shared_parameters
from accelerate_lshdp.engine.stores.fsdp2.limits import (
    check_sharded_optimizer,
    refuse_sparse_gradients,
    shards_of_state,
)
from accelerate_lshdp.engine.stores.fsdp2.plain_parameters import step_one_by_one
from accelerate_lshdp.engine.stores.shared.ownership import check_optimizer, hide_unowned_gradients
from accelerate_lshdp.runtime.agreement import raise_on_all_ranks
from accelerate_lshdp.runtime.option_advice import option_advice


if TYPE_CHECKING:
    from accelerate import Accelerator

    _Base = Accelerator
else:
    _Base = object

logger = get_logger(__name__)


class Preparing(_Base):
    """The part of ``LSHDPAccelerator`` that prepares objects."""

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        result = super().prepare(*args, device_placement=device_placement)
        self._warn_of_schedule(args)
        return result

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        known = PreparedModel.of(model)
        if known is not None:
            known = self._take_back(known, evaluation_mode)
        self._watch_inputs(model)
        trains = any(parameter.requires_grad for parameter in model.parameters())
        if evaluation_mode or not trains or known is not None:
            return super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)
        model = self._checked(model)
        before = dict(model.named_parameters(remove_duplicate=False))
        if self.policies.is_sharded:
            if not self.policies.strategy.is_offloaded:
                model = model.to(self.device)
            if model not in self._models:  # it may have been prepared for evaluation before
                self._models.append(model)
            model._is_accelerate_prepared = True
        else:
            model = super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)
        prepared = self._placement.place(model, model_index=len(self._prepared))
        if self.num_processes > 1:
            allow_single_values(model, self._loader_context.trains_several_samples, logger.warning_once)
        after = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in before.items():
            if name in after and after[name] is not parameter:
                # Weakly: an optimizer that still has to follow keeps it; nothing else should keep a full copy alive.
                self._new_parameters[id(parameter)] = (weakref.ref(parameter), after[name])
        self._prepared.append(prepared)
        if len(self._prepared) > 1:
            self._exchange.make_model_groups(None if prepared.can_be_completed else self.policies.shard_groups)
        self._take_optimizers([optimizer.optimizer for optimizer in self._optimizers], prepared.trainable_parameters())
        prepared.on_training_forward = self._timer.forward_begins
        if self.lsdp_plugin.loss_weighting is LossWeighting.TOKENS and self.lsdp_plugin.token_counter is None:
            require_known_labels(model)
        if self._losses is not None:
            self._losses.watch(model)
        return model

    def _checked(self, model: nn.Module) -> nn.Module:
        """The model, ready to be placed (collective).

        Raises:
            RuntimeError: on all ranks, if it cannot be trained under the strategy; of one rank alone the error itself.
        """
        error: Exception | None = None
        try:
            if self.policies.is_sharded and self.state.dynamo_plugin.backend != DynamoBackend.NO:
                raise ValueError(
                    f"dynamo_backend={self.state.dynamo_plugin.backend.value} is not supported with strategy "
                    f"{self.strategy}; leave it out, or use strategy ddp"
                )
            model = self._settle_batch_norm(model)
            if self.num_processes > 1 or self.policies.is_sharded:
                refuse_sparse_gradients(model)
            refuse_shared_parameters(
                model,
                self._prepared,
                self._new_parameters,
                frozen_too=self.policies.mechanism is not Mechanism.REPLICATED,
            )
        except ValueError as found:
            error = found
        self._raise_everywhere(error)
        return model

    def _take_back(self, prepared: PreparedModel, evaluation_mode: bool) -> PreparedModel | None:
        """Trains a model again that was prepared before; None: it is to be prepared anew.

        One that another accelerator prepared is this one's from now on, if that is possible. It may have trained it in
        an earlier stage of the script, and may be gone.
        """
        if prepared.clock is self._clock:
            if prepared not in self._prepared:
                self._prepared.append(prepared)
            return prepared
        if not prepared.can_step_locally:
            raise ValueError(
                "found a model that another accelerator of this process prepared, which has divided its parameters "
                "among ranks, or lets those of a node share them: only that one can train it. Use one accelerator for "
                "all stages of the script, or prepare a new model with the weights of this one "
                "(accelerator.get_state_dict)"
            )
        if evaluation_mode:
            return prepared
        unmark(prepared.module)
        self._prepared = [other for other in self._prepared if other.module is not prepared.module]
        return None

    def _settle_batch_norm(self, model: nn.Module) -> nn.Module:
        batches = self.plan.batch.ranks if self.plan.batch is not None else ()
        unequal = len({rank.micro_batch_size for rank in batches}) > 1 or self.plan.has_accumulation
        unequal = unequal or self.plan.automatic is not None
        norms = [name for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        mode = self.lsdp_plugin.batch_norm
        if not norms or not unequal or self.num_processes == 1:
            return model
        if mode is BatchNormMode.LOCAL:
            logger.warning(f"{len(norms)} batch norms normalise over each rank's own, unequal micro-batch")
            return model
        if mode is BatchNormMode.SYNC and self.device.type == "cuda" and not self.plan.has_accumulation:
            return nn.SyncBatchNorm.convert_sync_batchnorm(model)
        raise ValueError(
            f"the model has batch normalisation ({norms[0]} and {len(norms) - 1} more); its statistics depend on how "
            "the batch is divided, so unequal batches do not give the gradient of the global batch. Replace it (by "
            "group or layer normalisation), or accept statistics of each rank's own micro-batch with "
            f"{option_advice('batch_norm', 'local')}; 'sync' works on CUDA without accumulation"
        )

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        if isinstance(optimizer, PreparedOptimizer) and self not in StepHook.followers(optimizer.optimizer):
            optimizer = optimizer.optimizer  # another accelerator's: it gets a wrapper of this one
        if not getattr(optimizer, "_is_accelerate_prepared", False):
            # After free_memory scripts prepare the same one again.
            known = self in StepHook.followers(optimizer)
            parameters = [] if known else [p for group in optimizer.param_groups for p in group["params"]]
            self._take_optimizers([optimizer], parameters)
            if not known:
                if self.device.type == "cpu" and not optimizer.state:
                    fuse_steps(optimizer, self.policies.is_sharded)
                # As models do, it goes from one accelerator to the next, which may be gone: an earlier stage of the
                # script, or a cell of a notebook that is run again.
                StepHook.remove_from(optimizer)
                optimizer.register_step_pre_hook(StepHook(self._before_step))
                optimizer.register_step_post_hook(StepHook(self._after_step))
        prepared = super().prepare_optimizer(optimizer, device_placement=device_placement)
        if type(prepared) is AcceleratedOptimizer:
            prepared.__class__ = PreparedOptimizer  # accelerate leaves no choice of the class that it makes
        return prepared

    def _take_optimizers(self, optimizers: Sequence[torch.optim.Optimizer], new: Sequence[torch.Tensor]) -> None:
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
                self._follow_parameters(optimizer)
                check_sharded_optimizer(optimizer)
                step_one_by_one(optimizer)
                notice = check_optimizer(optimizer, new)
                if notice is not None:
                    logger.warning_once(notice)
        except ValueError as found:
            error = found
        self._raise_everywhere(error)

    def _follow_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives the optimizer the sharded parameters in place of those they were made from."""
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                replaced = self._new_parameters.get(id(parameter))
                if replaced is None or replaced[0]() is not parameter:
                    continue
                state = optimizer.state.get(parameter)
                if state and state.get("step") == 0:  # some have a state from the beginning
                    optimizer.state[replaced[1]] = shards_of_state(optimizer.state.pop(parameter), replaced[1])
                elif state:
                    raise ValueError(
                        "the optimizer has already stepped (it holds state for unsharded parameters); call prepare() "
                        "before the first step, and load_state() after it to continue a run"
                    )
                group["params"][index] = replaced[1]

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        """Called before ``optimizer.step(closure)``; returns its arguments if they change."""
        self._hidden = []
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._take_gradients(optimizer)
            return None

        def computed_and_taken() -> Any:
            loss = closure()
            self._take_gradients(optimizer)
            # It decides by the loss how far to go, so all ranks have to decide by the same one.
            return self._global_loss(loss) if isinstance(optimizer, torch.optim.LBFGS) else loss

        return args[:1], {**kwargs, "closure": computed_and_taken}

    def _global_loss(self, loss: Any) -> Any:
        """What the losses of all ranks are together, weighted as their gradients were (collective)."""
        if loss is None or self.num_processes == 1:
            return loss
        share = self._last_share
        own = torch.tensor([share * float(loss) if share else 0.0], dtype=torch.float64)
        total = self._exchange.sum(own)[0]
        return total.to(loss.device, loss.dtype) if isinstance(loss, torch.Tensor) else total.item()

    def _take_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        self._refuse_lost_gradients(optimizer)
        for prepared in self._prepared:
            prepared.before_step()
        if self.num_processes > 1:
            self._settle_local_gradients(optimizer)
            self._refuse_gradients_of_one_rank(optimizer)
        self._hidden += hide_unowned_gradients(optimizer)
        self._timer.optimizer_begins()

    def _refuse_lost_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        lost = self._unstepped.takes_lost(optimizer)
        if lost is None:
            return
        for prepared in self._prepared:
            prepared.collective_begins()
        raise_on_all_ranks(
            "found an optimizer.step() with gradients that were there when save_state was called, after the step of "
            "another optimizer: the checkpoint lacks them, so a run that continues it is another one. Call save_state "
            "after the steps of all optimizers, and drop gradients that are not to be stepped with before it, by "
            "model.zero_grad()"
            if lost
            else None
        )

    def _settle_local_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for prepared in self._prepared:
            mine = [p for p in prepared.trainable_parameters() if id(p) in updated] if prepared.local.held else []
            if mine and prepared.has_gradients():
                gradients = [p.grad for p in mine if p.grad is not None]
                prepared.local.rescale_for_local_step(
                    gradients, prepared.within_no_sync > 0, prepared.can_step_locally
                )
                logger.warning_once(
                    "an optimizer steps with gradients of each rank alone (inside no_sync(), as LocalSGD does): "
                    "parameters differ between ranks until they are averaged"
                )

    def _refuse_gradients_of_one_rank(self, optimizer: torch.optim.Optimizer) -> None:
        summed = {id(p) for prepared in self._prepared for p in prepared.trainable_parameters()}
        own = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        # Under a world-sharded strategy FSDP2 itself sums what was unfrozen later.
        own = [
            p for p in own if id(p) not in summed and not (self.strategy.is_world_sharded and isinstance(p, DTensor))
        ]
        if own:
            raise RuntimeError(
                f"found {len(own)} parameters in the optimizer (the first of shape {tuple(own[0].shape)}) that have a "
                "gradient of this rank only: their model was not given to prepare(), or they were frozen when it was. "
                "Prepare all models that the optimizer updates, and unfreeze before that what will be trained later"
            )

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._timer.step_ends()
        self._rank_step.optimizer_steps += 1
        self._unstepped.step_ended(optimizer)
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []
        for prepared in self._prepared:
            prepared.after_step()
        if self._optimizers and optimizer is self._optimizers[0].optimizer:
            self.completed_steps += 1
        if self._sizing is not None:
            self._rebalance()

    def _step_skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer did not step, because gradients have overflowed on some rank: they are of the past."""
        self._unstepped.step_ended(optimizer)

    def _gradients_dropped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has cleared ``.grad`` of its parameters; not all gradients are there."""
        holding = [prepared for prepared in self._prepared if prepared.local.held]
        for prepared in holding:
            prepared.drop_unsummed(parameters_of([optimizer]))

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

    def _warn_of_schedule(self, prepared: Sequence[Any]) -> None:
        """accelerate steps a scheduler once a rank; that fits schedules made from the loader's own batch size only."""
        ranks, planned = self.num_processes, self.plan.total_batch_size
        told_later = self.plan.batch is None or self.run_total.follows_script
        if told_later or ranks == 1 or not self._schedulers or self.split_batches:
            return
        for loader in prepared:
            size = getattr(loader, "batch_size", None)
            if isinstance(loader, torch.utils.data.DataLoader) and size and size * ranks != planned:
                logger.warning_once(
                    f"the loader's batch_size {size} x {ranks} ranks is not the plan's global batch of {planned}. The "
                    f"scheduler is stepped {ranks} times an optimizer step, so its length should be {ranks} x the "
                    f"number of optimizer steps{self._schedule_of_an_epoch(loader)}"
                )

    def _schedule_of_an_epoch(self, loader: torch.utils.data.DataLoader) -> str:
        """In numbers, where the length of the data is known."""
        try:
            samples = len(loader.dataset)
        except TypeError:
            return ""
        steps = -(-samples // (self.plan.total_batch_size * self.gradient_accumulation_steps))
        return f": an epoch has {steps}, so {self.num_processes * steps} of the schedule"
