# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The results of a benchmark: the contents of ``results.json`` as checked records, in seconds, bytes and samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelerate_lshdp.documents.placement import ModelPlacement
from accelerate_lshdp.documents.records import (
    BOOLEAN,
    LARGEST_COUNT,
    OBJECT,
    REAL,
    STRING,
    Record,
    Value,
    choice,
    entry,
    integer,
    name,
    number,
    optional,
    record,
    several,
)
from accelerate_lshdp.documents.value_checks import PlanError, at_key, describe, require_name


FULL_PRECISION = "fp32"
EVENT_NAMES = ("data", "forward", "backward", "wait", "optimizer")
_NAME = name("a name")
_COUNT = integer(most=LARGEST_COUNT)
# Zero seconds or samples would divide by zero in tables and pictures; zero waits and errors are fine.
_SECONDS, _POSITIVE = optional(number()), optional(number(positive=True))
_LIST = several(Value(lambda item, _: item))
_FIGURES, _COUNTS = optional(several(number())), optional(several(_COUNT))


class ResultsError(ValueError):
    """Results that cannot be read or are malformed; the message says where."""


# Figures that every case has that did not fail; the others may be null, as not every process can measure them.
_ALWAYS_MEASURED = ("step_seconds", "samples_per_second", "spread", "round_seconds")
_MEASURED_SOMEWHERE = ("idle_fraction", "predicted_seconds", "slowdown")
_PER_RANK = ("batch_sizes", "compute_seconds", "wait_seconds", "optimizer_seconds", "peak_rank_bytes", "timeline")
_PER_NODE = ("bytes_between_nodes", "formula_bytes", "bytes_inside_nodes", "peak_pss_bytes")


@dataclass(frozen=True, slots=True)
class Event(Record):
    """One activity of a rank in a step.

    Args:
        name: ``data``, ``forward``, ``backward``, ``wait`` or ``optimizer``.
        begin: seconds, on a clock that all ranks share.
        end: seconds, on the same clock.
    """

    name: str = entry(choice(EVENT_NAMES))
    begin: float = entry(REAL)
    end: float = entry(REAL)

    def _check_together(self) -> None:
        if self.end < self.begin:
            raise PlanError(f"found {self.end}, expected at least {self.begin}, where the event begins.", path="end")


@dataclass(frozen=True, slots=True)
class LossPoint(Record):
    """One loss of a curve.

    Args:
        seconds: wall time since the case's first step.
        step: optimizer steps done.
        loss: None where it was not a finite number.
    """

    seconds: float = entry(number())
    step: int = entry(_COUNT)
    loss: float | None = entry(optional(REAL))


def _read_losses(value: Any, path: str) -> tuple[LossPoint, ...]:
    """The curve of a case: a list of [seconds, step, loss]; null where the case failed."""
    kinds, points = (number(), _COUNT, optional(REAL)), []
    for index, point in enumerate(_LIST.accept([] if value is None else value, path)):
        at = f"{path}[{index}]"
        if not isinstance(point, list) or len(point) != 3:
            raise PlanError(f"found {describe(point)}, expected [seconds, step, loss].", path=at)
        parts = [kinds[place].accept(part, f"{at}[{place}]") for place, part in enumerate(point)]
        points.append(LossPoint(*parts))
    return tuple(points)


