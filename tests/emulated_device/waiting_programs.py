# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Small programs with streams, each with one wait that it needs, and that tests leave out.

Each is given ``wait``, which is called with what waits and may leave it out, and returns whether its values are right.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch_device as device


Wait = Callable[[Callable[[], object]], object]
COUNT = 4096


def pinned(value: float) -> torch.Tensor:
    return torch.full((COUNT,), value).pin_memory()


def on_device(value: float, count: int = COUNT) -> torch.Tensor:
    return torch.full((count,), value, device="emulated")


def is_everywhere(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor.cpu() == value).all())


def compute_after_copy(wait: Wait) -> bool:
    host, side = pinned(1.0), device.new_stream()
    with device.stream(side):
        there = host.to("emulated", non_blocking=True)
    wait(lambda: device.current_stream().wait_stream(side))
    doubled = there * 2
    there.record_stream(device.current_stream())
    return is_everywhere(doubled, 2.0)


def read_on_host_after_copy(wait: Wait) -> bool:
    there, host = on_device(1.0), pinned(0.0)
    host.copy_(there, non_blocking=True)
    wait(lambda: device.current_stream().synchronize())
    return is_everywhere(host, 1.0)


def write_on_host_after_copy(wait: Wait) -> bool:
    host = pinned(1.0)
    there = host.to("emulated", non_blocking=True)
    copied = device.current_stream().record_event()
    wait(copied.synchronize)
    host.zero_()
    return is_everywhere(there, 1.0)


def write_on_device_after_copy(wait: Wait) -> bool:
    there, host, side = on_device(1.0), pinned(0.0), device.new_stream()
    side.wait_stream(device.current_stream())
    with device.stream(side):
        host.copy_(there, non_blocking=True)
    wait(lambda: device.current_stream().wait_stream(side))
    there.zero_()
    side.synchronize()
    return is_everywhere(host, 1.0)


def copy_after_compute(wait: Wait) -> bool:
    there, host, side = on_device(1.0), pinned(0.0), device.new_stream()
    device.sleep(0.1)
    there.mul_(2)
    wait(lambda: side.wait_stream(device.current_stream()))
    with device.stream(side):
        host.copy_(there, non_blocking=True)
    side.synchronize()
    return is_everywhere(host, 2.0)


def record_event_after_compute(wait: Wait) -> bool:
    """The event exists without the wait, too, but stands for what was queued before."""
    there, host, side = on_device(1.0), pinned(0.0), device.new_stream()
    event = device.current_stream().record_event()
    device.sleep(0.1)
    there.mul_(2)
    wait(lambda: event.record(device.current_stream()))
    side.wait_event(event)
    with device.stream(side):
        host.copy_(there, non_blocking=True)
    side.synchronize()
    return is_everywhere(host, 2.0)


def chain_of_streams(wait: Wait) -> bool:
    """The last of three streams waits for the first one only, without the wait."""
    host, back = pinned(1.0), pinned(0.0)
    first, second, third = device.new_stream(), device.new_stream(), device.new_stream()
    with device.stream(first):
        there = host.to("emulated", non_blocking=True)
    second.wait_stream(first)
    with device.stream(second):
        device.sleep(0.1)
        doubled = there * 2
    third.wait_stream(first)
    wait(lambda: third.wait_stream(second))
    with device.stream(third):
        back.copy_(doubled, non_blocking=True)
    third.synchronize()
    right = is_everywhere(back, 2.0)
    device.synchronize()
    return right


def record_stream_of_memory(wait: Wait) -> bool:
    """Without record_stream the memory is used again while the other stream still has to read it."""
    side, reader = device.new_stream(), device.current_stream()
    with device.stream(side):
        held = [on_device(1.0)]
    reader.wait_stream(side)
    device.sleep(0.1)
    copy = held[0].clone()
    wait(lambda: held[0].record_stream(reader))
    held.clear()
    with device.stream(side):
        other = on_device(7.0)
    right = is_everywhere(copy, 1.0)
    side.synchronize()
    return right and is_everywhere(other, 7.0)


def compute_after_collective(wait: Wait) -> bool:
    value = on_device(dist.get_rank() + 1.0)
    work = dist.all_reduce(value, async_op=True)
    wait(work.wait)
    doubled = value * 2
    work.wait()
    return is_everywhere(doubled, 6.0)


def write_after_collective(wait: Wait) -> bool:
    """A collective still reads what it sends."""
    value, gathered = on_device(dist.get_rank() + 1.0), on_device(0.0, 2 * COUNT)
    work = dist.all_gather_into_tensor(gathered, value, async_op=True)
    wait(work.wait)
    value.zero_()
    work.wait()
    return is_everywhere(gathered[:COUNT], 1.0) and is_everywhere(gathered[COUNT:], 2.0)


def collective_after_compute(wait: Wait) -> bool:
    """A collective waits for the stream on which it is called, and for no other one."""
    value, side = on_device(dist.get_rank() + 1.0), device.new_stream()
    side.wait_stream(device.current_stream())
    with device.stream(side):
        device.sleep(0.1)
        value.add_(1)
    wait(lambda: device.current_stream().wait_stream(side))
    dist.all_reduce(value)
    right = is_everywhere(value, 5.0)
    device.synchronize()
    return right


def do(action: Callable[[], object]) -> None:
    action()


def leave_out(action: Callable[[], object]) -> None:
    pass


def leave_out_in_time(action: Callable[[], object]) -> None:
    """Nothing waits, but all has ended before the program goes on, as it may on a fast device."""
    time.sleep(0.2)


WAITS: dict[str, Wait] = {"waits": do, "does not wait": leave_out, "is lucky": leave_out_in_time}


_EVERYTHING = {"copy_delay": 0.05, "collective_delay": 0.05, "compute_delay": 0.02}
#: Seconds that what a program has to wait for takes longer, by the end of the program's name.
_DELAYS = {
    "copy": {"copy_delay": 0.3},
    "compute": {"compute_delay": 0.3},
    "collective": {"collective_delay": 0.3},
}


def run(program: str, how: str, is_slow: bool) -> tuple[bool, list[str]]:
    """Whether a program's values are right, and the races that were found.

    Args:
        program: one of those above.
        how: what it does where it needs its wait.
        is_slow: what the program waits for takes longer, or everything on the device.
    """
    if dist.get_world_size() > 1:
        device.join_device_world()
        dist.barrier()  # luck below is about one rank, and not about how far the other one is
    if is_slow:
        device.configure(**_DELAYS.get(program.rpartition("_")[2], _EVERYTHING))
    right = globals()[program](WAITS[how])
    device.synchronize()
    return right, device.races()
