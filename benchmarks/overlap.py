# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""How much of copies and of the optimizer's step streaming hides, where compute, copies and steps only sleep.

    python benchmarks/overlap.py
    python benchmarks/overlap.py --timeline docs/pictures/streamed_step.json      the step that the docs show

A model of equal blocks trains on the emulated device (`tests/emulated_device`). A block computes by sleeping on the
device, its copy takes as long as the emulated bandwidth says, and its optimizer's step sleeps on the host. So the
figures show the order of things, not the speed of anything: what could be hidden, and what was. It needs a compiler.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn


sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "emulated_device"))
import torch_device as device  # noqa: E402 - it registers the device

from accelerate_lshdp import Strategy  # noqa: E402
from accelerate_lshdp.documents.plan_sections import Communication  # noqa: E402
from accelerate_lshdp.engine.engine import Engine  # noqa: E402
from accelerate_lshdp.engine.flow import Flow  # noqa: E402
from accelerate_lshdp.engine.placement import Placement  # noqa: E402
from accelerate_lshdp.engine.policies import resolve_policies  # noqa: E402
from accelerate_lshdp.engine.stores.streamed import late_step  # noqa: E402
from accelerate_lshdp.engine.stores.streamed.gradients import DeviceGradients  # noqa: E402
from accelerate_lshdp.engine.stores.streamed.late_step import LateStep  # noqa: E402
from accelerate_lshdp.engine.stores.streamed.unit import StreamedUnit  # noqa: E402
from accelerate_lshdp.runtime.topology import Topology  # noqa: E402
from accelerate_lshdp.runtime.wait_clock import WaitClock  # noqa: E402


BLOCKS = 8
WIDTH = 512
STEPS = 4


class Timeline:
    """When each block was copied, computed and stepped, in seconds since the device was idle.

    Attributes:
        spans: by what is done, of each block: its number, begin and end; -1 where the block is not known.
    """

    def __init__(self) -> None:
        self.spans: dict[str, list[tuple[int, float, float]]] = {}
        self._events: list[tuple[str, int, Any, Any]] = []
        device.synchronize()
        self._base, self._began = self.mark(), time.perf_counter()

    @staticmethod
    def mark() -> Any:
        event = device.new_event(enable_timing=True)
        event.record()
        return event

    def add(self, lane: str, block: int, begin: float, end: float) -> None:
        """Takes in times of the host's clock."""
        self.spans.setdefault(lane, []).append((block, begin - self._began, end - self._began))

    @contextlib.contextmanager
    def on_device(self, lane: str, block: int, seconds: float | None = None) -> Iterator[None]:
        """Takes in what the block queues in the current stream; with ``seconds``, the last of them only."""
        begin = None if seconds is not None else self.mark()
        yield
        self._events.append((lane, block, begin if seconds is None else seconds, self.mark()))

    def finish(self) -> None:
        """Reads the device's events, which have passed."""
        device.synchronize()
        for lane, block, begin, end in self._events:
            ended = self._base.elapsed_time(end) / 1000
            began = ended - begin if isinstance(begin, float) else self._base.elapsed_time(begin) / 1000
            self.spans.setdefault(lane, []).append((block, began, ended))
        self._events.clear()


