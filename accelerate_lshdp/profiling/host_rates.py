# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""How fast a rank on a device copies from and to the memory of its host, and steps an optimizer there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import psutil
import torch

from accelerate_lshdp.documents.profile_sections import HostRates
from accelerate_lshdp.engine.module_state import parameters_of
from accelerate_lshdp.engine.stores.streamed.pinning import register_with_device
from accelerate_lshdp.profiling.memory import free_in_control_group
from accelerate_lshdp.runtime.cpu_binding import apply_thread_share


#: Bytes of a copy: as large as a block, so that its start does not count.
_COPIED = 64 * 2**20
#: Parameters of the measured step: with gradients and moments 512 MB, more than the caches of large processors hold.
_STEPPED = 32 * 2**20
_REPEATS = 5


def host_rates_of(
    device: torch.device,
    model: torch.nn.Module,
    mixed_precision: str,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> HostRates | None:
    """Measures what a model's units would take if they were streamed from this rank's host.

    Args:
        device: that computes.
        model: whose trainable parameters would be stepped on the host.
        mixed_precision: of the computation.
        clock: seconds, monotonic.

    Returns:
        None where no unit can be streamed: the host computes itself, or the device has no streams.

    Raises:
        NodeMemoryError: the device cannot use memory of the host.
    """
    if device.type == "cpu" or not hasattr(torch.get_device_module(device), "Stream"):
        return None
    apply_thread_share()  # as a run does that steps parameters on the host
    trained = sum(parameter.numel() for parameter in parameters_of(model) if parameter.requires_grad)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mixed_precision)
    return measure_host_rates(device, trained, dtype, clock=clock)


def measure_host_rates(
    device: torch.device,
    parameters: int,
    compute_dtype: torch.dtype | None,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> HostRates:
    """Measures on this rank; the ranks of a node are to do it at the same time, as they share links and memory.

    Args:
        device: that computes.
        parameters: number of the model's trainable parameters: no more are stepped.
        compute_dtype: that a copy of the parameters is written in after each step; None: there is none.
        clock: seconds, monotonic.

    Raises:
        NodeMemoryError: the device cannot use memory of the host.
    """
    free = psutil.virtual_memory().available
    in_group = free_in_control_group()
    to_device, to_host = _copy_rates(device, clock)
    return HostRates(
        to_device_bytes_per_second=to_device,
        to_host_bytes_per_second=to_host,
        optimizer_seconds_per_parameter=_step_seconds(min(parameters, _STEPPED), compute_dtype, clock),
        memory_bytes=free if in_group is None else min(free, in_group),
    )


def _copy_rates(device: torch.device, clock: Callable[[], float]) -> tuple[float, float]:
    """Bytes a second to the device and to the host, each way alone."""
    on_host = torch.zeros(_COPIED, dtype=torch.uint8)
    unregister = register_with_device(on_host, device)
    try:
        on_device = torch.zeros(_COPIED, dtype=torch.uint8, device=device)
        synchronise = torch.get_device_module(device).synchronize

        def copy(target: torch.Tensor, source: torch.Tensor) -> None:
            target.copy_(source, non_blocking=True)
            synchronise(device)

        ways = ((on_device, on_host), (on_host, on_device))
        to_device, to_host = (_COPIED / _median(lambda pair=pair: copy(*pair), clock) for pair in ways)
    finally:
        unregister()
    return to_device, to_host


def _step_seconds(count: int, compute_dtype: torch.dtype | None, clock: Callable[[], float]) -> float:
    """Seconds of a step of AdamW on the host, for each parameter."""
    parameter = torch.nn.Parameter(torch.zeros(count))
    parameter.grad = torch.ones(count)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    copy = None if compute_dtype in (None, parameter.dtype) else torch.zeros(count, dtype=compute_dtype)

    def step() -> None:
        optimizer.step()
        if copy is not None:
            copy.copy_(parameter.detach())

    return _median(step, clock) / count


def _median(work: Callable[[], None], clock: Callable[[], float]) -> float:
    """Seconds of something that is done several times, after once for nothing."""
    work()
    seconds = []
    for _ in range(_REPEATS):
        began = clock()
        work()
        seconds.append(clock() - began)
    return statistics.median(seconds)
