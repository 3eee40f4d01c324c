# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`Rebalancer`: the controller of automatic batch sizes, which re-cuts the global batch from measured training steps.

After every optimizer step it gets the seconds of each rank, learns each rank's time by batch size (`LearnedCurve`),
and lets the exact solver cut the global batch for these curves. It takes new sizes if their predicted gain is large
enough:

1. The first steps are left out: they allocate memory and choose kernels.
2. At first, and after a change of speed, it checks the sizes every 4 steps, a few times: each cut shows the ranks at
   new sizes, and so the part of their time that does not depend on the size. Mostly two or three cuts suffice.
3. Then it checks every `rebalance_every` steps. Now the predicted gain of a cut must also exceed the noise, so that
   sizes settle.
4. A rank whose last 4 steps all differ by more than 15 % has changed its speed: the sizes are cut again at once.

Every rank runs its own controller on the same numbers. There is no clock, randomness or communication in it, and only
arithmetic that is the same on all machines, so all ranks come to the same decision at the same step. Loaders prefetch:
sizes come into force some steps after they were decided. Steps run under older sizes until then. They teach the curves
like any step, but do not count as the outcome of the new sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from accelerate_lshdp.documents.curves import RankProfile, TimeCurve
from accelerate_lshdp.planning.cuts.batch_sizes import BatchSizes, plan_fixed_total
from accelerate_lshdp.planning.online.learned_curves import STEPS_TO_JUDGE, LearnedCurve
from accelerate_lshdp.planning.online.plain_values import (
    checked_count,
    checked_counts,
    checked_positive,
    checked_times,
    require_keys,
)


# Steps at the start of a run that are not recorded.
_WARM_UP_STEPS = 2
# Number of checks in quick succession at the start and after a change.
_QUICK_LOOKS = 5
# A rank gets at most so many times the largest batch that it has trained with: further out the line is a guess, and a
# rank that says it knows no limit gets the chance to meet one before it is far exceeded.
_LARGEST_GROWTH = 4
# Standard errors by which a gain must exceed the dead band before it counts as more than noise.
_STANDARD_ERRORS = 2.5
# Steps over which the seconds that do not depend on the batch are taken.
_FIXED_STEPS = 9
# A rank is said to have recovered when it is back within this part of its first speed.
_RECOVERED = 0.15


