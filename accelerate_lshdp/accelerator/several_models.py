# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Losses of several prepared models, of which a rank may leave one out.

A rank that leaves a model out of its loss hands in zeros for it, where this is possible: the others wait for its part.
Where it is not, all ranks have to know before the backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from accelerate_lshdp.engine.module_state import parameters_of
from accelerate_lshdp.engine.prepared import PreparedModel
from accelerate_lshdp.runtime.step_exchange import StepExchange


#: What a rank does with a model in a backward; 0: it was not asked.
_LEFT_OUT, _KEPT_ALONE, _SUMMED = 1, 2, 3
_WHAT_IT_DOES = {_LEFT_OUT: "left out", _KEPT_ALONE: "used under no_sync", _SUMMED: "used"}


def models_reached(loss: torch.Tensor, models: Sequence[PreparedModel]) -> list[bool]:
    """Which models the graph of a loss leads to, as far as it goes (not into reentrant checkpoints)."""
    leaves = {
        id(leaf): number
        for number, prepared in enumerate(models)
        for leaf in (*parameters_of(prepared.module), *prepared.gradient_leaves())
    }
    reached = [False] * len(models)
    waiting = [loss.grad_fn]
    seen = set(waiting)
    while waiting and not all(reached):
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in leaves:
            reached[leaves[id(variable)]] = True
        for following, _ in () if node is None else node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return reached


def require_same_models(
    exchange: StepExchange,
    loss: torch.Tensor,
    models: Sequence[PreparedModel],
    shard_groups: Iterable[Sequence[int]],
) -> None:
    """Checks, before autograd, that ranks which share parameters have losses of the same models (collective).

    Their collectives are in the middle of autograd, in groups of each model, so one would wait there for ever.

    Raises:
        RuntimeError: on all ranks, if they have not.
    """
    if len(models) < 2 or exchange.world_size == 1 or all(prepared.can_be_completed for prepared in models):
        return
    reached = models_reached(loss, models)
    own = [
        (_SUMMED if prepared.synchronise_next else _KEPT_ALONE) if reached[number] else _LEFT_OUT
        for number, prepared in enumerate(models)
    ]
    uses = exchange.rows_before_backward(torch.tensor(own, dtype=torch.uint8))
    for number, prepared in enumerate(models):
        for ranks in shard_groups:
            does = {rank: int(uses[rank][number]) for rank in ranks if rank in uses}
            if len(set(does.values())) > 1:
                found = ", ".join(f"{_WHAT_IT_DOES[what]} in that of rank {rank}" for rank, what in does.items())
                raise RuntimeError(
                    "the ranks have losses of different models, whose parameters they share: found "
                    f"{type(prepared.module).__name__} (number {number} of those prepared) {found}. "
                    "Let the losses of all ranks depend on the same models (add 0 times an output, where one does "
                    "not), or use strategy ddp, or lsdp on CPUs, under which a rank may leave a model out"
                )


def models_that_took_part(exchange: StepExchange, models: Sequence[PreparedModel]) -> list[PreparedModel]:
    """The models that the loss of any rank depends on, in the order of ``prepare`` (collective in a step's last one).

    A rank whose loss leaves one out hands in zeros for it.

    Raises:
        RuntimeError: on all ranks, if one of them sums gradients of a model in this backward and another cannot.
    """
    if len(models) < 2 or not any(prepared.synchronise_next for prepared in models):
        return [prepared for prepared in models if prepared.took_part]
    sums = [prepared.took_part and prepared.synchronise_next for prepared in models]
    own = torch.tensor([sums, [not prepared.synchronise_next for prepared in models]])
    uses = exchange.rows_beside_gradients(own.flatten().to(torch.uint8))
    for number, prepared in enumerate(models):
        # In the second half of a row: whether the rank keeps the gradients of the model alone.
        places = (number, len(models) + number)
        summing, alone = ([rank for rank, row in sorted(uses.items()) if row[place]] for place in places)
        if summing and alone:
            raise RuntimeError(
                f"found that the loss of rank {_ranks(summing)} depends on {type(prepared.module).__name__}, which "
                f"rank {_ranks(alone)} has used under no_sync only since the last synchronised backward: use "
                "accumulate() with all models that the loss of any rank depends on"
            )
        if summing:
            prepared.took_part = True
    return [prepared for prepared in models if prepared.took_part]


def _ranks(ranks: Sequence[int]) -> str:
    return " and ".join(map(str, ranks))
