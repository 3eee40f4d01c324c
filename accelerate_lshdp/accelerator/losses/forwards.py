# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The forwards of prepared models that a loss may be of, and what is kept of them until its backward."""

from __future__ import annotations

import inspect
import itertools
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import Node

from accelerate_lshdp.accelerator.losses.classes import class_name, kind_of_class
from accelerate_lshdp.accelerator.losses.parts import Composition
from accelerate_lshdp.data.tokens import integer_labels
from accelerate_lshdp.engine.prepared import PreparedModel
from accelerate_lshdp.engine.stores.sliced.head_loss import RowLosses
from accelerate_lshdp.engine.stores.sliced.logits import SlicedLogits


if TYPE_CHECKING:
    from accelerate_lshdp.data.place import MicroBatchPlace

#: Forwards that may wait for a backward. Those before them are of no loss that comes.
_MOST_FORWARDS = 3
#: Operations between a loss and the logits that it is of, at most.
_MOST_NODES = 2000
#: Operations with one number that make a multiple of it, or leave it as it is.
_MULTIPLYING = ("MulBackward0", "DivBackward0", "ToCopyBackward0", "CloneBackward0", "NegBackward0")
#: In the metadata of an operation: the numbers of the forwards that ended with it.
_ENDS = "accelerate_lshdp: ends forwards"
_numbers = itertools.count()
_SHAPING = ("MeanBackward0", "SumBackward0", "SqueezeBackward0", "ViewBackward0", "ReshapeAliasBackward0")


class Forward:
    """One forward. Nothing of it is read before a loss is looked at: no device is waited for until then.

    Args:
        model: a prepared model.
        named: all that it was given.
        output: what it returned.
    """

    def __init__(self, model: nn.Module, named: Mapping[str, Any], output: Any) -> None:
        self.name = class_name(model)
        self.labels = integer_labels(named)
        """Integer labels that it was given."""
        self.kind = kind_of_class(model)
        self.used: MicroBatchPlace | None = None
        """Where a loss of it was given to ``backward``; None: nowhere yet."""
        self.is_released = False
        self._items = named.get("num_items_in_batch")
        logits, loss = _logits_and_loss(output)
        self.row_losses: Sequence[RowLosses] = ()
        """Of the cross entropy that was computed without logits."""
        # Values of logits that wait take a collective, and not all ranks may look at their losses.
        waits = isinstance(logits, SlicedLogits)
        self.logits = logits.known if waits else None if logits is None else logits.detach()
        self.loss = None if loss is None else loss.detach()
        """Its own loss."""
        # Marks, as an operation itself would keep the activations of a forward alive that no backward follows.
        self._end, self._end_of_logits = _mark_end(loss), _mark_end(logits)
        if waits:
            self.row_losses, self._end_of_logits = logits.call.losses, next(_numbers)
            _mark(self._end_of_logits, logits.operation.metadata)
            if logits.call.notes_of_loss is not None:  # of a loss that is returned under any name
                _mark(self._end_of_logits, logits.call.notes_of_loss)
            logits.on_values.append(partial(_take_logits, weakref.ref(self)))
        self._auxiliary = (
            getattr(getattr(model, "config", None), "router_aux_loss_coef", None),
            _entry(output, "aux_loss"),
        )

    @property
    def items(self) -> float:
        """The number that it was told to divide its loss by; NaN: none."""
        return _number(self._items)

    @property
    def auxiliary(self) -> float:
        """The part of the loss that balances a mixture of experts."""
        factor, auxiliary = self._auxiliary
        part = _number(factor) * _number(auxiliary)
        return part if self.loss is not None and math.isfinite(part) else 0.0

    def multiple(self, loss: torch.Tensor) -> float:
        """By what the model's own loss was multiplied to make this one; NaN if it was made in another way."""
        if self._end is None or loss.numel() != 1 or self._end not in _ended_by(_chain(loss.grad_fn)):
            return math.nan
        own = self.loss.item()
        return loss.item() / own if own else math.nan

    def is_among(self, ended: set[int]) -> bool:
        """Whether it is one of those with these numbers."""
        return self._end in ended or self._end_of_logits in ended

    def release(self) -> None:
        """Forgets all that takes memory."""
        self.is_released = True
        self.row_losses = ()
        self.logits = self.loss = self._end = self._end_of_logits = None
        self._items, self._auxiliary = None, (None, None)


