# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The optimizer's step of streamed units, made by the host while the device computes the next forward already.

``optimizer.step()`` takes note of learning rates and other options as they are then, and returns. A thread steps unit
by unit, in the order in which the forward needs them, and a unit is copied to the device when all ranks of its node
have stepped their parameters of it. Whoever reads parameters, gradients or states meanwhile waits (`waiting`), and so
does the next backward, which writes where the gradients are. Each parameter is stepped by torch's own kernels with
the numbers that it would have been stepped with at once, so the bits are the same.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from accelerate_lshdp.engine.stores.shared.reduction import NodeReduction
from accelerate_lshdp.engine.stores.streamed.waiting import WaitingState, let_go, let_wait
from accelerate_lshdp.runtime.profiler_labels import label


logger = logging.getLogger(__name__)

#: Optimizers that treat parameters one by one, and whose state is all in ``state``. Subclasses may do something else.
_KNOWN = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


@dataclass
class _Work:
    """A step that a thread makes.

    Attributes:
        optimizer: whose step it is.
        groups: its options as they were, each with the indices of the parameters that this rank steps.
        kept: the optimizer's state when it was to step.
        keys: of each of these parameters, the key of its state.
        states: the state of each, of tensors of the thread's own in the same memory.
        waiting: the tensors that wait for the step.
    """

    optimizer: torch.optim.Optimizer
    groups: list[tuple[dict[str, Any], list[int]]]
    kept: MutableMapping[Any, dict[str, Any]]
    keys: dict[int, nn.Parameter]
    states: dict[int, dict[str, Any]] = field(default_factory=dict)
    waiting: list[torch.Tensor] = field(default_factory=list)

    def tensors(self) -> list[torch.Tensor]:
        """Those of the optimizer's state."""
        entries = (self.kept.get(key, {}) for key in self.keys.values())
        return [value for entry in entries for value in entry.values() if isinstance(value, torch.Tensor)]

    def write_back(self) -> None:
        """Gives the optimizer's state what the step has put into it anew."""
        for index, state in self.states.items():
            kept = self.kept.get(self.keys[index], {})
            changed = {name: value for name, value in state.items() if not _is_same(value, kept.get(name))}
            if changed:  # else it may have none at all, as SGD without momentum
                kept.update(changed)
                self.kept[self.keys[index]] = kept


def _is_shared(tensor: torch.Tensor) -> bool:
    """Whether other tensors, which the script has made, are in the same memory."""
    # What torch counts for a tensor alone, Python's object for the memory included.
    return _uses_of(tensor) > _uses_of(torch.empty(1))


