# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The picture of ``accelerate-lshdp plan --placement auto``: where each block goes, and the memory of every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate_lshdp.cli.byte_sizes import format_bytes, format_speed
from accelerate_lshdp.cli.placement_text import name_blocks
from accelerate_lshdp.comparing.report import style
from accelerate_lshdp.documents.placement import UnitPlacement, UnitStore
from accelerate_lshdp.documents.profile import Profile
from accelerate_lshdp.planning import PlacementResult


#: Colour of each store, and whether dark text is readable on it.
_COLOURS = {
    UnitStore.REPLICATE: (style.BLUE, False),
    UnitStore.NODE: (style.GREEN, False),
    UnitStore.WORLD: (style.VERMILION, False),
    UnitStore.WORLD_KEPT: (style.ORANGE, True),
    UnitStore.WORLD_TO_NODE: (style.PURPLE, True),
    UnitStore.HOST: (style.SKY, True),
}
_RECOMPUTED = "////"
_BLOCKS_IN_A_ROW, _WIDTH = 24, 12
_ROW_HEIGHT, _BAR_HEIGHT = 0.75, 0.42  # inches


@dataclass(frozen=True, slots=True)
class _Bar:
    """The memory of ranks that need the same."""

    label: str
    used: int
    limit: int


def draw_placement(profile: Profile, result: PlacementResult, path: Path) -> None:
    """Draws the picture of a plan with a placement as a PNG.

    Args:
        profile: with the sizes of the model's units.
        result: of planning with it.
        path: the file to write.
    """
    names = ["", *(unit.name for unit in profile.units.units)]
    placements = dict(result.placement.units)
    blocks = [(name, placements[name]) for name in names if name in placements]
    rows = -(-len(blocks) // _BLOCKS_IN_A_ROW)
    bars = _bars(result)
    heights = (rows * _ROW_HEIGHT + 0.5, len(bars) * _BAR_HEIGHT + 0.7)
    figure = style.new_figure(_WIDTH, sum(heights) + 1.7)
    top, bottom = figure.subplots(2, 1, height_ratios=heights)
    _draw_blocks(top, blocks)
    _draw_memory(bottom, bars)
    style.add_legend(figure, _legend([placement for _, placement in blocks]))
    predicted = result.predicted
    figure.suptitle(
        f"{result.total_batch_size} samples a step: {predicted.step_seconds:.3g} s,"
        f" {format_speed(predicted.samples_per_second)} samples/s (predicted)",
        fontsize=13,
        fontweight="bold",
    )
    figure.savefig(path, dpi=style.DPI)


def _draw_blocks(axes: Any, blocks: Sequence[tuple[str, UnitPlacement]]) -> None:
    """Draws a box for each block, row by row in the order of the forward."""
    from matplotlib.patches import Rectangle

    rows = -(-len(blocks) // _BLOCKS_IN_A_ROW)
    for place, (name, placement) in enumerate(blocks):
        row, column = divmod(place, _BLOCKS_IN_A_ROW)
        colour, is_light = _COLOURS[placement.store]
        axes.add_patch(
            Rectangle(
                (column + 0.04, row + 0.1),
                0.92,
                0.8,
                facecolor=colour,
                edgecolor="white",
                linewidth=0,
                hatch=_RECOMPUTED if placement.checkpoint else None,
            )
        )
        text = _short(name) + (f"\n1/{placement.slices}" if placement.slices > 1 else "")
        axes.text(
            column + 0.5,
            row + 0.5,
            text,
            ha="center",
            va="center",
            fontsize=9,
            color="black" if is_light else "white",
            # Hatching must not run through the letters.
            bbox={"boxstyle": "round,pad=0.15", "facecolor": colour, "edgecolor": "none"},
        )
    axes.set_xlim(0, min(len(blocks), _BLOCKS_IN_A_ROW) if rows == 1 else _BLOCKS_IN_A_ROW)
    axes.set_ylim(rows, 0)
    axes.set_xticks([])
    axes.set_yticks([])
    style.hide_frame(axes, "top", "right", "bottom", "left")
    named = [name for name, _ in blocks if name]
    rest = "rest: what is in no block" if len(named) < len(blocks) else ""
    title = "; ".join(
        filter(None, [f"Blocks {name_blocks(named)} in the order of the forward" if named else "", rest])
    )
    axes.set_title(title, fontsize=10, loc="left")


def _short(name: str) -> str:
    """What fits into the box of a block: the number at the end of its name, or the end itself."""
    last = name.rpartition(".")[2]
    return "rest" if not name else last[-7:]


def _bars(result: PlacementResult) -> list[_Bar]:
    """One bar for all ranks that have the same micro-batch, need and limit."""
    predicted, groups = result.predicted, {}
    rows = zip(result.micro_batches, predicted.memory_bytes, predicted.memory_limit_bytes, strict=True)
    for rank, row in enumerate(rows):
        groups.setdefault(row, []).append(rank)
    bars = []
    for ((size, steps), used, limit), ranks in groups.items():
        share = f"{size} samples" if steps == 1 else f"{steps} x {size} samples"
        numbers = name_blocks([str(rank) for rank in ranks])
        bars.append(_Bar(f"rank{'s' * (len(ranks) > 1)} {numbers}: {share}", used, limit))
    return bars


def _draw_memory(axes: Any, bars: Sequence[_Bar]) -> None:
    """Draws what each rank needs against its limit."""
    largest = max(max(bar.used, bar.limit) for bar in bars) / 1e9
    for place, bar in enumerate(bars):
        axes.barh(place, bar.used / 1e9, 0.6, color=style.GREY)
        axes.plot([bar.limit / 1e9] * 2, [place - 0.4, place + 0.4], color=style.BLACK, linewidth=2.5)
        text = f"{format_bytes(bar.used)} of {format_bytes(bar.limit)} ({bar.used / bar.limit:.0%})"
        axes.text(largest * 1.02, place, text, va="center", fontsize=9)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars], fontsize=9)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, largest * 1.35)
    axes.set_xlabel("memory (GB)")
    axes.set_title("Predicted memory of each rank; black lines: its limit", fontsize=10, loc="left")
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    style.hide_frame(axes)


def _legend(placements: Sequence[UnitPlacement]) -> list[Any]:
    """An entry for each store that is used, for recomputing and for slices."""
    from matplotlib.patches import Patch

    used = {placement.store for placement in placements}
    handles = [Patch(color=colour, label=str(store)) for store, (colour, _) in _COLOURS.items() if store in used]
    if any(placement.checkpoint for placement in placements):
        handles.append(
            Patch(facecolor=style.GREY, edgecolor="white", hatch=_RECOMPUTED, label="activations recomputed")
        )
    if any(placement.slices > 1 for placement in placements):
        handles.append(Patch(facecolor="white", edgecolor="white", label="1/k: gathered in k slices"))
    return handles
