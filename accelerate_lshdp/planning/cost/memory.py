# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Memory that a strategy needs on each rank, by the accounting of ZeRO (Rajbhandari et al., 2020, section 3).

With P parameters and Adam, a rank that holds everything keeps P * (parameter + gradient + optimizer) bytes: 16 * P, in
fp32 as 4 + 4 + 8, in ZeRO's mixed precision as 2 + 2 + 12. Where n ranks share one copy, each keeps 1/n of that, and
beside it the gathered parameters: two units and the root (one unit is computed, the next one gathered), and the
gradient of one unit before it is reduced. Activations come on top.

Where the copy of a node is in host memory and its ranks compute on devices, units are streamed from it: a copy in the
precision of the forward lies beside the parameters, each rank has a bucket of its own there, and gradients wait on the
device, bucket by bucket, until they are copied.

Where ranks compute in host memory, more is counted, and compared with real processes by `benchmarks/memory.py`: the
ranks of a node map one copy of what they share, and gather nothing inside it; gradients wait for the ranks of the node
that add theirs first; the message of the last unit's gradients stays until the next one's; and the C library keeps
some freed blocks (`runtime.heap_bound`). On devices these are within what estimates leave free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from accelerate_lshdp.documents.bucket_sizes import WAITING_BUCKETS, default_bucket_bytes
from accelerate_lshdp.documents.collectives import group_sizes
from accelerate_lshdp.documents.host_memory import HOLES_OF_ACTIVATIONS, free_in_heap
from accelerate_lshdp.documents.strategy import Gathered, SharedBy, StrategyTraits, strategy_traits
from accelerate_lshdp.documents.wire_format import WIRE_FORMATS


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of one parameter in each of its roles.

    Args:
        parameter: bytes that are kept between steps.
        gradient: bytes of the reduced gradient that the optimizer reads.
        optimizer: bytes of Adam's two moments, and of an fp32 master copy where `parameter` is not one.
        gathered: bytes of the parameter in the precision of the forward.
        unreduced: bytes of the gradient that the backward leaves.
    """

    parameter: float = 4
    gradient: float = 4
    optimizer: float = 8
    gathered: float = 4
    unreduced: float = 4


#: What the engine keeps, by `mixed_precision` of accelerate. The parameters that are kept stay in fp32.
STATE_BYTES = {
    "no": StateBytes(),
    "bf16": StateBytes(gathered=2, unreduced=2),
    "fp16": StateBytes(gathered=2, unreduced=2),
}
#: ZeRO's: parameters and gradients in fp16; the optimizer keeps the fp32 master copy.
ZERO_BYTES = StateBytes(parameter=2, gradient=2, optimizer=12, gathered=2, unreduced=2)


@dataclass(frozen=True, slots=True)
class ModelCounts:
    """Numbers of a model's parameters.

    Args:
        parameters: all parameters, tied ones once.
        trainable: parameters with gradients and optimizer states.
        units: parameters of each unit, in the order of the forward; the rest belongs to the root.
    """

    parameters: int
    trainable: int
    units: tuple[int, ...]

    @property
    def root(self) -> int:
        """Number of parameters in no unit."""
        return self.parameters - sum(self.units)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one rank by its use, in bytes.

    Args:
        parameters: parameters that are kept between steps.
        gradients: reduced gradients.
        optimizer: optimizer states.
        gathered: gathered parameters of the units that are computed, and of those that are kept.
        unreduced: gradients of this rank alone, in autograd's tensors and in the message that is made of them.
        activations: activations that are kept for the backward.
        communication: compressed copies of gradients, and the errors of the compression.
        starting: parameters before they are shared, with what is made of them: needed at the start, not later.
        is_offloaded: whether parameters, gradients and optimizer states are in host memory.
        computes_on_hosts: whether ranks compute there, too.
        free: freed memory that the C library keeps there, beside holes between activations.
    """

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    unreduced: float
    activations: float
    communication: float
    starting: float
    is_offloaded: bool
    computes_on_hosts: bool
    free: float

    @property
    def states(self) -> float:
        """Bytes of parameters, gradients and optimizer states."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def heap(self) -> float:
        """Bytes that the C library keeps free, where ranks compute in host memory."""
        return self.free + HOLES_OF_ACTIVATIONS * self.activations if self.computes_on_hosts else 0.0

    @property
    def device_bytes(self) -> float:
        """Bytes on the device, where it has memory of its own."""
        working = self.gathered + self.unreduced + self.activations
        return working if self.is_offloaded else working + self.states + self.communication

    @property
    def host_bytes(self) -> float:
        """Bytes in host memory, where the device has memory of its own."""
        return self.states + self.communication if self.is_offloaded else 0.0

    @property
    def total_bytes(self) -> float:
        """Bytes on device and host: the need of a rank on a CPU, where the two are one."""
        return max(self.device_bytes + self.host_bytes + self.heap, self.starting)


def rank_memory(
    strategy: str,
    counts: ModelCounts,
    nodes: Sequence[int],
    *,
    state_bytes: StateBytes | None = None,
    activation_bytes: float = 0.0,
    communication_dtype: str = "fp32",
    accumulates: bool = False,
    computes_on_hosts: bool = False,
) -> list[RankMemory]:
    """Memory of a rank of each node: one entry a node.

    What the ranks of a node share is divided among them.

    Args:
        strategy: one of `documents.strategy.STRATEGIES`.
        counts: numbers of the model's parameters.
        nodes: ranks on each node.
        state_bytes: bytes of a parameter in each role. None: fp32.
        activation_bytes: bytes of one micro-batch's activations.
        communication_dtype: format of gradients between nodes.
        accumulates: whether a step has several micro-batches; world-sharded strategies keep whole gradients between
            them.
        computes_on_hosts: whether ranks compute in host memory, which those of a node map together.

    Raises:
        ValueError: there is no such strategy or format.
    """
    traits, each = strategy_traits(strategy), state_bytes or StateBytes()
    if communication_dtype not in WIRE_FORMATS:
        raise ValueError(f"found format {communication_dtype!r}, expected one of {', '.join(WIRE_FORMATS)}")
    is_mapped = computes_on_hosts and traits.shared_by is SharedBy.NODE and not traits.is_plain
    is_streamed = traits.is_offloaded and traits.shared_by is SharedBy.NODE and not computes_on_hosts
    shares = nodes if is_mapped or is_streamed else group_sizes(traits, nodes)
    whole = counts.parameters * each.parameter
    cast = counts.parameters * each.gathered if is_streamed and each.gathered != each.parameter else 0.0
    memory = []
    for share, ranks in zip(shares, nodes, strict=True):
        gradients = counts.trainable * each.gradient / share
        if traits.shared_by is SharedBy.WORLD:
            communication = 0.0  # compressed and summed unit by unit
        else:
            # Each shard, and each bucket that a node has summed, is compressed by one rank of the node.
            compressed = counts.trainable * each.gradient / ranks
            communication = WIRE_FORMATS[communication_dtype].kept_bytes(compressed, len(nodes))
        if traits.shared_by is SharedBy.NOBODY and traits.is_plain:
            communication += gradients  # DDP's buckets beside .grad
        if is_streamed:
            of_all = counts.trainable * each.gradient
            communication += min(of_all, default_bucket_bytes(math.ceil(of_all), len(nodes)))
        gathers = not (traits.shared_by is SharedBy.NOBODY or is_mapped)
        if not gathers:  # autocast makes a copy
            gathered = 0.0 if each.gathered == each.parameter else counts.parameters * each.gathered
            if share > 1:
                unreduced = waiting_bytes(counts.trainable * each.gradient, len(nodes))
            else:
                unreduced = passing_bytes(gradients, len(nodes)) if computes_on_hosts else 0.0
        else:
            gathered, unreduced = _of_units(
                traits, counts, each, accumulates, gradients if computes_on_hosts else None
            )
        if is_streamed:
            # In fp32, as each bucket is until it has been copied.
            unreduced += waiting_bytes(counts.trainable * each.gradient, len(nodes))
        coming = 0.0
        if computes_on_hosts and gathers and traits.gathered is Gathered.EACH_PASS:
            # FSDP2 makes them anew in each step, as activations go. Some of these exist only in the backward, though.
            coming = min(gradients, (1 + HOLES_OF_ACTIVATIONS) * activation_bytes / 2)
        memory.append(
            RankMemory(
                parameters=(whole + cast) / share,
                gradients=gradients - coming,
                optimizer=counts.trainable * each.optimizer / share,
                gathered=gathered,
                unreduced=unreduced,
                activations=activation_bytes,
                communication=communication,
                starting=_starting(traits, whole, gradients, share) if computes_on_hosts else 0.0,
                is_offloaded=traits.is_offloaded,
                computes_on_hosts=computes_on_hosts,
                free=free_in_heap(whole) if computes_on_hosts else 0.0,
            )
        )
    return memory


def waiting_bytes(gradient_bytes: float, reducing_ranks: int) -> float:
    """Bytes of a rank's gradients that wait for other ranks of its node, and of the bucket that is being filled.

    Args:
        gradient_bytes: of the parameters that the node's ranks share.
        reducing_ranks: ranks that sum a bucket between nodes.
    """
    bucket = default_bucket_bytes(math.ceil(gradient_bytes), reducing_ranks)
    return min(gradient_bytes, (WAITING_BUCKETS + 1) * bucket)


def passing_bytes(gradient_bytes: float, reducing_ranks: int) -> float:
    """Bytes that a rank which shares no gradients has for a moment beside all of them, where hosts compute.

    The gradient that autograd has made last, before it is added to its bucket, a message that is received, and one
    that waits to be sent. Each counts as one bucket.

    Args:
        gradient_bytes: of all its parameters.
        reducing_ranks: ranks that sum a bucket.
    """
    return min(gradient_bytes, 3 * default_bucket_bytes(math.ceil(gradient_bytes), reducing_ranks))


def _of_units(
    traits: StrategyTraits, counts: ModelCounts, each: StateBytes, accumulates: bool, gradients: float | None
) -> tuple[float, float]:
    """Bytes of gathered parameters, and of gradients before they are reduced, where units are gathered.

    Args:
        gradients: bytes of those that the optimizer reads, where ranks compute in host memory; else None.
    """
    # The two largest units may be neighbours: an upper bound that needs no order.
    largest = sorted(counts.units, reverse=True)
    on_hosts, one = gradients is not None, sum(largest[:1])
    if traits.gathered is Gathered.EACH_PASS:
        gathered = (counts.root + sum(largest[:2])) * each.gathered
        is_kept = accumulates and traits.shared_by is SharedBy.WORLD
    else:
        # Kept from the forward on: all parameters stay until the backward has used them. On hosts the memory of a unit
        # goes to the gradients that the optimizer reads; what is in no unit goes last. Half of these gradients are
        # counted all the same: it has been more than none of them (`benchmarks/memory.py`).
        come = (gradients or 0.0) / 2 * sum(counts.units) / counts.parameters
        gathered, is_kept = max(0.0, counts.parameters * each.gathered - come), accumulates
    # On hosts the gradients of a unit, and the message of the unit before it, which FSDP2 keeps until the next one.
    # What is in no unit is reduced last, when units have nothing any more but that message.
    of_units = max(2 * one, counts.root) if on_hosts else one
    if is_kept:
        # Autograd adds the gradient of one parameter at a time to those that are kept. One is half of a unit at most,
        # if the unit has two matrices, one in and one out.
        of_units = counts.trainable + 1.5 * one * on_hosts
    return gathered, (of_units + counts.root) * each.unreduced


def _starting(traits: StrategyTraits, whole: float, gradients: float, share: int) -> float:
    """Bytes at the start, when each rank has the whole model of the script, and what is shared is made of it."""
    if share == 1:
        return whole + gradients  # which are the buffers of gradients
    shared = whole / share
    return whole + shared + (0.0 if traits.shared_by is SharedBy.WORLD else gradients)
