# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Whether all ranks have trained the same: what scripts do on one rank only is told on all, before a wrong step.

A rank that leaves out a batch, an ``optimizer.step()`` or a ``backward``, or repeats one, would sum gradients of
different global batches, or change its parameters alone. Every step's exchange carries where each rank is, so all of
them see the difference at the same backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from accelerate_lshdp.accelerator.accumulation_windows import INSIDE_WINDOW, LEFT_OPEN, LEFT_OUT
from accelerate_lshdp.accelerator.held_gradients import CHANGED, DROPPED
from accelerate_lshdp.accelerator.losses.finding import ANOTHER_LOSS
from accelerate_lshdp.data.batch_tracker import DIFFERENT_SHARES, UNRECOGNISED
from accelerate_lshdp.data.place import MicroBatchPlace
from accelerate_lshdp.runtime.step_exchange import RankReport


FAILED = "failed in its backward"
_AFTER_FAILURE = "So the sums of gradients are not those of the step, and the run has to end; its own output says why"

#: What a rank may have found, told to the others by its number.
PROBLEMS = (UNRECOGNISED, DIFFERENT_SHARES, INSIDE_WINDOW, LEFT_OUT, LEFT_OPEN, ANOTHER_LOSS, FAILED, DROPPED, CHANGED)

#: Hashes have 48 bits, of the 64 in which they travel.
_MODULUS = 2**48
_MULTIPLIER = 0x5DEECE66D

NOT_IN_STEP = (
    "A rank has left out, or repeated, a batch, a backward or an optimizer step that others have not: after an "
    "exception that was caught, or a condition that holds on one rank only. Let all ranks do the same (ask what the "
    "others found by accelerator.reduce), and go on from the last checkpoint"
)
_OTHER_SAMPLES = (
    "The order comes from something that ranks do differently, such as a generator that other code on them draws from "
    "as well: give the sampler a generator of its own, with a seed"
)


class RankStep:
    """What this rank has trained since ranks told each other last."""

    def __init__(self) -> None:
        self.optimizer_steps = 0
        self._global_batch = -1
        self._samples_hash = 0

    def trained(self, places: Iterable[MicroBatchPlace]) -> None:
        """Takes in batches whose global batches end with them."""
        for place in places:
            self._global_batch = place.global_batch
            mixed = self._samples_hash * _MULTIPLIER + place.samples_hash + place.epoch
            self._samples_hash = mixed % _MODULUS if place.samples_hash else self._samples_hash

    def complete(self, report: RankReport, problem: str | None) -> RankReport:
        """The report with where this rank is; what was trained is told once.

        Args:
            report: with the seconds.
            problem: one of `PROBLEMS`, or None.
        """
        completed = report._replace(
            global_batch=self._global_batch,
            optimizer_steps=self.optimizer_steps,
            samples_hash=self._samples_hash,
            problem=0 if problem is None else 1 + PROBLEMS.index(problem),
        )
        self._global_batch, self._samples_hash = -1, 0
        return completed


def require_same_step(reports: Sequence[RankReport], name: Callable[[int], str] = lambda rank: f"rank {rank}") -> None:
    """Checks what all ranks have told for a step, the same on all of them.

    Args:
        reports: one a rank.
        name: what to call a rank.

    Raises:
        RuntimeError: on all ranks, if one of them found a problem, or they are not at the same place.
    """
    found: dict[str, list[str]] = {}
    for rank, report in enumerate(reports):
        if report.problem:
            found.setdefault(PROBLEMS[report.problem - 1], []).append(name(rank))
    if found:
        sentences = (
            f"the backward of {' and '.join(ranks)} failed" if text is FAILED else f"{' and '.join(ranks)} {text}"
            for text, ranks in found.items()
        )
        raise RuntimeError("; ".join(sentences) + (f". {_AFTER_FAILURE}" if FAILED in found else ""))
    places = [(report.global_batch, report.optimizer_steps, report.samples_hash) for report in reports]
    if len(set(places)) == 1:
        return
    if len({samples for *_, samples in places}) > 1 and len({place[:2] for place in places}) == 1:
        what, why = (
            f"different samples in global batch {places[0][0]} (hashes {[samples for *_, samples in places]})",
            _OTHER_SAMPLES,
        )
    else:
        what, why = (
            ", ".join(
                f"rank {rank} at global batch {batch} after {steps} optimizer steps"
                for rank, (batch, steps, _) in enumerate(places)
            ),
            NOT_IN_STEP,
        )
    raise RuntimeError(f"the ranks are not in step in this backward: found {what}; expected the same on all. {why}")
