# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""When each unit of a model is on the device: hooks of its forwards and backwards, and what is fetched ahead."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from accelerate_lshdp.engine.attachments import Attachments
from accelerate_lshdp.engine.autograd_task import is_in_autograd
from accelerate_lshdp.engine.double_backward import refuse_gradients_of_gradients
from accelerate_lshdp.engine.stores.containers import change_tensors, tensors_in
from accelerate_lshdp.engine.stores.sliced.logits import SlicedLogits
from accelerate_lshdp.engine.stores.streamed.late_step import LateStep
from accelerate_lshdp.engine.stores.streamed.unit import StreamedUnit
from accelerate_lshdp.runtime.option_advice import option_advice


@dataclass
class _Forward:
    """One forward of a unit that a backward may follow.

    Attributes:
        unit: that computes.
        steps: how often the parameters had been changed by then.
        inputs: that need a gradient.
        awaited: number of those whose gradient is still to come in the backward.
        backward: the number of the backward in which the gradient of an output has come.
        given: inputs that need a gradient, with their counters of changes in place; dropped when the forward ends, as
            the graph of the backward keeps this object.
    """

    unit: StreamedUnit
    steps: int
    inputs: int = 0
    awaited: int = 0
    backward: int | None = None
    given: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    def take_changes(self) -> bool:
        """Whether the forward has changed an input in place."""
        given, self.given = self.given, []
        return any(tensor._version != version for tensor, version in given)


