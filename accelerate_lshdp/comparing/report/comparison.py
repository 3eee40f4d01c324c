# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Groups of comparable cases (one cluster and one model), and figures that compare them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from accelerate_lshdp.comparing.report.results import Case, Results


@dataclass(frozen=True, slots=True)
class Group:
    """The cases of one cluster and one model, in the order in which they were measured."""

    cluster: str
    model: str
    cases: tuple[Case, ...]

    @property
    def title(self) -> str:
        """The heading of the group."""
        return f"{self.model} on {self.cluster}"

    @property
    def networks(self) -> tuple[str, ...]:
        """The networks, in order of appearance."""
        return _distinct(case.network for case in self.cases)

    @property
    def labels(self) -> tuple[str, ...]:
        """The strategies with their formats, in order of appearance."""
        return _distinct(case.label for case in self.cases)

    def on(self, network: str) -> tuple[Case, ...]:
        """The cases of one network."""
        return tuple(case for case in self.cases if case.network == network)

    def peers(self, network: str) -> tuple[Case, ...]:
        """The cases of one network that use plain PyTorch only."""
        return tuple(case for case in self.on(network) if case.is_peer)

    def fastest(self, network: str) -> Case | None:
        """The case of one network with the shortest step, peers left aside; None if there is none."""
        own = [case for case in self.on(network) if not case.is_peer and case.step_seconds is not None]
        return min(own, key=lambda case: case.step_seconds, default=None)


def group_cases(results: Results) -> tuple[Group, ...]:
    """The groups, in order of appearance."""
    places = _distinct((case.cluster, case.model) for case in results.cases)
    return tuple(
        Group(*place, tuple(case for case in results.cases if (case.cluster, case.model) == place)) for place in places
    )


def own_speeds(group: Group) -> tuple[float, ...] | None:
    """Samples per second of each rank when it only computes; None where no case measured it.

    The largest batch size / compute seconds (forward and backward) over all cases of the group.
    """
    # The largest, because sending gradients during the backward prolongs the compute seconds of some cases.
    ranks = range(sum(group.cases[0].nodes))
    speeds = [
        max(
            (
                case.batch_sizes[rank] / case.compute_seconds[rank]
                for case in group.cases
                if case.compute_seconds is not None and case.batch_sizes is not None and case.compute_seconds[rank] > 0
            ),
            default=0.0,
        )
        for rank in ranks
    ]
    return tuple(speeds) if all(speeds) else None


def scaling_efficiency(case: Case, speeds: tuple[float, ...]) -> float | None:
    """The case's samples per second divided by the sum of `own_speeds`; None if the case failed."""
    return None if case.samples_per_second is None else case.samples_per_second / sum(speeds)


def largest_loss_difference(cases: Iterable[Case]) -> float | None:
    """The largest relative difference of losses at the same step, by the smaller one; None with fewer than two."""
    by_step: dict[int, list[float]] = {}
    for case in cases:
        for point in case.losses:
            if point.loss is not None:
                by_step.setdefault(point.step, []).append(point.loss)
    differences = [
        (max(losses) - min(losses)) / min(losses) for losses in by_step.values() if len(losses) > 1 and min(losses) > 0
    ]
    return max(differences, default=None)


def describe_fastest(group: Group, network: str) -> str | None:
    """One sentence about the strategy with the shortest step of a network, compared with plain PyTorch; or None."""
    fastest = group.fastest(network)
    if fastest is None:
        return None
    sentence = f"{network}: {fastest.label} has the shortest step, {fastest.step_seconds:.3f} s"
    savings = [(peer.label, fastest.time_saved(peer)) for peer in group.peers(network)]
    compared = [
        f"{abs(saved):.0%} {'less' if saved >= 0 else 'more'} than {label}"
        for label, saved in savings
        if saved is not None
    ]
    return f"{sentence} ({', '.join(compared)})." if compared else f"{sentence}."


def _distinct(values: Iterable) -> tuple:
    # A dict keeps the order of insertion, which a set does not.
    return tuple(dict.fromkeys(values))
