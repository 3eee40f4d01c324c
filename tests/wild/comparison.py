# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Compares three recordings of a script and writes the table."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from cases import Case


#: Of all trained parameters together, after the last step. Models in double precision come far below it.
PARAMETER_TOLERANCE = 5e-6
RATE_TOLERANCE = 1e-12


@dataclass
class Outcome:
    """What one run left: a recording a rank, and why ranks failed (an empty text for one that did not)."""

    record: Path
    ranks: int
    failures: tuple[str, ...]

    @property
    def failure(self) -> str:
        """The reason of the first rank that failed by itself, not because another one was gone."""
        told = sorted(
            filter(None, self.failures), key=lambda failure: "Connection" in failure or "Communication" in failure
        )
        return told[0] if told else ""

    def rates(self, rank: int = 0) -> list[list[float]]:
        file = self.record / f"rates-{rank}.json"
        return json.loads(file.read_text()) if file.exists() else []

    def parameters(self) -> list:
        import torch

        return [torch.load(file) for file in sorted((self.record / "parameters").glob("*.pt"))]


@dataclass
class Row:
    """One line of the table. Numbers are None where a run failed."""

    title: str
    plain_steps: int | None = None
    steps: int | None = None
    rate_difference: float | None = None
    error: float | None = None
    change_error: float | None = None
    verdict: str = ""
    is_good: bool = False

    def cells(self) -> list[str]:
        def shown(value: float | None) -> str:
            return "" if value is None else f"{value:.1e}" if isinstance(value, float) else str(value)

        numbers = (self.plain_steps, self.steps, self.rate_difference, self.error, self.change_error)
        return [f"`{self.title}`", *map(shown, numbers), self.verdict]

    def line(self) -> str:
        return " | ".join(self.cells())


def compare(case: Case, plain: Outcome, ours: Outcome | None, one: Outcome | None) -> Row:
    """The row of a script: what holds, or the first thing that does not."""
    row = Row(case.title)
    if plain.failure or ours is None:
        row.verdict, row.is_good = f"does not run under plain accelerate either: {plain.failure}", True
        return row
    wanted = plain.rates()
    row.plain_steps = len(wanted)
    if case.refusal and all(case.refusal in failure and "Error" in failure for failure in ours.failures):
        row.verdict, row.is_good = f"refused on all ranks: {ours.failure}", True
        return row
    if ours.failure:
        row.verdict = f"fails: {ours.failure}"
        return row
    rates = ours.rates()
    row.steps = len(rates)
    if any(ours.rates(rank) != rates for rank in range(ours.ranks)):
        row.verdict = "ranks differ in steps or learning rates"
        return row
    pairs = [pair for a, b in zip(wanted, rates, strict=False) for pair in zip(a, b, strict=True)]
    row.rate_difference = max((abs(a - b) for a, b in pairs), default=0.0)
    if one is None or one.failure:
        row.verdict = f"one process fails: {one.failure if one else 'not run'}"
        return row
    # The reference has plain accelerate's rates; parameters say nothing where ours had others.
    same_rates = row.rate_difference <= RATE_TOLERANCE * max((abs(a) for a, _ in pairs), default=1.0)
    problems = []
    if row.steps != row.plain_steps:
        problems.append("another number of steps")
    if not same_rates:
        problems.append("other learning rates")
    if len(one.rates()) != row.steps:
        problems.append(f"one process made {len(one.rates())} steps")
    row.error, row.change_error, first = _errors(ours.parameters(), one.parameters())
    if case.random:
        problems = [*problems, f"parameters not compared: {case.random}"] if problems else problems
        row.verdict = "; ".join(problems) or f"as plain; parameters not compared: {case.random}"
        row.is_good = not problems
        return row
    if row.error is None or not row.error <= PARAMETER_TOLERANCE:
        problems.append(f"other parameters, from step {first} on")
    row.verdict, row.is_good = "; ".join(problems) or "exact", not problems
    return row


def _errors(ours: list, one: list) -> tuple[float | None, float | None, int | None]:
    """Relative error of the last common step's parameters and of their change, and the first step that is off."""
    steps = min(len(ours), len(one))
    if not steps or any(a.shape != b.shape for a, b in zip(ours, one, strict=False)):
        return None, None, None
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(ours, one, strict=False)]
    first = next((i for i, error in enumerate(errors) if not error <= PARAMETER_TOLERANCE), None)
    a, b, start = ours[steps - 1], one[steps - 1], one[0]
    moved = float((b - start).norm())
    return errors[-1], float((a - b).norm()) / moved if moved else None, first


def write_table(file: Path, rows: list[Row], left_out: dict[str, str], arguments: argparse.Namespace) -> None:
    """Writes the rows and what was left out as a page in Markdown."""
    header = ["script", "steps plain", "steps ours", "rates differ by", "error", "error of the change", "verdict"]
    lines = [
        f"Strategy `{arguments.strategy}`, models in {arguments.dtype}; {sum(row.is_good for row in rows)} of "
        f"{len(rows)} as they should be.",
        "",
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(cell.replace("|", "\\|") for cell in row.cells()) + " |" for row in rows),
        "",
        "Left out:",
        "",
        *(f"- `{source}`: {reason}" for source, reason in left_out.items()),
    ]
    file.write_text("\n".join(lines) + "\n")
