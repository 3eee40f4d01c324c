# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`measure_units`: what each unit of a model keeps for its backward, and how many operations its forward has.

Forwards are watched from outside: autograd says which tensors are saved, and hooks of modules which unit is computed
at that moment. With fake tensors, which have shapes and no content, that takes no memory for the model or its data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from accelerate_lshdp.documents.unit_sizes import MeasuredHead, MeasuredUnit, ModelUnits
from accelerate_lshdp.engine.module_state import parameters_of
from accelerate_lshdp.engine.stores.containers import tensors_in
from accelerate_lshdp.engine.stores.sliced.uses import WeightUses
from accelerate_lshdp.engine.stores.sliced.without_values import WATCHES_ONLY
from accelerate_lshdp.engine.units import choose_units


#: Computes the loss of a model for a batch.
LossOf = Callable[[nn.Module, Any], torch.Tensor]

_ROOT = -1


@dataclass(slots=True)
class SavedBytes:
    """The bytes that one forward keeps for the backward, without parameters, buffers and the batch.

    Args:
        by_unit: bytes of each unit, and of the root under -1; each storage counts for the unit that saved it first.
        inputs: bytes of the inputs of each unit.
        before_head: bytes of each tensor that the root keeps before the end of the last unit.
        of_head: bytes of each one that it keeps after that; without units all of its own are before.
        of_units: bytes of the largest tensor that a unit keeps.
        outputs: bytes of the tensors that the forward returns.
        own_outputs: bytes of those of them that are not kept for the backward.
        repeats: whether a module of a unit had several forwards.
    """

    by_unit: dict[int, int]
    inputs: dict[int, int]
    before_head: list[int]
    of_head: list[int]
    of_units: int
    outputs: int
    own_outputs: int
    repeats: bool

    @property
    def total(self) -> int:
        """Bytes of all tensors that are kept."""
        return sum(self.by_unit.values())

    def largest(self, without: int = 0) -> int:
        """Bytes of the largest tensor, but for those of the root that have the bytes ``without``."""
        return max(self.of_units, *(each for each in (*self.before_head, *self.of_head) if each != without), 0)

    @property
    def largest_before_head(self) -> int:
        """Bytes of the largest tensor that is kept before the end of the last unit."""
        return max(self.of_units, *self.before_head, 0)


def measure_units(
    model: nn.Module,
    batches: Sequence[Any],
    samples: Sequence[int],
    loss_of: LossOf,
    *,
    block_names: Sequence[str] | None = None,
    mixed_precision: str = "no",
    parameter_bytes: float | None = None,
) -> tuple[ModelUnits, float]:
    """Measures all units of a model in forwards of two batches.

    Args:
        model: in training mode, without gradients; it has none afterwards.
        batches: two; the second one has the same kind of samples, but more of them.
        samples: their numbers of samples.
        loss_of: makes a forward and returns what a backward begins with.
        block_names: as for `choose_units`.
        mixed_precision: in which `loss_of` computes.
        parameter_bytes: of a parameter between steps. None: as the model has them here.

    Returns:
        The sizes of all units, and the operations of one sample's forward and backward.
    """
    casts = mixed_precision != "no"
    with WeightUses(model) as few_uses:
        few = saved_bytes(model, batches[0], loss_of, block_names, casts)
    with WeightUses(model) as many_uses:
        many = saved_bytes(model, batches[1], loss_of, block_names, casts)
    operations, all_operations = count_flops(model, batches[0], loss_of, block_names)
    more = samples[1] - samples[0]
    names = {id(module): name for name, module in model.named_modules()}

    def each(of: Callable[[SavedBytes], dict[int, int]], unit: int) -> float:
        # The difference of two batches: what does not grow with the samples (masks, positions) is no sample's.
        return max(0, of(many).get(unit, 0) - of(few).get(unit, 0)) / more

    def measured(unit: int, modules: tuple[str, ...], parameters: Iterable[nn.Parameter]) -> MeasuredUnit:
        own = {id(parameter): parameter for parameter in parameters}.values()
        return MeasuredUnit(
            modules,
            sum(parameter.numel() for parameter in own),
            sum(parameter.numel() for parameter in own if parameter.requires_grad),
            each(lambda saved: saved.by_unit, unit),
            each(lambda saved: saved.inputs, unit),
            operations.get(unit, 0) / samples[0],
            max((parameter.numel() for parameter in own if parameter.requires_grad), default=0),
            few_uses.sliceable(own),
        )

    groups = choose_units(model, block_names)
    units = tuple(
        measured(place, tuple(names[id(module)] for module in group), (p for m in group for p in parameters_of(m)))
        for place, group in enumerate(groups)
    )
    inside = {id(parameter) for group in groups for module in group for parameter in parameters_of(module)}
    rest = [parameter for parameter in parameters_of(model) if id(parameter) not in inside]
    # Twice: the gradient of the largest activation, and the gradient that this one is computed from.
    working = 2 * max(0, many.largest() - few.largest()) / more
    if parameter_bytes is None:
        everything = list(parameters_of(model))
        parameter_bytes = sum(p.nbytes for p in everything) / max(1, sum(p.numel() for p in everything))
    root = measured(_ROOT, ("",), rest)
    logits = [each.logits_bytes(rest) for each in (few_uses, many_uses)]
    if root.sliceable is not None and all(logits):
        a_sample = (logits[1] - logits[0]) / more
        others = 2 * max(0, many.largest(logits[1]) - few.largest(logits[0])) / more
        weights = replace(root.sliceable, logits_bytes=a_sample, loss_bytes=a_sample + working - others)
        root = replace(root, sliceable=weights)
    # Between the backwards of several forwards of a unit some of its gradients are there, and some of its activations.
    head = _head_of_sample(few, many, more) if units and not many.repeats else None
    return ModelUnits(units, root, working, mixed_precision, parameter_bytes, head), all_operations / samples[0]


