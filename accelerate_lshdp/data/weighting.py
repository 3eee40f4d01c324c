# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""How much a loss counts, so that unequal batches give exactly the gradient of the global batch.

With losses that are means over each rank's own micro-batch, the gradient of the global batch of B samples is

    g = sum over ranks i and micro-batches m of (b_im / B) * g_im

(LSHDP weights by b_i / B; Cannikin by the same share). With token means b_im and B are numbers of loss tokens, and B
is taken over the whole optimizer step. The shares below sum to one over ranks and micro-batches of a step.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import nn

from accelerate_lshdp.data.place import MicroBatchPlace


class LossWeighting(str, Enum):
    """What the script's loss is a mean over; ``auto``: it is found out."""

    SAMPLE = "sample"
    TOKENS = "tokens"
    NONE = "none"
    AUTO = "auto"

    def __str__(self) -> str:
        return self.value


def loss_share(
    place: MicroBatchPlace | None,
    weighting: LossWeighting,
    *,
    world_size: int,
    accumulation_steps: int,
    global_window_tokens: float | None = None,
) -> float:
    """The share of one micro-batch's mean loss in its optimizer step.

    Args:
        place: where the micro-batch stands; None for a batch of no prepared training loader: equal shares.
        weighting: what losses are means over.
        world_size: number of ranks.
        accumulation_steps: the script's own accumulation: a step is that many global batches, each counting the same
            (for samples, as accelerate divides; tokens are counted over the whole step).
        global_window_tokens: loss tokens of the step over all ranks, for token weighting.

    Returns:
        A number in [0, 1]; exactly 0 for a repeated sample and for a micro-batch without loss tokens.

    Raises:
        ValueError: token weighting without counted tokens.
    """
    if place is None:
        return 1.0 / (world_size * accumulation_steps)
    if place.samples == 0:
        return 0.0
    if weighting is LossWeighting.TOKENS:
        if place.tokens is None or global_window_tokens is None:
            raise ValueError("token weighting needs the tokens of the batch, but its loader did not count them")
        return place.tokens / global_window_tokens if place.tokens else 0.0
    if weighting is LossWeighting.SAMPLE:
        return place.samples / (place.total_samples * accumulation_steps)
    return 1.0 / (world_size * place.micro_batches * accumulation_steps)


def weigh(loss: torch.Tensor, weight: float) -> torch.Tensor:
    """``loss * weight``; for a weight of 0 an exact zero that still reaches every parameter.

    A loss that must not count may be NaN (a mean over no token), and 0 * NaN is NaN: it is replaced, not multiplied.
    """
    if weight == 0.0:
        return torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, torch.zeros_like(loss))
    return loss * weight


def require_known_labels(model: nn.Module) -> None:
    """Refuses to count the labels of a model that may have any.

    Raises:
        ValueError: the model is not one of transformers, so nobody can tell what its loss averages over.
    """
    if not hasattr(model, "loss_type"):
        raise ValueError(
            f"loss_weighting='tokens' cannot tell which labels the loss of {type(model).__name__} averages over; give "
            "LSDPPlugin(token_counter=...), a function from a batch to its number of loss tokens"
        )
