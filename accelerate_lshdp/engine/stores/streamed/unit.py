# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""One unit of a model whose parameters are in host memory, and on the device while the unit computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from accelerate_lshdp.engine.stores.containers import tensors_in
from accelerate_lshdp.engine.stores.streamed.masters import require_followable, require_registered


#: Attributes that every module has.
_OF_MODULES = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class Slot:
    """One place in a module where a parameter of a unit is found.

    Attributes:
        module: that has it as its own.
        name: of the parameter in the module.
        index: of the parameter among those of the unit; tied ones have several slots.
    """

    module: nn.Module
    name: str
    index: int


def slots_of(modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter]) -> list[Slot]:
    """All places in some modules, and in those inside, where some parameters are found."""
    indices = {id(parameter): index for index, parameter in enumerate(parameters)}
    parts = {id(part): part for module in modules for part in module.modules()}
    return [
        Slot(part, name, indices[id(parameter)])
        for part in parts.values()
        for name, parameter in part._parameters.items()
        if parameter is not None and id(parameter) in indices
    ]


class StreamedUnit:
    """The parameters of a unit: one piece of host memory, and as much memory of the device from time to time.

    The tensors of the device stay the same objects for the whole run, as those that autograd saves for the backward
    refer to them. Only their memory comes and goes.

    It belongs to the stream that is current when it is fetched, the computing one: what that stream does with the
    memory after `release` comes after all that it has done with it before. The copy from the host runs on a stream of
    its own, waits for the computing one to have the memory, and is waited for before the unit computes.

    Args:
        modules: that compute with the parameters.
        masters: the parameters in host memory, as the optimizer has them.
        source: what is copied to the device, bytes of host memory, 1-D.
        tensors: of each parameter, its offset in the source in bytes, and its dtype there.
        device: where the unit computes.
        copies: the stream of copies from the host.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        masters: Sequence[nn.Parameter],
        source: torch.Tensor,
        tensors: Sequence[tuple[int, torch.dtype]],
        device: torch.device,
        copies: torch.Stream,
    ) -> None:
        self.modules = tuple(modules)
        self.masters = list(masters)
        self._source = source
        self._streams = torch.get_device_module(device)
        self._copies = copies
        self._bytes = torch.empty(source.numel(), dtype=torch.uint8, device=device)
        self._memory = self._bytes.untyped_storage()
        #: What the unit computes with, in the order of the masters.
        self.leaves = [self._leaf(master, *place) for master, place in zip(masters, tensors, strict=True)]
        self._trains = [master.requires_grad for master in masters]
        self._memory.resize_(0)
        self._slots = slots_of(modules, masters)
        self._parts = [part for module in modules for part in module.modules()]
        self._is_free: torch.Event | None = None  # when the memory may be written to
        self._arrival: torch.Event | None = None  # of the copy that was queued last
        self._home: torch.Stream | None = None  # the stream that the memory belongs to
        self._is_ready = False
        self._versions: list[int] | None = None  # of the leaves when the unit began to compute

    def _leaf(self, master: nn.Parameter, offset: int, dtype: torch.dtype) -> nn.Parameter:
        # By set_, not as views of one tensor: these would count changes together, and each copy would be one.
        own = torch.empty(0, dtype=dtype, device=self._bytes.device)
        own.set_(
            self._memory, offset // dtype.itemsize, master.shape, torch.empty(master.shape, device="meta").stride()
        )
        return nn.Parameter(own, requires_grad=master.requires_grad)

    @property
    def is_ready(self) -> bool:
        """Whether the parameters are on the device for what the computing stream is given now."""
        return self._is_ready

    @property
    def is_in_use(self) -> bool:
        """Whether its modules have the tensors of the device as their parameters."""
        return self._versions is not None

    def reserve(self) -> None:
        """Takes memory of the device, if there is none yet: what is queued from now on does not hold up the copy."""
        if self._is_free is None:
            self._home = self._streams.current_stream()
            self._memory.resize_(self._bytes.numel())
            # The memory may be what the computing stream has used for something else until now.
            self._is_free = self._home.record_event()

    def fetch(self) -> None:
        """Queues the copy to the device, if it is not there or on its way."""
        if self._arrival is not None:
            return
        self.reserve()
        with self._streams.stream(self._copies):
            self._copies.wait_event(self._is_free)
            self._bytes.copy_(self._source, non_blocking=True)
            self._arrival = self._copies.record_event()

    def use(self) -> None:
        """Gives the modules the parameters on the device; what the current stream does from now on waits for them."""
        self.fetch()
        current = self._streams.current_stream()
        current.wait_event(self._arrival)
        self._is_ready = True
        if current != self._home:
            self._bytes.record_stream(current)
        if not self.is_in_use:
            self._follow_masters()
            for slot in self._slots:
                slot.module._parameters[slot.name] = self.leaves[slot.index]
            self._versions = [leaf._version for leaf in self.leaves]

    def _follow_masters(self) -> None:
        """Takes over what the script has changed about the parameters in host memory since."""
        for slot in self._slots:
            require_registered(slot.module, slot.name, self.masters[slot.index])
        for leaf, master, trains in zip(self.leaves, self.masters, self._trains, strict=True):
            require_followable(master, trains)
            if leaf.requires_grad != master.requires_grad:
                leaf.requires_grad_(master.requires_grad)
            # Hooks of the script on gradients, which autograd only gives to what it has computed with.
            if master._backward_hooks is not None and leaf._backward_hooks is not master._backward_hooks:
                leaf._backward_hooks = master._backward_hooks

    def kept_tensors(self) -> list[torch.Tensor]:
        """Tensors in attributes of the modules: an auxiliary loss, say, which a forward does not return."""
        own = (value for part in self._parts for name, value in vars(part).items() if name not in _OF_MODULES)
        # Not in objects of the script, of which each module may have the same large one (a configuration).
        plain = (value for value in own if isinstance(value, (torch.Tensor, list, tuple, dict)))
        return [tensor for value in plain for tensor in tensors_in(value, depth=2)]

    def is_looked_into(self) -> bool:
        """Whether hooks of the script see outputs inside of the unit, which a loss may use."""
        return any(part._forward_hooks for part in self._parts if part not in self.modules)

    @property
    def memory(self) -> int:
        """What tensors in the unit's memory on the device have as the identity of their storage."""
        return self._memory._cdata

    def put_aside(self) -> None:
        """Gives the modules the parameters in host memory again; those on the device stay there.

        Raises:
            RuntimeError: the unit has changed those on the device, which no other rank sees.
        """
        if not self.is_in_use:
            return
        changed = [leaf._version for leaf in self.leaves] != self._versions
        changed = changed or any(leaf.untyped_storage()._cdata != self.memory for leaf in self.leaves)
        self._versions = None
        for slot in self._slots:
            slot.module._parameters[slot.name] = self.masters[slot.index]
        if changed:
            raise RuntimeError(
                f"found parameters of {type(self.modules[0]).__name__} that its forward has changed in place. The "
                "forward has a copy on the device, which is dropped after it: change parameters between steps with "
                "load_state_dict, or use strategy ddp"
            )

    def release(self) -> None:
        """Gives the memory of the device back, and the modules the parameters in host memory."""
        try:
            self.put_aside()
        finally:
            if self._arrival is not None:
                # A unit that was fetched and not used: its copy must not write to what the memory is used for next, by
                # the stream that it belongs to.
                self._home.wait_event(self._arrival)
            if self._is_free is not None:
                self._arrival = self._is_free = None
                self._is_ready = False
                self._memory.resize_(0)
