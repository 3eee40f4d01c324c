# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`moments_of`: the moments of a step at which a rank may need most memory, each with a row of the problem.

Where devices train, three moments have a row. When the forward ends, all activations are there, and no gradient that
FSDP2 makes in a backward. In the backward of a unit there are the activations of the units before it and the
gradients of those after it, so for every unit the larger of the two is counted; beside these, what a unit gathers,
recomputes and works on. When the root is reduced, and the optimizer steps, all gradients are there, and of activations
only the outputs that the script holds.

Where ranks compute in host memory one row counts everything, as freed memory stays in the process; so does that of a
model whose head was not measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from accelerate_lshdp.documents.host_memory import HOLES_OF_ACTIVATIONS, free_in_heap
from accelerate_lshdp.documents.step_memory import stepping_bytes
from accelerate_lshdp.planning.placement.inputs import ModelSizes, PlacementCluster
from accelerate_lshdp.planning.placement.problem import MemoryRow
from accelerate_lshdp.planning.placement.unit_costs import UnitCost
from accelerate_lshdp.planning.placement.unit_memory import UnitMemory


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a step at which a rank may need most.

    Args:
        name: for messages, after that of the ranks.
        fixed: bytes of a micro-batch of some samples that are needed whatever is chosen.
        peak_weights: as those of `MemoryRow`, but the last one for each sample.
        bytes_of: bytes of a unit's placement with a micro-batch of some samples on a rank of a node size.
    """

    name: str
    fixed: Callable[[int], float]
    peak_weights: tuple[int, int, int]
    bytes_of: Callable[[UnitMemory, int, int], float]

    def row(self, ranks_name: str, samples: int, limit: int, ranks: Sequence[int]) -> MemoryRow:
        """The row of ranks with a micro-batch of some samples."""
        gathered, unreduced, recomputed = self.peak_weights
        weights = gathered, unreduced, recomputed * samples
        return MemoryRow(ranks_name + self.name, limit, math.ceil(self.fixed(samples)), weights, tuple(ranks))


def moments_of(
    model: ModelSizes,
    cluster: PlacementCluster,
    knows_moments: bool,
    offered: Sequence[tuple[Sequence[str], Sequence[UnitCost]]],
) -> list[Moment]:
    """The moments of a step that have rows.

    Args:
        model: sizes of its units.
        cluster: its ranks.
        knows_moments: whether the costs say what is there at which moment.
        offered: names of the units of each kind, and the costs of what these may have.
    """
    process, on_hosts = cluster.process_bytes, cluster.computes_on_hosts
    # On CPUs torch steps one parameter after the other, or with kernels that need no memory.
    each = model.state_bytes.parameter
    stepping = stepping_bytes(each * model.trainable, each * model.largest_parameter)
    if not cluster.streams or cluster.counts_states_alone:
        stepping = 0.0
    if knows_moments and model.head is not None:
        head = model.head
        of_loss = max(0.0, head.working_bytes - model.working_of_logits)  # the rest is the root's own
        return [
            Moment(" at the loss", lambda samples: process + samples * of_loss, (2, 0, 0), UnitMemory.at_loss),
            Moment(
                " in the backward",
                lambda samples: process + samples * head.units_working_bytes,
                (2, 1, 1),
                UnitMemory.in_backward,
            ),
            # What is streamed has its buffers on the device all the time.
            Moment(" in the optimizer's step", lambda samples: process + stepping, (2, 0, 0), UnitMemory.in_step),
        ]
    if on_hosts:
        process += math.ceil(free_in_heap(each * sum(unit.parameters for unit in model.everything)))
    working = model.working_bytes * (1 + HOLES_OF_ACTIVATIONS * on_hosts)
    least = sum(len(names) * min(cost.memory.sample_bytes for cost in choices) for names, choices in offered)

    def fixed(samples: int) -> float:
        # When the optimizer steps, activations are free, but for outputs (logits) that the script still holds.
        beyond = max(0.0, stepping - samples * (model.working_bytes / 2 + least))
        return process + math.ceil(samples * working) + math.ceil(beyond)

    return [Moment("", fixed, (2, 2 if on_hosts else 1, 1), UnitMemory.throughout)]