def _head_of_sample(few: SavedBytes, many: SavedBytes, more: int) -> MeasuredHead:
    """What the end of the forward needs for one sample, from batches of which one has ``more`` samples."""

    def each(of: Callable[[SavedBytes], int]) -> float:
        return max(0, of(many) - of(few)) / more

    return MeasuredHead(
        kept_bytes=each(lambda saved: sum(saved.of_head)),
        working_bytes=2 * each(lambda saved: max(saved.of_head, default=0)),
        units_working_bytes=2 * each(lambda saved: saved.largest_before_head),
        output_bytes=each(lambda saved: saved.outputs),
        own_output_bytes=each(lambda saved: saved.own_outputs),
    )


@dataclass(slots=True)
class _Computing:
    """The unit whose forward is being computed.

    Args:
        unit: its index, or -1 for the root.
        on_enter: called with the index and the inputs of a unit whose forward begins.
        on_change: called before another unit is computed.
        begun: number of forwards of units that have begun.
        modules: those that had one.
    """

    on_enter: Callable[[int, Any], None] = lambda unit, inputs: None
    on_change: Callable[[int], None] = lambda unit: None
    unit: int = field(default=_ROOT, init=False)
    begun: int = field(default=0, init=False)
    modules: set[int] = field(default_factory=set, init=False)

    @contextlib.contextmanager
    def watching(self, groups: Sequence[Sequence[nn.Module]]) -> Iterator[None]:
        """Follows the forwards of groups of modules, none of which is inside another."""
        handles = []
        for place, group in enumerate(groups):
            for module in group:
                handles += [
                    module.register_forward_pre_hook(self._begins(place), with_kwargs=True),
                    module.register_forward_hook(self._ends, with_kwargs=True),
                ]
        try:
            yield
            self.on_change(self.unit)
        finally:
            for handle in handles:
                handle.remove()

    def _begins(self, place: int) -> Callable[..., None]:
        def begins(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            self.on_change(self.unit)
            self.unit = place
            self.begun += 1
            self.modules.add(id(module))
            self.on_enter(place, (args, kwargs))

        return begins

    def _ends(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        self.on_change(self.unit)
        self.unit = _ROOT


def saved_bytes(
    model: nn.Module,
    batch: Any,
    loss_of: LossOf,
    block_names: Sequence[str] | None = None,
    casts_outputs: bool = False,
) -> SavedBytes:
    """The bytes that autograd keeps between forward and backward, each storage counted once.

    Args:
        model: in training mode.
        batch: of any structure.
        loss_of: makes the forward.
        block_names: as for `choose_units`.
        casts_outputs: whether a prepared model returns numbers in half precision as fp32, as under mixed precision.
    """
    known = {_storage(tensor) for tensor in (*parameters_of(model), *model.buffers(), *_tensors(batch))}
    # Tensors stay alive, so that no storage takes the place of another.
    kept: dict[int, tuple[int, int, torch.Tensor]] = {}
    given: dict[int, tuple[set[int], torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if _storage(tensor) not in known:
            kept.setdefault(_storage(tensor), (computing.unit, computing.begun, tensor))
        return tensor

    def enter(unit: int, inputs: Any) -> None:
        for tensor in _tensors(inputs):
            if _storage(tensor) not in known:
                given.setdefault(_storage(tensor), (set(), tensor))[0].add(unit)

    outputs: dict[int, torch.Tensor] = {}

    def note_outputs(_: nn.Module, args: Any, output: Any) -> None:
        outputs.update((_storage(tensor), tensor) for tensor in tensors_in(output) if _storage(tensor) not in known)

    setattr(keep, WATCHES_ONLY, True)
    computing = _Computing(on_enter=enter)
    with model.register_forward_hook(note_outputs), computing.watching(choose_units(model, block_names)):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = loss_of(model, batch)
    by_unit: dict[int, int] = {}
    for unit, _, tensor in kept.values():
        by_unit[unit] = by_unit.get(unit, 0) + tensor.untyped_storage().nbytes()
    inputs: dict[int, int] = {}
    for storage, (units, tensor) in given.items():
        saver = kept[storage][0] if storage in kept else None
        # What several units take, a mask for one, is kept once: for the one that saves it, recomputing or not. If none
        # of them does that for certain, each may be the one that keeps it.
        for unit in {saver} if saver in units else units:
            inputs[unit] = inputs.get(unit, 0) + tensor.untyped_storage().nbytes()
    before_head, of_head, of_units = [], [], 0
    for unit, begun, tensor in kept.values():
        size = tensor.untyped_storage().nbytes()
        if unit != _ROOT:
            of_units = max(of_units, size)
        else:
            (of_head if begun and begun == computing.begun else before_head).append(size)
    all_outputs = own_outputs = 0
    for storage, tensor in outputs.items():
        is_cast = casts_outputs and tensor.dtype in (torch.bfloat16, torch.float16)
        size = 4 * tensor.numel() if is_cast else tensor.untyped_storage().nbytes()
        all_outputs += size
        own_outputs += size if is_cast or storage not in kept else 0
    repeats = computing.begun > len(computing.modules)
    del loss
    return SavedBytes(by_unit, inputs, before_head, of_head, of_units, all_outputs, own_outputs, repeats)


def count_flops(
    model: nn.Module, batch: Any, loss_of: LossOf, block_names: Sequence[str] | None = None
) -> tuple[dict[int, int], int]:
    """The operations of each unit's forward, the root's under -1; and those of forward and backward of all.

    Args: as for `saved_bytes`.
    """
    aten = torch.ops.aten
    # torch has formulas for the attention kernels of GPUs only.
    attention_on_cpus = {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    }
    counter = FlopCounterMode(display=False, custom_mapping=attention_on_cpus)
    by_unit: dict[int, int] = {}
    counted = 0

    def count(unit: int) -> None:
        nonlocal counted
        total = counter.get_total_flops()
        by_unit[unit] = by_unit.get(unit, 0) + total - counted
        counted = total

    with counter:
        with _Computing(on_change=count).watching(choose_units(model, block_names)):
            loss = loss_of(model, batch)
        loss.backward()
    model.zero_grad()
    return by_unit, counter.get_total_flops()


def _attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *rest: Any, **options: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward_flops(
    gradient: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *rest: Any, **options: Any
) -> int:
    return sdpa_backward_flop_count(gradient, query, key, value)


def _tensors(tree: Any) -> list[torch.Tensor]:
    # Batches of transformers are mappings of a class of their own, whose values the tree does not know.
    values = list(tree.values()) if isinstance(tree, Mapping) else tree
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
