# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The emulated accelerator as a device of torch: importing this registers ``torch.emulated`` and its collectives.

Not to be imported by the process of pytest: the device stays, and torch then says everywhere that there is an
accelerator.

The device runs operators on the CPU, but has what makes programs for accelerators right or wrong: memory of its own,
streams that are threads, events, copies that take their time, and an allocator that uses memory again. The host only
queues work. So a wait that is missing gives wrong values when something is delayed (``configure``); and it is found
whatever the timing, by vector clocks (``races``). Where each of these is done stands in the C++ files.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from device_build import load_extension


NAME = "emulated"
BACKEND = "emulated_gloo"
NO_LIMIT = 2**62
_limit = NO_LIMIT  # bytes of the device

_extension = load_extension()
synchronize = _extension.synchronize
counts = _extension.counts
reset = _extension.reset
races = _extension.races
sleep = _extension.sleep
empty_cache = _extension.empty_cache
waited_operators = _extension.waited_operators


def configure(
    *,
    to_device: float = 0.0,
    to_host: float = 0.0,
    to_ranks: float = 0.0,
    copy_delay: float = 0.0,
    collective_delay: float = 0.0,
    compute_delay: float = 0.0,
    limit: int = NO_LIMIT,
) -> None:
    """Says how slow the device is, and how much memory it has; what is not given is as it was in the beginning.

    Args:
        to_device: bytes a second that are copied to the device; 0: as fast as it goes.
        to_host: bytes a second that are copied to the host.
        to_ranks: bytes a second that collectives send to other ranks, each as a ring sends them.
        copy_delay: seconds that each copy takes longer.
        collective_delay: seconds that each collective takes longer.
        compute_delay: seconds that each operator takes longer.
        limit: bytes of the device.
    """
    global _limit
    _limit = limit
    _extension.configure(to_device, to_host, to_ranks, copy_delay, collective_delay, compute_delay, limit)


def register_host_memory(memory: torch.Tensor) -> Callable[[], None]:
    """Makes host memory one that copies need not block for, as ``cudaHostRegister`` does; returns what ends that."""
    address = memory.data_ptr()
    _extension.register_host_memory(address, memory.nbytes)
    return lambda: _extension.unregister_host_memory(address)


def new_stream(device: Any = None, priority: int = 0) -> torch.Stream:
    return torch.Stream(device=f"{NAME}:0", priority=priority)


def new_event(enable_timing: bool = False, **_: Any) -> torch.Event:
    return torch.Event(device=f"{NAME}:0", enable_timing=enable_timing)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream()


@contextlib.contextmanager
def stream(entered: torch.Stream | None) -> Iterator[None]:
    if entered is None:
        yield
        return
    before = current_stream()
    torch.accelerator.set_stream(entered)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def _set_device(device: torch.device | int) -> None:
    """Refuses what ``torch.cuda.set_device`` does: where one process runs alone, accelerate's device has no index."""
    if isinstance(device, torch.device) and device.index is None:
        raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{device}")


def _device_module() -> ModuleType:
    """``torch.emulated``, with the functions that torch and its libraries expect of a device."""
    module = ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = _set_device
    module.device = lambda device: contextlib.nullcontext()
    module.synchronize = lambda device=None: synchronize()
    module.Stream, module.Event = new_stream, new_event
    module.stream, module.current_stream = stream, current_stream
    module.empty_cache = empty_cache
    module.register_host_memory = register_host_memory
    module.memory_reserved = lambda device=None: counts()["reserved_device_bytes"]
    module.mem_get_info = lambda device=None: (_limit - counts()["reserved_device_bytes"], _limit)
    module.memory_allocated = lambda device=None: counts()["device_bytes"]
    module.max_memory_allocated = lambda device=None: counts()["peak_device_bytes"]
    module.reset_peak_memory_stats = lambda device=None: _extension.reset_peak()
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    # Random numbers are the host's, which torch seeds and saves itself.
    module._is_in_bad_fork = lambda: False
    module.manual_seed = module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    return module


def _make_backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Backend:
    return _extension.on_streams(dist.ProcessGroupGloo(dist.PrefixStore(NAME, store), rank, size, timeout))


def join_device_world() -> None:
    """Gives this case's ranks a world whose groups have a backend for the device, in the place of the world of gloo.

    The pool sees that its world has gone, and makes another one for the next case.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore(NAME, dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group(
        f"cpu:gloo,{NAME}:{BACKEND}", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    # A rank that joins twice leaves this world at once, while another one may still be connecting to it.
    dist.barrier()


torch.utils.rename_privateuse1_backend(NAME)
torch._register_device_module(NAME, _device_module())
torch.utils.generate_methods_for_privateuse1_backend()
dist.Backend.register_backend(BACKEND, _make_backend, devices=[NAME])
# Threads of streams do not end, and must not compute while the process takes its libraries apart.
atexit.register(synchronize)