@dataclass(frozen=True, slots=True)
class Case(Record):
    """One strategy with one communication format on one cluster, model and network.

    Figures are None where they were not measured. If `error` is set, the case failed and all of them are None.

    Args:
        bits_per_second: of every node's link, as it was described; None: the nodes are real.
        label: the strategy and its format as people read it, ``lshdp int8``.
        is_peer: whether it uses plain PyTorch and nothing of accelerate_lshdp, for comparison.
        nodes: number of ranks of each node.
        placement: of the model's units, as in a plan; None: all are kept as the strategy says.
        memory_share: memory that the rank in most need counts for parameters, gradients, optimizer states and what is
            gathered of them, as a share of what it counts under ``lsdp``; None for plain PyTorch.
        batch_sizes: one a rank; None if the case failed before they were known.
        step_seconds: the median step.
        spread: median absolute deviation of the steps / their median.
        round_seconds: the median of every interleaved round.
        compute_seconds: forward and backward of a step, one a rank; wait_seconds and optimizer_seconds likewise.
        bytes_between_nodes: measured bytes that each node sent to others in a step; formula_bytes: by the formula.
        bytes_inside_nodes: bytes that the ranks of each node sent to one another in a step.
        peak_pss_bytes: the proportional set size of all processes of each node, at its peak.
        peak_rank_bytes: the peak memory of every rank.
        predicted_seconds: seconds of the step by the cost model.
        slowdown: seconds of a micro-batch during the case divided by the profiled ones, the mean of the ranks.
        timeline: the events of one step, one tuple a rank.
    """

    cluster: str = entry(_NAME)
    model: str = entry(_NAME)
    parameters: int = entry(_COUNT)
    network: str = entry(_NAME)
    bits_per_second: float | None = entry(_POSITIVE)
    strategy: str = entry(_NAME)
    communication_dtype: str = entry(_NAME)
    label: str = entry(_NAME)
    is_peer: bool = entry(BOOLEAN)
    nodes: tuple[int, ...] = entry(several(integer(least=1, most=LARGEST_COUNT)))
    total_batch_size: int = entry(integer(least=1, most=LARGEST_COUNT))
    batch_sizes: tuple[int, ...] | None = entry(_COUNTS)
    step_seconds: float | None = entry(_POSITIVE)
    spread: float | None = entry(_SECONDS)
    round_seconds: tuple[float, ...] | None = entry(_FIGURES)
    samples_per_second: float | None = entry(_POSITIVE)
    compute_seconds: tuple[float, ...] | None = entry(_FIGURES)
    wait_seconds: tuple[float, ...] | None = entry(_FIGURES)
    optimizer_seconds: tuple[float, ...] | None = entry(_FIGURES)
    idle_fraction: float | None = entry(_SECONDS)
    bytes_between_nodes: tuple[float, ...] | None = entry(_FIGURES)
    formula_bytes: tuple[float, ...] | None = entry(_FIGURES)
    bytes_inside_nodes: tuple[float, ...] | None = entry(_FIGURES)
    peak_pss_bytes: tuple[int, ...] | None = entry(_COUNTS)
    peak_rank_bytes: tuple[int, ...] | None = entry(_COUNTS)
    predicted_seconds: float | None = entry(_SECONDS)
    slowdown: float | None = entry(_SECONDS)
    losses: tuple[LossPoint, ...] = entry(Value(lambda value, path: tuple(value), _read_losses))
    timeline: tuple[tuple[Event, ...], ...] | None = entry(optional(several(several(record(Event)))))
    error: str | None = entry(optional(name("what went wrong, or null")))
    # Results of earlier versions do not have them.
    placement: ModelPlacement | None = entry(optional(record(ModelPlacement)), default=None)
    memory_share: float | None = entry(_POSITIVE, default=None)

    def _check_together(self) -> None:
        if self.error is not None:
            self._check_failed()
        else:
            for field in ("batch_sizes", *_ALWAYS_MEASURED):
                if getattr(self, field) is None:
                    raise PlanError(
                        'found null, expected a figure. A case without one says why under "error".', path=field
                    )
        # Lists are as long as there are ranks and nodes, so that every picture may zip them.
        for length, what, fields in ((sum(self.nodes), "rank", _PER_RANK), (len(self.nodes), "node", _PER_NODE)):
            for field in fields:
                found = getattr(self, field)
                if found is not None and len(found) != length:
                    raise PlanError(f"found {len(found)} entries, expected {length}, one a {what}.", path=field)
        # Samples per second are computed from the total, so sizes with another sum would make them wrong.
        if self.batch_sizes is not None and sum(self.batch_sizes) != self.total_batch_size:
            raise PlanError(
                f"found sizes that sum to {sum(self.batch_sizes)}, expected total_batch_size,"
                f" {self.total_batch_size}.",
                path="batch_sizes",
            )

    def _check_failed(self) -> None:
        """Checks that a case with an error has no figures, which readers might take for a result."""
        figures = {*_ALWAYS_MEASURED, *_MEASURED_SOMEWHERE, *_PER_RANK, *_PER_NODE, "losses"}
        for field in sorted(figures - {"batch_sizes"}):
            found = getattr(self, field)
            if found not in (None, ()):
                found = list(found) if isinstance(found, tuple) else found
                raise PlanError(
                    f"found {describe(found)}, expected null, as the case has an error. Remove one of the two.",
                    path=field,
                )
            if field != "losses":  # empty lists are as good as null
                object.__setattr__(self, field, None)

    @property
    def is_lossy(self) -> bool:
        """Whether gradients lose precision on the wire."""
        return self.communication_dtype != FULL_PRECISION

    @property
    def prediction_error(self) -> float | None:
        """The relative error predicted / measured - 1 of the step seconds; None unless there are both."""
        if self.predicted_seconds is None or self.step_seconds is None:
            return None
        return self.predicted_seconds / self.step_seconds - 1

    def time_saved(self, other: Case) -> float | None:
        """The fraction of `other`'s step that this case saves, negative if it takes longer; None unless both ran."""
        if self.step_seconds is None or other.step_seconds is None:
            return None
        return 1 - self.step_seconds / other.step_seconds


