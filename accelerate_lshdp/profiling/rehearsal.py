# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What sending gradients costs the rank that sends them.

Gradients travel while the backward goes on, and copying and summing them takes time of the processor that computes:
little where a GPU computes, much on a CPU with few cores. So all ranks train a few micro-batches together, sending and
not sending in turns. The difference, without what they wait for each other, is the load of communication.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from accelerate_lshdp.engine.collectives import REDUCTIONS, GradientReduction, PendingReduction
from accelerate_lshdp.engine.policies import ShardingPolicies
from accelerate_lshdp.planning.curves import TimeCurve


MOST_ROUNDS = 20
# Differences count if their median is so many times as large as their median absolute deviation: of two runs of the
# same work on a busy machine one is longer, too.
_SIGNIFICANCE = 2.0
_LEAST_ROUNDS = 2
# Parts of a round, in times of a micro-batch: one without sending, one with, and what they wait for the network.
_PARTS = 3
_POLL_SECONDS = 0.001


@dataclass(frozen=True)
class Rehearsal:
    """What a rank does in a rehearsal: so many rounds with micro-batches of this size."""

    micro_batch_size: int
    rounds: int


def plan_rehearsal(curves: Sequence[TimeCurve], rank: int, seconds: float) -> Rehearsal:
    """Micro-batches that take all ranks equally long, as many as there is time for; the same rounds on all ranks.

    Args:
        curves: of all ranks.
        rank: whose micro-batch size is wanted.
        seconds: how long the rehearsal may take, the same on all ranks.
    """
    longest = min(curve.seconds[-1] for curve in curves)
    length = min(longest, seconds / (_PARTS * (_LEAST_ROUNDS + 1)))
    rounds = min(MOST_ROUNDS, max(_LEAST_ROUNDS, int(seconds / (_PARTS * length)) - 1))
    curve = curves[rank]
    fitting = [size for size in range(1, curve.batch_sizes[-1] + 1) if curve(size) <= length]
    return Rehearsal(max(fitting, default=1), rounds)


def load_of(alone: Sequence[float], sending: Sequence[float]) -> float:
    """By how many seconds sending makes a micro-batch longer; 0 if that is not more than what runs differ by anyway.

    Args:
        alone, sending: seconds of micro-batches, in pairs that followed each other.
    """
    differences = [longer - shorter for shorter, longer in zip(alone, sending, strict=True)]
    middle = median(differences)
    deviation = median(abs(difference - middle) for difference in differences)
    return middle if middle > _SIGNIFICANCE * deviation else 0.0


class SharedPart(GradientReduction):
    """Sums between nodes the part of a buffer that a rank of a real run would send: its shard.

    Ends waiting when another rank has failed, which would otherwise never send its part.

    Args:
        reduction: sums over the ranks that hold the same shard.
        ranks: number of ranks that share one copy of the parameters.
        raise_if_another_failed: called while waiting.
    """

    def __init__(self, reduction: GradientReduction, ranks: int, raise_if_another_failed: Callable[[], None]) -> None:
        super().__init__(reduction.group)
        self._reduction = reduction
        self._ranks = ranks
        self._raise_if_another_failed = raise_if_another_failed

    def start(self, buffer: torch.Tensor) -> PendingReduction:
        pending = self._reduction.start(buffer[: -(-buffer.numel() // self._ranks)])
        return _Watched(pending, self._raise_if_another_failed)


class _Watched(PendingReduction):
    def __init__(self, pending: PendingReduction, raise_if_another_failed: Callable[[], None]) -> None:
        self._pending = pending
        self._raise_if_another_failed = raise_if_another_failed

    def is_done(self) -> bool:
        return self._pending.is_done()

    def wait(self) -> None:
        while not self._pending.is_done():
            self._raise_if_another_failed()
            time.sleep(_POLL_SECONDS)
        self._pending.wait()


def make_sender(
    policies: ShardingPolicies, rank: int, communication_dtype: str, raise_if_another_failed: Callable[[], None]
) -> GradientReduction | None:
    """What sends a rank's gradients between nodes as its strategy does (collective: it makes process groups).

    None where no gradient travels during the backward: on one node, and under the world-sharded strategies, whose
    ranks wait for everything that they send.
    """
    if len(policies.replica_groups[0]) == 1:
        return None
    # Groups of its own: what a failed rank leaves unanswered must not get mixed up with other messages.
    groups = {ranks: dist.new_group(list(ranks)) for ranks in policies.replica_groups}
    mine = next(group for ranks, group in groups.items() if rank in ranks)
    return SharedPart(REDUCTIONS[communication_dtype](mine), len(policies.shard_groups[0]), raise_if_another_failed)
