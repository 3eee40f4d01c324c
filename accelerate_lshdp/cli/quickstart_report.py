# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The table and the picture of the quickstart, from the contents of ``results.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate_lshdp.comparing.report.style import BLUE, DPI, ORANGE, hide_frame, new_figure


NAMES = {"ddp_equal": "DDP, equal batches", "lshdp": "LSHDP, planned batches"}
_COMPUTE, _WAIT, _OTHER = BLUE, ORANGE, "#BBBBBB"
_DDP_CURVE, _LSHDP_CURVE = ORANGE, BLUE


def saving(results: dict[str, Any]) -> float:
    """The fraction of DDP's step time that LSHDP saves; negative if it takes longer."""
    return 1 - results["lshdp"]["step_seconds"] / results["ddp_equal"]["step_seconds"]


def largest_loss_difference(results: dict[str, Any]) -> float:
    """The largest difference of the two loss curves at the same step."""
    pairs = zip(results["ddp_equal"]["losses"], results["lshdp"]["losses"], strict=True)
    return max(abs(one - other) for one, other in pairs)


def print_table(results: dict[str, Any]) -> None:
    """Prints both runs side by side, at most 100 columns wide."""
    from rich.console import Console
    from rich.table import Table

    equal, planned = results["ddp_equal"], results["lshdp"]
    table = Table(title=_title(results), title_justify="left", caption=_caption(results), caption_justify="left")
    table.add_column("")
    for name in NAMES.values():
        table.add_column(name, justify="right")
    table.add_column("change", justify="right")

    def add(label: str, key: str, form: str, unit: str = "", relative: bool = True) -> None:
        one, other = equal[key], planned[key]
        change = f"{(other / one - 1) * 100:+.1f} %" if relative else f"{(other - one) * 100:+.1f} points"
        scale = 1 if relative else 100
        table.add_row(label, *(f"{value * scale:{form}}{unit}" for value in (one, other)), change)

    sizes = [" + ".join(map(str, run["batch_sizes"])) for run in (equal, planned)]
    table.add_row("batch sizes (rank 0 + rank 1)", *sizes)
    add("step time", "step_seconds", ".3f", " s")
    add("idle fraction", "idle_fraction", ".1f", " %", relative=False)
    add("samples per second", "samples_per_second", ".1f")
    losses = [run["losses"][-1] for run in (equal, planned)]
    table.add_row("final training loss", *(f"{loss:.4f}" for loss in losses), f"{losses[1] - losses[0]:+.1e}")
    add("held-out accuracy", "accuracy", ".1f", " %", relative=False)
    Console(width=100, soft_wrap=False).print(table)


def _title(results: dict[str, Any]) -> str:
    share = saving(results) * 100
    verdict = f"takes {share:.0f} % less time" if share >= 0 else f"takes {-share:.0f} % more time"
    return f"A step with LSHDP {verdict}, on the same samples"


def _caption(results: dict[str, Any]) -> str:
    steps = len(results["lshdp"]["losses"])
    return (
        f"Times are medians over steps. The loss curves differ by at most {largest_loss_difference(results):.0e}"
        f" over {steps} steps."
    )


def draw_picture(results: dict[str, Any], path: Path) -> None:
    """Draws the compute and wait seconds of each rank in a step, and both loss curves, as a PNG."""
    figure = new_figure(11, 4.6)
    bars, curves = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _draw_bars(bars, results)
    _draw_curves(curves, results)
    figure.suptitle(_title(results), fontsize=13, fontweight="bold")
    figure.savefig(path, dpi=DPI)


def _draw_bars(axes: Any, results: dict[str, Any]) -> None:
    """Draws compute and wait of each rank, DDP above LSHDP; the rest of the step is optimizer and loader."""
    longest = max(run["step_seconds"] for run in results.values())
    emulation = results["lshdp"]["emulation"]
    labels, places = [], []
    for place, (name, run) in enumerate(results.items()):
        for rank, (compute, wait) in enumerate(zip(run["compute_seconds"], run["wait_seconds"], strict=True)):
            y = -(place * 3 + rank)
            # Medians of the parts need not sum to the median of the step.
            other = max(0.0, run["step_seconds"] - compute - wait)
            first = place == rank == 0
            style = {"height": 0.72, "edgecolor": "white"}
            axes.barh(y, compute, color=_COMPUTE, label="computing" if first else None, **style)
            axes.barh(y, wait, left=compute, color=_WAIT, hatch="///", label="waiting" if first else None, **style)
            left = compute + wait
            axes.barh(y, other, left=left, color=_OTHER, label="optimizer, loader" if first else None, **style)
            if compute > 0.15 * longest:  # the text would not fit into a shorter bar
                samples = f"{run['batch_sizes'][rank]} samples"
                axes.text(compute / 2, y, samples, ha="center", va="center", color="white", fontsize=9)
            slowed = rank == emulation["rank"] and emulation["slowdown"] > 1
            labels.append(f"rank {rank}" + (f"\n(slowed {emulation['slowdown']:g}x,\nemulated)" if slowed else ""))
            places.append(y)
        text = f"{NAMES[name]}: {run['step_seconds']:.3f} s a step, {run['idle_fraction']:.0%} idle"
        axes.text(0, -place * 3 + 0.5, text, va="bottom", fontsize=10, fontweight="bold")
    axes.set_yticks(places, labels)
    axes.set_ylim(min(places) - 0.6, 1.1)
    axes.set_xlim(0, longest * 1.03)
    axes.set_xlabel("seconds of one step (median)")
    hide_frame(axes, "top", "right", "left")
    axes.tick_params(axis="y", length=0)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, frameon=False)


def _draw_curves(axes: Any, results: dict[str, Any]) -> None:
    """Draws both loss curves, a thin one over a thick one, because they coincide."""
    styles = {
        "ddp_equal": {"color": _DDP_CURVE, "linewidth": 5, "solid_capstyle": "round"},
        "lshdp": {"color": _LSHDP_CURVE, "linewidth": 1.6, "linestyle": (0, (4, 1.5))},
    }
    for name, style in styles.items():
        run = results[name]
        label = f"{NAMES[name]} (accuracy {run['accuracy']:.1%})"
        axes.plot(range(1, len(run["losses"]) + 1), run["losses"], label=label, **style)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss (global batch)")
    axes.set_ylim(bottom=0)
    axes.set_title(f"Same loss curve: at most {largest_loss_difference(results):.0e} apart", fontsize=10)
    hide_frame(axes)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="upper right")
