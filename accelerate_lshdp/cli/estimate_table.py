# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The table that ``accelerate-lshdp estimate`` prints."""

from __future__ import annotations

from collections.abc import Sequence

from accelerate_lshdp.cli.byte_sizes import format_bytes, format_speed
from accelerate_lshdp.cli.placement_text import describe_placement
from accelerate_lshdp.estimation.advice import Advice
from accelerate_lshdp.estimation.estimates import Estimate
from accelerate_lshdp.estimation.hardware import Hardware
from accelerate_lshdp.estimation.model_measurement import MeasuredModel


_WIDTH, _BATCHES_WIDTH = 100, 20


def print_estimates(
    model: MeasuredModel,
    hardware: Hardware,
    estimates: Sequence[Estimate],
    advice: Advice,
    *,
    is_measured: bool,
) -> None:
    """Prints all strategies and those to choose, at most 100 columns wide.

    Args:
        model: the measured model.
        hardware: the nodes and their link.
        estimates: of all strategies, those of one strategy next to each other.
        advice: the strategies to choose, which are highlighted.
        is_measured: whether speeds come from a profile, not from data sheets.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(width=_WIDTH)
    console.print(
        f"{model.name}: {model.counts.parameters:,} parameters in {len(model.counts.units)} units; a sample takes"
        f" {format_bytes(model.activations(1))} of activations and {model.flops / 1e9:.3g} GFLOP",
        highlight=False,
    )
    nodes = "; ".join(f"{node.ranks} x {node.name}" for node in hardware.nodes)
    console.print(f"{len(hardware.nodes)} nodes ({nodes}), {hardware.bits_per_second / 1e9:.3g} Gb/s", highlight=False)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("strategy", "gradients"):
        table.add_column(name, no_wrap=True)
    for name in ("a device", "a host", "node sends", "step", "samples/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("batch sizes", overflow="ellipsis", no_wrap=True, max_width=_BATCHES_WIDTH)
    before = None
    for estimate in estimates:
        chosen = estimate is advice.exact or estimate is advice.lossy
        table.add_row(
            # A strategy's name stands in its first row only.
            "" if estimate.strategy == before else estimate.strategy,
            estimate.communication_dtype,
            _most(estimate.device_bytes),
            _most(estimate.host_bytes),
            *_figures(estimate),
            style="bold green" if chosen else "dim" if estimate.problem else None,
        )
        before = estimate.strategy
    console.print(table)
    _print_advice(console, advice)
    _print_placements(console, estimates)
    speeds = "measured" if is_measured else "estimated from data sheets; --profile takes measured ones"
    console.print(
        "a device, a host: of the node that needs most, activations and the process included; node sends: to other"
        f" nodes in a step; 3x2: 3 micro-batches of 2; speeds are {speeds}",
        style="dim",
    )


def _figures(estimate: Estimate) -> list[str]:
    prediction = estimate.prediction
    if prediction is None:
        return ["", "", "", "cannot be cut so" if estimate.fits else "does not fit"]
    return [
        format_bytes(max(prediction.bytes_between_nodes)),
        f"{prediction.seconds:.3g} s",
        format_speed(sum(estimate.batch_sizes) / prediction.seconds),
        describe_batches(estimate.micro_batches),
    ]


def describe_batches(micro_batches: Sequence[tuple[int, int]]) -> str:
    """Batch sizes of all ranks: ``8 on each rank`` where they are the same, ``3x2`` for 3 micro-batches of 2."""
    texts = [str(size) if steps == 1 else f"{steps}x{size}" for size, steps in micro_batches]
    if len(set(texts)) == 1 and len(texts) > 1:
        return f"{texts[0]} on each rank"
    return " ".join(texts)


def _most(values: Sequence[float | None]) -> str:
    # None: a node whose ranks compute in host memory.
    known = [value for value in values if value is not None]
    return format_bytes(max(known)) if known else "-"


def _print_advice(console, advice: Advice) -> None:  # noqa: ANN001 - rich is imported where it is used
    if advice.exact is not None:
        console.print(f"choose: {_describe(advice.exact)}", style="bold", highlight=False)
    if advice.lossy is not None:
        label = "or, with rounded gradients" if advice.exact is not None else "choose"
        console.print(f"{label}: {_describe(advice.lossy)}", style="bold", highlight=False)
    for reason in advice.reasons:
        console.print(f"- {reason}", highlight=False)


def _print_placements(console, estimates: Sequence[Estimate]) -> None:  # noqa: ANN001 - as above
    for estimate in estimates:
        if estimate.placement is not None:
            console.print(f"{estimate.strategy}: where each block goes", highlight=False)
            for line in describe_placement(estimate.placement):
                console.print(f"- {line}", highlight=False)


def _describe(estimate: Estimate) -> str:
    return (
        f"{estimate.strategy}, gradients in {estimate.communication_dtype}, batch sizes"
        f" {describe_batches(estimate.micro_batches)}: {estimate.prediction.seconds:.3g} s a step (predicted)"
    )
