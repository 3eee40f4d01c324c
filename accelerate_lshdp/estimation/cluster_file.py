# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`EstimatedCluster`: the cluster of an estimate, read from a YAML file: the emulated cluster's form plus devices.

nodes:
  - {device: RTX 3090, ranks: 2, memory: 64 GiB}           # ranks: devices; memory: of the host; cpu: its cores
  - {device: my card, tflops: 12, device_memory: 16 GiB}   # a rank's own; tflops: what it reaches in training
  - {cpu: 8, memory: 32 GiB}                               # no device: computes on its cores
network: {rate: 1 Gb/s, delay: 0.2 ms}
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate_lshdp.documents.cluster import ClusterDescription, NodeDescription
from accelerate_lshdp.documents.network import Link
from accelerate_lshdp.documents.strict_reading import read_yaml
from accelerate_lshdp.documents.value_checks import describe
from accelerate_lshdp.estimation.devices import (
    CORE_FLOPS,
    CORE_OPTIMIZER_SECONDS,
    Device,
    find_device,
)


_HARDWARE_KEYS = ("device", "tflops", "device_memory")
#: Number of cores of a host with devices, where the file does not say.
_HOST_CORES = 8.0
_MOST_TERAFLOPS = 1e6  # far above any device


@dataclass(frozen=True)
class EstimatedNode:
    """One machine of an estimate.

    Args:
        ranks: number of training processes, one a device.
        cores: number of the host's cores.
        memory_bytes: memory of the host; None: not known.
        device: the device of each rank; None: ranks compute on the host's cores.
        core_flops: floating-point operations per second that a core reaches in training.
    """

    ranks: int
    cores: float
    memory_bytes: int | None
    device: Device | None
    core_flops: float = CORE_FLOPS

    @property
    def name(self) -> str:
        """The name of its processors for tables and messages."""
        return self.device.name if self.device is not None else f"{self.cores:g} CPU cores"

    def rank_flops(self, mixed_precision: str) -> float:
        """Floating-point operations per second of one rank."""
        if self.device is not None:
            return self.device.flops_in(mixed_precision)
        # CPUs get no gain from half precision here: few have units for it.
        return self.core_flops * self.cores / self.ranks

    def optimizer_seconds(self, parameters: float, on_host: bool) -> float:
        """Seconds of one rank's optimizer step on `parameters` parameters, beside those of the node's other ranks."""
        if self.device is not None and not on_host:
            return self.device.optimizer_seconds(parameters)
        return parameters * CORE_OPTIMIZER_SECONDS * self.ranks / self.cores


@dataclass(frozen=True)
class EstimatedCluster:
    """The nodes, in rank order, and the link between them."""

    nodes: tuple[EstimatedNode, ...]
    link: Link
    bits_per_second: float

    @property
    def node_sizes(self) -> tuple[int, ...]:
        """Ranks on each node."""
        return tuple(node.ranks for node in self.nodes)

    @property
    def node_of_rank(self) -> list[EstimatedNode]:
        """The node of each rank."""
        return [node for node in self.nodes for _ in range(node.ranks)]

    @property
    def has_devices(self) -> bool:
        """Whether every rank has a device with memory and streams of its own."""
        return all(node.device is not None for node in self.nodes)


def load_cluster(path: str | Path) -> EstimatedCluster:
    """Reads a YAML file.

    Raises:
        ValueError: what is wrong in it, with its path.
    """
    if not Path(path).is_file():
        raise ValueError(f"{path}: found no cluster that can be read: there is no such file. Give a YAML file")
    document = read_yaml(path, "cluster")
    try:
        return read_cluster(document)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_cluster(document: Any) -> EstimatedCluster:
    """The cluster that the values of a YAML file describe.

    Raises:
        ValueError: unknown or missing keys, wrong types, impossible values.
    """
    emulated, hardware = _split(document)
    description = ClusterDescription.from_dict(emulated)
    nodes = []
    for index, (node, found) in enumerate(zip(description.nodes, hardware, strict=True)):
        try:
            nodes.append(_node(node, found))
        except ValueError as error:
            raise ValueError(f"nodes[{index}]: {error}") from None
    rate, delay = description.network.bits_per_second, description.network.delay_seconds
    return EstimatedCluster(tuple(nodes), Link.from_rate(rate, delay), rate)


def _split(document: Any) -> tuple[Any, list[dict[str, Any]]]:
    """The document without the keys of devices, for `ClusterDescription`; and these keys of each node."""
    if not isinstance(document, dict) or not isinstance(document.get("nodes"), list):
        return document, []  # its reader says what is wrong
    nodes, hardware = [], []
    for node in document["nodes"]:
        if not isinstance(node, dict):
            return document, []
        hardware.append({key: node[key] for key in _HARDWARE_KEYS if key in node})
        rest = {key: value for key, value in node.items() if key not in _HARDWARE_KEYS}
        # A file may leave out the cores of a host with devices, which its reader demands.
        nodes.append({"cpu": _HOST_CORES, **rest} if "device" in node else rest)
    return {**document, "nodes": nodes}, hardware


def _node(node: NodeDescription, found: dict[str, Any]) -> EstimatedNode:
    teraflops = found.get("tflops")
    if teraflops is not None and (
        isinstance(teraflops, bool) or not isinstance(teraflops, (int, float)) or not 0 < teraflops <= _MOST_TERAFLOPS
    ):
        raise ValueError(
            f"tflops: found {describe(teraflops)}, expected 1e12 operations a second, more than 0, such as 12.5"
        )
    memory = None
    if "device_memory" in found:
        # Read as the memory of a node, which is written in the same way.
        one = {"cpu": 1, "memory": found["device_memory"]}
        try:
            memory = (
                ClusterDescription.from_dict({"nodes": [one], "network": {"rate": "1 Gb/s"}}).nodes[0].memory_bytes
            )
        except ValueError:
            raise ValueError(
                f"device_memory: found {found['device_memory']!r:.80}, expected an amount such as 24 GiB"
            ) from None
    if "device" not in found:
        if memory is not None:
            raise ValueError("device_memory: found it without a device: name the device, or leave it out")
        flops = CORE_FLOPS if teraflops is None else teraflops * 1e12 * node.ranks / node.cpu
        return EstimatedNode(node.ranks, node.cpu, node.memory_bytes, None, flops)
    if not isinstance(found["device"], str):
        raise ValueError(f"device: found {describe(found['device'])}, expected the name of a product")
    return EstimatedNode(node.ranks, node.cpu, node.memory_bytes, find_device(found["device"], teraflops, memory))
