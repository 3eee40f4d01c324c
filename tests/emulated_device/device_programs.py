# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Programs on the emulated device that show what its memory, copies, events and operators do."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
import torch_device as device
from torch import nn
from torch.nn import functional as F


KIBIBYTE = 1024
MEBIBYTE = 1024 * KIBIBYTE


def floats(count: int) -> torch.Tensor:
    return torch.ones(count, device="emulated")


def bytes_of_device(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device="emulated")


def pinned_bytes(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8).pin_memory()


# What is not a race


def disjoint_parts() -> list[str]:
    """Two streams write to two halves of one tensor."""
    whole, side = floats(2048), device.new_stream()
    side.wait_stream(device.current_stream())
    with device.stream(side):
        whole[:1024].mul_(2)
    whole[1024:].mul_(3)
    device.current_stream().wait_stream(side)
    assert whole.sum().item() == 5 * 1024
    return device.races()


def readers_on_two_streams() -> list[str]:
    read, side = floats(1024), device.new_stream()
    side.wait_stream(device.current_stream())
    with device.stream(side):
        doubled = read * 2
    tripled = read * 3
    device.current_stream().wait_stream(side)
    assert (doubled + tripled).sum().item() == 5 * 1024
    doubled.record_stream(device.current_stream())
    return device.races()


def order_through_the_host() -> list[str]:
    """The host waits for one stream, and then gives work to the other one."""
    device.configure(compute_delay=0.02)
    value, side = floats(1024), device.new_stream()
    device.current_stream().synchronize()
    with device.stream(side):
        value.mul_(2)
    side.synchronize()
    assert value.sum().item() == 2 * 1024
    return device.races()


def seen_by_a_query() -> list[str]:
    """The host has not waited, but has asked and been told that the event has come."""
    value, side = floats(1024), device.new_stream()
    event = device.current_stream().record_event()
    while not event.query():
        time.sleep(0.001)
    with device.stream(side):
        value.mul_(2)
    while not side.query():
        time.sleep(0.001)
    assert value.sum().item() == 2 * 1024
    return device.races()


# Memory


def limit_of_memory() -> dict[str, Any]:
    device.empty_cache()
    device.configure(limit=device.counts()["reserved_device_bytes"] + 4 * MEBIBYTE)
    kept = bytes_of_device(3 * MEBIBYTE)
    try:
        bytes_of_device(2 * MEBIBYTE)
        message = ""
    except torch.OutOfMemoryError as error:
        message = str(error)
    del kept
    other = bytes_of_device(2 * MEBIBYTE)  # what is only kept for later use is given back
    return {"message": message, "after": other.numel(), "reserved": device.counts()["reserved_device_bytes"]}


def cache_emptied_beside_work() -> bool:
    """Whether memory that one thread gives back with work queued waits for it, as another thread empties the cache."""
    device.empty_cache()
    default, side = device.current_stream(), device.new_stream()
    device.configure(limit=device.counts()["reserved_device_bytes"] + 8 * MEBIBYTE, compute_delay=0.5)
    held = bytes_of_device(4 * MEBIBYTE)
    with device.stream(side):
        bytes_of_device(KIBIBYTE).add_(1)  # for which the other thread waits before it frees anything
    found = []

    def allocate() -> None:
        kept = bytes_of_device(6 * MEBIBYTE)
        found.append(default.query())
        del kept

    thread = threading.Thread(target=allocate)
    thread.start()
    time.sleep(0.2)
    held.add_(1)
    del held
    thread.join()
    device.synchronize()
    return found[0]


def memory_used_again() -> dict[str, bool]:
    """Which tensors get the memory of one that was given back."""
    side = device.new_stream()
    size = 7 * MEBIBYTE
    first = bytes_of_device(size)
    address = first.data_ptr()
    del first
    with device.stream(side):
        of_other_stream = bytes_of_device(size)
    of_same_stream = bytes_of_device(size - 4096)
    results = {
        "other stream": of_other_stream.data_ptr() == address,
        "same stream": of_same_stream.data_ptr() == address,
    }
    side.wait_stream(device.current_stream())
    with device.stream(side):
        device.sleep(0.2)
    of_same_stream.record_stream(side)
    del of_same_stream
    while_used = bytes_of_device(size)
    results["while a recorded stream uses it"] = while_used.data_ptr() == address
    side.synchronize()
    results["after that"] = bytes_of_device(size).data_ptr() == address
    return results


