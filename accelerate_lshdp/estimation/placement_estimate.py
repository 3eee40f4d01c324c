# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`estimate_placement`: the best placement of a model's units on a described cluster (OSDP).

Its seconds are the closed form of `planning.placement.problem`, those of the other strategies come from a simulated
step (`planning.cost.step_writer`). Both have the same seconds of computing, of the optimizer and of the wire. They
differ in three things: the closed form adds up all that is sent in a forward or a backward, as if units did not wait
for each other; where processors do the sending, that work is a part of the link's seconds here and slows computing
there; and what ranks of a node exchange is counted as if it went through sockets.
"""

from __future__ import annotations

from collections.abc import Sequence

from accelerate_lshdp.documents.curves import RankProfile
from accelerate_lshdp.documents.network import LinkCost
from accelerate_lshdp.documents.placement import UnitStore
from accelerate_lshdp.estimation.hardware import Hardware, NodeHardware
from accelerate_lshdp.planning.cost.cluster_model import CommunicationCost
from accelerate_lshdp.planning.cost.step_prediction import RankStep, StepPrediction
from accelerate_lshdp.planning.placement.inputs import ModelSizes, PlacementCluster
from accelerate_lshdp.planning.placement.result import PlacementResult
from accelerate_lshdp.planning.placement.sent_bytes import bytes_between_nodes


#: Stands for memory that a cluster file does not limit: more bytes than any node has.
_UNLIMITED = 2**50


def placement_cluster(
    hardware: Hardware,
    profiles: Sequence[RankProfile],
    trainable: int,
    *,
    usable: float,
    process_bytes: int,
    process_host_bytes: int,
    one_core: CommunicationCost,
    device_link: LinkCost,
) -> PlacementCluster:
    """A described cluster as the planner of placements takes it.

    Args:
        hardware: the nodes and their link.
        profiles: one a rank, with the optimizer step of all parameters on its processor as `fixed_seconds`.
        trainable: number of trainable parameters.
        usable: the fraction of memory that may be used.
        process_bytes, process_host_bytes: bytes of a process on a device, and in host memory.
        one_core: what communication takes of a core, where processors do the sending.
        device_link: between host memory and devices, and between devices of a node.
    """
    nodes = hardware.nodes
    limits = tuple(_rank_limit(node, usable) for node in hardware.node_of_rank)
    if hardware.has_devices:
        return PlacementCluster(
            hardware.node_sizes,
            profiles,
            limits,
            hardware.link,
            device_link,
            device_link,
            host_limits=tuple(_host_limit(node, usable, process_host_bytes) for node in nodes),
            # `optimizer_seconds` is that of one rank beside those of the node's others; here they share one copy.
            host_optimizer_seconds=tuple(node.optimizer_seconds(trainable, True) / node.ranks for node in nodes),
            process_bytes=process_bytes,
        )
    on_cores = [one_core.on(node.cores) for node in nodes if node.device is None]
    work = max((cost.seconds_per_byte for cost in on_cores), default=0.0)
    start = max((cost.seconds_per_collective for cost in on_cores), default=0.0)
    link = LinkCost(hardware.link.latency_seconds + start, hardware.link.seconds_per_byte + work)
    # All ranks of a node send at once, on the node's processors.
    inside = LinkCost(start, work * max(hardware.node_sizes))
    # Nodes of both kinds have no host memory beside that of their ranks: the planner knows one kind of cluster.
    return PlacementCluster(
        hardware.node_sizes,
        profiles,
        limits,
        link,
        inside,
        process_bytes=process_host_bytes if len(on_cores) == len(nodes) else max(process_bytes, process_host_bytes),
        streams=False,
    )


def predicted_step(result: PlacementResult, model: ModelSizes, cluster: PlacementCluster) -> StepPrediction:
    """The step of a planned placement, in the form of other predictions."""
    steps = result.micro_batches[0][1]
    seconds = result.predicted.step_seconds
    ranks = []
    for profile, (size, count) in zip(cluster.profiles, result.micro_batches, strict=True):
        compute = count * profile.time(size)
        optimizer = min(profile.fixed_seconds, max(0.0, seconds - compute))
        ranks.append(RankStep(compute, optimizer, 0.0, max(0.0, seconds - compute - optimizer)))
    sent = bytes_between_nodes(model, result.placement, cluster.nodes, steps)
    return StepPrediction(seconds, tuple(ranks), sent, (0.0,) * len(cluster.nodes))


def host_state_bytes(result: PlacementResult, model: ModelSizes) -> float:
    """Bytes of parameters, gradients and optimizer states that a placement keeps in the memory of each host.

    In half precision with the copy of the parameters that is streamed.
    """
    each = model.state_bytes
    cast = each.gathered if each.gathered != each.parameter else 0.0
    return sum(
        unit.parameters * (each.parameter + cast) + unit.trainable * (each.gradient + each.optimizer)
        for unit in model.everything
        if result.placement.of(unit.name).store is UnitStore.HOST
    )


def _rank_limit(node: NodeHardware, usable: float) -> int:
    """Bytes that a rank may use of its device, or of its share of the host where that computes."""
    if node.device is not None:
        return _UNLIMITED if node.device.memory_bytes is None else int(node.device.memory_bytes * usable)
    return _UNLIMITED if node.memory_bytes is None else int(node.memory_bytes * usable) // node.ranks


def _host_limit(node: NodeHardware, usable: float, process_host_bytes: int) -> int:
    if node.memory_bytes is None:
        return _UNLIMITED
    return max(0, int(node.memory_bytes * usable) - node.ranks * process_host_bytes)