class Streaming:
    """Brings units to the device before they compute, and takes them off it after that.

    A unit is on the device during its forward, and from the moment in which the gradient of one of its outputs is
    there until those of its inputs and parameters are; the last one stays from its forward to its backward. While one
    computes, those that came after it in the last pass are copied. The rest of the model stays on the device from the
    beginning of its forward to the end of the backward: its forward is around those of all units.

    Args:
        units: of the model, in the order of registration; the last one is the rest, with the model as its module.
        device: where they compute.
        late: the optimizer's step, whose parts are the units.
        ahead: number of units that are copied while one computes.
        compute_dtype: that floating-point inputs of units are cast to, None: as they are.
        output_dtype: that floating-point outputs of the model are cast to, None: as they are.
        casts_rest: whether the two hold for the model itself, too; else another store keeps what is in no unit.
        attachments: of the model.
    """

    def __init__(
        self,
        units: Sequence[StreamedUnit],
        device: torch.device,
        *,
        late: LateStep,
        ahead: int,
        compute_dtype: torch.dtype | None,
        output_dtype: torch.dtype | None,
        casts_rest: bool,
        attachments: Attachments,
    ) -> None:
        self._units = list(units)
        self._rest = self._units[-1]
        self._device = device
        self._late = late
        self._numbers = {unit: number for number, unit in enumerate(self._units)}
        self._memories = {unit.memory for unit in self._units}
        self._ahead = ahead
        self._compute_dtype = compute_dtype
        self._output_dtype = output_dtype if casts_rest else None
        self._casts_rest = casts_rest
        self._steps = 0
        # As the model is registered, until a forward shows how it computes.
        blocks = self._units[:-1]
        self._after = dict(zip(blocks, blocks[1:], strict=False))
        self._before = dict(zip(blocks[1:], blocks, strict=False))
        self._newest: StreamedUnit | None = None  # of the forward of the model that is under way
        self._last: StreamedUnit | None = blocks[-1] if blocks else None  # of the one before
        self._forwards: dict[nn.Module, list[_Forward]] = {}  # that are under way, the innermost last
        self._unseen: Counter[StreamedUnit] = Counter()  # forwards of each whose backward cannot be seen coming
        self._backward = 0  # the number of the one that is under way, or of the next one
        self._in_backward: Counter[StreamedUnit] = Counter()  # forwards of each unit whose backward is under way
        self._awaited: dict[StreamedUnit, set[int]] = {}  # leaves whose gradient is to come in this backward
        for unit in self._units:
            for module in unit.modules:
                attachments.add(*self._register_hooks(unit, module))

    def _register_hooks(self, unit: StreamedUnit, module: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
        # Functions, not partial objects: copies of the module leave out hooks of this package, which they know by the
        # name of the hook's module.
        def begins(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return self._forward_begins(unit, module, args, kwargs)

        def ends(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            return self._forward_ends(unit, module, output)

        # The first hook before the forward and the last one after it, as others may look at the parameters.
        return (
            module.register_forward_pre_hook(begins, with_kwargs=True, prepend=True),
            module.register_forward_hook(ends, always_call=True),
        )

    # What the store says

    def order(self) -> list[int]:
        """The numbers of all units in the order in which a forward needs them, as far as that is known."""
        # What comes before all others, and in the end what no forward has used after another one.
        order = [self._rest]
        unit = next((unit for unit in self._units[:-1] if unit not in self._before), None)
        while unit is not None and unit not in order:
            order.append(unit)
            unit = self._after.get(unit)
        return [self._numbers[unit] for unit in dict.fromkeys([*order, *self._units])]

    def parameters_change(self) -> None:
        """Takes note that parameters are about to be changed: what is on the device is of no use any more."""
        self._steps += 1
        self._unseen.clear()
        self.release()

    def backward_begins(self) -> None:
        """Takes note that a backward begins."""
        self._in_backward.clear()
        self._backward += 1
        self._awaited = {
            unit: {index for index, leaf in enumerate(unit.leaves) if leaf.requires_grad} for unit in self._units
        }

    def gradient_came(self, unit: StreamedUnit, index: int) -> None:
        """Takes note that the gradient of a unit's leaf is complete."""
        if not unit.is_ready:
            raise RuntimeError(
                f"found a gradient of {type(unit.modules[0]).__name__} computed while its parameters were not on "
                "the device: its backward began where it could not be seen. Return what leads to the loss from its "
                f"forward, in tuples, dictionaries or objects, or use {option_advice('intra_node', 'collectives')}"
            )
        if unit in self._awaited:
            self._awaited[unit].discard(index)
            self._release_done(unit)

    def backward_ends(self) -> None:
        """Takes note that a backward has ended, or was given up; units whose own is still to come stay."""
        self._unseen -= Counter(unit for unit in self._unseen if not self._awaits_all(unit))  # which drops zeros
        self._awaited.clear()
        self._backward += 1  # what follows is another one, also if a script asks autograd for it
        self.release()

    def _awaits_all(self, unit: StreamedUnit) -> bool:
        trained = sum(leaf.requires_grad for leaf in unit.leaves)
        return trained > 0 and len(self._awaited.get(unit, ())) == trained

    def give_back(self) -> None:
        """Gives all modules the parameters in host memory; what is on the device stays there."""
        self._forwards.clear()  # of a forward that an interrupt has ended, of which torch says nothing
        for unit in self._units:
            unit.put_aside()

    def release(self) -> None:
        """Takes units off the device; never inside a forward or a backward."""
        self._forwards.clear()
        errors = []
        for unit in self._units:
            try:
                unit.put_aside() if unit in self._unseen else unit.release()
            except RuntimeError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    # Forward

    def _forward_begins(
        self, unit: StreamedUnit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._late.wait_for(self._numbers[unit])
        unit.use()
        if unit is not self._rest:
            if is_in_autograd():  # activations are computed again
                self._fetch_next(unit, self._before)
            else:
                self._note_order(unit)
                self._fetch_next(unit, self._after)
        forward = _Forward(unit, self._steps)
        self._forwards.setdefault(module, []).append(forward)
        prepare = functools.partial(self._prepare_input, forward)
        args = tuple(change_tensors(each, prepare) for each in args)
        return args, {name: change_tensors(each, prepare) for name, each in kwargs.items()}

    def _note_order(self, unit: StreamedUnit) -> None:
        before, self._newest = self._newest, unit
        if before is not None and before is not unit:
            self._after[before], self._before[unit] = unit, before

    def _fetch_next(self, unit: StreamedUnit, following: dict[StreamedUnit, StreamedUnit]) -> None:
        for _ in range(self._ahead):
            next_unit = following.get(unit)
            if next_unit is None:
                return
            if self._late.is_made(self._numbers[next_unit]):
                next_unit.fetch()
            else:
                # Copied when it is needed: whoever waited here would keep the device from what it can compute before.
                next_unit.reserve()
            unit = next_unit

    def _prepare_input(self, forward: _Forward, tensor: torch.Tensor, stays: bool) -> torch.Tensor:
        if forward.unit is self._rest and tensor.device.type == "cpu":
            # As FSDP2 does. Scripts send batches to model.device, which is where the first parameter is.
            tensor = tensor.to(self._device, non_blocking=True)
        if self._is_parameter(tensor):
            return tensor  # of another unit: it is there as long as that one is
        casts = self._compute_dtype is not None and (self._casts_rest or forward.unit is not self._rest)
        cast = casts and tensor.is_floating_point() and tensor.dtype != self._compute_dtype
        own = tensor.to(self._compute_dtype) if cast else tensor
        if torch.is_grad_enabled() and own.requires_grad:
            # A tensor of this forward alone, where possible: the gradient of the one that came in is complete only
            # when all others that use it have had their backward. A view, as a unit may change its input in place.
            own = own if cast or stays else own.view_as(own)
            forward.inputs += 1
            forward.awaited += 1
            forward.given.append((own, own._version))
            own.register_hook(functools.partial(self._input_has_gradient, forward))
        return own

    def _forward_ends(self, unit: StreamedUnit, module: nn.Module, output: Any) -> Any:
        # Called after a forward that failed, too, maybe in a hook before ours.
        forwards = self._forwards.get(module)
        if not forwards:
            return None
        forward = forwards.pop()
        if unit is self._rest and not forwards:
            self._last, self._newest = self._newest, None
            output = self._cast(output)
        can_be_seen = self._watch_outputs(forward, output)
        if unit is not self._rest and torch.is_grad_enabled():
            can_be_seen = self._watch_what_stays(forward) and can_be_seen
        if any(self._forwards.get(each) for each in unit.modules) or is_in_autograd():
            return output  # it is still in use
        if unit is self._rest and not torch.is_grad_enabled():
            self.release()  # what was fetched ahead and not used, too
            return output
        if torch.is_grad_enabled() and not can_be_seen:
            self._unseen[unit] += 1
        # What is in no unit is needed from the beginning of the backward on, and soon after it what came last.
        is_next = torch.is_grad_enabled() and unit is self._last
        unit.put_aside() if unit is self._rest or is_next or unit in self._unseen else unit.release()
        return output

    def _cast(self, output: Any) -> Any:
        dtype = self._output_dtype
        if dtype is None:
            return output
        return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, output)

    def _watch_what_stays(self, forward: _Forward) -> bool:
        """Watches what a forward has left in its modules beside what it returns; False if it may be elsewhere, too."""
        for tensor in forward.unit.kept_tensors():
            if tensor.grad_fn is not None:
                tensor.register_hook(functools.partial(self._output_has_gradient, forward))
        return not forward.unit.is_looked_into()

    def _is_parameter(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter on the device, or a part of one."""
        # What an operator has computed has memory of its own.
        may_be = tensor.layout is torch.strided and (tensor.is_leaf or tensor._is_view())
        return may_be and tensor.untyped_storage()._cdata in self._memories

    def _watch_outputs(self, forward: _Forward, output: Any) -> bool:
        """Lets the backward of a forward begin with its unit on the device; False if it cannot be seen coming."""
        unit = forward.unit
        # Logits of a head in slices that were not computed give no gradient: their loss does.
        given = (tensor for tensor in tensors_in(output) if not isinstance(tensor, SlicedLogits))
        tensors = [tensor for tensor in given if tensor.requires_grad]
        # A parameter itself, or a part of one, is there for whoever gets it, and its gradient needs no other.
        watched = [tensor for tensor in tensors if not self._is_parameter(tensor)]
        for tensor in watched:
            tensor.register_hook(functools.partial(self._output_has_gradient, forward))
        # What leads to the loss may also be an input that was changed in place, and not what the forward returns.
        is_changed = forward.take_changes()
        needs_none = not forward.inputs and not any(leaf.requires_grad for leaf in unit.leaves)
        return len(watched) == len(tensors) and not is_changed and (bool(tensors) or needs_none)

    # Backward

    def _output_has_gradient(self, forward: _Forward, gradient: torch.Tensor) -> None:
        refuse_gradients_of_gradients()
        unit = forward.unit
        if forward.steps != self._steps:
            raise RuntimeError(
                f"found a backward through a forward of {type(unit.modules[0]).__name__} from before its parameters "
                "were changed (by an optimizer's step or load_state_dict): the values that it has computed with are "
                "gone. Call backward before the step, or compute the forward again after it"
            )
        # Another backward through the same forward (retain_graph) begins anew.
        if forward.backward != self._backward or not forward.awaited:
            forward.backward, forward.awaited = self._backward, forward.inputs
            self._in_backward[unit] += 1
        unit.use()
        if unit is not self._rest:
            self._fetch_next(unit, self._before)
        elif self._last is not None:
            self._last.fetch()

    def _input_has_gradient(self, forward: _Forward, gradient: torch.Tensor) -> None:
        forward.awaited -= 1
        if forward.awaited == 0:
            self._in_backward[forward.unit] -= 1
            self._release_done(forward.unit)

    def _release_done(self, unit: StreamedUnit) -> None:
        """Takes a unit off the device in the backward, if nothing that is still to be computed can need it."""
        # Gradients of inputs alone do not tell: those of parameters may be computed after them, from other parameters.
        # A unit with inputs or parameters that get no gradient in this backward stays until its end.
        is_done = self._in_backward[unit] <= 0 and not self._awaited.get(unit)
        if is_done and unit is not self._rest and unit not in self._unseen:
            unit.release()
