# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Draws the pictures of docs/how_it_works.md: ``python docs/pictures/draw.py [FOLDER]``, by default beside this file.

Their numbers are those of commands, kept beside this file:

    accelerate-lshdp quickstart --output-dir outputs/quickstart        its lshdp_plan.json is quickstart_plan.json
    accelerate-lshdp estimate --model gpt2-medium --cluster docs/pictures/cluster.yaml --sequence-length 256 \\
        --json docs/pictures/estimate.json
    python benchmarks/overlap.py --timeline docs/pictures/streamed_step.json

and of the code that trains: how a global batch is cut, and which ranks share a copy of the parameters.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from accelerate_lshdp import Plan, Strategy
from accelerate_lshdp.comparing.report.style import BLUE, DPI, GREEN, GREY, ORANGE, PALETTE, hide_frame, new_figure
from accelerate_lshdp.data.cut import GlobalBatchCut
from accelerate_lshdp.engine.policies import resolve_policies
from accelerate_lshdp.profiling import Profile
from accelerate_lshdp.runtime.topology import Topology


HERE = Path(__file__).resolve().parent
RANK_COLOURS = (BLUE, ORANGE)
# Of the estimate: in fp32, and with equal batches where the name has no H.
SHOWN = ("ddp", "hdp", "fsdp", "fsdp_offload", "zero2", "group_sharding", "lsdp", "lshdp")


