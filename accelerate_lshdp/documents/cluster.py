# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`Cluster`, `Node` and `Link`: the machines of a run and the network between them, wherever a document names them.

The ``cluster`` section of plans and profiles has their fields as JSON. `cluster_file` reads them from YAML files with
units, for estimates and for emulated clusters.
"""

from __future__ import annotations

from dataclasses import dataclass

from accelerate_lshdp.documents.records import (
    LARGEST_COUNT,
    Record,
    entry,
    integer,
    name,
    number,
    optional,
    record,
    records,
)


@dataclass(frozen=True, slots=True)
class Link(Record):
    """The link of every node to the network, in each direction.

    Args:
        bandwidth_bits_per_second: its rate, headers included; 1 Gb/s = 1e9.
        latency_seconds: one-way delay between two nodes, in addition to that of the machines themselves.
    """

    bandwidth_bits_per_second: float = entry(number(positive=True))
    latency_seconds: float = entry(number(), default=0.0)


@dataclass(frozen=True, slots=True)
class Node(Record):
    """One machine; what is None is not known.

    Args:
        ranks: number of training processes on the node.
        address: its host name or address.
        device: the kind of its processors ("cpu", "cuda") or the name of a product.
        cores: cores that all processes of the node share, fractions allowed.
        memory_bytes: host memory that these processes may use in all.
        device_memory_bytes: memory of each device, one a rank.
        teraflops: 1e12 floating-point operations per second that a rank reaches in training.
    """

    ranks: int = entry(integer(least=1))
    address: str | None = entry(optional(name("a host name or address")), default=None)
    device: str | None = entry(optional(name("the name of a device")), default=None)
    cores: float | None = entry(optional(number(positive=True)), default=None, omit=True)
    memory_bytes: int | None = entry(optional(integer(least=1, most=LARGEST_COUNT)), default=None, omit=True)
    device_memory_bytes: int | None = entry(optional(integer(least=1, most=LARGEST_COUNT)), default=None, omit=True)
    teraflops: float | None = entry(optional(number(positive=True)), default=None, omit=True)

    @property
    def trains_on_cpu(self) -> bool | None:
        """Whether its ranks train on processors; None: not known. All names but "cpu" are those of devices."""
        return None if self.device is None else self.device.lower() == "cpu"


@dataclass(frozen=True, slots=True)
class Cluster(Record):
    """The nodes of a run in rank order: the first node runs ranks 0..ranks-1, and so on."""

    nodes: tuple[Node, ...] = entry(records(Node, "node"))
    link: Link | None = entry(optional(record(Link)), default=None)

    @property
    def node_sizes(self) -> list[int]:
        """Ranks on each node."""
        return [node.ranks for node in self.nodes]
