# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`Hardware`: how fast each node of a described cluster computes, for estimates."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate_lshdp.documents.cluster import Cluster, Node
from accelerate_lshdp.documents.network import LinkCost
from accelerate_lshdp.documents.value_checks import PlanError
from accelerate_lshdp.estimation.devices import CORE_FLOPS, CORE_OPTIMIZER_SECONDS, Device, find_device


#: Number of cores of a host with devices, where the file does not say.
_HOST_CORES = 8.0


@dataclass(frozen=True)
class NodeHardware:
    """What one node computes with.

    Args:
        node: its ranks, one a device, and its memory.
        cores: number of the host's cores.
        device: the device of each rank; None: ranks compute on the host's cores.
        core_flops: floating-point operations per second that a core reaches in training.
    """

    node: Node
    cores: float
    device: Device | None
    core_flops: float = CORE_FLOPS

    @classmethod
    def of(cls, node: Node) -> NodeHardware:
        """The hardware of a node, from the table of devices and the figures that the user gives instead.

        Raises:
            ValueError: the device is unknown, and nothing says how fast it is.
        """
        cores = _HOST_CORES if node.cores is None else node.cores
        if node.device is None:
            flops = CORE_FLOPS if node.teraflops is None else node.teraflops * 1e12 * node.ranks / cores
            return cls(node, cores, None, flops)
        return cls(node, cores, find_device(node.device, node.teraflops, node.device_memory_bytes))

    @property
    def ranks(self) -> int:
        """Number of training processes on the node."""
        return self.node.ranks

    @property
    def memory_bytes(self) -> int | None:
        """Memory of the host; None: not known."""
        return self.node.memory_bytes

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
class Hardware:
    """The nodes of a cluster, in rank order, and the cost of the link between them."""

    nodes: tuple[NodeHardware, ...]
    link: LinkCost
    bits_per_second: float

    @classmethod
    def of(cls, cluster: Cluster) -> Hardware:
        """The hardware of a cluster whose link is described.

        Raises:
            PlanError: a device is unknown, and nothing says how fast it is; the error names the node.
        """
        nodes = []
        for index, node in enumerate(cluster.nodes):
            try:
                nodes.append(NodeHardware.of(node))
            except ValueError as error:
                raise PlanError(str(error), path=f"nodes[{index}]") from None
        rate = cluster.link.bandwidth_bits_per_second
        return cls(tuple(nodes), LinkCost.from_rate(rate, cluster.link.latency_seconds), rate)

    @property
    def node_sizes(self) -> tuple[int, ...]:
        """Ranks on each node."""
        return tuple(node.ranks for node in self.nodes)

    @property
    def node_of_rank(self) -> list[NodeHardware]:
        """The node of each rank."""
        return [node for node in self.nodes for _ in range(node.ranks)]

    @property
    def has_devices(self) -> bool:
        """Whether every rank has a device with memory and streams of its own."""
        return all(node.device is not None for node in self.nodes)
