# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`WeightUses`: how forwards use the weights that could be in slices, seen from outside before one is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from accelerate_lshdp.documents.unit_sizes import LEAST_SLICEABLE_ROWS, SliceableWeights
from accelerate_lshdp.engine.stores.sliced.choice import can_be_sliced, places_of_parameters
from accelerate_lshdp.engine.stores.sliced.stand_in import KNOWN_WITHOUT_VALUES


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


class WeightUses(TorchFunctionMode):
    """Counts the uses of a model's weights in the forwards inside of the context.

    Args:
        model: before it is prepared.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        places = places_of_parameters(model)
        # Kept alive: they are known by their ids.
        self._weights = {id(p): p for p in model.parameters() if can_be_sliced(p, places[id(p)], 1)}
        self._uses = {each: _Uses() for each in self._weights}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if func not in _WITHOUT_VALUES:
            for given in tree_leaves((args, keywords)):
                if id(given) in self._uses:
                    self._count(self._uses[id(given)], func, given, args, keywords)
        return func(*args, **keywords)

    def _count(
        self, uses: _Uses, func: Callable[..., Any], weight: torch.Tensor, args: tuple, keywords: dict[str, Any]
    ) -> None:
        if not _takes_slices(func, weight, args, keywords):
            uses.others += 1
        elif func is functional.embedding:
            uses.embeddings += 1
        else:
            uses.products += 1

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
