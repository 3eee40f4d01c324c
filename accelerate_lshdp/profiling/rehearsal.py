# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What a rank's forward and backward take in real steps, beside what it measured by itself.

Gradients travel while the backward goes on, and copying and summing them takes time of the processor that computes:
little where a GPU computes, much on a CPU with few cores. So all ranks train a few steps together, sending gradients
as their strategy does, in turns with steps in which nobody sends. The difference of two neighbours is what sending
takes, whatever else made the machine faster or slower since the curve was measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from accelerate_lshdp.engine.collectives import GradientReduction, PendingReduction
from accelerate_lshdp.engine.groups import new_group
from accelerate_lshdp.engine.policies import ShardingPolicies
from accelerate_lshdp.engine.reductions import make_reduction
from accelerate_lshdp.plan_sections import Communication
from accelerate_lshdp.planning.curves import TimeCurve
from accelerate_lshdp.profiling.measured import MeasuredRank


MOST_STEPS = 30
LEAST_STEPS = 6
# A difference counts if it is more than the standard error of the median: on a busy machine steps differ anyway. For
# normal noise that is 1.25 * 1.48 median absolute deviations, by the root of the number of steps.
_SIGNIFICANCE = 1.25 * 1.48
_NEGLIGIBLE = 0.01
# Two steps in times of their micro-batch: with what sending adds to one, and what ranks wait for each other and the
# network.
_STEPS = 3
_POLL_SECONDS = 0.001


@dataclass(frozen=True)
class Rehearsal:
    """What a rank does in a rehearsal: so many steps with micro-batches of this size, and as many without sending."""

    micro_batch_size: int
    steps: int


def plan_rehearsal(curves: Sequence[TimeCurve], seconds: float) -> list[Rehearsal]:
    """Steps that take all ranks equally long, as many as there is time for: one entry a rank.

    Args:
        curves: of all ranks.
        seconds: how long the rehearsal may take, the same on all ranks.
    """
    longest = min(curve.seconds[-1] for curve in curves)
    length = min(longest, seconds / (_STEPS * (LEAST_STEPS + 1)))
    steps = min(MOST_STEPS, max(LEAST_STEPS, int(seconds / (_STEPS * length)) - 1))
    fitting = [[size for size in range(1, curve.batch_sizes[-1] + 1) if curve(size) <= length] for curve in curves]
    return [Rehearsal(max(sizes, default=1), steps) for sizes in fitting]


def learn_from_steps(
    measured: MeasuredRank, micro_batch_size: int, steps: Sequence[tuple[float, float]]
) -> MeasuredRank:
    """The rank as the steps of a rehearsal show it.

    If those that send take longer than those that do not, by more than chance, sending takes the difference from every
    step. The curve is scaled to what the steps without sending took, or if they send at no cost, to both: the machine
    may be slower than before, and ranks that share it were in each other's way while all of them measured without a
    pause.

    Args:
        measured: the rank as it measured itself.
        micro_batch_size: of the steps.
        steps: pairs of neighbours: seconds of forward and backward, without waiting, of one without and one with
            sending.
    """
    expected = measured.time(micro_batch_size)
    load = _significant([sending - alone for alone, sending in steps], 0.0, expected)
    if load > 0:
        change = _significant([alone for alone, _ in steps], expected, expected)
        measured = replace(measured, communication_load_seconds=load)
    else:
        change = _significant([min(pair) if load < 0 else sum(pair) / 2 for pair in steps], expected, expected)
    return measured.slowed_down(1 + change / expected) if change else measured


def _significant(seconds: Sequence[float], expected: float, scale: float) -> float:
    """By how much the median is off what was expected; 0 if chance explains it, or if it is little on that scale."""
    middle = median(seconds)
    deviation = median(abs(value - middle) for value in seconds)
    chance = max(_SIGNIFICANCE * deviation / math.sqrt(len(seconds)), _NEGLIGIBLE * scale)
    return middle - expected if abs(middle - expected) > chance else 0.0


class SharedPart(GradientReduction):
    """Sums between nodes the parts of a buffer that a rank of a real run would send.

    Ends waiting when another rank has failed, which would otherwise never send its part.

    Args:
        reductions: one for each part of this rank, over the ranks that send the same one.
        parts: of a whole buffer: as many as the largest node has ranks that share one copy of the parameters.
        raise_if_another_failed: called while waiting.
    """

    def __init__(
        self, reductions: Sequence[GradientReduction], parts: int, raise_if_another_failed: Callable[[], None]
    ) -> None:
        super().__init__(reductions[0].group)
        self._reductions = reductions
        self._parts = parts
        self._raise_if_another_failed = raise_if_another_failed

    def start(self, buffer: torch.Tensor, index: int, shapes: Sequence[torch.Size]) -> PendingReduction:
        shards = [torch.Size((-(-shape[0] // self._parts), *shape[1:])) if shape else shape for shape in shapes]
        part = buffer[: sum(map(torch.Size.numel, shards))]
        copies = [part, *(part.clone() for _ in self._reductions[1:])]
        started = [
            reduction.start(copy, index, shards) for reduction, copy in zip(self._reductions, copies, strict=True)
        ]
        return _Watched(started, self._raise_if_another_failed)


class _Watched(PendingReduction):
    def __init__(self, pending: Sequence[PendingReduction], raise_if_another_failed: Callable[[], None]) -> None:
        self._pending = pending
        self._raise_if_another_failed = raise_if_another_failed

    def is_done(self) -> bool:
        return all(pending.is_done() for pending in self._pending)

    def wait(self) -> None:
        while not self.is_done():
            self._raise_if_another_failed()
            time.sleep(_POLL_SECONDS)
        for pending in self._pending:
            pending.wait()


def make_sender(
    policies: ShardingPolicies, rank: int, communication: Communication, raise_if_another_failed: Callable[[], None]
) -> GradientReduction | None:
    """What sends a rank's gradients between nodes as its strategy does (collective: it makes process groups).

    None where no gradient travels during the backward: on one node, and under the world-sharded strategies, whose
    ranks wait for everything that they send.
    """
    if len(policies.replica_groups[0]) == 1:
        return None
    # Groups of its own: what a failed rank leaves unanswered must not get mixed up with other messages.
    groups = {ranks: new_group(ranks) for ranks in policies.replica_groups}
    # Several where other nodes have more ranks that share the work.
    mine = [make_reduction(communication, group) for ranks, group in groups.items() if rank in ranks]
    return SharedPart(mine, len(policies.replica_groups), raise_if_another_failed)
