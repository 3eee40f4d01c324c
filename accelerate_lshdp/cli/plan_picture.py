# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The picture of ``accelerate-lshdp plan``: measured curves with the chosen sizes, and seconds of every rank."""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from accelerate_lshdp.cli.byte_sizes import format_speed
from accelerate_lshdp.cli.plan_prediction import Prediction
from accelerate_lshdp.comparing.report import style
from accelerate_lshdp.documents.profile import Profile


_MOST_NAMED_RANKS = 14  # a longer legend would hide the curves


def draw_picture(profile: Profile, planned: Prediction, equal: Prediction | None, path: Path) -> None:
    """Draws the picture of a plan as a PNG.

    Args:
        profile: the measured curves.
        planned: the prediction of the plan.
        equal: the prediction of an equal split of the same total; None if it does not fit.
        path: the file to write.
    """
    figure = style.new_figure(12, 5)
    curves, bars = figure.subplots(1, 2, width_ratios=(1.2, 1))
    _draw_curves(curves, profile, planned)
    _draw_bars(bars, planned, equal)
    for axes in (curves, bars):
        style.hide_frame(axes)
    speed = f"{planned.step_seconds:.3g} s, {format_speed(planned.samples_per_second)} samples/s (predicted)"
    figure.suptitle(
        f"{sum(planned.batch_sizes)} samples a step: {speed}",
        fontsize=13,
        fontweight="bold",
    )
    figure.savefig(path, dpi=style.DPI)


def _draw_curves(axes: Any, profile: Profile, planned: Prediction) -> None:
    """Draws seconds by micro-batch size: measured points with their spread, the planner's curve, the chosen sizes."""
    named = len(profile.ranks) <= _MOST_NAMED_RANKS
    styles = islice(cycle(zip(style.PALETTE, style.MARKERS, strict=True)), len(profile.ranks))
    for rank, (size, steps), (colour, marker) in zip(profile.ranks, planned.micro_batches, styles, strict=True):
        measured, seconds = np.array(rank.time.batch_sizes), np.array(rank.time.seconds)
        axes.errorbar(
            measured,
            seconds,
            yerr=seconds * np.array(rank.spread),
            fmt=marker,
            color=colour,
            markersize=4.5,
            capsize=3,
            linewidth=1,
        )
        # Only up to the rank's limits, as the planner may choose nothing beyond.
        allowed = np.arange(1, rank.profile().largest_micro_batch + 1)
        share = f"{size} samples" if steps == 1 else f"{steps} x {size} samples"
        axes.plot(allowed, rank.time.table(int(allowed[-1])), color=colour, linewidth=1.3)
        # An empty line, so that the legend shows marker and line in one entry.
        axes.plot([], [], color=colour, marker=marker, label=f"rank {rank.rank}: {share}" if named else None)
        star = {"markersize": 17 if named else 11, "markeredgecolor": "black", "markeredgewidth": 0.8, "zorder": 5}
        axes.plot(size, rank.time(size), marker="*", color=colour, linestyle="none", **star)
    axes.set_xlabel("micro-batch size (samples)")
    axes.set_ylabel("forward + backward of a micro-batch (s)")
    axes.set_title("Measured times (bars: spread) and chosen micro-batches (stars)", fontsize=10)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    if named:
        axes.legend(frameon=False, fontsize=9, loc="upper left")


def _draw_bars(axes: Any, planned: Prediction, equal: Prediction | None) -> None:
    """Draws compute seconds of every rank, equal split beside plan."""
    from matplotlib.ticker import MaxNLocator

    runs = [("equal batches", equal, style.ORANGE, "///"), ("plan", planned, style.BLUE, None)]
    shown = [run for run in runs if run[1] is not None]
    ranks = np.arange(len(planned.compute_seconds))
    width = 0.8 / len(shown)
    for place, (name, prediction, colour, hatch) in enumerate(shown):
        left = ranks + (place - (len(shown) - 1) / 2) * width
        idle = sum(prediction.waits) / len(prediction.waits)
        label = f"{name}: step {prediction.step_seconds:.3g} s, {idle:.1%} idle"
        bars = axes.bar(
            left, prediction.compute_seconds, width, color=colour, hatch=hatch, edgecolor="white", label=label
        )
        if len(ranks) <= _MOST_NAMED_RANKS // len(shown):
            axes.bar_label(bars, [str(size) for size in prediction.batch_sizes], fontsize=9, padding=2)
    axes.set_xlabel("rank (numbers on bars: samples)" if len(ranks) <= _MOST_NAMED_RANKS // len(shown) else "rank")
    axes.set_ylabel("forward + backward of a rank's share (s)")
    axes.set_title("Predicted compute of every rank", fontsize=10)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
