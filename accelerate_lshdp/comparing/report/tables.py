# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The tables of a benchmark as text in cells, which terminal, Markdown and HTML page all show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from accelerate_lshdp.comparing.report.comparison import Group
from accelerate_lshdp.comparing.report.numbers import format_number
from accelerate_lshdp.comparing.report.results import Case, Results


NOTHING = "–"  # a figure that was not measured, or has no meaning in its row
STEP_LEGEND = (
    "step: median of the steps of all interleaved rounds; spread: median absolute deviation / median; less time than"
    " X: 1 - step / step of X; idle: 1 - mean / max of the ranks' compute seconds; MB between nodes: what the busiest"
    " node sent in a step, measured/by formula; GB a node: peak proportional set size (PSS) of the node that needs"
    " most; memory / lsdp: what is counted for parameters, gradients, optimizer states and what is gathered of them,"
    " as a share of what lsdp counts; prediction error: predicted / measured step - 1."
)
DETAIL_LEGEND = (
    "One figure a rank or a node, in order. compute: forward and backward; wait: for other ranks; all per step. Peaks"
    " of nodes are proportional set sizes (PSS), which count memory that processes share once."
)


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text.

    Args:
        title: heading of the table.
        columns: the headings; the first column names the row, the others hold figures.
        rows: one string a column.
        notes: sentences below the table: cases that failed, with their errors.
        alarming: indices of rows to highlight: failures, limits that do not hold.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    alarming: frozenset[int] = frozenset()


def step_table(group: Group, network: str) -> Table:
    """The table of steps on one network: seconds, bytes, memory and prediction error of each strategy."""
    # One column for each peer: what a strategy saves depends on what it is compared with.
    cases, peers = group.on(network), group.peers(network)
    # Where units are placed, for a limit of memory that the others may not keep.
    shows_memory = any(case.placement is not None for case in cases)
    columns = (
        *("strategy", "step, s", "spread", "samples/s"),
        *(f"less time than {peer.label}" for peer in peers),
        *("idle", "MB between nodes", "GB a node", *["memory / lsdp"] * shows_memory, "prediction error"),
    )
    rows = []
    for case in cases:
        if case.error is not None:
            # As many cells as columns: renderers do not check.
            rows.append((case.label, "failed", *[NOTHING] * (len(columns) - 2)))
            continue
        rows.append(
            (
                case.label,
                f"{case.step_seconds:.3f}",
                f"{case.spread:.1%}",
                format_number(case.samples_per_second),
                *(NOTHING if peer is case else _percent(case.time_saved(peer), ".0%") for peer in peers),
                _percent(case.idle_fraction, ".1%"),
                f"{_megabytes(_largest(case.bytes_between_nodes))}/{_megabytes(_largest(case.formula_bytes))}",
                _gigabytes(_largest(case.peak_pss_bytes)),
                *[_percent(case.memory_share, ".2f")] * shows_memory,
                _percent(case.prediction_error, "+.1%"),
            )
        )
    failed = frozenset(place for place, case in enumerate(cases) if case.error is not None)
    return Table(f"{group.title}, {network}", columns, tuple(rows), _failures(cases), failed)


def detail_table(group: Group, network: str) -> Table:
    """The table of details on one network: seconds, bytes and memory of every rank and node, for each strategy."""
    columns = (
        *("strategy", "batch sizes", "compute, s", "wait, s", "optimizer, s"),
        *("MB sent to other nodes", "MB sent inside nodes", "GB a node", "GB a rank"),
    )
    cases = [case for case in group.on(network) if case.error is None]
    rows = tuple(
        (
            case.label,
            _each(case.batch_sizes, str),
            _each(case.compute_seconds, "{:.2f}".format),
            _each(case.wait_seconds, "{:.2f}".format),
            _each(case.optimizer_seconds, "{:.2f}".format),
            _each(case.bytes_between_nodes, _megabytes),
            _each(case.bytes_inside_nodes, _megabytes),
            _each(case.peak_pss_bytes, _gigabytes),
            _each(case.peak_rank_bytes, _gigabytes),
        )
        for case in cases
    )
    return Table(f"{group.title}, {network}: ranks and nodes", columns, rows)


def limits_table(results: Results) -> Table:
    """The table of limits: measured value, largest allowed value and outcome of each."""
    rows = tuple(
        (
            limit.name,
            "not measured" if limit.value is None else f"{limit.value:.4g}",
            f"{limit.limit:.4g}",
            limit.verdict,
        )
        for limit in results.limits
    )
    broken = frozenset(place for place, limit in enumerate(results.limits) if not limit.holds)
    return Table("What has to hold", ("limit", "measured", "at most", "result"), rows, alarming=broken)


def _failures(cases: Sequence[Case]) -> tuple[str, ...]:
    return tuple(f"{case.label} failed: {case.error}" for case in cases if case.error is not None)


def _largest(values: Sequence[float] | None) -> float | None:
    return None if values is None else max(values)


def _each(values: Sequence | None, show: Callable) -> str:
    return NOTHING if values is None else " ".join(map(show, values))


def _percent(value: float | None, form: str) -> str:
    return NOTHING if value is None else format(value, form)


def _megabytes(count: float | None) -> str:
    # "0" and not "0.000": nothing was sent at all.
    return NOTHING if count is None else format_number(count / 1e6) if count else "0"


def _gigabytes(count: float | None) -> str:
    return NOTHING if count is None else f"{count / 1e9:.2f}"
