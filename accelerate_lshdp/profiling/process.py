# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`ProfiledProcess`: the attributes and methods of an `LSHDPAccelerator` that profiling uses, as a protocol."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from accelerate_lshdp.documents.plan_sections import Communication
from accelerate_lshdp.runtime.topology import Topology


class EngineOptions(Protocol):
    """The options by which the engine places models; the attributes are those of ``LSDPPlugin``."""

    communication: Communication
    units: tuple[str, ...] | None
    prefetch: int
    bucket_megabytes: float | None
    reshard_after_forward: bool | None
    pin_memory: bool | None
    intra_node: str


class ProfiledProcess(Protocol):
    """One rank of a world, and the collective calls that profiling makes.

    Attributes:
        device: where it trains.
        process_index: its rank in the world.
        num_processes: number of ranks.
        mixed_precision: ``no``, ``bf16`` or ``fp16``.
        topology: nodes and ranks.
        lsdp_plugin: how models are placed.
    """

    device: torch.device
    process_index: int
    num_processes: int
    mixed_precision: str
    topology: Topology
    lsdp_plugin: EngineOptions

    def check_agreement(self, digest: str, what: str) -> None:
        """Raises RuntimeError on all ranks if ``digest`` differs between them (collective)."""

    def wait_for_everyone(self) -> None:
        """Returns when all ranks have called it (collective)."""

    def autocast(self) -> AbstractContextManager[None]:
        """Forwards inside compute in ``mixed_precision``."""
