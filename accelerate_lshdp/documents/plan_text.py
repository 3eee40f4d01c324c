# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The text of a plan for ``print(plan)``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate_lshdp.documents.cluster import Cluster
from accelerate_lshdp.documents.placement import ModelPlacement
from accelerate_lshdp.documents.plan_sections import Automatic, Batch, Communication
from accelerate_lshdp.documents.wire_format import WIRE_FORMATS


def describe_plan(
    strategy: str,
    communication: Communication,
    *,
    batch: Batch | None,
    automatic: Automatic | None,
    cluster: Cluster | None,
    placement: ModelPlacement | None = None,
    predicted: Mapping[str, Any] | None,
) -> str:
    """The sections of a plan as text: a line of options and a table of ranks."""
    head = f"strategy {strategy}, communication {communication.dtype}"
    if "powersgd_rank" in WIRE_FORMATS[communication.dtype].options:
        head += f" of rank {communication.powersgd_rank}"
    if automatic is not None:
        total = automatic.total
        size = "the script's size (its batch size x ranks)" if total is None else total
        head += f"\nautomatic batch sizes: the run cuts global batches of {size} by measurement"
    elif batch is None:
        head += "\nequal batches: every loader keeps its own batch_size on every rank"
    if placement is not None:
        head += f"\nplacement: {placement}"
    if batch is None:
        return f"Plan: {head}"
    columns = ["rank", "micro-batch", "accumulation", "batch", "share"]
    rows = [
        [
            entry.rank,
            entry.micro_batch_size,
            entry.accumulation_steps,
            entry.batch_size,
            entry.batch_size / batch.total,
        ]
        for entry in batch.ranks
    ]
    table = [columns, *([*map(str, row[:-1]), f"{row[-1]:.1%}"] for row in rows)]
    table.append(["total", "", "", str(batch.total), "100.0%"])
    if cluster is not None:
        nodes = [str(index) for index, size in enumerate(cluster.node_sizes) for _ in range(size)]
        for line, cell in zip(table, ["node", *nodes, ""], strict=True):
            line.insert(1, cell)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    # What the planner predicts for each rank stands in lists, for which one line has no room.
    scalars = {k: v for k, v in (predicted or {}).items() if isinstance(v, (int, float))}
    if scalars:
        lines.append("predicted: " + ", ".join(f"{name} {value:.4g}" for name, value in scalars.items()))
    return "\n".join([f"Plan: {head}", *lines])
