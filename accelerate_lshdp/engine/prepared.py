# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`PreparedModel`: a model that is being trained, with the same few calls for every strategy."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate_lshdp.engine.attachments import Attachments
from accelerate_lshdp.engine.backward_state import BackwardState
from accelerate_lshdp.engine.batch_norm import RunningStatistics
from accelerate_lshdp.engine.local_gradients import LocalGradients
from accelerate_lshdp.engine.module_state import PREPARED, Link, mark, unmark
from accelerate_lshdp.engine.store import Store, StoreContext
from accelerate_lshdp.engine.wire.reduction import GradientReduction
from accelerate_lshdp.runtime.wait_clock import WaitClock


class PreparedModel:
    """A model whose gradients are reduced over all ranks. Its parameters are in one or several stores.

    One backward goes ``begin_backward(synchronise)``, autograd, ``deliver_backward()``, ``finish_backward()``, in the
    hands of a `Flow`; see `Store`.

    Args:
        module: the user's model.
        clock: counts seconds blocked in communication.

    Attributes:
        stores: of its parameters; each trainable one is in exactly one of them.
        state: of its backward.
        attachments: what is attached to the module and its parameters while it is prepared.
        reductions: what sums its gradients between ranks, with what that keeps from step to step.
        requires_synchronisation: whether forwards that begin now synchronise their backward; never inside ``no_sync``.
        within_no_sync: how many ``no_sync`` are open.
        synchronise_next: whether the next backward synchronises: as ``requires_synchronisation`` was in the last
            forward, because that is where ``no_sync`` has to be in force (as in torch's DDP).
        statistics: those that its normalisations keep of what they have seen.
        is_released: whether its engine has forgotten it, so that another one may take it.
        on_training_forward: called when a forward of the whole model begins that a backward may follow.
    """

    def __init__(self, module: nn.Module, clock: WaitClock) -> None:
        self.module = module
        self.clock = clock
        self.stores: list[Store] = []
        self.state = BackwardState()
        self.attachments = Attachments()
        self.reductions: tuple[GradientReduction, ...] = ()
        self.is_released = False
        self.within_no_sync = 0
        self.requires_synchronisation = True
        self.synchronise_next = True
        self.statistics = RunningStatistics(module, clock)
        self.on_training_forward: Callable[[], None] | None = None
        self._parameters: list[nn.Parameter] = []
        mark(module, Link(self))
        self.attachments.at_removal(functools.partial(unmark, module))
        self.attachments.add(module.register_forward_pre_hook(_before_forward))

    @property
    def context(self) -> StoreContext:
        """What the next store of this model needs of it."""
        return StoreContext(self.module, self.clock, self.state, self.attachments, first=len(self._parameters))

    def add(self, store: Store) -> None:
        """Adds a store that was made with `context`.

        Raises:
            ValueError: it needs losses of another scale than those before it.
        """
        if self.stores and store.loss_multiplier != self.loss_multiplier:
            raise ValueError(
                f"found stores that multiply losses with {self.loss_multiplier} and {store.loss_multiplier}, expected "
                "one number for all parameters of a loss"
            )
        self.stores.append(store)
        self._parameters += store.trainable_parameters()

    @staticmethod
    def of(module: nn.Module) -> PreparedModel | None:
        """The prepared model around a user's module, None if it was not prepared for training."""
        link = getattr(module, PREPARED, None)
        prepared = None if link is None else link.prepared
        # A copy that a module makes of itself may carry the link, but is not prepared.
        return prepared if prepared is not None and prepared.module is module else None

    @staticmethod
    def within(model: Any) -> list[PreparedModel]:
        """The prepared models of what a script calls its model: the model itself, or a module that was made around it
        since, by ``torch.compile`` or by the script.
        """
        if not isinstance(model, nn.Module):
            return []
        itself = PreparedModel.of(model)
        found = [itself] if itself is not None else map(PreparedModel.of, model.modules())
        return [prepared for prepared in found if prepared is not None]

    def close(self) -> None:
        """Gives the module back to the script as it was before it was prepared, with the values that it has now.

        A module whose parameters stay divided among ranks stays prepared. No rank waits for another one. Never inside
        a backward.
        """
        if self.can_be_closed:
            self.attachments.remove()
            for store in self.stores:
                store.close()

    # What the stores have in common

    @property
    def loss_multiplier(self) -> float:
        """What a loss has to be multiplied with beside its share of the global batch."""
        return self.stores[0].loss_multiplier if self.stores else 1.0

    @property
    def can_be_completed(self) -> bool:
        """Whether a backward that autograd did not finish can be, so that other ranks need not wait for this one."""
        return all(store.can_be_completed for store in self.stores)

    @property
    def can_be_closed(self) -> bool:
        """Whether the module can be given back to the script."""
        return all(store.can_be_closed for store in self.stores)

    @property
    def can_step_locally(self) -> bool:
        """Whether a rank has whole parameters for itself, so that it may step with them."""
        return all(store.can_step_locally for store in self.stores)

    @property
    def took_part(self) -> bool:
        """Whether autograd produced gradients for this model since ``begin_backward``."""
        return self.state.took_part

    @took_part.setter
    def took_part(self, took_part: bool) -> None:
        self.state.took_part = took_part

    @property
    def local(self) -> LocalGradients:
        """The gradients that this rank holds alone."""
        return self.state.local

    def trainable_parameters(self) -> list[nn.Parameter]:
        """The parameters as the optimizer sees them, in an order that is the same on all ranks."""
        return self._parameters

    def gradient_leaves(self) -> Iterator[torch.Tensor]:
        """The tensors whose gradients a backward produces: the parameters as the forward has used them."""
        for store in self.stores:
            yield from store.gradient_leaves()

    # Forwards

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Makes backwards of forwards inside the block only accumulate gradients on this rank (or its node)."""
        # Counted, not a flag: contexts may be nested, as those of the script inside one of accelerate.
        before = self._synchronises
        self.within_no_sync += 1
        try:
            yield
        finally:
            self.within_no_sync -= 1
            self._synchronises = before

    @property
    def requires_synchronisation(self) -> bool:
        return self._synchronises and not self.within_no_sync

    @requires_synchronisation.setter
    def requires_synchronisation(self, synchronises: bool) -> None:
        self._synchronises = synchronises

    def forward_begins(self) -> None:
        """Notes that a forward of the whole model begins; called by a hook of the module."""
        self.synchronise_next = self.requires_synchronisation
        if self.on_training_forward is not None and self.module.training and torch.is_grad_enabled():
            self.on_training_forward()
        for store in self.stores:
            store.forward_begins()

    # One backward

    def begin_backward(self, synchronise: bool) -> None:
        """Makes the model ready for autograd; see `Store.begin`."""
        self.state.begin(self._parameters, self.has_gradients())
        for store in self.stores:
            store.begin(synchronise)

    def deliver_backward(self) -> None:
        """Hands in gradients that autograd did not produce on this rank but others wait for; does not wait itself."""
        for store in self.stores:
            store.deliver()

    def finish_backward(self) -> None:
        """Waits for the reductions of this backward; if it was synchronised, ``.grad`` is final afterwards."""
        self.state.in_backward = False
        for store in self.stores:
            store.finish()

    def cancel_backward(self) -> None:
        """Undoes ``begin_backward``, as the loss did not depend on this model."""
        self.state.in_backward = False
        for store in self.stores:
            store.cancel()

    def abandon_backward(self) -> None:
        """Forgets a backward that was begun and has failed; does not wait for other ranks."""
        self.state.in_backward = False
        for store in self.stores:
            store.abandon()

    def explain(self, error: BaseException) -> None:
        """Raises RuntimeError that says what an error of a backward means, where a store knows."""
        for store in self.stores:
            store.explain(error)

    # Gradients

    def has_gradients(self) -> bool:
        """Whether this rank holds gradients, final or not."""
        return any(store.has_gradients() for store in self.stores)

    def holds_gradients(self, among: Collection[int] | None = None) -> bool:
        """Whether there are gradients that would change the parameters; see `Store.holds_gradients`."""
        return any(store.holds_gradients(among) for store in self.stores)

    def drop_gradients(self) -> None:
        """Drops all gradients, wherever they are; never inside a backward."""
        for store in self.stores:
            store.drop_gradients()
        self.local.clear()

    def drop_unsummed(self, parameters: Collection[int] | None = None) -> None:
        """Drops gradients that are not in ``.grad`` until they are summed; see `Store.drop_unsummed`."""
        for store in self.stores:
            store.drop_unsummed(parameters)
        if not self.has_gradients():
            self.local.clear()

    def take_usage(self) -> torch.Tensor:
        """Reports to which trainable gradients this rank has contributed: 0/1, shape (parameters,), float64."""
        return self.state.report(len(self._parameters))

    def no_usage(self) -> torch.Tensor:
        """The usage of a rank that took no part in the backward: zeros, shape (parameters,), float64."""
        return torch.zeros(len(self._parameters), dtype=torch.float64)

    def drop_unused(self, used: torch.Tensor) -> None:
        """Sets ``.grad`` to None where no rank had a gradient, as in one process (AdamW would decay the parameter).

        Args:
            used: whether any rank used each trainable parameter, shape (parameters,).
        """
        for parameter, is_used in zip(self._parameters, used.tolist(), strict=True):
            if not is_used:
                parameter.grad = None

    # Steps and states

    def require_own(self) -> None:
        """Raises RuntimeError if another accelerator trains the module by now."""
        if PreparedModel.of(self.module) is not self:
            raise RuntimeError(
                f"found that another accelerator has prepared {type(self.module).__name__} since: this one does not "
                "train it any more. Go on with the accelerator that prepared it last, or prepare it again"
            )

    def before_step(self, stepping: Collection[int] | None = None) -> None:
        """Checks and prepares the parameters for an optimizer that is about to change some.

        Args:
            stepping: ids of those that it has; None: all.

        Raises:
            RuntimeError: gradients are not those of the global batch.
        """
        self.require_own()
        if self.state.bypassed:
            raise RuntimeError(
                "gradients were computed by loss.backward(), so they are neither weighted nor summed over ranks; "
                "call accelerator.backward(loss) instead"
            )
        for store in self.stores:
            store.before_step(stepping)

    def postpone_step(self, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        """Takes over the step of some parameters; see `Store.postpone_step`."""
        return [parameter for store in self.stores for parameter in store.postpone_step(optimizer)]

    def step_is_over(self) -> None:
        """Takes note that an optimizer has stepped, or has raised an error instead."""
        for store in self.stores:
            store.step_is_over()

    def after_step(self) -> None:
        """Lets other ranks go on, as an optimizer has changed the parameters (collective where ranks share them)."""
        for store in self.stores:
            store.after_step()

    @property
    def loads_together(self) -> bool:
        """Whether ranks load states together."""
        return any(store.loads_together for store in self.stores)

    def loading_begins(self, state: dict[str, Any]) -> None:
        """Prepares for ``load_state_dict`` of the model or a part of it (collective, except where ranks are apart)."""
        for store in self.stores:
            store.loading_begins(state)

    def parameters_loaded(self) -> None:
        """Takes note that all ranks have set the parameters to the same values."""
        for store in self.stores:
            store.parameters_loaded()

    def collective_begins(self) -> None:
        """Takes note that this rank is about to call a collective of the whole world."""
        for store in self.stores:
            store.collective_begins()

    # Calls of the module's own methods

    def skips_conversion(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Whether a conversion of the whole module is to be left out; see `Store.skips_conversion`."""
        skipped = [store.skips_conversion(convert) for store in self.stores]  # all are asked: each may raise
        return all(skipped)

    def refuse_copy(self) -> None:
        """Raises RuntimeError if the module itself cannot be pickled."""
        for store in self.stores:
            store.refuse_copy()


def _before_forward(module: nn.Module, args: tuple) -> None:
    prepared = PreparedModel.of(module)
    if prepared is not None:
        prepared.forward_begins()


def broadcast_initial_state(model: nn.Module, device: torch.device) -> None:
    """Makes parameters and buffers of all ranks those of rank 0 (collective; FSDP2 itself never does).

    Args:
        model: with the same parameters and buffers on all ranks.
        device: whose tensors the backend carries. Tensors elsewhere (host memory of an offloaded model) travel through
            it, one at a time.

    Raises:
        ValueError: a parameter has no data yet (meta device).
    """
    # In the order of the model, which is the same on all ranks: broadcasts are matched by their order alone.
    for name, tensor in _tensors(model):
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device; give the model weights before prepare()")
        # As bytes: backends do not know every dtype.
        staged = tensor.to(device)  # the tensor itself, if it is there already
        dist.broadcast(staged.view(-1).view(torch.uint8), src=0)
        if staged is not tensor:
            tensor.copy_(staged)


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, tied ones once, contiguous."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        # A view of the bytes needs contiguous memory. The tensor itself gets it, so that it holds what is received.
        if not tensor.data.is_contiguous():
            tensor.data = tensor.data.contiguous()
        yield name, tensor.data
