# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Which gradients wait for others of their optimizer step: accelerate's ``accumulate`` under a plan."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.state import GradientState
from torch import nn
from torch.utils.hooks import RemovableHandle

from accelerate_lshdp.accelerator.session import Session
from accelerate_lshdp.data.place import MicroBatchPlace
from accelerate_lshdp.engine.module_state import exclude_hooks_from_pickles
from accelerate_lshdp.engine.prepared import PreparedModel


logger = get_logger(__name__)


class _InputWatch:
    """A hook that tells what models are called with; it does not keep the accelerator alive."""

    handle: RemovableHandle

    def __init__(self, owner: Accumulation) -> None:
        self._reference = weakref.ref(owner)

    @property
    def owner(self) -> Accumulation | None:
        return self._reference()

    def __call__(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        # In a compiled graph there is no memory to look at; then the batch that is alive is taken.
        if not torch.compiler.is_compiling() and self.owner is not None:
            self.owner.forward_begins(model, (args, kwargs))


class Accumulation:
    """Follows blocks of ``accumulate``, and sets for each micro-batch whether its gradients are summed over ranks.

    Args:
        session: with the models and the batches.
        gradient_state: accelerate's, which scripts, optimizers and schedulers read.

    Attributes:
        models: those that the open block accumulates for; none outside of one.
        step: micro-batches accumulated so far, as accelerate counts them.
    """

    def __init__(self, session: Session, gradient_state: GradientState) -> None:
        self._session = session
        self._gradient_state = gradient_state
        self.models: Sequence[PreparedModel] = ()
        self.step = 0
        self._steps_before = 0  # as `step` was when the block began

    @contextlib.contextmanager
    def block(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """One block of ``accumulate``, for these models of the script; none: all that are prepared."""
        session = self._session
        session.tracker.expect()
        session.windows.begin_block()
        self.models = self._models_among(models) if models else list(session.engine.models)
        before = [prepared.requires_synchronisation for prepared in self.models]
        step = self.step
        session.tracker.accumulating = True
        try:
            self._enter_place(step)
            if session.exchange.counts is not None and session.tracker.within_window:
                # Another model, which has a block of its own, must not let this rank meet the others here: they may
                # be in another micro-batch. A forward of it inside the block sets this again, and is refused then.
                for prepared in session.engine.models:
                    prepared.synchronise_next = prepared.synchronise_next and prepared in self.models
            yield
        finally:
            passed_over = session.tracker.leave()
            if passed_over:
                session.windows.passed_over(passed_over)
            for prepared, synchronises in zip(self.models, before, strict=True):
                prepared.requires_synchronisation = synchronises
            self.models = ()

    def _models_among(self, models: Sequence[Any]) -> list[PreparedModel]:
        """The prepared models that a block was given; all there are, if it was given something else."""
        found = list(dict.fromkeys(prepared for model in models for prepared in PreparedModel.within(model)))
        if found:
            return found
        # With none, no window would be followed: gradients of one that is left open would go into the next step.
        everything = self._session.engine.models
        if len(everything) > 1:
            given = ", ".join(type(model).__name__ for model in models)
            logger.warning_once(
                f"accumulate() was given no prepared model (found {given}), so it accumulates for all prepared ones; "
                "give it those that prepare() returned"
            )
        return list(everything)

    def _enter_place(self, step: int) -> None:
        """Lets gradients of this rank's micro-batch wait for others of its step, or not, as its place says.

        Args:
            step: micro-batches that were accumulated before it.
        """
        place, state = self._session.tracker.current, self._gradient_state
        self._steps_before = step
        if place is None:
            self._count_batch()
        else:
            self.step = 0 if place.last_in_pass and state.sync_with_dataloader else step + 1
            state._set_sync_gradients(place.window_end)
            if place.accumulation_steps != state.num_steps:
                logger.warning_once(
                    f"gradient_accumulation_steps was set to {state.num_steps} in a pass that began "
                    f"with {place.accumulation_steps}; it is used from the next pass over a loader on"
                )
        every_batch = self._session.world_size > 1 and state.plugin_kwargs.get("sync_each_batch", False)
        for prepared in self.models:
            # Also for a model that has no forward in this micro-batch: what its last one had is of the past.
            prepared.requires_synchronisation = state.sync_gradients or every_batch
            prepared.synchronise_next = prepared.requires_synchronisation

    def _count_batch(self) -> None:
        """Counts a batch of no prepared loader, as accelerate does."""
        state = self._gradient_state
        if state.sync_with_dataloader and state.end_of_dataloader:
            self.step = 0
            state._set_sync_gradients(True)
        else:
            self.step += 1
            state._set_sync_gradients(self.step % state.num_steps == 0)

    def watch_inputs(self, model: nn.Module) -> None:
        """Lets the forwards of a model that was given to ``prepare`` tell which batch the script works on."""
        prepared = PreparedModel.of(model)
        attachments = self._session.attachments if prepared is None else prepared.attachments
        for hook in model._forward_pre_hooks.values():
            if isinstance(hook, _InputWatch) and hook.owner is self:
                attachments.add(hook.handle)  # a model that was not trained until now
                return
        # Before the hook of PreparedModel, which asks whether to synchronise, and before that of FSDP2, which may hand
        # on other tensors than the script's.
        watch = _InputWatch(self)
        watch.handle = model.register_forward_pre_hook(watch, with_kwargs=True, prepend=True)
        exclude_hooks_from_pickles(model)
        attachments.add(watch.handle)

    def forward_begins(self, model: nn.Module, inputs: tuple) -> None:
        """Says that a prepared model is called with these inputs."""
        tracker = self._session.tracker
        trains = torch.is_grad_enabled()
        validates = not trains and not model.training
        if tracker.forward(inputs, trains, validates) and tracker.accumulating:
            self._enter_place(self._steps_before)

    def take_batch(self) -> MicroBatchPlace | None:
        """The place of the batch that a backward is of, which also says whether it is the last one of its step."""
        tracker = self._session.tracker
        before = tracker.current
        place = tracker.take()
        if tracker.accumulating and place is not before:
            self._enter_place(self._steps_before)
        return place