@dataclass(frozen=True, slots=True)
class Decision:
    """One change of the batch sizes.

    Attributes:
        step: number of the step after which it was made, counted from 0 at the first step observed.
        old: micro-batch sizes that this step was trained with, one a rank.
        new: micro-batch sizes from now on.
        measured_seconds: seconds of each rank under `old`: forward, backward and the seconds independent of the batch.
        predicted_seconds: the same under `new`, as estimated.
        reason: the reason for the change: "start", "re-balance", "rank 2 became 1.9x slower", "rank 2 recovered", ...
    """

    step: int
    old: tuple[int, ...]
    new: tuple[int, ...]
    measured_seconds: tuple[float, ...]
    predicted_seconds: tuple[float, ...]
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.reason}: batch sizes {list(self.old)} -> {list(self.new)}, slowest rank"
            f" {max(self.measured_seconds):.4g} s measured -> {max(self.predicted_seconds):.4g} s predicted"
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON values that `from_dict` takes."""
        return {
            "step": self.step,
            "old": list(self.old),
            "new": list(self.new),
            "measured_seconds": list(self.measured_seconds),
            "predicted_seconds": list(self.predicted_seconds),
            "reason": self.reason,
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Decision:
        """A decision as `to_dict` wrote it.

        Raises:
            ValueError: a key is missing or unknown, or a value is not of its kind.
        """
        require_keys(document, cls.__slots__)
        if not isinstance(document["reason"], str):
            raise ValueError(f"found {document['reason']!r:.60} as reason, expected a text")
        return cls(
            step=checked_count(document["step"], "step"),
            old=tuple(checked_counts(document["old"], "old")),
            new=tuple(checked_counts(document["new"], "new")),
            measured_seconds=tuple(checked_positive(document["measured_seconds"], "measured_seconds")),
            predicted_seconds=tuple(checked_positive(document["predicted_seconds"], "predicted_seconds")),
            reason=document["reason"],
        )


class Rebalancer:
    """Chooses the micro-batch size of every rank after each step; the sum of the sizes never changes.

    Args:
        batch_sizes: micro-batch sizes in samples at the start, one a rank, each at least 1.
        rebalance_every: steps between checks of the sizes once they have settled.
        dead_band: the part of the step time (0 to 1) that new sizes must save by prediction.
        profiles: measured curves, one a rank, if the run has them. Their shapes and maxima are used; the level of the
            seconds comes from the training steps.

    Attributes:
        decisions: all decisions so far.

    Raises:
        ValueError: an argument is not as described.
    """

    def __init__(
        self,
        batch_sizes: Sequence[int],
        *,
        rebalance_every: int = 10,
        dead_band: float = 0.03,
        profiles: Sequence[RankProfile] | None = None,
    ) -> None:
        self._sizes = checked_counts(batch_sizes, "batch_sizes")
        if not self._sizes or min(self._sizes) < 1:
            raise ValueError(f"found batch_sizes {self._sizes}, expected at least 1 sample for each rank")
        if checked_count(rebalance_every, "rebalance_every") < 1:
            raise ValueError(f"found rebalance_every {rebalance_every}, expected at least 1 step")
        if not 0 <= dead_band < 1:
            raise ValueError(f"found dead_band {dead_band!r}, expected a part of the step time: 0 <= dead_band < 1")
        if profiles is not None and len(profiles) != len(self._sizes):
            raise ValueError(f"found {len(profiles)} profiles for {len(self._sizes)} ranks, expected one a rank")
        self._total = sum(self._sizes)
        self._every = rebalance_every
        self._dead_band = dead_band
        self._profiles = list(profiles) if profiles is not None else [None] * len(self._sizes)
        self._curves = [LearnedCurve(profile) for profile in self._profiles]
        self._fixed: list[list[float]] = [[] for _ in self._sizes]
        # By how much each rank is slower than it was at first, as far as changes were noticed.
        self._slowdowns = [1.0] * len(self._sizes)
        self._steps = 0
        self._quick_looks = _QUICK_LOOKS
        self._since_look = 0
        self.decisions: list[Decision] = []

    @property
    def batch_sizes(self) -> list[int]:
        """Micro-batch sizes as last decided, one a rank."""
        return list(self._sizes)

    def observe(
        self,
        batch_sizes: Sequence[int],
        compute_seconds: Sequence[float],
        fixed_seconds: Sequence[float],
        limits: Sequence[int | None],
    ) -> Decision | None:
        """Records an optimizer step and returns a change of the sizes, if there is one.

        Must be called after every step, on all ranks with the same values. Steps with fewer samples than the total, as
        the last one of an epoch, are not recorded.

        Args:
            batch_sizes: micro-batch sizes that the step was trained with, one a rank.
            compute_seconds: seconds of forward and backward, one a rank.
            fixed_seconds: seconds that do not depend on the batch (the optimizer step), one a rank; may be 0.
            limits: the largest micro-batch that each rank believes to fit its memory, in samples; None: it knows no
                limit. A rank beyond its limit gets a smaller batch, whatever that costs in time. Where the limits sum
                to less than the total, ranks may keep their sizes.

        Returns:
            The decision; None: the sizes stay.

        Raises:
            ValueError: a value is not as described; the message names the rank. The step is not recorded then.
        """
        sizes = self._checked_step(batch_sizes, compute_seconds, fixed_seconds, limits)
        self._steps += 1
        if self._steps <= _WARM_UP_STEPS or sum(sizes) < self._total:
            return None
        changes = []
        for rank, curve in enumerate(self._curves):
            curve.record(sizes[rank], float(compute_seconds[rank]))
            self._fixed[rank] = [*self._fixed[rank], float(fixed_seconds[rank])][-_FIXED_STEPS:]
            factor = curve.detect_speed_change()
            if factor is not None:
                changes.append(self._describe_change(rank, factor))
        # Steps under older sizes, which loaders had fetched ahead, do not bring the next check closer.
        self._since_look += sizes == self._sizes
        if changes:
            self._quick_looks = _QUICK_LOOKS
        if not all(curve.known for curve in self._curves):
            return None
        caps = self._caps(limits)
        beyond = [rank for rank, (size, cap) in enumerate(zip(self._sizes, caps, strict=True)) if size > cap]
        if beyond:
            reason = ", ".join(f"rank {rank} has memory for {caps[rank]} samples only" for rank in beyond)
            return self._decide(reason, sizes, caps, None)
        if changes:
            return self._decide(", ".join(changes), sizes, caps, self._dead_band)
        if self._since_look >= (STEPS_TO_JUDGE if self._quick_looks else max(STEPS_TO_JUDGE, self._every)):
            return self._look(sizes, caps)
        return None

    def _look(self, sizes: list[int], caps: list[int]) -> Decision | None:
        self._since_look = 0
        for curve in self._curves:
            curve.follow_drift()
        reason = "re-balance" if self.decisions else "start"
        if self._quick_looks:
            self._quick_looks -= 1
            return self._decide(reason, sizes, caps, self._dead_band)
        noise = _STANDARD_ERRORS * max(curve.uncertainty for curve in self._curves)
        return self._decide(reason, sizes, caps, self._dead_band + noise)

    def _decide(self, reason: str, trained: list[int], caps: list[int], gain: float | None) -> Decision | None:
        """Changes the sizes to the best cut if it saves the part `gain` of the present step (None: always)."""
        fixed = [median_low(seconds) for seconds in self._fixed]
        profiles = []
        for curve, seconds, size, cap in zip(self._curves, fixed, self._sizes, caps, strict=True):
            # Up to the present size as well, which may be above a new cap: its time is what a cut is compared with.
            table = curve.table(max(size, cap)) + seconds
            profiles.append(RankProfile(TimeCurve(range(1, len(table) + 1), table.tolist()), cap))
        best: BatchSizes = plan_fixed_total(profiles, self._total)
        if gain is not None:
            present = max(profile.time(size) for profile, size in zip(profiles, self._sizes, strict=True))
            if best.step_seconds >= present * (1 - gain):
                return None
        if best.batch_sizes == self._sizes:
            return None
        decision = Decision(
            step=self._steps - 1,
            old=tuple(trained),
            new=tuple(best.batch_sizes),
            measured_seconds=tuple(curve.seconds + extra for curve, extra in zip(self._curves, fixed, strict=True)),
            predicted_seconds=tuple(best.rank_seconds),
            reason=reason,
        )
        self._sizes = list(best.batch_sizes)
        self._since_look = 0
        self.decisions.append(decision)
        return decision

    def _caps(self, limits: Sequence[int | None]) -> list[int]:
        """The largest size of each rank in samples: its memory limit, and the growth that one decision may make."""
        most = self._total - len(self._sizes) + 1
        fitting = [most if limit is None else min(limit, most) for limit in limits]
        reachable = []
        for cap, curve, profile in zip(fitting, self._curves, self._profiles, strict=True):
            growth = _LARGEST_GROWTH * curve.largest
            if profile is not None:
                growth = max(profile.max_micro_batch_size, curve.largest)
            reachable.append(min(cap, growth))
        # Limits are given up in this order where they leave no room for the total: growth first, memory last.
        if sum(reachable) >= self._total:
            return reachable
        if sum(fitting) >= self._total:
            return fitting
        return [max(cap, size) for cap, size in zip(fitting, self._sizes, strict=True)]

    def _describe_change(self, rank: int, factor: float) -> str:
        before = self._slowdowns[rank]
        now = self._slowdowns[rank] = before * factor
        if factor < 1 and before > 1 + _RECOVERED and abs(now - 1) <= _RECOVERED:
            return f"rank {rank} recovered"
        if factor < 1:
            return f"rank {rank} became {1 / factor:.1f}x faster"
        return f"rank {rank} became {factor:.1f}x slower"

    def _checked_step(
        self,
        batch_sizes: Sequence[int],
        compute_seconds: Sequence[float],
        fixed_seconds: Sequence[float],
        limits: Sequence[int | None],
    ) -> list[int]:
        world = len(self._sizes)
        lengths = [len(values) for values in (batch_sizes, compute_seconds, fixed_seconds, limits)]
        if lengths != [world] * 4:
            raise ValueError(f"found {lengths} sizes, compute times, fixed times and limits, expected {world} of each")
        sizes = checked_counts(batch_sizes, "batch_sizes")
        if sum(sizes) > self._total:
            raise ValueError(
                f"found batch_sizes {sizes} with {sum(sizes)} samples, expected at most the total of {self._total}:"
                " give the micro-batches of one global batch"
            )
        full = sum(sizes) == self._total
        for rank in range(world):
            if full and sizes[rank] < 1:
                raise ValueError(f"found a batch of {sizes[rank]} samples on rank {rank}, expected at least 1")
            if not 0 < compute_seconds[rank] < math.inf:
                raise ValueError(
                    f"rank {rank} took {compute_seconds[rank]} s for forward and backward, expected a positive and"
                    " finite time: check its clock"
                )
            if not 0 <= fixed_seconds[rank] < math.inf:
                raise ValueError(
                    f"rank {rank} took {fixed_seconds[rank]} s besides forward and backward, expected a finite time of"
                    " at least 0: check its clock"
                )
            limit = limits[rank]
            if limit is not None and checked_count(limit, f"limits, rank {rank}") < 1:
                raise ValueError(f"rank {rank} has memory for {limit} samples, expected at least 1: it cannot train")
        return sizes

    def state_dict(self) -> dict[str, Any]:
        """JSON values from which `load_state_dict` continues."""
        return {
            "version": 1,
            "batch_sizes": list(self._sizes),
            "steps": self._steps,
            "quick_looks": self._quick_looks,
            "since_look": self._since_look,
            "fixed_seconds": [list(seconds) for seconds in self._fixed],
            "slowdowns": list(self._slowdowns),
            "curves": [curve.state_dict() for curve in self._curves],
            "decisions": [decision.to_dict() for decision in self.decisions],
        }

    def learned(self) -> list[dict[str, Any]]:
        """What was learned of each rank, as JSON values that `go_on_with` takes, also for other ranks beside it."""
        pairs = zip(self._curves, self._fixed, strict=True)
        return [{"curve": curve.state_dict(), "fixed_seconds": list(fixed)} for curve, fixed in pairs]

    def go_on_with(self, learned: Sequence[Mapping[str, Any] | None]) -> None:
        """Begins with what was learned of some of the ranks in another set of ranks, and with the sizes that follow.

        Ranks of which nothing is known are taken to be as fast as the others on average, until they have trained.

        Args:
            learned: one entry a rank; None: nothing is known of it.

        Raises:
            ValueError: an entry is malformed. Nothing has changed then.
        """
        if len(learned) != len(self._sizes):
            raise ValueError(f"found {len(learned)} entries of ranks, expected {len(self._sizes)}, one a rank")
        curves, fixed = [], []
        for profile, entry in zip(self._profiles, learned, strict=True):
            curve = LearnedCurve(profile)
            if entry is not None:
                require_keys(entry, ("curve", "fixed_seconds"))
                curve.load_state_dict(entry["curve"])
            curves.append(curve)
            fixed.append([] if entry is None else checked_times(entry["fixed_seconds"], "fixed_seconds"))
        self._curves, self._fixed = curves, fixed
        if not any(curve.known for curve in curves):
            return
        most = self._total - len(self._sizes) + 1
        tables = [
            curve.table(most) + (median_low(seconds) if seconds else 0.0) if curve.known else None
            for curve, seconds in zip(curves, fixed, strict=True)
        ]
        known = [table for table in tables if table is not None]
        average = sum(known) / len(known)
        # Each step may be the first of a rank in this set: nobody begins far beyond what is known to fit its memory.
        largest = max(curve.largest for curve in curves)
        fitting = [most if profile is None else min(most, profile.max_micro_batch_size) for profile in self._profiles]
        caps = [
            min(cap, _LARGEST_GROWTH * (curve.largest or largest)) if profile is None else cap
            for cap, curve, profile in zip(fitting, curves, self._profiles, strict=True)
        ]
        # As in `_caps`: growth is given up first, memory last.
        if sum(caps) < self._total:
            caps = fitting if sum(fitting) >= self._total else [most] * len(caps)
        profiles = [
            RankProfile(TimeCurve(range(1, most + 1), (average if table is None else table).tolist()), cap)
            for table, cap in zip(tables, caps, strict=True)
        ]
        self._sizes = list(plan_fixed_total(profiles, self._total).batch_sizes)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where `state_dict` was taken, with the same decisions from the same steps.

        Raises:
            ValueError: it is malformed, or of another number of ranks or samples. Nothing has changed then.
        """
        require_keys(state, self.state_dict())
        if state["version"] != 1:
            raise ValueError(f"found version {state['version']!r:.60}, expected 1: it is of another release")
        sizes = checked_counts(state["batch_sizes"], "batch_sizes")
        if len(sizes) != len(self._sizes) or sum(sizes) != self._total or min(sizes) < 1:
            raise ValueError(
                f"found a state of batch sizes {sizes}, {sum(sizes)} samples on {len(sizes)} ranks, expected"
                f" {self._total} samples on {len(self._sizes)} ranks: start the automatic mode anew for this run"
            )
        for key in ("fixed_seconds", "slowdowns", "curves", "decisions"):
            if not isinstance(state[key], list) or (key != "decisions" and len(state[key]) != len(sizes)):
                raise ValueError(f"found {key} {state[key]!r:.60}, expected a list of one entry a rank")
        counts = [checked_count(state[key], key) for key in ("steps", "quick_looks", "since_look")]
        fixed = [checked_times(seconds, "fixed_seconds") for seconds in state["fixed_seconds"]]
        slowdowns = checked_positive(state["slowdowns"], "slowdowns")
        curves = [LearnedCurve(profile) for profile in self._profiles]
        for curve, learned in zip(curves, state["curves"], strict=True):
            curve.load_state_dict(learned)
        decisions = [Decision.from_dict(document) for document in state["decisions"]]
        self._sizes, self._fixed, self._slowdowns = sizes, fixed, slowdowns
        self._steps, self._quick_looks, self._since_look = counts
        self._curves, self.decisions = curves, decisions
