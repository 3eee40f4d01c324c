# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`WeightUses`: how forwards use the weights that could be in slices, seen from outside before one is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from accelerate_lshdp.documents.unit_sizes import LEAST_SLICEABLE_ROWS, SliceableWeights
from accelerate_lshdp.engine.module_state import parameters_of
from accelerate_lshdp.engine.stores.sliced.choice import can_be_sliced, places_of_parameters
from accelerate_lshdp.engine.stores.sliced.stand_in import KNOWN_WITHOUT_VALUES
from accelerate_lshdp.engine.stores.sliced.without_values import (
    CONSTANT,
    KNOWN,
    is_checkpointed,
    plain_loss,
    waiting_change,
)


#: Where an operator has its weight: number and name of the argument.
_PLACES: dict[Callable[..., Any], tuple[int, str]] = {
    functional.linear: (1, "weight"),
    functional.embedding: (1, "weight"),
    torch.addmm: (2, "mat2"),
    torch.mm: (1, "mat2"),
    torch.matmul: (1, "other"),
    torch.Tensor.matmul: (1, "other"),
    torch.Tensor.__matmul__: (1, "other"),
}
_WITHOUT_VALUES = {*KNOWN_WITHOUT_VALUES, torch.Tensor.untyped_storage}
#: With one of these the operators refuse slices; of an embedding they may come by number.
_REFUSED = ("max_norm", "scale_grad_by_freq", "sparse", "beta", "alpha", "out", "out_dtype")
_REFUSED_OF_EMBEDDINGS = (3, 5, 6)


@dataclass(slots=True)
class _Uses:
    """Uses of one weight: those that need its values in the backward, too, and embeddings; or others."""

    products: int = 0
    embeddings: int = 0
    others: int = 0
    losses: list[int] = field(default_factory=list)
    """Bytes of the logits of a loss that a head in slices computes without them; of one at most."""
    reads: int = 0
    """Uses of its products that need their values."""

    @property
    def logits(self) -> int:
        """Bytes of logits that nothing needs where the weight is in slices."""
        return sum(self.losses) if not self.reads and self.products == 1 else 0


class WeightUses(TorchFunctionMode):
    """Counts the uses of a model's weights in the forwards inside of the context.

    Args:
        model: before it is prepared.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._in_forward = False
        self._hooks: list[RemovableHandle] = []
        places = places_of_parameters(model)
        # Kept alive: they are known by their ids.
        self._weights = {id(p): p for p in parameters_of(model) if can_be_sliced(p, places[id(p)], 1)}
        self._uses = {each: _Uses() for each in self._weights}
        # Results of products, and what was made of them, as logits that may wait: with their weights, by id, and which
        # rows are left out.
        self._logits: dict[int, tuple[torch.Tensor, int, int]] = {}

    def __enter__(self) -> WeightUses:
        self._hooks = [
            self._model.register_forward_pre_hook(lambda *_: self._enter_forward(True)),
            self._model.register_forward_hook(lambda *_: self._enter_forward(False), always_call=True),
        ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._logits.clear()  # they keep the activations of whole forwards
        for hook in self._hooks:
            hook.remove()

    def _enter_forward(self, inside: bool) -> None:
        self._in_forward = inside

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        result = func(*args, **keywords)
        if func not in _WITHOUT_VALUES:
            for given in tree_leaves((args, keywords)):
                if id(given) in self._uses:
                    self._count(self._uses[id(given)], func, given, args, keywords)
                    if func is functional.linear and not is_checkpointed():
                        self._logits[id(result)] = result, id(given), 0
                elif id(given) in self._logits and func not in KNOWN and func not in CONSTANT:
                    self._follow(func, given, args, keywords, result)
        return result

    def _follow(self, func: Callable[..., Any], given: torch.Tensor, args: tuple, keywords: dict, result: Any) -> None:
        """Looks at what a forward does with the product of a weight."""
        _, weight, leaves_out = self._logits[id(given)]
        uses = self._uses[weight]
        if args and args[0] is given:
            if func is functional.cross_entropy:
                loss = plain_loss(*args, **keywords)
                # That of a script comes after the logits were returned.
                waits = self._in_forward and loss is not None and leaves_out < 2 and not uses.losses
                if waits and loss.precision is loss.dtype:
                    uses.losses.append(given.numel() * loss.dtype.itemsize)
                    return
            elif (change := waiting_change(func, given, args[1:], keywords)) is not None:
                self._logits[id(result)] = result, weight, leaves_out + change.leaves_out
                return
        uses.reads += 1

    def _count(
        self, uses: _Uses, func: Callable[..., Any], weight: torch.Tensor, args: tuple, keywords: dict[str, Any]
    ) -> None:
        if not _takes_slices(func, weight, args, keywords):
            uses.others += 1
        elif func is functional.embedding:
            uses.embeddings += 1
        else:
            uses.products += 1

    def logits_bytes(self, parameters: Iterable[nn.Parameter]) -> int:
        """Bytes of the logits that nothing needs where the root, which has these parameters, is in slices."""
        return max((self._uses[id(p)].logits for p in parameters if id(p) in self._uses), default=0)

    def sliceable(self, parameters: Iterable[nn.Parameter]) -> SliceableWeights | None:
        """The weights of a unit that can be gathered in slices; None: none of them, or not all that would be.

        Args:
            parameters: of the unit, each once.
        """
        own = [(p, self._uses[id(p)]) for p in parameters if id(p) in self._uses]
        large = [(p.numel(), uses) for p, uses in own if p.shape[0] >= LEAST_SLICEABLE_ROWS]
        if not large or any(uses.others for _, uses in own):
            return None
        return SliceableWeights(
            parameters=sum(numel for numel, _ in large),
            forward=sum(numel * (uses.products + uses.embeddings) for numel, uses in large),
            backward=sum(numel * uses.products for numel, uses in large),
            uses=sum(uses.products + uses.embeddings for _, uses in large),
        )


def _takes_slices(func: Callable[..., Any], weight: torch.Tensor, args: tuple, keywords: dict[str, Any]) -> bool:
    """Whether an operator takes a weight slice by slice where it has it."""
    if func not in _PLACES:
        return False
    number, name = _PLACES[func]
    options = [keywords.get(option) for option in _REFUSED]
    if func is functional.embedding:
        options += [args[place] for place in _REFUSED_OF_EMBEDDINGS if place < len(args)]
    found = args[number] if number < len(args) else keywords.get(name)
    once = sum(each is weight for each in (*args, *keywords.values())) == 1
    return found is weight and once and all(option is None or option is False for option in options)
