# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The results of a benchmark: the contents of ``results.json`` as immutable values, in seconds, bytes and samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


FULL_PRECISION = "fp32"


class ResultsError(ValueError):
    """Results that cannot be read or are malformed; the message says where."""


@dataclass(frozen=True, slots=True)
class Event:
    """One activity of a rank in a step.

    Args:
        name: ``data``, ``forward``, ``backward``, ``wait`` or ``optimizer``.
        begin: seconds, on a clock that all ranks share.
        end: seconds, on the same clock.
    """

    name: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class LossPoint:
    """One loss of a curve.

    Args:
        seconds: wall time since the case's first step.
        step: optimizer steps done.
        loss: None where it was not a finite number.
    """

    seconds: float
    step: int
    loss: float | None


@dataclass(frozen=True, slots=True)
class Case:
    """One strategy with one communication format on one cluster, model and network.

    Figures are None where they were not measured. If `error` is set, the case failed and all of them are None.

    Args:
        bits_per_second: of every node's link, as it was described; None: the nodes are real.
        label: the strategy and its format as people read it, ``lshdp int8``.
        is_peer: whether it uses plain PyTorch and nothing of accelerate_lshdp, for comparison.
        nodes: number of ranks of each node.
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

    cluster: str
    model: str
    parameters: int
    network: str
    bits_per_second: float | None
    strategy: str
    communication_dtype: str
    label: str
    is_peer: bool
    nodes: tuple[int, ...]
    total_batch_size: int
    batch_sizes: tuple[int, ...] | None
    step_seconds: float | None
    spread: float | None
    round_seconds: tuple[float, ...] | None
    samples_per_second: float | None
    compute_seconds: tuple[float, ...] | None
    wait_seconds: tuple[float, ...] | None
    optimizer_seconds: tuple[float, ...] | None
    idle_fraction: float | None
    bytes_between_nodes: tuple[float, ...] | None
    formula_bytes: tuple[float, ...] | None
    bytes_inside_nodes: tuple[float, ...] | None
    peak_pss_bytes: tuple[int, ...] | None
    peak_rank_bytes: tuple[int, ...] | None
    predicted_seconds: float | None
    slowdown: float | None
    losses: tuple[LossPoint, ...]
    timeline: tuple[tuple[Event, ...], ...] | None
    error: str | None

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
class Limit:
    """A limit of the benchmark's configuration and its outcome.

    Args:
        name: description of what is limited.
        value: the measured value; None: it could not be measured.
        limit: the largest allowed value.
        holds: whether the limit holds.
    """

    name: str
    value: float | None
    limit: float
    holds: bool

    @property
    def verdict(self) -> str:
        """The outcome as a word: ``holds``, ``BROKEN``, or ``NOT SHOWN`` where it could not be measured."""
        return "holds" if self.holds else "NOT SHOWN" if self.value is None else "BROKEN"


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of a benchmark: processor, number of cores, bytes of memory, kernel version."""

    cpu: str
    cores: int
    memory_bytes: int
    kernel: str


@dataclass(frozen=True, slots=True)
class Results:
    """One invocation of the benchmark.

    Args:
        created: time of the benchmark, in ISO form.
        command: the command that reproduces it.
        versions: versions of Python and libraries, by name.
        config: the configuration as it was read.
        wall_seconds: seconds of the whole benchmark.
    """

    created: str
    command: str
    machine: Machine
    versions: Mapping[str, str]
    config: Mapping[str, Any]
    wall_seconds: float
    cases: tuple[Case, ...]
    limits: tuple[Limit, ...]