def pinned_memory() -> dict[str, Any]:
    before = device.counts()["pinned_bytes"]
    host = pinned_bytes(5 * MEBIBYTE)
    used = device.counts()["pinned_bytes"] - before
    address = host.data_ptr()
    device.configure(copy_delay=0.2)
    there = host.to("emulated", non_blocking=True)
    is_pinned, part_is_pinned = host.is_pinned(), host[100:].is_pinned()
    del host
    other = pinned_bytes(5 * MEBIBYTE)
    device.synchronize()
    again = pinned_bytes(5 * MEBIBYTE)
    return {
        "used": used,
        "is pinned": is_pinned and part_is_pinned and not torch.zeros(1).is_pinned(),
        "used again while it is copied": other.data_ptr() == address,
        "used again": again.data_ptr() == address,
        "copied": there.sum().item() == 0,
        "races": device.races(),
    }


def counted_memory() -> dict[str, int]:
    before = device.counts()["device_bytes"]
    tensors = [bytes_of_device(1000), bytes_of_device(513)]
    del tensors[0]
    return {
        "now": device.counts()["device_bytes"] - before,
        "peak": device.counts()["peak_device_bytes"] - before,
    }


def resized_storage() -> dict[str, Any]:
    """As FSDP does it: memory that a tensor has only at times."""
    before = device.counts()["device_bytes"]
    tensor = floats(1024)
    storage = tensor.untyped_storage()
    storage.resize_(0)
    freed = device.counts()["device_bytes"] - before
    storage.resize_(4096)
    tensor.fill_(3)
    storage.resize_(8192)
    return {"freed": freed, "sum": tensor.sum().item(), "size": storage.nbytes()}


# Copies


def seconds_of_copies(directions: tuple[str, ...], rate: float) -> float:
    """How long copies of 1 MiB take that are queued at once, each on a stream of its own."""
    device.configure(to_device=rate, to_host=rate)
    pairs = [(direction, pinned_bytes(MEBIBYTE), bytes_of_device(MEBIBYTE)) for direction in directions]
    streams = [device.new_stream() for _ in pairs]
    device.synchronize()
    start = time.monotonic()
    for (direction, host, there), stream in zip(pairs, streams, strict=True):
        with device.stream(stream):
            target, source = (there, host) if direction == "to device" else (host, there)
            target.copy_(source, non_blocking=True)
    queued = time.monotonic() - start
    device.synchronize()
    assert queued < 0.05, queued
    return time.monotonic() - start


def counted_copies() -> dict[str, int]:
    there = bytes_of_device(1000)
    there.copy_(torch.zeros(1000, dtype=torch.uint8))
    there.copy_(pinned_bytes(1000), non_blocking=True)
    there.cpu()
    there[:500].sum().item()
    device.synchronize()
    return device.counts()


def copies_of_other_layouts() -> bool:
    """Copies that convert, transpose and broadcast give what they give on the CPU."""
    matrix = torch.arange(12.0).reshape(3, 4)
    there = matrix.to("emulated")
    double = torch.zeros(4, 3, dtype=torch.float64, device="emulated")
    double.copy_(matrix.t())
    rows = torch.zeros(3, 4, device="emulated")
    rows.copy_(matrix[0])
    back = torch.zeros(4, 3, dtype=torch.float64)
    back.copy_(there.t(), non_blocking=True)
    columns = torch.zeros(3, 8)[:, ::2]
    columns.copy_(there)
    return (
        torch.equal(double.cpu(), matrix.t().double())
        and torch.equal(rows.cpu(), matrix[0].expand(3, 4))
        and torch.equal(back, matrix.t().double())
        and torch.equal(columns, matrix)
        and torch.equal(there.to("cpu", torch.float64), matrix.double())
    )


def values_under_way() -> tuple[bool, bool]:
    """Whether the target of a copy holds no numbers before it has ended, and numbers afterwards."""
    device.configure(copy_delay=0.2)
    there, host = floats(1024), torch.zeros(1024).pin_memory()
    host.copy_(there, non_blocking=True)
    time.sleep(0.1)
    seen = host.numpy().copy()  # which is no operator of torch, so that it is no race that is found
    device.synchronize()
    return bool((seen != seen).all()), bool((host == 1).all())


