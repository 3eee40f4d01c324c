# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The timeline of one step: the activities of every rank, strategy by strategy."""

from __future__ import annotations

from typing import Any

from accelerate_lshdp.comparing.report import style
from accelerate_lshdp.comparing.report.comparison import Group
from accelerate_lshdp.comparing.report.results import Case
from accelerate_lshdp.comparing.report.style import Drawing, Missing


# In the order of drawing: waits lie inside other events and are drawn over them.
_EVENTS: dict[str, dict[str, Any]] = {
    "data": {"facecolor": style.PURPLE},
    "forward": {"facecolor": style.SKY},
    "backward": {"facecolor": style.BLUE},
    "optimizer": {"facecolor": style.GREEN},
    "wait": {"facecolor": style.ORANGE, "hatch": "////"},
}
_RANK_HEIGHT = 0.15  # inches
_HEADING = 1.6  # rows that a strategy's heading takes


def draw_timeline(group: Group) -> Drawing | Missing:
    """Draws one row a rank, below the name of each strategy; one panel a network."""
    shown = {name: [case for case in group.on(name) if case.timeline is not None] for name in group.networks}
    networks = [name for name, cases in shown.items() if cases]
    if not networks:
        return Missing("no case has a timeline.")
    ranks = sum(group.cases[0].nodes)
    labels = [label for label in group.labels if any(case.label == label for name in networks for case in shown[name])]
    figure, panels = style.new_panels(
        networks,
        f"One step, rank by rank: {group.title}",
        panel_width=5.2,
        panel_height=0.5 + _RANK_HEIGHT * (ranks + _HEADING) * len(labels),
    )
    tops = [place * (ranks + _HEADING) for place in range(len(labels))]
    for axes, network in zip(panels, networks, strict=True):
        cases = {case.label: case for case in shown[network]}
        # Rows of a strategy stay empty where it failed, so that panels can be compared side by side.
        failed = {case.label for case in group.on(network) if case.error is not None}
        for top, label in zip(tops, labels, strict=True):
            if label in cases:
                _draw_step(axes, top + _HEADING, cases[label])
            else:
                reason = "failed" if label in failed else "not measured"
                axes.text(0, top + 1.1, f"{label}: {reason}", fontsize=8, style="italic", color="#666666")
        axes.set_xlabel("seconds since the step began")
        axes.grid(axis="x", alpha=0.25)
        axes.tick_params(axis="y", length=0, labelsize=6.5)
        style.hide_frame(axes, "left")
    rows = [top + _HEADING + rank + 0.5 for top in tops for rank in range(ranks)]
    panels[0].set_yticks(rows, [f"rank {rank}" for _ in labels for rank in range(ranks)])
    panels[0].set_ylim(tops[-1] + _HEADING + ranks + 0.5, 0)
    panels[0].set_xlim(left=0)
    style.add_legend(figure, _legend(shown[name] for name in networks))
    caption = (
        "What every rank did in one measured step, from the first event of any rank on. Wait: for other ranks and the"
        " network, drawn over what it interrupts. White: nothing was recorded."
    )
    if any(case.is_peer for name in networks for case in shown[name]):
        caption += " Peers: torch waits inside forward and backward, which do not tell when."
    return Drawing(figure, caption)


def _draw_step(axes: Any, top: float, case: Case) -> None:
    events = [event for row in case.timeline for event in row]
    # The clock's zero is arbitrary: the step begins with the first event of any rank.
    start = min((event.begin for event in events), default=0.0)
    seconds = max((event.end for event in events), default=0.0) - start
    axes.text(0, top - 0.3, f"{case.label}: {seconds:.3g} s", fontsize=8, fontweight="bold", va="bottom")
    for rank, row in enumerate(case.timeline):
        for name, fill in _EVENTS.items():
            spans = [(event.begin - start, event.end - event.begin) for event in row if event.name == name]
            if spans:
                axes.broken_barh(spans, (top + rank + 0.06, 0.88), edgecolor="white", linewidth=0.3, **fill)


def _legend(shown: Any) -> list[Any]:
    from matplotlib.patches import Patch

    names = {event.name for cases in shown for case in cases for row in case.timeline for event in row}
    return [Patch(label=name, edgecolor="white", **fill) for name, fill in _EVENTS.items() if name in names]
