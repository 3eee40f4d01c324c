# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Registers host memory that exists already with a device, so that copies from and to it need not block the host.

Memory that torch pins itself cannot be shared by the ranks of a node, and takes up to twice the bytes, as its
allocator rounds every block up to a power of two. Memory that the ranks of a node map is registered where it is, by
each of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from accelerate_lshdp.engine.stores.shared.memory import NodeMemoryError, require_on_all_ranks
from accelerate_lshdp.runtime.topology import Topology


def register_with_device(memory: torch.Tensor, device: torch.device) -> Callable[[], None]:
    """Registers host memory with a device.

    Args:
        memory: a whole mapping, 1-D.
        device: whose copies are to read and write it.

    Returns:
        What ends the registration, when all copies have ended; the memory must exist until then.

    Raises:
        NodeMemoryError: the device cannot use the memory.
    """
    if device.type == "cuda":
        return _register_with_cuda(memory, device)
    # Another device says itself how. If it cannot, copies block the host, but are right all the same.
    register = getattr(torch.get_device_module(device), "register_host_memory", None)
    return (lambda: None) if register is None else register(memory)


def _register_with_cuda(memory: torch.Tensor, device: torch.device) -> Callable[[], None]:
    runtime, address = torch.cuda.cudart(), memory.data_ptr()
    with torch.cuda.device(device):
        error = int(runtime.cudaHostRegister(address, memory.nbytes, 0))
    if error:
        raise NodeMemoryError(
            f"CUDA error {error} (cudaHostRegister of {memory.nbytes} bytes): the device cannot copy from and to the "
            "memory of the node. Look at the limit of locked memory (ulimit -l)"
        )
    return lambda: _unregister_from_cuda(address, device)


def _unregister_from_cuda(address: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # a unit that was fetched for nothing may still be on its way
        torch.cuda.cudart().cudaHostUnregister(address)


def register_on_all_ranks(memory: torch.Tensor, device: torch.device, topology: Topology) -> Callable[[], None]:
    """Registers a node's memory with the devices of all ranks (collective, unless a rank trains for itself).

    Raises:
        NodeMemoryError: on all ranks, if a device cannot use it.
    """
    if topology.world_size == 1:  # it asks nobody, also where other processes are about something else
        return register_with_device(memory, device)
    error, unregister = None, None
    try:
        unregister = register_with_device(memory, device)
    except Exception as caught:  # whatever it is: the other ranks wait in the collective below
        error = f"rank {topology.rank}: {type(caught).__name__}: {caught}"
    try:
        require_on_all_ranks(error, topology)
    except NodeMemoryError:
        if unregister is not None:
            unregister()
        raise
    return unregister