# Events


def event_times() -> dict[str, Any]:
    start, end = device.new_event(enable_timing=True), device.new_event(enable_timing=True)
    start.record()
    device.sleep(0.1)
    end.record()
    before = end.query(), device.current_stream().query()
    end.synchronize()
    return {"before": before, "after": (end.query(), device.current_stream().query()), "ms": start.elapsed_time(end)}


# Operators


def host_is_ahead() -> float:
    """Seconds that the host needs to queue 20 operators of 20 ms."""
    value = floats(64).reshape(8, 8)
    (value @ value).clamp(max=1.0)  # torch imports a lot when it is asked for shapes for the first time
    device.synchronize()
    device.configure(compute_delay=0.02)
    start = time.monotonic()
    for _ in range(10):
        value = (value @ value).clamp(max=1.0)
    seconds = time.monotonic() - start
    assert value.sum().item() == 64
    return seconds


def error_of_a_kernel() -> str:
    """What is raised for an index that only the device sees."""
    table, index = floats(10).reshape(5, 2), torch.tensor([7], device="emulated")
    F.embedding(index, table)
    try:
        device.synchronize()
    except RuntimeError as error:
        return str(error)
    return ""


def refusals() -> list[str]:
    """What is raised at once: shapes that do not match, and tensors of two devices."""
    messages = []
    for wrong in (lambda: floats(3) + floats(4), lambda: floats(3) + torch.ones(3), lambda: floats(3).add_(floats(4))):
        try:
            wrong()
            messages.append("")
        except RuntimeError as error:
            messages.append(str(error))
    return messages


def unknown_shapes() -> tuple[list[int], dict[str, int], int]:
    value = torch.tensor([0.0, 1.0, 0.0, 2.0], device="emulated")
    device.reset()
    found = value.nonzero()
    syncs = device.counts()["host_synchronisations"]
    return found.flatten().tolist(), device.waited_operators(), syncs


def random_numbers() -> bool:
    """Whether a seed decides them, also if the device is behind."""
    device.configure(compute_delay=0.01)
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        value = floats(1000) * 2
        value = F.dropout(value, 0.5) + torch.rand(1000, device="emulated")
        drawn.append(value.cpu() + torch.rand(1000))
    return torch.equal(*drawn) and not torch.equal(drawn[0], drawn[0].roll(1))


class Net(nn.Module):
    """Layers of most kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Linear(8, 24)
        self.out = nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        q, k, v = self.mix(self.norm(x)).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        return self.out(F.gelu(x))


def train(place: str, steps: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Net().double().to(place)  # AdamW makes steps of what rounding leaves of gradients that are zero
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        tokens = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(step)).to(place)
        loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [torch.stack(losses).cpu(), *(parameter.detach().cpu() for parameter in model.parameters())]


def training(is_slow: bool) -> tuple[float, list[str], dict[str, int]]:
    """The largest difference between trainings on the device and on the CPU, and the races that were found."""
    expected = train("cpu", 3)
    if is_slow:
        device.configure(compute_delay=0.001, copy_delay=0.01)
    found = train("emulated", 3)
    largest = max((a - b).abs().max().item() for a, b in zip(expected, found, strict=True))
    return largest, device.races(), device.waited_operators()


def moved_parameter() -> str:
    """``.data`` moves a parameter that is on the host, as for the accelerators that torch knows."""
    parameter = nn.Parameter(torch.ones(3))
    parameter.data = parameter.data.to("emulated")
    (parameter * 2).sum().backward()
    return f"{parameter.device} {parameter.grad.device} {parameter.grad.sum().item()}"


def autocast_results() -> tuple[str, str, float]:
    """The types of a linear layer's output and of a norm of it under autocast, and how far the norm is from fp32's."""
    torch.manual_seed(0)
    linear, norm, x = nn.Linear(8, 4).to("emulated"), nn.LayerNorm(4).to("emulated"), torch.randn(2, 8).to("emulated")
    with torch.autocast("emulated", torch.bfloat16):
        output = linear(x)
        normalised = norm(output)
    return str(output.dtype), str(normalised.dtype), (normalised - norm(output.float())).abs().max().item()
