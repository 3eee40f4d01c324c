"""The interface of a model that is being trained: the same few calls for every strategy."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate_lshdp.engine.batch_norm import RunningStatistics
from accelerate_lshdp.engine.local_gradients import LocalGradients
from accelerate_lshdp.engine.module_state import PREPARED, Link, mark
from accelerate_lshdp.engine.wire.reduction import GradientReduction
from accelerate_lshdp.runtime.wait_clock import WaitClock


class PreparedModel(ABC):
    """A model whose gradients are reduced over all ranks.

    One backward goes ``begin_backward(synchronise)``, autograd, ``deliver_backward()``, ``finish_backward()``, in the
    hands of a `Flow`. A backward with ``synchronise=False`` only adds to what this rank (or its node) has; the next
    one with ``synchronise=True`` reduces the sum of all of them. After ``finish_backward`` of a synchronised one,
    ``.grad`` is final on every rank.

    Attributes:
        module: the user's model.
        loss_multiplier: what a loss has to be multiplied with beside its share of the global batch.
        clock: seconds blocked in communication.
        in_backward: whether a backward was begun and not finished.
        bypassed: whether autograd produced gradients outside ``begin_backward`` and ``finish_backward``.
        took_part: whether autograd produced gradients for this model since ``begin_backward``.
        reductions: what sums its gradients between ranks, with what that keeps from step to step.
        can_be_completed: whether ``deliver_backward`` and ``finish_backward`` may follow a backward that autograd did
            not finish, so that other ranks need not wait for this one.
        requires_synchronisation: whether forwards that begin now synchronise their backward; never inside ``no_sync``.
        within_no_sync: how many ``no_sync`` are open.
        synchronise_next: whether the next backward synchronises: as ``requires_synchronisation`` was in the last
            forward, because that is where ``no_sync`` has to be in force (as in torch's DDP).
        statistics: those that its normalisations keep of what they have seen.
        on_training_forward: called when a forward of the whole model begins that a backward may follow.
        local: the gradients that this rank holds alone.
        can_step_locally: whether a rank has whole parameters for itself, so that it may step with them.
    """

    module: nn.Module
    loss_multiplier: float = 1.0
    reductions: tuple[GradientReduction, ...] = ()
    can_be_completed: bool = True
    can_step_locally = False

    def __init__(self, module: nn.Module, clock: WaitClock) -> None:
        self.module = module
        self.clock = clock
        self.in_backward = False
        self.bypassed = False
        self.took_part = False
        self.within_no_sync = 0
        self.requires_synchronisation = True
        self.synchronise_next = True
        self.statistics = RunningStatistics(module, clock)
        self.on_training_forward: Callable[[], None] | None = None
        self._used: set[int] = set()
        self._usage_reported = False
        self.local = LocalGradients()
        mark(module, Link(self))
        module.register_forward_pre_hook(_before_forward)

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

    def skips_conversion(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Whether a conversion of the whole module (``.to()``, ``.float()``, ``.cpu()``, ...) is to be left out.

        Args:
            convert: from a tensor as it is to what it shall be.

        Raises:
            RuntimeError: it is not possible with a prepared model.
        """
        return False

    def refuse_copy(self) -> None:
        """Raises RuntimeError if the module itself cannot be pickled."""
        return

    @abstractmethod
    def begin_backward(self, synchronise: bool) -> None:
        """Makes the store ready for autograd.

        Args:
            synchronise: whether this backward's gradients are summed over ranks, with what was not summed before.
        """

    @abstractmethod
    def deliver_backward(self) -> None:
        """Hands in gradients that autograd did not produce on this rank but others wait for; does not wait itself."""

    @abstractmethod
    def finish_backward(self) -> None:
        """Waits for the reductions of this backward; if it was synchronised, ``.grad`` is final afterwards."""

    @abstractmethod
    def cancel_backward(self) -> None:
        """Undoes ``begin_backward``, as the loss did not depend on this model."""

    @abstractmethod
    def abandon_backward(self) -> None:
        """Forgets a backward that was begun and has failed; does not wait for other ranks."""

    @abstractmethod
    def trainable_parameters(self) -> list[nn.Parameter]:
        """The parameters as the optimizer sees them, in an order that is the same on all ranks."""

    def drop_gradients(self) -> None:
        """Drops all gradients, wherever they are; never inside a backward."""
        for parameter in self.trainable_parameters():
            parameter.grad = None
        self.local.clear()

    def drop_unsummed(self, parameters: Collection[int]) -> None:
        """Drops gradients that are not in ``.grad`` until they are summed; the script has cleared what is there.

        Args:
            parameters: ids of those whose gradients were dropped.
        """
        return

    def holds_gradients(self, among: Collection[int] | None = None) -> bool:
        """Whether there are gradients that would change the parameters: not those that were set to None or zero.

        Args:
            among: ids of the parameters that are asked about; None: all.
        """
        gradients = (
            p.grad for p in self.trainable_parameters() if p.grad is not None and (among is None or id(p) in among)
        )
        return any(bool(g.to_local().any() if isinstance(g, DTensor) else g.any()) for g in gradients)

    def has_gradients(self) -> bool:
        """Whether this rank holds gradients, final or not."""
        return any(parameter.grad is not None for parameter in self.trainable_parameters())

    def gradient_leaves(self) -> Iterator[torch.Tensor]:
        """The tensors whose gradients a backward produces: the parameters as the forward has used them."""
        yield from self.module.parameters()

    def require_own(self) -> None:
        """Raises RuntimeError if another accelerator trains the module by now."""
        if PreparedModel.of(self.module) is not self:
            raise RuntimeError(
                f"found that another accelerator has prepared {type(self.module).__name__} since: this one does not "
                "train it any more. Go on with the accelerator that prepared it last, or prepare it again"
            )

    def before_step(self) -> None:
        """Checks and prepares the parameters for an optimizer that is about to change them.

        Raises:
            RuntimeError: gradients are not those of the global batch.
        """
        self.require_own()
        if self.bypassed:
            raise RuntimeError(
                "gradients were computed by loss.backward(), so they are neither weighted nor summed over ranks; "
                "call accelerator.backward(loss) instead"
            )

    def after_step(self) -> None:
        """Lets other ranks go on, as an optimizer has changed the parameters (collective where ranks share them)."""
        return

    def loading_begins(self, state: dict[str, Any]) -> None:
        """Prepares for ``load_state_dict`` of the model or a part of it (collective, except where ranks are apart)."""
        return

    def parameters_loaded(self) -> None:
        """Takes note that all ranks have set the parameters to the same values."""
        return

    def collective_begins(self) -> None:
        """Takes note that this rank is about to call a collective of the whole world."""
        return

    def mark_used(self, index: int) -> None:
        """Takes note that autograd has produced a gradient for trainable parameter ``index`` on this rank."""
        # Else it is a loss.backward() of the script; its gradients are of this rank alone, and `before_step` refuses
        # them.
        if not self.in_backward:
            self.bypassed = True
        self.took_part = True
        self._used.add(index)

    def take_usage(self) -> torch.Tensor:
        """Reports to which trainable gradients this rank has contributed: 0/1, shape (parameters,), float64."""
        # Counts of ranks are exact in any float; these travel with the step's report, in one message of float64.
        usage = self.no_usage()
        if self._used:
            usage[sorted(self._used)] = 1
        self._usage_reported = True
        return usage

    def no_usage(self) -> torch.Tensor:
        """The usage of a rank that took no part in the backward: zeros, shape (parameters,), float64."""
        return torch.zeros(len(self.trainable_parameters()), dtype=torch.float64)

    def forget_cleared(self) -> None:
        """Drops from the usage what the script has set to None since the last step; called as a backward begins."""
        # Only after a report: before it, gradients that are still to be summed may be elsewhere than in .grad.
        if self._usage_reported:
            parameters = self.trainable_parameters()
            self._used = {index for index in self._used if parameters[index].grad is not None}
            self._usage_reported = False

    def drop_unused(self, usage: torch.Tensor) -> None:
        """Sets ``.grad`` to None where no rank had a gradient, as in one process (AdamW would decay the parameter).

        Args:
            usage: number of ranks that used each trainable parameter, shape (parameters,).
        """
        for parameter, ranks in zip(self.trainable_parameters(), usage.tolist(), strict=True):
            if ranks == 0:
                parameter.grad = None


def _before_forward(module: nn.Module, args: tuple) -> None:
    prepared = PreparedModel.of(module)
    if prepared is not None:
        prepared.forward_begins()


def broadcast_initial_state(model: nn.Module, device: torch.device) -> None:
    """Makes parameters and buffers of all ranks those of rank 0 (collective; FSDP2 itself never does).

    Tensors elsewhere than on ``device`` (host memory of an offloaded model) travel through it, one at a time.

    Raises:
        ValueError: a parameter has no data yet (meta device).
    """
    # In the order of the model, which is the same on all ranks: broadcasts are matched by their order alone.
    for name, tensor in _tensors(model):
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device; give the model weights before prepare()")
        # As bytes: backends do not know every dtype.
        staged = tensor if device.type == "cpu" else tensor.to(device)
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
