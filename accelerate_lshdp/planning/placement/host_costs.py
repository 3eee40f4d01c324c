# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What a cluster's hosts cost units that are in their memory, from what each rank has measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from accelerate_lshdp.documents.network import LinkCost
from accelerate_lshdp.documents.profile_sections import HostRates


#: Seconds until a copy between host and device begins.
COPY_LATENCY_SECONDS = 20e-6
#: Fraction of a host's free memory that states may take: processes, batches and messages are there, too.
USABLE_HOST_MEMORY = 0.8


def host_costs(hosts: Sequence[HostRates | None], nodes: Sequence[int], trainable: int) -> dict[str, Any]:
    """The arguments of `PlacementCluster` that are about hosts.

    Args:
        hosts: of each rank, None where it was not measured, or nothing can be streamed from it. All ranks stream a
            unit, or none does.
        nodes: ranks on each node.
        trainable: number of the model's trainable parameters.

    Returns:
        The slowest link between a host and a device, in its slower direction; the bytes that states may take on each
        host; and the seconds in which the ranks of each node step all parameters there, each its part.
    """
    if not hosts or None in hosts:
        return {"device_link": None, "host_limits": None, "host_optimizer_seconds": ()}
    rate = min(min(host.to_device_bytes_per_second, host.to_host_bytes_per_second) for host in hosts)
    of_nodes = list(_of_nodes(hosts, nodes))
    return {
        "device_link": LinkCost(COPY_LATENCY_SECONDS, 1 / rate),
        "host_limits": tuple(int(USABLE_HOST_MEMORY * min(host.memory_bytes for host in own)) for own in of_nodes),
        "host_optimizer_seconds": tuple(
            max(host.optimizer_seconds_per_parameter for host in own) * trainable / len(own) for own in of_nodes
        ),
    }


def _of_nodes(hosts: Sequence[HostRates], nodes: Sequence[int]) -> Iterator[Sequence[HostRates]]:
    first = 0
    for size in nodes:
        yield hosts[first : first + size]
        first += size
