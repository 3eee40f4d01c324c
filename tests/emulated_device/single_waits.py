# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Programs that use one part of the engine in a way that needs one of its waits.

Whole trainings do not show these waits: there, other waits happen to order the same accesses. Each function returns
what is wrong, None if nothing is.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch_device as device
from torch import nn

from accelerate_lshdp.documents.plan_sections import Communication
from accelerate_lshdp.engine.stores.shared.sliced_layout import SlicedPieces
from accelerate_lshdp.engine.stores.streamed.gradients import DeviceGradients
from accelerate_lshdp.engine.stores.streamed.host_weight import HostWeight
from accelerate_lshdp.engine.stores.streamed.kept_gradients import KeptGradients
from accelerate_lshdp.engine.stores.streamed.sliced_gradients import SlicedGradients
from accelerate_lshdp.engine.wire.formats import make_reduction, make_second_group
from accelerate_lshdp.engine.wire.node_first import NodeFirstReduction, Place
from accelerate_lshdp.engine.wire.reduction import ExactReduction, GradientReduction
from accelerate_lshdp.runtime.groups import new_group


COUNT = 4096
MICRO_BATCHES = 4


def filled(value: float) -> torch.Tensor:
    return torch.full((COUNT,), value, device="emulated")


def sums_in_turns() -> str | None:
    """Streams take turns to compute the gradient of one parameter, and the script lets none wait for the other."""
    device.configure(compute_delay=0.002)
    parameter = nn.Parameter(torch.zeros(COUNT))
    parameter.grad = torch.zeros(COUNT)
    place = torch.device("emulated", 0)
    arriving = DeviceGradients(place, torch.empty(0, dtype=torch.uint8))
    kept = KeptGradients([parameter], place, arriving)
    streams = [device.new_stream(), device.new_stream()]
    for number in range(MICRO_BATCHES):
        with device.stream(streams[number % 2]):
            # As large as what is kept: it may get the memory of a sum that the other stream still reads.
            gradient = filled(1.0)
            arriving.begin()
            kept.backward_begins()
            arriving.computed_here()
            kept.keep(0, kept.add(0, gradient, keeps=True))
            kept.backward_ends()
    (total,) = kept.take_all().values()
    return _wrong("sums in turns", bool((total == MICRO_BATCHES).all()))


def host_weight() -> HostWeight:
    """A weight of two slices, each as large as `filled`."""
    weight = nn.Parameter(torch.ones(2 * COUNT, 1).pin_memory())
    return HostWeight(
        "weight",
        weight,
        [],
        2,
        source=weight.detach(),
        device=torch.device("emulated", 0),
        copies=device.new_stream(),
        wait=lambda: None,
        take_slice=lambda index, gradient: None,
        take_rows=lambda places, gradient: None,
        used=lambda is_product: None,
    )


def slices_given_up() -> str | None:
    """A slice is dropped while it is copied, as when the operator fails that it was copied ahead for."""
    device.configure(copy_delay=0.005)
    sliced = host_weight()
    sliced.gather(0, torch.float32)
    sliced.drop()
    others = [filled(7.0) for _ in range(2)]  # one of which may get the memory of the second slice
    return _wrong("a slice given up", all(bool((other.cpu() == 7.0).all()) for other in others))


def slices_of_two_streams() -> str | None:
    """Two streams compute gradients of one slice, and the memory of the first one is used again in its stream."""
    device.configure(compute_delay=0.002)
    gradients = SlicedGradients(
        SlicedPieces([], [0, 1]), DeviceGradients(torch.device("emulated", 0), torch.empty(0, dtype=torch.uint8))
    )
    gradients.weight = host_weight()
    streams = [device.new_stream(), device.new_stream()]
    for _ in streams:
        gradients.used(True)
    for stream in streams:
        with device.stream(stream):
            gradient = filled(1.0)
            gradients._arriving.computed_here()
            ready = gradients.add_slice(0, gradient)
            del gradient
    with device.stream(streams[0]):
        filled(7.0)
    with device.stream(streams[1]):
        total = gradients.take(ready)
        return _wrong("slices of two streams", bool((total.cpu() == 2.0).all()))


def buffers_given_up(nodes: tuple[int, ...]) -> str | None:
    """A buffer is dropped while it travels, as when a backward fails and the script drops the model."""
    device.configure(collective_delay=0.005)
    for what, reduction in _reductions(nodes).items():
        buffer = filled(1.0)
        pending = reduction.start(buffer, 0, [buffer.shape])
        del buffer, pending
        other = filled(7.0)  # which may get the memory of the buffer
        if wrong := _wrong(f"a buffer given up, {what}", bool((other.cpu() == 7.0).all())):
            return wrong
    return None


def _reductions(nodes: tuple[int, ...]) -> dict[str, GradientReduction]:
    world = list(range(sum(nodes)))
    if max(nodes) > 1:
        firsts = [sum(nodes[:node]) for node in range(len(nodes))]
        groups = [new_group(range(first, first + size)) for first, size in zip(firsts, nodes, strict=True)]
        between = new_group(firsts)
        mine = max(node for node, first in enumerate(firsts) if first <= dist.get_rank())
        is_owner = dist.get_rank() == firsts[mine]
        place = Place(firsts[mine], ExactReduction(between) if is_owner else None)
        inside = groups[mine] if nodes[mine] > 1 else None
        return {"nodes first": NodeFirstReduction(dist.group.WORLD, inside, [place])}
    made = {}
    for name in ("int8", "powersgd"):
        communication = Communication(dtype=name)
        second = make_second_group(communication, [world])
        made[name] = make_reduction(communication, dist.group.WORLD, second)
    return made


def _wrong(what: str, is_right: bool) -> str | None:
    device.synchronize()
    races = device.races()
    device.configure()
    device.reset()
    return None if is_right and not races else f"{what}: right values: {is_right}, races: {races[:1]}"
