# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What was measured of one case on one network, and how it stands in ``results.json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import mean, median
from typing import Any

from accelerate_lshdp.comparing.cases import Case
from accelerate_lshdp.documents.placement import ModelPlacement


#: Step by step, for every rank: (wall seconds, loss, samples).
Steps = Sequence[Sequence[tuple[float, float, int]]]


@dataclass
class Measurement:
    """Figures of a case, which grow while it is measured. Lists are by rank or by node.

    Args:
        cluster, model, network: their names.
        bits_per_second: of the network; None: not known.
        nodes: ranks of each node.
        total_batch_size: samples in a global batch.
        case: what is trained.
    """

    cluster: str
    model: str
    network: str
    bits_per_second: float | None
    nodes: Sequence[int]
    total_batch_size: int
    case: Case
    parameters: int = 0
    micro_batches: list[tuple[int, int]] | None = None
    placement: ModelPlacement | None = None
    memory_share: float | None = None
    turns: list[list[float]] = field(default_factory=list)
    losses: list[tuple[float, int, float]] = field(default_factory=list)
    trained_seconds: float = 0.0
    statistics: dict[str, Any] | None = None
    timeline: list[list[dict[str, Any]]] | None = None
    between: list[list[float]] = field(default_factory=list)
    inside: list[list[float]] = field(default_factory=list)
    formula_bytes: list[float] | None = None
    peak_pss_bytes: list[int] | None = None
    peak_rank_bytes: list[int] | None = None
    predicted_seconds: float | None = None
    slowdown: float | None = None
    error: str | None = None

    @property
    def name(self) -> str:
        """Its name for the ranks."""
        return f"{self.case.label}, {self.network}"

    @property
    def batch_sizes(self) -> list[int] | None:
        return None if self.micro_batches is None else [size * steps for size, steps in self.micro_batches]

    @property
    def step_seconds(self) -> float | None:
        """The median of all steps that count."""
        return median(seconds for turn in self.turns for seconds in turn) if self.turns else None

    def trained(self, steps: Steps) -> list[float]:
        """Notes the losses of steps and returns their seconds: means over ranks, which wait for each other."""
        seconds = []
        for ranks in zip(*steps, strict=True):
            seconds.append(mean(taken for taken, _, _ in ranks))
            self.trained_seconds += seconds[-1]
            loss = sum(loss * samples for _, loss, samples in ranks) / sum(samples for _, _, samples in ranks)
            self.losses.append((self.trained_seconds, len(self.losses) + 1, loss))
        return seconds

    def add_turn(self, steps: Steps, between: Sequence[int] | None, inside: Sequence[int] | None) -> None:
        """Notes a turn's counted steps and the bytes that they sent, one number a node."""
        seconds = self.trained(steps)
        self.turns.append(seconds)
        for sums, sent in ((self.between, between), (self.inside, inside)):
            if sent is not None:
                sums.append([count / len(seconds) for count in sent])

    def to_dict(self) -> dict[str, Any]:
        """The entry in ``results.json``."""
        case = self.case
        identity = {
            "cluster": self.cluster,
            "model": self.model,
            "parameters": self.parameters,
            "network": self.network,
            "bits_per_second": self.bits_per_second,
            "strategy": case.strategy,
            "communication_dtype": case.communication_dtype,
            "label": case.label,
            "is_peer": case.is_peer,
            "nodes": list(self.nodes),
            "total_batch_size": self.total_batch_size,
            "placement": None if self.placement is None else self.placement.to_dict(),
            "memory_share": self.memory_share,
        }
        figures = self._figures()
        if self.error is not None:
            figures = {key: [] if key == "losses" else None for key in figures}
        return {**identity, **figures, "error": self.error}

    def _figures(self) -> dict[str, Any]:
        step = self.step_seconds
        statistics = self.statistics or {}
        all_steps = [seconds for turn in self.turns for seconds in turn]
        return {
            "batch_sizes": self.batch_sizes,
            "step_seconds": step,
            "spread": step and median(abs(seconds - step) for seconds in all_steps) / step,
            "round_seconds": [median(turn) for turn in self.turns],
            "samples_per_second": step and self.total_batch_size / step,
            "compute_seconds": statistics.get("compute_seconds"),
            "wait_seconds": statistics.get("wait_seconds"),
            "optimizer_seconds": statistics.get("optimizer_seconds"),
            "idle_fraction": statistics.get("idle_fraction"),
            "bytes_between_nodes": _medians(self.between),
            "formula_bytes": self.formula_bytes,
            "bytes_inside_nodes": _medians(self.inside),
            "peak_pss_bytes": self.peak_pss_bytes,
            "peak_rank_bytes": self.peak_rank_bytes,
            "predicted_seconds": self.predicted_seconds,
            "slowdown": self.slowdown,
            # JSON has no NaN; a diverged case must not cost the results of all others
            "losses": [[seconds, step, loss if isfinite(loss) else None] for seconds, step, loss in self.losses],
            "timeline": self.timeline,
        }


def _medians(turns: Sequence[Sequence[float]]) -> list[float] | None:
    """Of each node over the turns."""
    return [median(values) for values in zip(*turns, strict=True)] if turns else None
