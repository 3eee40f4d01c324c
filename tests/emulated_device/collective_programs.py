# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Collectives of two ranks on the emulated device."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
import torch_device as device

from accelerate_lshdp.engine.wire.two_stage import Stages, TwoStageAllGather
from accelerate_lshdp.runtime.groups import ProcessGroups
from accelerate_lshdp.runtime.topology import Topology
from accelerate_lshdp.runtime.wait_clock import WaitClock


def of_rank(*values: float) -> torch.Tensor:
    """A tensor on the device: the values, with the rank added."""
    return torch.tensor(values, device="emulated") + dist.get_rank()


def results() -> dict[str, list]:
    """What each of the collectives gives."""
    device.join_device_world()
    rank = dist.get_rank()
    found = {}
    summed, sent = of_rank(1.0), of_rank(5.0)
    dist.all_reduce(summed)
    dist.broadcast(sent, src=1)
    found["all_reduce"], found["broadcast"] = summed.tolist(), sent.tolist()
    gathered, scattered = torch.zeros(2, device="emulated"), torch.zeros(1, device="emulated")
    dist.all_gather_into_tensor(gathered, of_rank(3.0))
    dist.reduce_scatter_tensor(scattered, of_rank(1.0, 10.0))
    found["all_gather"], found["reduce_scatter"] = gathered.tolist(), scattered.tolist()
    parts = [torch.zeros(1, device="emulated") for _ in range(2)]
    dist.all_gather(parts, of_rank(7.0))
    found["all_gather of a list"] = torch.cat(parts).tolist()
    exchanged = torch.zeros(2, device="emulated")
    dist.all_to_all_single(exchanged, of_rank(0.0, 10.0))
    found["all_to_all"] = exchanged.tolist()
    parts = [torch.zeros(1, device="emulated") for _ in range(2)]
    dist.all_to_all(parts, [of_rank(0.0), of_rank(10.0)])
    found["all_to_all of a list"] = torch.cat(parts).tolist()
    received = torch.zeros(1, device="emulated")
    works = [dist.isend(of_rank(2.0), 1 - rank), dist.irecv(received, 1 - rank)]
    for work in works:
        work.wait()
    found["receive"] = received.tolist()
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    found["objects"] = objects
    dist.barrier()
    assert not device.races(), device.races()
    return found


def seconds_of_the_host() -> tuple[float, float]:
    """Until a slow collective is queued and waited for by its stream, and until its result is there."""
    device.join_device_world()
    value = of_rank(1.0)
    device.synchronize()
    dist.barrier()
    device.configure(collective_delay=0.2)
    start = time.monotonic()
    dist.all_reduce(value)
    queued = time.monotonic() - start
    assert value.item() == 3.0
    return queued, time.monotonic() - start


def seconds_on_a_link() -> dict[str, float]:
    """Of collectives that send 200 kB of each rank, at 1 MB a second."""
    device.join_device_world()
    part, whole = torch.zeros(50_000, device="emulated"), torch.zeros(100_000, device="emulated")
    calls = {
        "all_reduce": lambda: dist.all_reduce(part),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(torch.zeros_like(whole), whole),
        "broadcast": lambda: dist.broadcast(part, src=0),
    }
    found = {}
    for name, call in calls.items():
        device.synchronize()
        dist.barrier()
        device.configure(to_ranks=1e6)
        start = time.monotonic()
        call()
        device.synchronize()
        found[name] = time.monotonic() - start
    return found


def future_of_a_work() -> tuple[float, list[str]]:
    """A future lets the stream wait that asks for its value."""
    device.join_device_world()
    value = of_rank(1.0)
    device.configure(collective_delay=0.1)
    work = dist.all_reduce(value, async_op=True)
    (result,) = work.get_future().wait()
    return (result * 2).item(), device.races()


def gathered_in_place(node_sizes: tuple[int, ...]) -> tuple[list[float], int]:
    """What an all-gather in two stages gives, and the bytes that the device had to have beside its output."""
    device.join_device_world()
    groups, nodes, rank = ProcessGroups(), Topology(dist.get_rank(), node_sizes).node_groups, dist.get_rank()
    places = tuple(zip(*nodes, strict=True))
    gather = TwoStageAllGather(
        Stages(groups.of_partition(nodes, rank), groups.of_partition(places, rank)), WaitClock()
    )
    size = 1000
    output = torch.full((dist.get_world_size() * size,), -1.0, device="emulated")
    own = output[rank * size : (rank + 1) * size]  # as FSDP2 does
    own.fill_(rank)
    memory = torch.get_device_module("emulated")
    memory.reset_peak_memory_stats()
    before = memory.memory_allocated()
    gather(output_tensor=output, input_tensor=own, group=dist.group.WORLD)
    needed = memory.max_memory_allocated() - before
    found = output.view(-1, size)
    assert bool((found == found[:, :1]).all()) and not device.races(), device.races()
    return found[:, 0].tolist(), needed