@dataclass(frozen=True, slots=True)
class Limit(Record):
    """A limit of the benchmark's configuration and its outcome.

    Args:
        name: description of what is limited.
        value: the measured value; None: it could not be measured.
        limit: the largest allowed value.
        holds: whether the limit holds.
    """

    name: str = entry(name("what has to hold"))
    # Null where the case that it is about has failed.
    value: float | None = entry(optional(REAL))
    limit: float = entry(REAL)
    holds: bool = entry(BOOLEAN)

    def _check_together(self) -> None:
        if self.value is None and self.holds:
            raise PlanError("found null for a limit that holds, expected what was measured.", path="value")

    @property
    def verdict(self) -> str:
        """The outcome as a word: ``holds``, ``BROKEN``, or ``NOT SHOWN`` where it could not be measured."""
        return "holds" if self.holds else "NOT SHOWN" if self.value is None else "BROKEN"


@dataclass(frozen=True, slots=True)
class Machine(Record):
    """The machine of a benchmark: processor, number of cores, bytes of memory, kernel version."""

    cpu: str = entry(STRING)
    cores: int = entry(integer(least=1, most=LARGEST_COUNT))
    memory_bytes: int = entry(integer(least=1, most=LARGEST_COUNT))
    kernel: str = entry(STRING)


def _accept_versions(value: Any, path: str) -> dict[str, str]:
    for library, version in OBJECT.accept(value, path).items():
        require_name(version, at_key(path, library), "a version")
    return dict(value)


@dataclass(frozen=True, slots=True)
class Results(Record):
    """One invocation of the benchmark.

    Args:
        created: time of the benchmark, in ISO form.
        command: the command that reproduces it.
        versions: versions of Python and libraries, by name.
        config: the configuration as it was read.
        wall_seconds: seconds of the whole benchmark.
    """

    created: str = entry(name("the time of the benchmark"))
    command: str = entry(STRING)
    machine: Machine = entry(record(Machine))
    versions: Mapping[str, str] = entry(Value(_accept_versions))
    config: Mapping[str, Any] = entry(OBJECT)
    wall_seconds: float = entry(number())
    cases: tuple[Case, ...] = entry(several(record(Case)))
    limits: tuple[Limit, ...] = entry(several(record(Limit)))

    def _check_together(self) -> None:
        """Checks that no case stands twice, and that a cluster has the same nodes in all of its cases."""
        seen, nodes = set(), {}
        for index, case in enumerate(self.cases):
            place = (case.cluster, case.model, case.network, case.label)
            if place in seen:
                raise PlanError(
                    f"found {describe(case.label)} twice for one cluster, model and network, expected it once.",
                    path=f"cases[{index}].label",
                )
            seen.add(place)
            if nodes.setdefault(case.cluster, case.nodes) != case.nodes:
                raise PlanError(
                    f"found {list(case.nodes)}, expected {list(nodes[case.cluster])} as in other cases of the cluster"
                    f" {describe(case.cluster)}.",
                    path=f"cases[{index}].nodes",
                )
