# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Bar charts with one bar a strategy and one panel a network: throughput, efficiency, memory, bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate_lshdp.comparing.report import style
from accelerate_lshdp.comparing.report.comparison import Group, own_speeds, scaling_efficiency
from accelerate_lshdp.comparing.report.numbers import format_number
from accelerate_lshdp.comparing.report.results import Case
from accelerate_lshdp.comparing.report.style import Drawing, Missing


_ROW_HEIGHT = 0.29
_PANEL_WIDTH, _LETTER_WIDTH = 4.2, 0.08
_MOST_MARKED_NODES = len(style.MARKERS)
_DIAMOND = {"marker": "D", "markersize": 5, "markerfacecolor": "white", "markeredgecolor": "black"}
_TICK = {"marker": "|", "markersize": 13, "markeredgecolor": "black", "markeredgewidth": 2.2}


@dataclass(frozen=True, slots=True)
class _Bar:
    """The bar of one case in the unit of its axis.

    Args:
        length: length of the bar.
        text: text at the end of the bar.
        spread: half of the error bar.
        marks: (place, style of matplotlib) of each mark.
        spread_marks: draw marks one above the other, so that those at one place are seen.
    """

    length: float
    text: str
    spread: float = 0.0
    marks: tuple[tuple[float, dict[str, Any]], ...] = ()
    spread_marks: bool = False

    @property
    def end(self) -> float:
        """The place of the rightmost part, where the text begins."""
        return max(self.length + self.spread, *(place for place, _ in self.marks), 0.0)


def draw_throughput(group: Group) -> Drawing | Missing:
    """Draws samples per second, with the spread of the steps and the prediction."""

    def bar(case: Case) -> _Bar | None:
        if case.samples_per_second is None:
            return None
        speed = case.samples_per_second
        marks = ()
        if case.predicted_seconds:
            marks = ((case.total_batch_size / case.predicted_seconds, _DIAMOND),)
        # The spread is relative to the step; to first order that of the throughput is the same fraction.
        return _Bar(speed, format_number(speed), speed * case.spread, marks)

    caption = (
        "Samples of the global batch / the median step, over all interleaved rounds. Error bars: the median absolute"
        " deviation of the steps. Peers use nothing of accelerate_lshdp."
    )
    extra = ()
    if any(case.predicted_seconds for case in group.cases):
        caption += " Diamonds: what the cost model predicted."
        extra = (("predicted", _DIAMOND),)
    return _draw(group, bar, "Throughput", "samples / s", caption, extra)


def draw_efficiency(group: Group) -> Drawing | Missing:
    """Draws throughput as a fraction of the sum of the ranks' own speeds."""
    speeds = own_speeds(group)
    if speeds is None:
        return Missing("no case has compute seconds of every rank, which tell what a rank could do alone.")

    def bar(case: Case) -> _Bar | None:
        share = scaling_efficiency(case, speeds)
        return None if share is None else _Bar(100 * share, f"{100 * share:.0f}%", 100 * share * case.spread)

    own = " + ".join(map(format_number, speeds)) if len(speeds) <= 8 else f"{len(speeds)} ranks"
    caption = (
        "Samples a second / the sum of what the ranks could do alone"
        f" ({own} = {format_number(sum(speeds))} samples/s). A rank's own speed is the best batch size / compute"
        " seconds (forward and backward) that it showed in any case of this cluster and model. At 100% no rank would"
        " ever wait, send, load data or run the optimizer."
    )
    return _draw(group, bar, "Scaling efficiency", "% of the ranks' own speeds", caption)


def draw_memory(group: Group) -> Drawing | Missing:
    """Draws the peak memory of the node that needs most, in GB, with a mark for every node."""
    nodes = len(group.cases[0].nodes)
    # With one node the mark is the bar's end, and more nodes than markers could not be told apart.
    marked = 1 < nodes <= _MOST_MARKED_NODES
    styles = [
        {"marker": style.MARKERS[node], "markersize": 4, "markerfacecolor": "white", "markeredgecolor": "black"}
        for node in range(nodes if marked else 0)
    ]

    def bar(case: Case) -> _Bar | None:
        if case.peak_pss_bytes is None:
            return None
        sizes = [size / 1e9 for size in case.peak_pss_bytes]
        return _Bar(max(sizes), f"{max(sizes):.2f}", marks=tuple(zip(sizes, styles, strict=False)), spread_marks=True)

    caption = (
        "Peak proportional set size (PSS) of all processes of a node, in fresh processes for each strategy; memory"
        " that processes share counts once. Bars: the node that needs most."
    )
    if marked:
        caption += " Marks: every node."
    extra = tuple((f"node {node}", mark) for node, mark in enumerate(styles))
    return _draw(group, bar, "Memory of a node", "GB", caption, extra)


