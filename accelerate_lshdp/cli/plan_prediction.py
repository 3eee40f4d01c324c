# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`predict`: seconds, idle time and memory of every rank for given batch sizes, from a profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accelerate_lshdp.planning import RankProfile
from accelerate_lshdp.planning.cuts.step_time import step_times


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction of one step with given batch sizes.

    Args:
        micro_batches: (micro-batch size, accumulation steps) of each rank.
        compute_seconds: seconds of forward and backward of each rank's share, prolonged by sending gradients.
        busy_seconds: `compute_seconds` and the seconds of the optimizer step.
        step_seconds: seconds of the whole step, with optimizer and communication.
        memory_bytes: peak bytes of each rank; None where memory was not measured.
    """

    micro_batches: list[tuple[int, int]]
    compute_seconds: list[float]
    busy_seconds: list[float]
    step_seconds: float
    memory_bytes: list[int | None]

    @property
    def batch_sizes(self) -> list[int]:
        """Samples of each rank in a global batch."""
        return [size * steps for size, steps in self.micro_batches]

    @property
    def samples_per_second(self) -> float:
        """Throughput of all ranks."""
        return sum(self.batch_sizes) / self.step_seconds

    @property
    def idle_fraction(self) -> float:
        """1 - mean / maximum of the ranks' compute seconds, as in a run's `step_statistics`."""
        return 1 - sum(self.compute_seconds) / len(self.compute_seconds) / max(self.compute_seconds)

    @property
    def waits(self) -> list[float]:
        """The fraction of the slowest rank's busy seconds in which each rank waits."""
        return [1 - seconds / max(self.busy_seconds) for seconds in self.busy_seconds]


def predict(
    profiles: Sequence[RankProfile],
    micro_batches: Sequence[tuple[int, int]],
    bucket_seconds: Sequence[float] | None,
    communication_seconds: float,
) -> Prediction:
    """Predicts a step of the ranks with given micro-batches.

    Args:
        profiles: one for each rank.
        micro_batches: (micro-batch size, accumulation steps) of each rank, within its limits.
        bucket_seconds: seconds of each bucket of gradients that travels during the backward; None: none does.
        communication_seconds: seconds of communication after the backward.
    """
    times = step_times(profiles, bucket_seconds)
    finish = [time.finish(size, steps) for time, (size, steps) in zip(times, micro_batches, strict=True)]
    compute = [time.compute(size, steps) for time, (size, steps) in zip(times, micro_batches, strict=True)]
    return Prediction(
        micro_batches=list(micro_batches),
        compute_seconds=compute,
        busy_seconds=[seconds + profile.fixed_seconds for seconds, profile in zip(compute, profiles, strict=True)],
        step_seconds=max(finish) + communication_seconds,
        memory_bytes=[
            None if profile.memory is None else round(profile.memory(size))
            for profile, (size, _) in zip(profiles, micro_batches, strict=True)
        ],
    )


def split_equally(
    profiles: Sequence[RankProfile], total_batch_size: int, *, allow_accumulation: bool
) -> list[tuple[int, int]] | None:
    """(micro-batch size, accumulation steps) of each rank for equal shares, in as few micro-batches as possible.

    Shares differ by one sample where the total cannot be divided, as the first ranks take the rest.

    Returns:
        None if there is no sample for some rank, or no number of equal micro-batches that fits on all ranks.
    """
    share, rest = divmod(total_batch_size, len(profiles))
    if share == 0:
        return None
    sizes = [share + 1] * rest + [share] * (len(profiles) - rest)
    # More micro-batches than samples of the smallest share would leave some empty.
    for steps in range(1, (share if allow_accumulation else 1) + 1):
        parts = [size // steps for size in sizes]
        fits = all(part <= profile.largest_micro_batch for part, profile in zip(parts, profiles, strict=True))
        if fits and all(size % steps == 0 for size in sizes):
            return [(part, steps) for part in parts]
    return None
