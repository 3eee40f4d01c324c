# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The table that ``accelerate-lshdp plan`` prints."""

from __future__ import annotations

from accelerate_lshdp.cli.byte_sizes import format_bytes, format_speed
from accelerate_lshdp.cli.plan_prediction import Prediction
from accelerate_lshdp.documents.profile import Profile


_WIDTH, _DEVICE_WIDTH = 100, 24


def print_plan(profile: Profile, planned: Prediction, equal: Prediction | None) -> None:
    """Prints a row for each rank, and the whole step beside that of equal batches, at most 100 columns wide.

    Args:
        profile: the profile that the predictions come from.
        planned: the prediction of the plan.
        equal: the prediction of an equal split of the same total; None if it does not fit.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    title = f"{sum(planned.batch_sizes)} samples over {len(profile.ranks)} ranks, strategy {profile.strategy}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("rank", "node"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("device", overflow="ellipsis", no_wrap=True, max_width=_DEVICE_WIDTH)
    for name in ("batch", "micro-batches", "compute", "idle", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    nodes = [str(node) for node, size in enumerate(profile.cluster.node_sizes) for _ in range(size)]
    for rank, (size, steps) in zip(profile.ranks, planned.micro_batches, strict=True):
        table.add_row(
            str(rank.rank),
            nodes[rank.rank],
            rank.device,
            str(size * steps),
            f"{steps} x {size}",
            f"{planned.compute_seconds[rank.rank]:.3g} s",
            f"{planned.waits[rank.rank]:.1%}",
            _memory(planned.memory_bytes[rank.rank], rank.memory_limit_bytes),
        )
    console = Console(width=_WIDTH)
    console.print(table)
    console.print(f"plan:          {_describe(planned)}", highlight=False)
    if equal is None:
        console.print("equal batches: do not fit", highlight=False)
    else:
        console.print(f"equal batches: {_describe(equal)}", highlight=False)
        console.print(f"The plan's step {_compare(planned, equal)}.", highlight=False)
    # Gathers inside a node are in no curve: a rank is measured with all parameters at hand.
    node_sizes = set(profile.cluster.node_sizes)
    if profile.strategy.is_node_sharded and len(node_sizes) == 1 and max(node_sizes) > 1:
        console.print("not predicted: the time in which ranks of one node gather parameters", style="dim")


def _describe(prediction: Prediction) -> str:
    return (
        f"{prediction.step_seconds:.3g} s a step (predicted), {format_speed(prediction.samples_per_second)} samples/s,"
        f" {_mean(prediction.waits):.1%} idle"
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _compare(planned: Prediction, equal: Prediction) -> str:
    share = 1 - planned.step_seconds / equal.step_seconds
    # A saving that would be shown as 0 % is none.
    return f"takes {share:.0%} less time" if round(share, 2) > 0 else "takes as long as that of equal batches"


def _memory(used: int | None, limit: int | None) -> str:
    if used is None:
        return "not measured"
    if limit is None:
        return format_bytes(used)
    return f"{format_bytes(used)} ({1 - used / limit:.0%} free)"
