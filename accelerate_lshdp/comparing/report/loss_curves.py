# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The picture of the training loss against wall time."""

from __future__ import annotations

from typing import Any

import numpy as np

from accelerate_lshdp.comparing.report import style
from accelerate_lshdp.comparing.report.comparison import Group, largest_loss_difference
from accelerate_lshdp.comparing.report.results import Case, LossPoint
from accelerate_lshdp.comparing.report.style import Drawing, Missing


_GREYS = ("#D0D0D0", "#A8A8A8", "#808080")
_DASHES = ("-", (0, (4, 1.5)), (0, (1.2, 1.2)))
_MARKS_ON_A_CURVE = 6
_MOST_RAW_POINTS = 60  # longer curves are smoothed, or noise would hide which one is where
_WINDOWS_OF_A_CURVE = 20


def draw_losses(group: Group) -> Drawing | Missing:
    """Draws training loss against wall time: one curve a case, one panel a network."""
    networks = [name for name in group.networks if any(_finite(case) for case in group.on(name))]
    if not networks:
        return Missing("no case has losses.")
    cases = [case for case in group.cases if _finite(case)]
    styles = _styles(cases, group.labels)
    figure, panels = style.new_panels(
        networks, f"Loss against wall time: {group.title}", panel_width=5.2, panel_height=4.2, share_x=False
    )
    # One window for all curves: different ones would make equal losses look different.
    longest = max(len(_finite(case)) for case in cases)
    window = 1 if longest <= _MOST_RAW_POINTS else longest // _WINDOWS_OF_A_CURVE
    for axes, network in zip(panels, networks, strict=True):
        for place, case in enumerate(group.on(network)):
            points = _finite(case)
            if points:
                seconds, losses = _smooth(points, window)
                spacing = max(1, len(seconds) // _MARKS_ON_A_CURVE)
                marks = (place % spacing, spacing)  # marks of curves that coincide stand side by side
                axes.plot(seconds, losses, markevery=marks, **styles[case.label])
        axes.set_xlabel("seconds since the case's first step")
        axes.set_xlim(left=0)
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("training loss (global batch)")
    style.add_legend(figure, _legend(styles))
    smoothed = f", mean of {window} steps," if window > 1 else ""
    caption = f"Training loss of the global batch{smoothed} against the wall time that the case itself has trained."
    # Lossy formats change the gradients, so their losses may differ by more than rounding.
    exact = [case for case in cases if not case.is_lossy]
    differences = [largest_loss_difference(case for case in exact if case.network == name) for name in networks]
    if any(difference is not None for difference in differences):
        largest = max(difference for difference in differences if difference is not None)
        caption += f" At the same step, losses of full-precision cases differ by at most {largest:.1e}."
    if any(point.loss is None for case in cases for point in case.losses):
        caption += " Losses that were not finite are left out."
    return Drawing(figure, caption)


def _finite(case: Case) -> list[LossPoint]:
    return [point for point in case.losses if point.loss is not None]


def _smooth(points: list[LossPoint], window: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds, and means of the last `window` losses at them: arrays of shape [points - window + 1]."""
    losses = np.array([point.loss for point in points])
    seconds = np.array([point.seconds for point in points])
    window = min(window, len(points))
    return seconds[window - 1 :], np.convolve(losses, np.ones(window) / window, mode="valid")


def _styles(cases: list[Case], labels: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Line styles by label: thick greys for peers, on which thin curves that coincide with them can be seen."""
    peers = {case.label for case in cases if case.is_peer}
    shown = {case.label for case in cases}
    styles, own, grey = {}, 0, 0
    for label in labels:
        if label in peers:
            styles[label] = {"color": _GREYS[grey % len(_GREYS)], "linewidth": 5, "zorder": 1}
            grey += 1
        elif label in shown:
            colour, marker = style.PALETTE[own % len(style.PALETTE)], style.MARKERS[own % len(style.MARKERS)]
            # Colours repeat after the palette; dashes tell the repetitions apart.
            dashes = _DASHES[own // len(style.PALETTE) % len(_DASHES)]
            styles[label] = {"color": colour, "marker": marker, "linestyle": dashes, "linewidth": 1.3, "markersize": 4}
            own += 1
    return styles


def _legend(styles: dict[str, dict[str, Any]]) -> list[Any]:
    from matplotlib.lines import Line2D

    return [Line2D([], [], label=label, **look) for label, look in styles.items()]
