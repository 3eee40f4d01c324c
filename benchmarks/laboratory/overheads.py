# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What FSDP2 takes of a rank's processor beside computing and sending, in CPU seconds.

Around every exchange of a unit it does some work in Python. It copies the unit out of the buffer that was gathered,
and its gradients into the one that is reduced, and the memory of all of these is new each time: the kernel has to find
and clear its pages. And its parameters are DTensors, which the optimizer has to unwrap one by one however small a
rank's shards are.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import mean, median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from accelerate_lshdp.runtime.groups import temporary_group


_REPEATS = 5
# With exchanges, of which some show several times as much as others on this clock. The standard deviation of six means
# of `inside_seconds_per_byte` was 4 %, that of six lower quartiles 11 %.
_BACKWARDS, _UNCOUNTED_EXCHANGES, _EXCHANGES = 10, 5, 40
# Of the whole model.
_STEPS = 4


class ComputingSeconds:
    """CPU seconds of forwards and backwards, in the place of the timeline that a training tells what happens."""

    def __init__(self) -> None:
        self.steps: list[float] = []

    def note_waits(self, clock: object) -> None:
        """Nothing: a process that waits takes no CPU seconds."""

    @contextlib.contextmanager
    def span(self, what: str) -> Iterator[None]:
        """Around a part of a step; "data" is the first one."""
        begun = time.process_time()
        yield
        if what == "data":
            self.steps.append(0.0)
        elif what in ("forward", "backward"):
            self.steps[-1] += time.process_time() - begun


def step_seconds(step: Callable[[], object], spent: ComputingSeconds) -> float:
    """Of the forward and backward of a step; the first one, which makes what the others find, does not count."""
    for _ in range(1 + _STEPS):
        step()
    return mean(spent.steps[-_STEPS:])


def inside_seconds_per_byte(
    size: int,
    nodes: Sequence[Sequence[int]],
    gather: Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], object],
    scatter: Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup, dist.ReduceOp.RedOpType], object],
) -> float:
    """Of a byte that ranks of a node send each other when they gather a unit twice and reduce it (collective).

    Not that of an all-reduce: where both were measured, this was two to three times as much.

    Args:
        size: bytes of the unit.
        nodes: ranks of each node. One without others sends nothing: 0.
        gather: all-gather, of an output, an input and a group.
        scatter: reduce-scatter, of an output, an input, a group and an operation.
    """
    with temporary_group(nodes) as own:
        count = own.size()
        if count == 1:
            return 0.0
        shard = torch.zeros(max(1, size // 4 // count))
        whole = torch.zeros(shard.numel() * count)
        # Into new memory each time, as FSDP2 gathers and reduces: where it is given back in between, the kernel has to
        # find and clear its pages.
        seconds = 2 * _exchange_seconds(lambda: gather(torch.empty_like(whole), shard, own))
        seconds += _exchange_seconds(lambda: scatter(torch.empty_like(shard), whole, own, dist.ReduceOp.SUM))
    return count * seconds / 3 / ((count - 1) * whole.nbytes)


def seconds_per_unit(plain: nn.Module, sharded: nn.Module, blocks: int, batch: Mapping[str, torch.Tensor]) -> float:
    """Of gathering or reducing a unit, its messages included (collective). Parameters should be small.

    Args:
        plain: a model.
        sharded: the same by FSDP2: its blocks, and what is left as one more unit. Each is gathered in the forward and
            in the backward, but for the last, and reduced.
        blocks: how many there are.
        batch: of one sample.
    """

    def seconds(model: nn.Module) -> float:
        return mean(_times(lambda: model(**batch).loss.backward(), 1, _BACKWARDS))

    return max(0.0, seconds(sharded) - seconds(plain)) / (3 * blocks + 2)


def sharded_step_seconds(
    count: int, make_optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
) -> float:
    """What an optimizer step takes longer because parameters are shards (collective: it makes a device mesh).

    Args:
        count: number of parameters.
        make_optimizer: of parameters.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def seconds(wrap: Callable[[torch.Tensor], torch.Tensor]) -> float:
        parameters = [nn.Parameter(wrap(torch.zeros(1))) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = wrap(torch.zeros(1))
        return _cpu_seconds(make_optimizer(parameters).step)

    sharded = seconds(lambda tensor: DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False))
    return max(0.0, sharded - seconds(lambda tensor: tensor))


def _cpu_seconds(work: Callable[[], object]) -> float:
    """Median of this process, after a first time that does not count."""
    return median(_times(work, 1, _REPEATS))


def _exchange_seconds(exchange: Callable[[], object]) -> float:
    """Mean of this process, after some exchanges that do not count."""
    return mean(_times(exchange, _UNCOUNTED_EXCHANGES, _EXCHANGES))


def _times(work: Callable[[], object], uncounted: int, counted: int) -> list[float]:
    times = []
    for _ in range(uncounted + counted):
        before = time.process_time()
        work()
        times.append(time.process_time() - before)
    return times[uncounted:]
