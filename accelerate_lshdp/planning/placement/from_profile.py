# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What placements are planned from, taken from a profile: sizes of the units, and a cluster with measured costs.

Each rank's seconds are its measured curve, prolonged by what sending gradients takes of its processor. Links are those
that explain the measured all-reduces. What a process needs beside states and activations is what the profile measured
of it, or what its measured peaks have beyond states and activations, if that is more. The store ``host`` is offered
where all ranks have devices, and the profile knows how fast they copy from and to their hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from accelerate_lshdp.documents.curves import RankProfile, TimeCurve
from accelerate_lshdp.documents.host_memory import HOLES_OF_ACTIVATIONS, free_in_heap
from accelerate_lshdp.documents.profile import Profile
from accelerate_lshdp.documents.profile_sections import MeasuredRank
from accelerate_lshdp.planning.cuts.step_time import PlanningError
from accelerate_lshdp.planning.placement.host_costs import host_costs
from accelerate_lshdp.planning.placement.inputs import ModelSizes, PlacementCluster
from accelerate_lshdp.planning.placement.links import measured_links


_AGAIN = "Profile again with `accelerate-lshdp profile`"


def profiled_model(profile: Profile) -> ModelSizes:
    """The sizes of the profiled model's units.

    Raises:
        PlanningError: the profile does not have them.
    """
    if profile.units is None:
        raise PlanningError(
            "found a profile without the sizes of the model's units, expected a section `units`, from which placements"
            f" are planned: profiles of earlier versions do not have it. {_AGAIN}, which says so if it cannot measure"
            " them"
        )
    return ModelSizes.of(profile.units)


def profiled_cluster(profile: Profile, memory_limits: Sequence[int] | None = None) -> PlacementCluster:
    """The profiled cluster.

    Args:
        profile: with the sizes of units.
        memory_limits: bytes that each rank may use, one a rank. None: those of the profile.

    Raises:
        PlanningError: a rank has no limit, numbers do not match, or something was not measured.
    """
    nodes = tuple(profile.cluster.node_sizes)
    model = profiled_model(profile)
    if memory_limits is None:
        memory_limits = [limit for rank in profile.ranks if (limit := rank.memory_limit_bytes) is not None]
        if len(memory_limits) < len(profile.ranks):
            raise PlanningError(
                "found ranks without a limit of memory, expected one for each: give --memory-limit SIZE, or one SIZE a"
                " rank with commas"
            )
    link, inside = measured_links(profile.network, nodes)
    return PlacementCluster(
        nodes,
        tuple(_rank(rank) for rank in profile.ranks),
        tuple(memory_limits),
        link,
        inside,
        **host_costs([rank.host for rank in profile.ranks], nodes, model.trainable),
        process_bytes=max(_process_bytes(profile, rank, model) for rank in profile.ranks),
        streams=not _computes_on_hosts(profile),
    )


def _rank(measured: MeasuredRank) -> RankProfile:
    """The seconds of a rank for placements: those of steps that send, without what belongs to one strategy."""
    profile, load = measured.profile(), measured.communication_load_seconds
    curve = TimeCurve(profile.time.batch_sizes, [seconds + load for seconds in profile.time.seconds])
    return replace(
        profile, time=curve, bucket_ready=None, communication_load_seconds=0.0, memory=None, memory_limit_bytes=None
    )


def _process_bytes(profile: Profile, rank: MeasuredRank, model: ModelSizes) -> int:
    """Bytes of a rank that are neither states nor activations."""
    if rank.process_bytes is None:
        raise PlanningError(
            f"found no process_bytes of rank {rank.rank}, expected what its process needs beside the model: its memory"
            f" was not measured. {_AGAIN}"
        )
    # Of world-sharded strategies a rank alone is measured with copies that no other placement has.
    if rank.memory is None or profile.strategy.is_world_sharded:
        return rank.process_bytes
    each, parameters = model.state_bytes, sum(unit.parameters for unit in model.everything)
    states = parameters * each.parameter + model.trainable * (each.gradient + each.optimizer)
    # Offloaded, they are not on a device; a host that computes has them all the same.
    states = 0.0 if profile.strategy.is_offloaded and not _computes_on_hosts(profile) else states
    activations = sum(unit.activation_bytes for unit in model.everything)
    # What the C library keeps was measured with the rest, and is a term of every placement on hosts.
    kept, holes = 0, 0.0
    if _computes_on_hosts(profile):
        holes = HOLES_OF_ACTIVATIONS
        kept = int(free_in_heap(parameters * each.parameter))
    beyond = []
    for size, peak in zip(rank.memory.batch_sizes, rank.memory.bytes, strict=True):
        if model.head is None or _computes_on_hosts(profile):
            needed = states + size * (model.working_bytes + activations) * (1 + holes)
        else:
            needed = _needed_at_most(model, size, states)
        beyond.append(peak - needed)
    return max(rank.process_bytes, int(max(beyond)) - kept)


def _needed_at_most(model: ModelSizes, samples: int, states: float) -> float:
    """Bytes at the moment of a step at which a rank alone needs most on a device: the terms of `moments`.

    Args:
        model: whose head is known.
        samples: of the micro-batch.
        states: bytes of parameters, gradients and moments on the device.
    """
    head = model.head
    activations = samples * sum(unit.activation_bytes for unit in model.everything)
    # Gradients are there all the time: what is measured has two micro-batches.
    of_units = activations - samples * (model.working_of_logits + head.kept_bytes)
    of_loss = max(0.0, head.working_bytes - model.working_of_logits)
    return states + max(activations + samples * of_loss, of_units + samples * head.units_working_bytes)


def _computes_on_hosts(profile: Profile) -> bool:
    return all(node.trains_on_cpu for node in profile.cluster.nodes)
