# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Verification of maximum throughput: no batch sizes train more samples per second than a certificate's choice.

Let N(T) be the most samples that the ranks can finish within T seconds, c the seconds of communication, and R the
samples a second of the choice. The claim is N(T) <= R * (T + c) for all T. N never falls, so times a < b with
N(T) <= R * (a + c) for all T < b settle every T from a to b. A certificate names times t_0 < t_1 < ..., each of which
settles what lies up to the next one. Before t_0 some rank can finish nothing, and R * (t_last + c) is not less than
all that the ranks can ever do. N is evaluated here, just before each of the times. Where the total had to be a
multiple of a number, N is what the ranks can finish, rounded down to one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

from accelerate_lshdp.planning.proofs.certificate_fields import (
    CertificateError,
    Claim,
    read_most_steps,
    read_multiple,
    read_seconds,
    read_times,
)
from accelerate_lshdp.planning.proofs.exact_times import ExactRank


def check_throughput(
    ranks: Sequence[ExactRank],
    claim: Claim,
    seconds: Fraction,
    certificate: Mapping[str, Any],
    rounding: Fraction,
) -> None:
    """Checks the step time and the bound.

    Args:
        ranks: their exact step times.
        claim: the problem and the choice, which keeps all limits that are in it.
        seconds: when the slowest rank has finished the choice.
        certificate: JSON values, of which the fields of this kind are read here.
        rounding: relative error that seconds and samples per second may have.

    Raises:
        CertificateError: a value is malformed or wrong.
    """
    communication = Fraction(read_seconds(certificate, "communication_seconds"))
    most_steps = read_most_steps(certificate, "max_accumulation_steps", claim.allow_accumulation)
    times = [Fraction(time) for time in read_times(certificate, "check_seconds")]
    multiple = read_multiple(certificate, claim.allow_accumulation)
    if claim.total % multiple:
        raise CertificateError(
            f"found total_batch_size {claim.total}, expected a multiple of {multiple}, as it claims"
        )
    step = seconds + communication
    if abs(step - Fraction(claim.step_seconds)) > rounding * step:
        raise CertificateError(
            f"the slowest rank and the communication take {float(step)} s, expected the claimed step_seconds"
            f" {claim.step_seconds}"
        )
    for rank, (_, steps) in enumerate(claim.micro_batches):
        if steps > most_steps:
            raise CertificateError(f"rank {rank} has {steps} micro-batches, expected at most {most_steps}")
    rate = claim.total / step * (1 + rounding)
    greatest = most_steps * sum(rank.largest for rank in ranks) // multiple * multiple
    if greatest > rate * (times[-1] + communication):
        raise CertificateError(
            f"after {float(times[-1])} s, the last of check_seconds, the ranks can finish {greatest} samples, expected"
            f" no more than {float(rate * (times[-1] + communication))}: more samples a second are not excluded"
        )
    samples_before = _SamplesBefore(ranks, claim.groups, most_steps, multiple)
    if samples_before(times[0] * (1 - rounding)) is not None:
        raise CertificateError(
            f"all ranks finish something in less than {float(times[0])} s, the first of check_seconds, expected that"
            " some cannot: the bound does not hold"
        )
    for time, following in pairwise(times):
        samples = samples_before(following * (1 - rounding))
        if samples is not None and samples > rate * (time + communication):
            raise CertificateError(
                f"in less than {float(following)} s the ranks finish {samples} samples, expected no more than"
                f" {float(rate * (time + communication))}: more samples a second are not excluded"
            )


class _SamplesBefore:
    """N just before a time: the largest number of samples that the ranks finish.

    None if some rank cannot finish a sample, or all of them not enough for the smallest total. Must be called with
    increasing times: sizes that were finished before one time are the lower bounds for the next.
    """

    def __init__(
        self, ranks: Sequence[ExactRank], groups: Sequence[Sequence[int]], most_steps: int, multiple: int
    ) -> None:
        self._ranks, self._groups, self._most_steps, self._multiple = ranks, groups, most_steps, multiple
        # By rank and number of micro-batches, the largest ones that were finished so far.
        self._largest: dict[tuple[int, int], int] = {}

    def __call__(self, time: Fraction) -> int | None:
        limits = [rank.units_before(time) for rank in self._ranks]
        numbers = [self._most_of(group, limits) for group in self._groups]
        samples = sum(numbers) // self._multiple * self._multiple
        return samples if all(numbers) and samples >= len(self._ranks) else None

    def _most_of(self, group: Sequence[int], limits: Sequence[int]) -> int:
        sizes = [self._ranks[rank].largest for rank in group]
        best = 0
        for steps in range(1, self._most_steps + 1):
            for place, rank in enumerate(group):
                # More micro-batches are never larger ones.
                known = self._largest.get((rank, steps), 0)
                sizes[place] = self._ranks[rank].largest_below(limits[rank], steps, known, sizes[place])
                self._largest[rank, steps] = sizes[place]
            if 0 in sizes:
                break
            best = max(best, steps * sum(sizes))
        return best
