# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The common style of all pictures: colours, figures, panels (one a network) and legends."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


# The Okabe-Ito palette, which colour-blind readers can tell apart, less its yellow, which is weak on white. Kinds also
# differ in markers, hatching or dashes.
BLUE, VERMILION, GREEN, PURPLE, SKY, ORANGE, BLACK = PALETTE = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7"),
    *("#56B4E9", "#E69F00", "#000000"),
)
GREY = "#999999"
OWN, LOSSY, PEER = BLUE, ORANGE, GREY
MARKERS = "os^Dv<>"
DPI = 130
_PANELS_IN_A_ROW = 3
_LETTER_WIDTH, _TITLE_LETTER_WIDTH = 0.07, 0.12  # inches


@dataclass(frozen=True, slots=True)
class Drawing:
    """A finished figure of matplotlib with its caption."""

    figure: Any
    caption: str

    def save(self, path: Path) -> None:
        """Writes a PNG."""
        self.figure.savefig(path, dpi=DPI)


@dataclass(frozen=True, slots=True)
class Missing:
    """The reason why a picture was not drawn."""

    reason: str


def new_figure(width: float, height: float) -> Any:
    """A figure of matplotlib of `width` x `height` inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # no display is needed, and pyplot's global state stays untouched
    return figure


def hide_frame(axes: Any, *sides: str) -> None:
    """Hides sides of the frame, ``top`` and ``right`` if none is named."""
    for side in sides or ("top", "right"):
        axes.spines[side].set_visible(False)


def new_panels(
    names: Sequence[str],
    title: str,
    *,
    panel_width: float,
    panel_height: float,
    label_width: float = 0.0,
    share_x: bool = True,
) -> tuple[Any, list[Any]]:
    """A figure with one panel a name, at most three side by side; all have the same vertical axis.

    Args:
        names: the panels' headings.
        title: the figure's.
        panel_width: inches.
        panel_height: inches.
        label_width: inches left of the first panel of a row.
        share_x: whether the horizontal axis is the same, too.
    """
    columns = min(len(names), _PANELS_IN_A_ROW)
    rows = -(-len(names) // columns)
    # Inches: the constant below is the room for title and legend.
    width = label_width + columns * panel_width
    figure = new_figure(width, 1.3 + rows * panel_height)
    # Shared axes: bars of different networks can only be compared by eye at one scale.
    grid = figure.subplots(rows, columns, sharex=share_x, sharey=True, squeeze=False).flatten()
    title = textwrap.fill(title, int(width / _TITLE_LETTER_WIDTH))
    figure.suptitle(title, fontsize=12, fontweight="bold")
    for axes, name in zip(grid, names, strict=False):
        axes.set_title(name, fontsize=10)
        axes.set_axisbelow(True)
        axes.tick_params(labelbottom=True)  # also where another panel stands below
        hide_frame(axes)
    for axes in grid[len(names) :]:
        axes.remove()
    return figure, list(grid[: len(names)])


def add_legend(figure: Any, handles: Sequence[Any]) -> None:
    """A legend below all panels, with as many columns as the figure is wide enough for."""
    if not handles:
        return
    entry = _LETTER_WIDTH * (7 + max(len(handle.get_label()) for handle in handles))  # 7: the sample and the gap
    columns = min(len(handles), max(1, int(figure.get_figwidth() / entry)))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