class Sleeping(torch.autograd.Function):
    """Keeps the device busy for a time, in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: Block) -> torch.Tensor:
        ctx.block = block
        block.compute("forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.block.compute("backward")
        return gradient, None


class Block(nn.Module):
    def __init__(self, number: int, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.number, self.seconds = number, seconds
        self.timeline: Timeline | None = None

    def compute(self, what: str) -> None:
        with nullcontext() if self.timeline is None else self.timeline.on_device(what, self.number):
            device.sleep(self.seconds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleeping.apply(self.linear(x), self)


class Network(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(number, seconds) for number in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Training:
    """A network on the device, and steps of it.

    Args:
        compute: seconds of a block, in the forward, and again in the backward.
        copy: of a block to the device, and of its gradients to the host.
        way: how parameters come to the device, as the plan's ``intra_node``.
    """

    def __init__(self, compute: float, copy: float, way: str = "auto") -> None:
        torch.manual_seed(0)
        self.model = Network(compute)
        placement = Placement(
            resolve_policies(Strategy.LSDP, Topology(0, (1,)), device_type="emulated", intra_node=way),
            Topology(0, (1,)),
            device=torch.device("emulated", 0),
            clock=WaitClock(),
            communication=Communication(),
            units=None,
            prefetch=1,
            bucket_bytes=WIDTH * WIDTH * 4,
        )
        self.engine = Engine(placement)
        self.prepared = self.engine.place(self.model, dict(self.model.named_parameters()))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.x = torch.randn(4, WIDTH).to("emulated")
        bandwidth = WIDTH * WIDTH * 4 / copy
        device.configure(to_device=bandwidth, to_host=bandwidth)

    def step(self, optimizer_seconds: float = 0.0) -> None:
        """A step, whose optimizer takes so long if it is not late."""
        with Flow([self.prepared]) as flow:
            loss = self.model(self.x).square().mean()
            flow.begin()
            loss.backward()
            flow.deliver([self.prepared])
            flow.finish([self.prepared])
        self.engine.before_step(self.optimizer)
        self.engine.hide_gradients_of_others(self.optimizer)
        self.optimizer.step()
        time.sleep(optimizer_seconds)
        self.engine.after_step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        device.configure()
        self.engine.close()


def seconds_of_step(compute: float, copy: float, *, step: float = 0.0, late: bool = True, way: str = "auto") -> float:
    """Seconds of a training step, the median of some; arguments as of `Training`, and those of the optimizer's step.

    Args:
        step: seconds of a block.
        late: whether it may be late.
    """
    training, found = Training(compute, copy, way), []
    with _sleeping_steps(step) if late else _steps_at_once():
        for _ in range(STEPS):
            device.synchronize()
            began = time.perf_counter()
            training.step(0.0 if late else BLOCKS * step)
            found.append(time.perf_counter() - began)
    training.close()
    return statistics.median(found[1:])


def timeline_of_step(compute: float, copy: float, step: float) -> dict[str, Any]:
    """When each block is copied, computed and stepped in a step, the one before being stepped meanwhile."""
    training = Training(compute, copy)
    with _sleeping_steps(step):
        training.step()
        timeline = Timeline()
        for block in training.model.blocks:
            block.timeline = timeline
        with _recording(timeline, training, copy, step):
            training.step()
            began = time.perf_counter()
            training.step()
            device.synchronize()
            ended = time.perf_counter()
    timeline.finish()
    training.close()
    first, last = began - timeline._began, ended - timeline._began
    lanes = {
        lane: sorted(
            (block, round(begin - first, 4), round(end - first, 4))
            for block, begin, end in spans
            if first <= end <= last
        )
        for lane, spans in timeline.spans.items()
    }
    return {"seconds": round(last - first, 4), "compute": compute, "copy": copy, "step": step, "lanes": lanes}


@contextlib.contextmanager
def _recording(timeline: Timeline, training: Training, copy: float, step: float) -> Iterator[None]:
    """Takes in copies and optimizer steps; how long each sleeps is known, and when it has ended is recorded."""
    numbers = {id(block): block.number for block in training.model.blocks}
    order = [training.prepared.stores[0]._late._index[id(block.linear.weight)] for block in training.model.blocks]
    fetch, bring, make = StreamedUnit.fetch, DeviceGradients._copy, LateStep._step_part

    def fetched(self: StreamedUnit) -> None:
        is_new = self._arrival is None and self.masters
        fetch(self)
        if is_new:
            with device.stream(self._copies), timeline.on_device("to the device", numbers[id(self.modules[0])], copy):
                pass

    def brought(self: DeviceGradients, noted: Any, pairs: Any) -> None:
        bring(self, noted, pairs)
        now = time.perf_counter()
        timeline.add("to the host", -1, now - copy, now)

    def made(self: LateStep, kind: type, groups: list, states: dict) -> None:
        make(self, kind, groups, states)
        now = time.perf_counter()
        for _, mine in groups:
            for index in mine:
                timeline.add("optimizer", order.index(index), now - step, now)

    with (
        mock.patch.object(StreamedUnit, "fetch", fetched),
        mock.patch.object(DeviceGradients, "_copy", brought),
        mock.patch.object(LateStep, "_step_part", made),
    ):
        yield


def _sleeping_steps(seconds: float) -> AbstractContextManager:
    whole = LateStep._step_part

    def step_part(self: LateStep, kind: type, groups: list, states: dict) -> None:
        if groups:
            time.sleep(seconds)
        whole(self, kind, groups, states)

    return mock.patch.object(LateStep, "_step_part", step_part)


def _steps_at_once() -> AbstractContextManager:
    return mock.patch.object(late_step, "_is_known", lambda optimizer: False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compute", type=float, default=0.04, help="seconds of a block, forward and backward each")
    parser.add_argument("--timeline", type=Path, metavar="FILE.json", help="write a step to this file instead")
    arguments = parser.parse_args()
    compute = arguments.compute
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    device.join_device_world()
    if arguments.timeline is not None:
        found = timeline_of_step(compute, 0.75 * compute, 0.6 * compute)
        arguments.timeline.write_text(json.dumps(found) + "\n", encoding="utf-8")
        return 0
    whole = 2 * BLOCKS * compute  # of a step, and of its copies if they are as long
    equal, half = seconds_of_step(compute, compute), seconds_of_step(compute, compute / 2)
    print(f"copies as long as compute: {equal:.3f} s, {equal / whole:.2f} of the larger")
    print(f"copies half as long: {half:.3f} s, {half / whole:.2f} of compute")
    offload = seconds_of_step(compute, compute, way="collectives")
    print(f"offload of FSDP2, copies as long as compute: {offload:.3f} s; streamed {equal / offload:.2f} of it")
    step = compute * 0.8
    late, at_once = (seconds_of_step(compute, compute / 2, step=step, late=late) for late in (True, False))
    hidden = (at_once - late) / (BLOCKS * step)
    print(f"optimizer of {BLOCKS * step:.3f} s: at once {at_once:.3f} s, late {late:.3f} s; hidden {hidden:.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