def draw_cut() -> Any:
    """Two global batches of 16 samples, cut for two plans."""
    figure = new_figure(9, 3.4)
    panels = figure.subplots(2, 1, sharex=True)
    for axes, sizes in zip(panels, ([8, 8], [11, 5]), strict=True):
        cut = GlobalBatchCut.from_plan(Plan.from_batch_sizes(sizes).batch.ranks)
        for number in range(2):
            for rank, colour in enumerate(RANK_COLOURS):
                for sample in cut.micro_batches(rank, cut.total)[0]:
                    place = number * (cut.total + 1) + sample
                    axes.bar(place, 1, 0.9, color=colour)
                    label = str(number * cut.total + sample)
                    style = {"fontsize": 9, "color": "black" if rank else "white"}
                    axes.text(place, 0.5, label, ha="center", va="center", **style)
            axes.text(number * (cut.total + 1) + 7.5, 1.08, f"global batch {number}", ha="center", fontsize=9)
        axes.set_ylabel(f"{sizes[0]} + {sizes[1]}", rotation=0, ha="right", va="center", fontsize=11)
        axes.set_yticks([])
        axes.set_xticks([])
        axes.set_ylim(0, 1.35)
        hide_frame(axes, "top", "right", "left", "bottom")
    handles = [panels[0].bar(0, 0, color=colour) for colour in RANK_COLOURS]
    figure.legend(handles, ["rank 0", "rank 1"], loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle("The same samples in every global batch; only who trains on them changes", weight="bold", size=12)
    return figure


def draw_planning() -> Any:
    """Measured curves of two ranks, and the sizes that take the same time on both."""
    plan = Plan.load(HERE / "quickstart_plan.json")
    profile = Profile.from_dict(plan.profile)
    figure = new_figure(9, 4.4)
    axes = figure.subplots()
    seconds = plan.predicted["step_seconds"]
    for rank, size, colour, marker in zip(profile.ranks, plan.batch_sizes, RANK_COLOURS, "os", strict=True):
        sizes = np.arange(1, rank.time.batch_sizes[-1] + 1)
        axes.plot(sizes, rank.time.table(int(sizes[-1])), color=colour)
        axes.plot(rank.time.batch_sizes, rank.time.seconds, marker, color=colour, label=f"rank {rank.rank}, measured")
        time = rank.time(size)
        axes.plot([size, size], [0, time], ":", color=colour)
        axes.plot(size, time, "*", color=colour, markersize=18, markeredgecolor="black")
        axes.annotate(f"{size} samples", (size, time), (8, -18), textcoords="offset points", fontsize=10)
    axes.axhline(seconds, color=GREY, linewidth=1)
    axes.text(plan.total_batch_size, seconds, f"{seconds:.3f} s ", va="bottom", ha="right", color="#555555")
    equal = plan.total_batch_size // 2
    slowest = max(rank.time(equal) for rank in profile.ranks)
    axes.plot([equal], [slowest], "X", color="black", markersize=9)
    text = f"equal batches: rank 1 takes {slowest:.3f} s for {equal} samples"
    axes.annotate(text, (equal, slowest), (-6, 8), textcoords="offset points", fontsize=10, ha="right")
    axes.set_xlabel("samples of the rank")
    axes.set_ylabel("forward and backward (s)")
    axes.set_ylim(0, 1.35 * slowest)
    axes.set_xlim(0, plan.total_batch_size)
    axes.legend(frameon=False, loc="upper left")
    axes.grid(alpha=0.25)
    hide_frame(axes)
    title = f"{plan.total_batch_size} samples in the shortest time: both ranks finish together"
    figure.suptitle(title, weight="bold", size=12)
    return figure


def draw_placement() -> Any:
    """What each GPU and each host of two nodes with two GPUs keeps of a model in four parts."""
    topology = Topology(0, (2, 2))
    strategies = (Strategy.DDP, Strategy.FSDP, Strategy.GROUP_SHARDING, Strategy.LSDP)
    figure = new_figure(11, 3.9)
    panels = figure.subplots(1, len(strategies))
    for axes, strategy in zip(panels, strategies, strict=True):
        policies = resolve_policies(strategy, topology, device_type="cuda")
        for node, ranks in enumerate(topology.node_groups):
            low = -node * 3.2
            _box(axes, (-0.25, low - 0.35), 4.5, 2.75, f"node {node}")
            for place, rank in enumerate(ranks):
                group = next(group for group in policies.shard_groups if rank in group)
                parts = _parts_of(group.index(rank), len(group), 4)
                kept = [] if strategy.is_offloaded else parts
                _parts(axes, (place * 2.1, low + 1.1), kept, f"GPU {rank}")
                _parts(axes, (place * 2.1, low), parts if strategy.is_offloaded else [], "")
            axes.text(1.95, low + 0.6, "host memory", ha="center", va="bottom", fontsize=8)
        copies = len(policies.shard_groups)
        axes.set_title(f"{strategy}\n{copies} {'copy' if copies == 1 else 'copies'}", fontsize=10)
        axes.set_xlim(-0.5, 4.5)
        axes.set_ylim(-3.8, 2.6)
        axes.set_axis_off()
    title = "Where a model of four parts stays between steps (2 nodes, 2 GPUs each)"
    figure.suptitle(title, weight="bold", size=12)
    return figure


def _parts_of(place: int, ranks: int, parts: int) -> range:
    """The parts that one of `ranks` ranks keeps."""
    return range(place * parts // ranks, (place + 1) * parts // ranks)


def _parts(axes: Any, corner: tuple[float, float], kept: Sequence[int], label: str) -> None:
    left, low = corner
    for part in range(4):
        colour = PALETTE[part] if part in kept else "white"
        axes.bar(left + 0.25 + part * 0.45, 0.55, 0.4, bottom=low, color=colour, edgecolor=GREY, linewidth=0.8)
    axes.text(left + 0.9, low + 0.6, label, ha="center", va="bottom", fontsize=8)


def _box(axes: Any, corner: tuple[float, float], width: float, height: float, label: str) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle(corner, width, height, fill=False, edgecolor="#555555"))
    axes.text(corner[0] + 0.1, corner[1] + height - 0.08, label, ha="left", va="top", fontsize=8, color="#555555")


def draw_network() -> Any:
    """What a node sends in a step, and how long the step takes, by strategy."""
    document = json.loads((HERE / "estimate.json").read_text(encoding="utf-8"))
    estimates = {e["strategy"]: e for e in document["estimates"] if e["communication_dtype"] == "fp32"}
    figure = new_figure(10, 3.9)
    sent, step = figure.subplots(1, 2, sharey=True)
    for place, name in enumerate(SHOWN):
        prediction = estimates[name]["prediction"]
        colour = GREEN if name in ("lsdp", "lshdp") else GREY
        gigabytes = max(prediction["bytes_between_nodes"]) / 1e9
        for axes, value in ((sent, gigabytes), (step, prediction["seconds"])):
            bar = axes.barh(-place, value, 0.7, color=colour)
            axes.bar_label(bar, [f"{value:.3g}"], padding=3, fontsize=9)
    sent.set_yticks(range(0, -len(SHOWN), -1), SHOWN)
    sent.set_xlabel("what a node sends in a step (GB)")
    step.set_xlabel("step, predicted (s)")
    for axes in (sent, step):
        axes.margins(x=0.12)
        hide_frame(axes)
    model = document["model"]
    title = f"{model['source']}, {model['parameters'] / 1e6:.0f} M parameters, gradients in fp32, 1 Gb/s"
    figure.suptitle(title, weight="bold", size=12)
    return figure


#: Of the timeline of a streamed step: what is done, where, and its colour.
STREAMED = {
    "optimizer": ("host: optimizer", GREY),
    "to the device": ("copies to the GPU", BLUE),
    "forward": ("GPU", GREEN),
    "backward": ("GPU", ORANGE),
    "to the host": ("gradients to the host", PALETTE[3]),
}


def draw_streamed() -> Any:
    """A step whose parameters are streamed, as it was recorded."""
    document = json.loads((HERE / "streamed_step.json").read_text(encoding="utf-8"))
    figure = new_figure(11, 3.4)
    axes = figure.subplots()
    places = list(dict.fromkeys(label for label, _ in STREAMED.values()))
    for lane, (label, colour) in STREAMED.items():
        low = -places.index(label)
        for block, begin, end in document["lanes"][lane]:
            axes.barh(low, end - begin, 0.7, left=begin, color=colour, edgecolor="white")
            if block >= 0:
                axes.text((begin + end) / 2, low, str(block), ha="center", va="center", fontsize=9)
    axes.set_yticks(range(0, -len(places), -1), places)
    axes.set_xlabel("seconds")
    axes.set_xlim(0, document["seconds"])
    hide_frame(axes)
    handles = [axes.bar(0, 0, color=STREAMED[lane][1]) for lane in ("forward", "backward")]
    figure.legend(handles, ["forward", "backward"], loc="outside lower right", ncols=2, frameon=False)
    figure.suptitle(
        "A step of eight blocks: copies and the optimizer's step run beside the GPU", weight="bold", size=12
    )
    return figure


PICTURES = {
    "cut.png": draw_cut,
    "planning.png": draw_planning,
    "placement.png": draw_placement,
    "network.png": draw_network,
    "streamed.png": draw_streamed,
}


def main(argv: Sequence[str]) -> None:
    """Draws all pictures into a folder."""
    folder = Path(argv[0]) if argv else HERE
    for name, draw in PICTURES.items():
        draw().savefig(folder / name, dpi=DPI)


if __name__ == "__main__":
    main(sys.argv[1:])
