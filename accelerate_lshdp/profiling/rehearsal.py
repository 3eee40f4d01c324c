# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Rehearsals: steps that all ranks train at the same time before they are planned, sending their gradients.

Gradients travel while the backward goes on, and copying and summing them takes time of the processor that computes:
little where a GPU computes, much on a CPU with few cores. So all ranks train a few steps together, sending gradients
as their strategy does, in turns with steps in which nobody sends (`rehearsed_rank` says what follows from them).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist

from accelerate_lshdp.documents.curves import TimeCurve
from accelerate_lshdp.documents.plan_sections import Communication
from accelerate_lshdp.engine.policies import ShardingPolicies
from accelerate_lshdp.engine.wire.formats import make_reduction, make_second_group
from accelerate_lshdp.engine.wire.reduction import GradientReduction, PendingReduction
from accelerate_lshdp.runtime.groups import new_group
from accelerate_lshdp.runtime.wait_clock import WaitClock


MOST_STEPS = 30
LEAST_STEPS = 6
# Duration of a pair of steps, in micro-batches: two micro-batches, and one for sending and waiting.
_STEPS = 3
_POLL_SECONDS = 0.001
# Asking for failures is a message to another node.
_POLLS_PER_QUESTION = 100


@dataclass(frozen=True)
class Rehearsal:
    """One rank's rehearsal: `steps` pairs of a micro-batch without sending and one with it.

    Args:
        micro_batch_size: samples of each micro-batch.
        steps: number of pairs, the same on all ranks.
    """

    micro_batch_size: int
    steps: int


def plan_rehearsal(curves: Sequence[TimeCurve], seconds: float) -> list[Rehearsal]:
    """Rehearsals that take all ranks equally long, with as many steps as there is time for: one entry a rank.

    Args:
        curves: the time curves of all ranks.
        seconds: seconds that the rehearsal may take, the same on all ranks.
    """
    # No rank can be given more than its largest micro-batch takes, so the fastest one limits the length.
    longest = min(curve.seconds[-1] for curve in curves)
    length = min(longest, seconds / (_STEPS * (LEAST_STEPS + 1)))
    steps = min(MOST_STEPS, max(LEAST_STEPS, int(seconds / (_STEPS * length)) - 1))
    fitting = [[size for size in range(1, curve.batch_sizes[-1] + 1) if curve(size) <= length] for curve in curves]
    return [Rehearsal(max(sizes, default=1), steps) for sizes in fitting]


class ShardReduction(GradientReduction):
    """Sums between nodes the shards of a buffer that a rank of a real run would send.

    Waiting ends when another rank has failed, which would otherwise never send its shard.

    Args:
        reductions: one for each shard of this rank, over the ranks that send the same one.
        parts: number of shards of a whole buffer: the ranks of the largest node that share one copy of the parameters.
        raise_if_another_failed: called while waiting.
        own_groups: process groups that `close` destroys.
    """

    def __init__(
        self,
        reductions: Sequence[GradientReduction],
        parts: int,
        raise_if_another_failed: Callable[[], None],
        own_groups: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        super().__init__(reductions[0].group)
        self._reductions = reductions
        self._own_groups = own_groups
        self._parts = parts
        self._raise_if_another_failed = raise_if_another_failed
        self._polling = WaitClock(time.thread_time)

    def polling_cpu_seconds(self) -> float:
        """CPU seconds that waiting took since the last call."""
        return self._polling.take()

    def start(self, buffer: torch.Tensor, index: int, shapes: Sequence[torch.Size]) -> PendingReduction:
        shards = [torch.Size((-(-shape[0] // self._parts), *shape[1:])) if shape else shape for shape in shapes]
        part = buffer[: sum(map(torch.Size.numel, shards))]
        # A reduction sums in place, so each shard needs a buffer of its own.
        copies = [part, *(part.clone() for _ in self._reductions[1:])]
        started = [
            reduction.start(copy, index, shards) for reduction, copy in zip(self._reductions, copies, strict=True)
        ]
        return _PolledReduction(started, self._raise_if_another_failed, self._polling)

    def close(self) -> None:
        """Destroys its process groups; must be called when no rank has a reduction that is not done."""
        for group in self._own_groups:
            dist.destroy_process_group(group)


class _PolledReduction(PendingReduction):
    """Reductions that are waited for by polling, so that a failure of another rank can end the wait."""

    def __init__(
        self, pending: Sequence[PendingReduction], raise_if_another_failed: Callable[[], None], polling: WaitClock
    ) -> None:
        self._pending = pending
        self._raise_if_another_failed = raise_if_another_failed
        self._polling = polling

    def is_done(self) -> bool:
        return all(pending.is_done() for pending in self._pending)

    def wait(self) -> None:
        with self._polling.waiting():
            polls = 0
            while not self.is_done():
                if polls % _POLLS_PER_QUESTION == 0:
                    self._raise_if_another_failed()
                polls += 1
                time.sleep(_POLL_SECONDS)
        for pending in self._pending:
            pending.wait()


def make_sender(
    policies: ShardingPolicies, rank: int, communication: Communication, raise_if_another_failed: Callable[[], None]
) -> ShardReduction | None:
    """The reduction that sends a rank's gradients as its strategy does (collective: it makes process groups).

    None where no gradient travels during the backward: on one node, but for whole copies that cannot be summed in
    memory, and under the world-sharded strategies, whose ranks wait for all exchanges.
    """
    partition = policies.replica_groups
    if len(partition[0]) == 1:
        if len(policies.shard_groups) == 1 or len(policies.shard_groups[0]) > 1 or policies.shares_memory:
            return None
        partition, communication = (tuple(chain(*policies.shard_groups)),), Communication()
    # Groups of its own: gloo tells messages of a group apart by their order only, and a rank that fails in the middle
    # leaves messages unanswered.
    groups = {ranks: (new_group(ranks), make_second_group(communication, [ranks])) for ranks in partition}
    # Several where other nodes have more ranks that share the work.
    mine = [made for ranks, made in groups.items() if rank in ranks]
    reductions = [make_reduction(communication, *made) for made in mine]
    own_groups = [group for made in mine for group in made if group is not None]
    return ShardReduction(reductions, len(partition), raise_if_another_failed, own_groups)
