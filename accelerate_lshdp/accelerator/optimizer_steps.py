# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""How a session follows the optimizers that are prepared: their steps, and gradients that they drop or skip."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.optimizer import AcceleratedOptimizer

from accelerate_lshdp.accelerator.session import Session
from accelerate_lshdp.accelerator.unstepped_gradients import parameters_of
from accelerate_lshdp.engine.step_groups import zeroed_one_by_one
from accelerate_lshdp.engine.stores.fsdp2.limits import refuse_in_files
from accelerate_lshdp.engine.stores.shared.ownership import NodeOwnership
from accelerate_lshdp.runtime.agreement import raise_on_all_ranks


logger = get_logger(__name__)


class OptimizerSteps:
    """What happens before and after the steps of the optimizers of a session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Follows an optimizer's steps from now on, and no other session does."""
        # As models do, it goes from one accelerator to the next, which may be gone: an earlier stage of the script, or
        # a cell of a notebook that is run again.
        for follower in followers(optimizer):
            follower.step_is_over()  # a step that failed may have left its groups cut
        _StepHook.remove_from(optimizer)
        optimizer.register_step_pre_hook(_StepHook(self.step_begins))
        optimizer.register_step_post_hook(_StepHook(self.step_ends))

    def follows(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it follows an optimizer's steps."""
        return self in followers(optimizer)

    def step_begins(
        self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        """Called before ``optimizer.step(closure)``; returns its arguments if they change."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        # A closure and hooks of the script may look at the groups, or change them for this step.
        self._session.engine.step_begins(optimizer, is_unseen=closure is None and _is_around_step(optimizer))
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
        session = self._session
        if loss is None or session.world_size == 1:
            return loss
        share = session.losses.last
        own = torch.tensor([share * float(loss) if share else 0.0], dtype=torch.float64)
        total = session.exchange.sum(own)[0]
        return total.to(loss.device, loss.dtype) if isinstance(loss, torch.Tensor) else total.item()

    def _take_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        session = self._session
        self._refuse_lost_gradients(optimizer)
        session.engine.before_step(optimizer)
        if session.world_size > 1:
            self._settle_local_gradients(optimizer)
            self._refuse_gradients_of_one_rank(optimizer)
        session.engine.hide_gradients_of_others(optimizer, may_be_late=_is_around_step(optimizer))
        session.step_begins()

    def _refuse_lost_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        lost = self._session.unstepped.takes_lost(optimizer)
        if lost is None:
            return
        self._session.engine.collective_begins()
        raise_on_all_ranks(
            "found an optimizer.step() with gradients that were there when save_state was called, after the step of "
            "another optimizer: the checkpoint lacks them, so a run that continues it is another one. Call save_state "
            "after the steps of all optimizers, and drop gradients that are not to be stepped with before it, by "
            "model.zero_grad()"
            if lost
            else None
        )

    def _settle_local_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        updated = parameters_of([optimizer])
        for prepared in self._session.engine.models:
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
        own = self._session.engine.of_one_rank(optimizer)
        if own:
            raise RuntimeError(
                f"found {len(own)} parameters in the optimizer (the first of shape {tuple(own[0].shape)}) that have a "
                "gradient of this rank only: their model was not given to prepare(), or they were frozen when it was. "
                "Prepare all models that the optimizer updates, and unfreeze before that what will be trained later"
            )

    def step_ends(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Called after the optimizer has changed parameters."""
        self._session.optimizer_stepped(optimizer)

    def step_is_over(self) -> None:
        """An optimizer has stepped, or its step has failed."""
        self._session.engine.step_is_over()

    def step_skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer did not step, because gradients have overflowed on some rank."""
        self._session.gradients_used(optimizer)
        if self._session.keeper is not None:
            self._session.keeper.step_ends()

    def gradients_dropped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has cleared ``.grad`` of its parameters; not all gradients are there."""
        self._session.engine.drop_unsummed(parameters_of([optimizer]))


class _StepHook:
    """A hook of an optimizer that calls a method of `OptimizerSteps` and does not keep it alive."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, *args: Any) -> Any:
        method = self._method()
        if method is None:
            raise RuntimeError(
                "the accelerator that prepared this optimizer is gone; keep it as long as you use what it prepared"
            )
        return method(*args)

    @property
    def follower(self) -> OptimizerSteps | None:
        method = self._method()
        return None if method is None else method.__self__

    @staticmethod
    def remove_from(optimizer: torch.optim.Optimizer) -> None:
        """Takes off those of all accelerators, also of ones that are gone."""
        for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, _StepHook)]:
                del hooks[key]


def followers(optimizer: torch.optim.Optimizer) -> Iterator[OptimizerSteps]:
    """Those that follow an optimizer's steps; none those of a copy, which has no hooks."""
    for hook in optimizer._optimizer_step_post_hooks.values():
        follower = hook.follower if isinstance(hook, _StepHook) else None
        if follower is not None:
            yield follower


def _is_around_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether no hook of the script sees an optimizer between ours before its step and ours after it."""
    before, after = optimizer._optimizer_step_pre_hooks.values(), optimizer._optimizer_step_post_hooks.values()
    return isinstance(next(reversed(before)), _StepHook) and isinstance(next(iter(after)), _StepHook)


class PreparedOptimizer(AcceleratedOptimizer):
    """What ``prepare`` returns for an optimizer: accelerate's, and what it does to gradients is told."""

    _has_stepped = False

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        self._has_stepped = True
        try:
            super().step(closure)
        finally:
            # torch calls no hook where the step has raised; the script may go on with the optimizer's groups.
            for follower in followers(self.optimizer):
                follower.step_is_over()
        # With fp16 an overflow skips the optimizer's own step, and its hooks with it.
        if self.gradient_state.sync_gradients and self.step_was_skipped:
            for follower in followers(self.optimizer):
                follower.step_skipped(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """As `torch.optim.Optimizer.state_dict`; shards in it are of use in this process, and cannot be pickled.

        Raises:
            RuntimeError: this rank has the states of some parameters only.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        owned = [p for p in parameters if (ownership := NodeOwnership.of(p)) is None or ownership.owned]
        # Without a check, a script would write a file that lacks states, and train on from it without a word.
        if len(owned) < len(parameters) and (self._has_stepped or any(self.optimizer.state.values())):
            raise RuntimeError(
                f"found state_dict() of an optimizer of which this rank has the states of {len(owned)} of "
                f"{len(parameters)} parameters, as the ranks of a node divide them. Use accelerator.save_state(), "
                "which saves all of them, and load_state(), which loads them under any strategy; or use strategy ddp"
            )
        state = super().state_dict()
        for own in state.get("state", {}).values():
            refuse_in_files(own.values() if isinstance(own, dict) else ())
        return state

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        with zeroed_one_by_one(self.optimizer):
            super().zero_grad(set_to_none)
        if self.gradient_state.sync_gradients:  # else it has done nothing
            for follower in followers(self.optimizer):
                follower.gradients_dropped(self.optimizer)
