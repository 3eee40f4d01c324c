# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The tables of `uneven_cluster.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def print_report(results: Mapping[str, Any], limits: Any) -> None:
    """Prints what each phase that was run has measured, then the limits."""
    from rich.console import Console

    console = Console(width=140)
    configuration = results["configuration"]
    shares = "/".join(f"{share * 100:g}" for share in configuration["shares"])
    console.print(
        f"{len(configuration['shares'])} ranks at {shares} % of a core: {configuration['speeds']}. ViT of"
        f" {configuration['parameters'] / 1e6:.1f} M parameters, strategy {configuration['strategy']}, global batch"
        f" {configuration['total']}."
    )
    if "profile" in results:
        console.print(_profile_table(results["profile"]))
    if "plans" in results:
        console.print(_plans_table(results["plans"]))
    if "automatic" in results:
        console.print(_automatic_table(results["automatic"]))
    console.print(limits)


def _profile_table(profile: Mapping[str, Any]) -> Any:
    table = _table(f"Profile, measured in {profile['wall_seconds']:.1f} s", ["rank", "batch sizes", "milliseconds"])
    for rank in profile["ranks"]:
        seconds = "  ".join(f"{value * 1000:.0f}" for value in rank["seconds"])
        table.add_row(str(rank["rank"]), _joined(rank["batch_sizes"]), seconds)
    return table


def _plans_table(rows: Sequence[Mapping[str, Any]]) -> Any:
    headings = [
        "global batch",
        "batch sizes",
        "slowdown",
        "predicted, s",
        "measured, s",
        "error",
        "of each rank",
        "idle",
        "step, s",
    ]
    table = _table("Executed plans: compute of the slowest rank", headings)
    for row in rows:
        table.add_row(
            str(row["total_batch_size"]),
            _joined(size if count == 1 else f"{count}x{size}" for size, count in row["micro_batches"]),
            f"{row['slowdown']:.2f}",
            f"{max(row['predicted_seconds']):.3f}",
            f"{max(row['measured_seconds']):.3f}",
            f"{row['error']:+.1%}",
            "  ".join(f"{error:+.0%}" for error in row["rank_errors"]),
            f"{row['idle_fraction']:.1%}",
            f"{row['step_seconds']:.3f}",
        )
    return table


def _automatic_table(automatic: Mapping[str, Any]) -> Any:
    headings = ["situation", "automatic, s", "full profiling, s", "ratio", "automatic sizes", "planned sizes"]
    table = _table("Automatic batch sizes: step time", headings)
    for row in automatic["situations"]:
        table.add_row(
            row["name"],
            f"{row['automatic_seconds']:.3f}",
            f"{row['fixed_seconds']:.3f}",
            f"{row['ratio']:.3f}",
            _joined(row["automatic_batch_sizes"]),
            _joined(row["fixed_batch_sizes"]),
        )
    return table


def _table(title: str, headings: Sequence[str]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("situation", "rank") else "right")
    return table


def _joined(sizes: Any) -> str:
    return " ".join(map(str, sizes))