class ForwardWatch:
    """The forwards of the prepared models since the last backward."""

    def __init__(self) -> None:
        self.idle = False
        self._forwards: list[Forward] = []
        # Models, and what their own losses are by their class.
        self._models: list[tuple[weakref.ref[nn.Module], Composition | None]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_forwards": [], "_models": []}  # graphs and weak references are of this process

    def watch(self, prepared: PreparedModel) -> None:
        """Looks at the forwards of a model, until it is closed."""
        model = prepared.module
        # What is kept of a forward leads to the model by its graph, a circle that Python's collector cannot see into.
        reference = weakref.ref(self)
        entry = weakref.ref(model), kind_of_class(model)
        self._models.append(entry)

        # Functions, not methods: see PreparedModel.
        def watched(called: nn.Module) -> bool:
            if torch.compiler.is_compiling():
                return False
            watch = reference()
            known = watch is not None and not watch.idle and PreparedModel.of(called) is not None
            return known and torch.is_grad_enabled()

        def before_forward(called: nn.Module, args: tuple) -> None:
            if watched(called):  # not beside the activations of the next one
                watch = reference()
                watch._forwards = [one for one in watch._forwards if one.used is None][1 - _MOST_FORWARDS :]

        def after_forward(called: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            if watched(called):
                reference()._forwards.append(Forward(called, _named(called, args, kwargs), output))

        def forget() -> None:
            watch = reference()
            if watch is not None:
                watch._models.remove(entry)

        prepared.attachments.at_removal(forget)
        prepared.attachments.add(
            model.register_forward_pre_hook(before_forward),
            model.register_forward_hook(after_forward, with_kwargs=True),
        )

    def of(self, loss: torch.Tensor | None, place: MicroBatchPlace) -> Forward | None:
        """The forward that a loss is of; without a loss, the last one that no loss was of yet.

        Args:
            loss: as it is given to ``backward``.
            place: of its batch. What was of another batch is of the past.
        """
        known = [one for one in self._forwards if one.used is None or (loss is not None and one.used is place)]
        if len(known) > 1 and loss is not None:
            ended = _ended_by(_before(loss.grad_fn))
            known = [one for one in known if one.is_among(ended)] or known
        return known[-1] if known else None

    def used(self, forward: Forward, place: MicroBatchPlace, keep: bool) -> None:
        """A loss of this forward was given to ``backward``; those before it will not be any more.

        Args:
            forward: of `of`.
            place: of the batch.
            keep: whether further losses of it are to be looked at.
        """
        forward.used = place
        if not keep:
            forward.release()
        if forward in self._forwards:
            self._forwards = self._forwards[self._forwards.index(forward) :]

    @property
    def only_kind(self) -> Composition | None:
        """What the own loss of the only prepared model is, by its class; for where its forward is not seen."""
        return self._models[0][1] if len(self._models) == 1 else None

    @property
    def is_blind(self) -> bool:
        """Whether the forwards of a prepared model are in compiled graphs, where nothing can look at them."""
        models = [model() for model, _ in self._models]
        return any(getattr(model, "_compiled_call_impl", None) or hasattr(model, "_orig_mod") for model in models)


def operation_of(loss: torch.Tensor) -> str:
    """The name of the operation that made a loss, before it was multiplied and reshaped."""
    return _chain(loss.grad_fn)[-1].name() if loss.grad_fn is not None else ""


def operations_of(loss: torch.Tensor) -> str:
    """The names of the operation that made a loss, and of those that have reshaped it since, also sums and means."""
    names = [node.name() for node in _chain(loss.grad_fn)]
    return ", ".join(name for name in names if name not in _MULTIPLYING)


def factor_of(loss: torch.Tensor) -> float:
    """The product of the numbers that a loss was multiplied with, as far as its graph shows them."""
    factor, chain = 1.0, _chain(loss.grad_fn)
    for node in chain[:-1]:
        other = getattr(node, "_saved_other", None)
        value = _number(other)
        if math.isfinite(value) and value:
            factor = factor / value if node.name() == "DivBackward0" else factor * value
    return factor


def _mark_end(output: torch.Tensor | None) -> int | None:
    """Marks the operation that an output of a forward comes from; returns the number by which it is found again."""
    if output is None or isinstance(output, SlicedLogits) or output.grad_fn is None:
        return None
    number = next(_numbers)
    _mark(number, output.grad_fn.metadata)
    return number


def _mark(number: int, notes: dict[str, Any]) -> None:
    # A model that returns what another one has computed ends with the same operation.
    notes.setdefault(_ENDS, set()).add(number)


def _take_logits(reference: weakref.ref[Forward], values: torch.Tensor) -> None:
    """Takes logits that were computed after all."""
    forward = reference()
    if forward is not None and not forward.is_released:
        forward.logits = values.detach()


def _ended_by(nodes: Iterable[Node]) -> set[int]:
    """The numbers of the forwards that ended with these operations."""
    return set().union(*(node.metadata.get(_ENDS, ()) for node in nodes))


def _chain(node: Node | None) -> list[Node]:
    """The operation of a loss, those before it that only multiply and reshape it, and the first other one."""
    chain = []
    while node is not None:
        chain.append(node)
        before = [one for one, _ in node.next_functions if one is not None]
        if node.name() not in _MULTIPLYING + _SHAPING or len(before) != 1:
            break
        node = before[0]
    return chain


def _before(node: Node | None) -> set[Node]:
    """The operations that a loss comes from, the nearest ones."""
    found, following = set(), [] if node is None else [node]
    while following and len(found) < _MOST_NODES:
        node = following.pop(0)
        if node not in found:
            found.add(node)
            following += [one for one, _ in node.next_functions if one is not None]
    return found


def _named(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a forward by their names, as far as they have some."""
    names = list(inspect.signature(type(model).forward).parameters)[1:] if args else []
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _logits_and_loss(output: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if torch.is_tensor(output):
        return output, None
    if isinstance(output, Sequence) and not isinstance(output, Mapping) and not hasattr(output, "logits"):
        # As models of transformers return them under return_dict=False: a loss if there is one, and logits.
        tensors = [one for one in output if torch.is_tensor(one) and one.is_floating_point()]
        loss = tensors.pop(0) if tensors and tensors[0].numel() == 1 else None
        return (tensors[0] if tensors else None), loss
    loss = _entry(output, "loss")
    return _entry(output, "logits"), loss if loss is not None and loss.numel() == 1 else None


def _number(value: Any) -> float:
    """NaN for what is none."""
    if torch.is_tensor(value):
        return float(value) if value.numel() == 1 else math.nan
    return float(value) if isinstance(value, int | float) else math.nan


def _entry(output: Any, name: str) -> torch.Tensor | None:
    value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    return value if torch.is_tensor(value) else None
