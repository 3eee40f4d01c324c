# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Streams of devices: what a stream still uses is not given to another one. Devices are stood in for."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from accelerate_lshdp.engine.stores.fsdp2.store import Fsdp2Store
from accelerate_lshdp.engine.stores.fsdp2.unit import Unit


class DeviceTensor:
    """As much of a tensor on a device as the all-reduce hook of a unit needs."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self.dtype = torch.float32
        self.streams: list[str] = []

    def record_stream(self, stream: str) -> None:
        self.streams.append(stream)

    def numel(self) -> int:
        return 4

    def to(self, device: torch.device) -> DeviceTensor:
        return self

    def reshape(self, *shape: int) -> DeviceTensor:
        return self

    def __getitem__(self, places: slice) -> DeviceTensor:
        return self

    def add_(self, other: DeviceTensor) -> DeviceTensor:
        assert other.streams  # before it is read here, since nobody keeps it after that
        return self


class Reductions:
    """Notes on which streams a buffer is known to be used when its reduction starts."""

    def __init__(self) -> None:
        self.started: list[list[str]] = []

    def reduce_now(self, number: int, buffer: DeviceTensor, shapes: list) -> None:
        self.started.append(list(buffer.streams))


@pytest.mark.parametrize("synchronise", [False, True])
def test_the_allocator_knows_that_the_hooks_stream_uses_what_the_reduce_scatter_stream_allocated(synchronise):
    model = object.__new__(Fsdp2Store)
    model._synchronise, model._overlaps = synchronise, True
    model._skipped, model._substitutes, model._reductions = set(), {}, Reductions()
    unit = Unit(module=None, parameters=[torch.nn.Parameter(torch.zeros(4))], fsdp_params=[], indices=[0])
    unit.fsdp_params = [SimpleNamespace(padded_sharded_param_size=torch.Size([4]))]
    buffer, earlier = DeviceTensor(), DeviceTensor()
    unit.local = [(0, earlier)]
    module = SimpleNamespace(current_stream=lambda device: "the hook's stream")
    with mock.patch.object(torch, "get_device_module", lambda device: module):
        model._reduce_hook(0, unit)(buffer)
    # After the hook FSDP2 goes on with the buffer on this stream, synchronised or not, and then drops it.
    assert buffer.streams == ["the hook's stream"]
    assert model._reductions.started == ([["the hook's stream"]] if synchronise else [])
    assert earlier.streams == (["the hook's stream"] if synchronise else [])


def test_on_a_cpu_there_is_no_stream_to_record(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "record_stream", None)
    model = object.__new__(Fsdp2Store)
    model._synchronise = False
    model._reduce_hook(0, Unit(None, parameters=[torch.nn.Parameter(torch.zeros(4))]))(torch.zeros(4))