def draw_bytes(group: Group) -> Drawing | Missing:
    """Draws the bytes that the busiest node sent to others in a step, in MB, beside the formula."""

    def bar(case: Case) -> _Bar | None:
        if case.bytes_between_nodes is None:
            return None
        sent = max(case.bytes_between_nodes) / 1e6
        if case.formula_bytes is None:
            return _Bar(sent, format_number(sent))
        formula = max(case.formula_bytes) / 1e6
        text = f"{format_number(sent)} ({sent / formula - 1:+.1%})" if formula else format_number(sent)
        return _Bar(sent, text, marks=((formula, _TICK),))

    extra, caption = (), "What the busiest node sent to other nodes in a step, read from its network interface."
    if any(case.formula_bytes is not None for case in group.cases):
        caption += " Ticks: what the strategy's formula says; in brackets: measured / formula - 1."
        extra = (("formula", _TICK),)
    return _draw(group, bar, "Bytes between nodes", "MB sent in a step", caption, extra)


def _draw(
    group: Group,
    bar: Callable[[Case], _Bar | None],
    title: str,
    unit: str,
    caption: str,
    extra: Sequence[tuple[str, dict[str, Any]]] = (),
) -> Drawing | Missing:
    """Draws the bars that `bar` returns for the cases; networks without a bar have no panel."""
    bars = {(case.network, case.label): bar(case) for case in group.cases}
    networks = [name for name in group.networks if any(bars[name, case.label] for case in group.on(name))]
    if not networks:
        return Missing("no case has the figures for it.")
    # Memory, for one, need not be measured on every network.
    if len(networks) < len(group.networks):
        caption += f" Measured on {', '.join(networks)} only."
    labels = group.labels
    figure, panels = style.new_panels(
        networks,
        f"{title}: {group.title}",
        panel_width=_PANEL_WIDTH,
        panel_height=0.6 + _ROW_HEIGHT * len(labels),
        label_width=_LETTER_WIDTH * max(map(len, labels)),
    )
    for axes, network in zip(panels, networks, strict=True):
        cases = {case.label: case for case in group.on(network)}
        for row, label in enumerate(labels):
            if label in cases:
                _draw_bar(axes, row, cases[label], bars[network, label])
            else:
                _write_in_row(axes, row, "not run")
        axes.set_xlabel(unit)
        axes.grid(axis="x", alpha=0.25)
        axes.tick_params(axis="y", length=0)
    panels[0].set_yticks(range(len(labels)), labels)
    # Downwards, in the order of the tables. All panels share this axis.
    panels[0].set_ylim(len(labels) - 0.4, -0.6)
    found = [bar for bar in bars.values() if bar is not None]
    # The fraction of the panel that the longest text needs right of the longest bar.
    room = _LETTER_WIDTH * (2 + max(len(bar.text) for bar in found)) / _PANEL_WIDTH
    panels[0].set_xlim(0, (max(bar.end for bar in found) or 1.0) / (1 - room))
    style.add_legend(figure, _legend(group, extra))
    return Drawing(figure, caption)


def _draw_bar(axes: Any, row: int, case: Case, bar: _Bar | None) -> None:
    if bar is None:
        _write_in_row(axes, row, "not measured" if case.error is None else "failed")
        return
    axes.barh(row, bar.length, 0.72, **_fill(case))
    if bar.spread:
        axes.errorbar(bar.length, row, xerr=bar.spread, color="black", capsize=3, linewidth=1.2)
    for index, (place, mark) in enumerate(bar.marks):
        # Evenly over the height of the bar, as two nodes often need the same memory.
        height = 0.6 * ((index + 0.5) / len(bar.marks) - 0.5) if bar.spread_marks else 0.0
        axes.plot(place, row + height, linestyle="none", zorder=4, **mark)
    axes.annotate(bar.text, (bar.end, row), (7, 0), textcoords="offset points", va="center", fontsize=8.5)


def _write_in_row(axes: Any, row: int, text: str) -> None:
    colour = style.VERMILION if text == "failed" else "#666666"
    axes.annotate(
        text, (0, row), (4, 0), textcoords="offset points", va="center", fontsize=8.5, style="italic", color=colour
    )


def _fill(case: Case) -> dict[str, Any]:
    """The fill of a case's bar: a colour for its kind, and hatching for readers who see no colours."""
    if case.is_peer:
        return {"facecolor": style.PEER, "edgecolor": "white"}
    if case.is_lossy:
        return {"facecolor": style.LOSSY, "edgecolor": "white", "hatch": "///"}
    return {"facecolor": style.OWN, "edgecolor": "white"}


def _legend(group: Group, extra: Sequence[tuple[str, dict[str, Any]]]) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = {}
    for case in group.cases:
        kind = "peer (torch alone)" if case.is_peer else "lossy format" if case.is_lossy else "full precision"
        kinds.setdefault(kind, Patch(label=kind, **_fill(case)))
    return [*kinds.values(), *(Line2D([], [], linestyle="none", label=name, **mark) for name, mark in extra)]
