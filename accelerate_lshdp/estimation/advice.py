# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`advise`: the strategy to choose, and the reasons, from the estimates of all strategies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from accelerate_lshdp.documents.placement import UnitStore
from accelerate_lshdp.documents.strategy import strategy_traits
from accelerate_lshdp.estimation.estimates import Estimate
from accelerate_lshdp.estimation.hardware import Hardware
from accelerate_lshdp.estimation.model_measurement import MeasuredModel
from accelerate_lshdp.planning.placement.options import uniform_counts


_EXACT = "fp32"
#: Relative error of predictions: of strategies whose step times differ by less, the simpler one is chosen.
_ALIKE = 0.03


@dataclass(frozen=True)
class Advice:
    """The strategies to choose.

    Args:
        exact: the fastest estimate whose gradients are exact; None: nothing fits.
        lossy: the fastest of all, if it is faster than `exact` by more than the error of predictions; else None.
        reasons: sentences that explain the choice.
    """

    exact: Estimate | None
    lossy: Estimate | None
    reasons: tuple[str, ...]


def advise(model: MeasuredModel, hardware: Hardware, estimates: Sequence[Estimate]) -> Advice:
    """Chooses among the estimates that fit the memory.

    Args:
        model: the measured model.
        hardware: the nodes and their link.
        estimates: of all strategies and formats; plain `ddp` must be among them.
    """
    predicted = [estimate for estimate in estimates if estimate.prediction is not None]
    fitting = [estimate for estimate in predicted if _is_worth_it(estimate)] or predicted
    exact = _fastest([estimate for estimate in fitting if estimate.communication_dtype == _EXACT])
    lossy = _fastest(fitting)
    # Rounded gradients cost accuracy: they are worth a word only where they save time for certain.
    if exact is not None and lossy is not None and _seconds(lossy) > (1 - _ALIKE) * _seconds(exact):
        lossy = None
    reasons = [_memory_reason(hardware, estimates)]
    if fitting:
        chosen = exact or lossy
        reasons += [_network_reason(hardware, chosen), *_speed_reason(hardware, estimates, chosen)]
    elif not any(estimate.fits for estimate in estimates):
        reasons.append("Nothing fits. " + _advice_if_nothing_fits(model))
    else:
        reasons.append("The global batch cannot be cut: " + next(e.problem for e in estimates if e.fits) + ".")
    return Advice(exact, lossy, tuple(reasons))


def _is_worth_it(estimate: Estimate) -> bool:
    """Whether units that differ save more than the error of predictions over units that are kept alike.

    By their own seconds: those of other strategies come from another model of the step.
    """
    if estimate.placement is None:
        return True
    problem = estimate.placement.problem
    # No other strategy recomputes activations, or drops what other nodes have after the forward.
    others = [uniform_counts(problem, store, False) for store in UnitStore if not store.reshards_to_node]
    alike = [problem.nanoseconds(counts) for counts in others if counts is not None and problem.fits(counts)]
    return estimate.placement.predicted.step_seconds * 1e9 < (1 - _ALIKE) * min(alike, default=math.inf)


def _seconds(estimate: Estimate) -> float:
    return estimate.prediction.seconds


def _fastest(estimates: Sequence[Estimate]) -> Estimate | None:
    """The simplest strategy among those within the error of the fastest; of one strategy's formats the fastest."""
    if not estimates:
        return None
    best = min(map(_seconds, estimates))
    alike = [estimate for estimate in estimates if _seconds(estimate) <= best * (1 + _ALIKE)]
    return min(alike, key=lambda estimate: (strategy_traits(estimate.strategy).complexity, _seconds(estimate)))


def _memory_reason(hardware: Hardware, estimates: Sequence[Estimate]) -> str:
    whole = next(estimate for estimate in estimates if estimate.strategy == "ddp")
    states = whole.memory[0].states / 1e9
    text = f"Parameters, gradients and optimizer states of one copy take {states:.3g} GB"
    if whole.fits:
        return f"{text}: with activations, a copy on every rank fits."
    fitting = ", ".join(dict.fromkeys(estimate.strategy for estimate in estimates if estimate.fits))
    rest = f"; what fits: {fitting}" if fitting else ""
    return f"{text}: a copy on every rank does not fit ({whole.problem}){rest}."


def _network_reason(hardware: Hardware, chosen: Estimate) -> str:
    prediction = chosen.prediction
    compute = max(rank.compute_seconds for rank in prediction.ranks)
    sent = max(prediction.bytes_between_nodes)
    wire = hardware.link.seconds(sent)
    if sent == 0:
        return f"There is one node, so nothing travels between nodes; ranks compute for {compute:.3g} s a step."
    bound = "the network" if wire > compute else "computing"
    return (
        f"With {chosen.label}, what a node sends in a step takes {wire:.3g} s on the wire"
        f" ({hardware.bits_per_second / 1e9:.3g} Gb/s), and the slowest rank computes for {compute:.3g} s: {bound}"
        " sets the pace."
    )


def _speed_reason(hardware: Hardware, estimates: Sequence[Estimate], chosen: Estimate) -> list[str]:
    by_label = {estimate.label: estimate for estimate in estimates if estimate.prediction is not None}
    equal, unequal = (
        by_label.get(f"{name} {chosen.communication_dtype}")
        for name in (("lsdp", "lshdp") if chosen.strategy in ("lsdp", "lshdp") else ("ddp", "hdp"))
    )
    if equal is None or unequal is None:
        return []
    # Of the equal split: there every rank's seconds are those of the same work.
    speeds = [
        size / rank.compute_seconds for size, rank in zip(equal.batch_sizes, equal.prediction.ranks, strict=True)
    ]
    saved = 1 - _seconds(unequal) / _seconds(equal)
    spread = f"The fastest rank is {max(speeds) / min(speeds):.3g} times as fast as the slowest"
    if saved <= _ALIKE:
        return [f"{spread}: batch sizes that follow the speeds save nothing worth mentioning."]
    return [f"{spread}: batch sizes that follow the speeds save {saved:.0%} of the step ({unequal.strategy})."]


def _advice_if_nothing_fits(model: MeasuredModel) -> str:
    # Activations of one sample beyond the parameters in fp32: sharding them would not help.
    if model.activation_bytes > 4 * model.counts.parameters:
        return "Activations of one sample are large: use gradient checkpointing, shorter sequences, or bf16."
    return "Use more or larger nodes, or --precision bf16."