def _uses_of(tensor: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _is_same(value: Any, kept: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(kept, torch.Tensor):
        return value.data_ptr() == kept.data_ptr() and value.shape == kept.shape
    return value is kept


class LateStep:
    """Steps the parameters of one model that this rank owns, part by part.

    The rank's progress is published in the table of its node, as that of others is needed: they own other parameters
    of the same unit.

    Args:
        parts: what is stepped together, indices of parameters.
        owned: indices of the parameters that this rank steps; of all others the other ranks of the node do.
        parameters: all that are trained.
        gradients: of each, where ``.grad`` is when a backward has ended.
        finish: called with the parameters of a part that this rank has stepped.
        settled: called when all ranks of the node have made a step.
        reduction: of the node.
        device: of this rank.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[int]],
        owned: Sequence[int],
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[torch.Tensor],
        *,
        finish: Callable[[Sequence[int]], None],
        settled: Callable[[], None],
        reduction: NodeReduction,
        device: torch.device,
    ) -> None:
        self._device = device
        own = set(owned)
        self._parts = [[index for index in part if index in own] for part in parts]
        self._parameters = list(parameters)
        self._gradients = list(gradients)
        self._index = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        # Tensors of the thread's own in the same memory: those of the script wait.
        self._targets = {index: self._parameters[index].detach() for index in own}
        self._sources = {index: self._gradients[index].detach() for index in own}
        # One that the script has made (``.data``, ``.numpy()``) shows the values as they are, without waiting.
        tensors = (*self._parameters, *self._gradients)
        self._storages = list(dict.fromkeys(tensor.untyped_storage()._cdata for tensor in tensors))
        self._uses = self._count_uses()
        self._finish = finish
        self._settled = settled
        self._reduction = reduction
        self._step = 0
        self._has_begun = self._is_pending = False
        self._postponed: _Work | None = None
        self._work: _Work | None = None
        self._error: BaseException | None = None
        self._lock = threading.RLock()
        _late_steps.add(self)

    @property
    def is_pending(self) -> bool:
        """Whether a step was begun that nobody has waited for."""
        return self._is_pending

    # The optimizer's step

    def begins(self) -> None:
        """Takes note that an optimizer is about to step; on all ranks of the node, when the last step is settled."""
        self._step += 1
        self._has_begun = True
        self._postponed = None

    def postpone(self, optimizer: torch.optim.Optimizer) -> list[int]:
        """Takes over an optimizer's step of the parameters that have a gradient now, if it can be made later.

        Returns:
            Indices of the parameters; none if the optimizer is to step itself.
        """
        if not self._has_begun or not _is_known(optimizer):
            return []
        if any(now > before for now, before in zip(self._count_uses(), self._uses, strict=True)):
            return []
        groups = []
        for group in optimizer.param_groups:
            mine = [self._index[id(p)] for p in group["params"] if id(p) in self._index and p.grad is not None]
            if any(self._parameters[index].grad is not self._gradients[index] for index in mine):
                return []  # one of the script, which may change it any time
            groups.append(({name: value for name, value in group.items() if name != "params"}, mine))
        keys = {index: self._parameters[index] for _, mine in groups for index in mine}
        work = _Work(optimizer, groups, WaitingState.behind(optimizer), keys)
        if any(type(tensor) is not torch.Tensor or _is_shared(tensor) for tensor in work.tensors()):
            return []
        self._postponed = work
        return list(keys)

    def _count_uses(self) -> list[int]:
        """The number of tensors in the memory of each parameter, and of each bucket of gradients."""
        return [torch._C._storage_Use_Count(storage) for storage in self._storages]

    def ends(self, order: Sequence[int]) -> None:
        """Takes note that an optimizer has stepped, but for what was postponed, which is begun now.

        Args:
            order: of the parts.
        """
        work, self._postponed = self._postponed, None
        self._has_begun, self._is_pending = False, True
        try:
            if work is None:
                for part in self._parts:
                    self._finish(part)
                self._reduction.publish_step(slice(None), self._step)
            else:
                self._start(work, list(order))
        except BaseException as error:
            self._fail(error)  # before others wait for what does not come
            raise
        if work is None:
            self.settle()

    def _start(self, work: _Work, order: Sequence[int]) -> None:
        for index, key in work.keys.items():
            work.states[index] = {
                name: value.detach() if isinstance(value, torch.Tensor) else value
                for name, value in work.kept.get(key, {}).items()
            }
        # One a step, that Python waits for at exit: a thread that is stopped inside of torch ends the process badly.
        thread = threading.Thread(target=self._run, args=(work, order), name="lshdp-step")
        self._reduction.beside = thread
        self._work = work
        work.waiting = [*self._parameters, *self._gradients, *work.tensors()]
        let_wait(work.waiting, self.settle)
        WaitingState.put_before(work.optimizer, self.settle)
        thread.start()

    def _run(self, work: _Work, order: Sequence[int]) -> None:
        try:
            # Of this thread, which begins with the first device: asking for its stream would take memory of that one.
            torch.get_device_module(self._device).set_device(self._device)
            with torch.no_grad(), label("late_step"):
                for number in order:
                    part = set(self._parts[number])
                    parts = [(options, [index for index in mine if index in part]) for options, mine in work.groups]
                    self._step_part(type(work.optimizer), [each for each in parts if each[1]], work.states)
                    self._finish(self._parts[number])
                    self._reduction.publish_step(number, self._step)
        except BaseException as error:  # whatever it is, somebody waits for this thread
            self._fail(error)

    def _step_part(
        self,
        kind: type[torch.optim.Optimizer],
        groups: Sequence[tuple[dict[str, Any], list[int]]],
        states: dict[int, dict[str, Any]],
    ) -> None:
        if not groups:
            return
        optimizer = kind([{**options, "params": [self._targets[i] for i in mine]} for options, mine in groups])
        for _, mine in groups:
            for index in mine:
                self._targets[index].grad = self._sources[index]
                optimizer.state[self._targets[index]] = states[index]
        # Without the hooks that others have registered for all optimizers: the script's has called them.
        getattr(kind.step, "__wrapped__", kind.step)(optimizer)

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._reduction.publish_broken_step(self._step)

    def is_over(self) -> None:
        """Takes note that an optimizer has stepped, or has raised an error: then nothing was postponed."""
        self._postponed = None
        if self._has_begun:
            self._has_begun = False
            # Other ranks may wait for this one's part.
            self._reduction.publish_broken_step(self._step)

    # Waiting for it

    def is_made(self, part: int) -> bool:
        """Whether all ranks of the node have stepped a part."""
        return not self._is_pending or self._reduction.has_stepped(part, self._step)

    def wait_for(self, part: int) -> None:
        """Waits until all ranks of the node have stepped a part.

        Raises:
            RuntimeError: one of them has failed, or is gone.
        """
        if self._is_pending:
            self._wait(part)

    def settle(self) -> None:
        """Waits until all ranks of the node have made the step.

        Raises:
            RuntimeError: one of them has failed, or is gone.
        """
        if not self._is_pending:
            return
        if threading.current_thread() is self._reduction.beside:
            # Python collects garbage in any thread, and objects of the script may read parameters at their end.
            raise RuntimeError("found a parameter read in the thread that makes the optimizer's step")
        with self._lock:
            if self._is_pending:  # else another thread of the script has settled it meanwhile
                self._wait(slice(None))
                self._let_go()

    def settle_or_give_up(self) -> None:
        """Waits as `settle`. A step that has failed is given up: parameters are as far as it has come."""
        with self._lock:
            try:
                self.settle()
            except RuntimeError as error:
                logger.warning(f"gave up an optimizer's step, of which some parameters have been stepped: {error}")
                self._let_go()
            self._error = None

    def _wait(self, parts: int | slice) -> None:
        try:
            if self._error is None:
                self._reduction.wait_for_step(parts, self._step, lambda: self._error is not None)
        except RuntimeError as error:
            # Other ranks of the node are not waited for again, nor do they have to wait for this one.
            self._fail(error)
        if self._error is not None:
            raise RuntimeError(f"the optimizer's step failed: {self._error}") from self._error

    def _let_go(self) -> None:
        self._reduction.join_beside()  # so that it holds no tensors in their memory any more
        self._reduction.beside = None
        work, self._work = self._work, None
        if work is not None:
            let_go(work.waiting)
            work.write_back()
            WaitingState.let_go(work.optimizer, self.settle)
        self._settled()
        self._is_pending = False


def _is_known(optimizer: torch.optim.Optimizer) -> bool:
    if type(optimizer) not in _KNOWN:
        return False
    # Set by torch's gradient scaler, for optimizers that look at it themselves.
    if getattr(optimizer, "found_inf", None) is not None or getattr(optimizer, "grad_scale", None) is not None:
        return False
    for group in optimizer.param_groups:
        options = [value for name, value in group.items() if name != "params"]
        options += [each for value in options if isinstance(value, (tuple, list)) for each in value]
        # A tensor may be changed in place before it is used.
        if any(isinstance(value, torch.Tensor) for value in options):
            return False
        if group.get("capturable") or group.get("differentiable"):
            return False
    return True


#: Those of this process, for what has to wait for all of them.
_late_steps: weakref.WeakSet[LateStep] = weakref.WeakSet()


def _settle_all() -> None:
    for late in list(_late_steps):
        late.settle()


if hasattr(os, "register_at_fork"):
    # A process that is forked (a worker of a loader) has no thread that would go on with the step.
    os.register_at_fork(before=_settle_all)
