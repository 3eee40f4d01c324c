# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What is said of losses: what they were found to be, and where nobody can tell how they count."""

from __future__ import annotations

from accelerate.logging import get_logger

from accelerate_lshdp.accelerator.losses.observations import SeenLoss, kind_of, shares_differ
from accelerate_lshdp.accelerator.losses.parts import Composition
from accelerate_lshdp.accelerator.losses.undecided import OpenLoss
from accelerate_lshdp.data.labels import LabelCounts


logger = get_logger(__name__)

_SAY_IT = (
    "Say it with LSDPPlugin(loss_weighting='sample'), 'tokens' (see token_counter) or 'none' (weight it yourself), or "
    "LSDP_LOSS_WEIGHTING in the environment"
)
_CONSEQUENCES = {
    Composition.LABELS: "so the loss of a rank counts by its number of these labels",
    Composition.SHIFTED_LABELS: "so the loss of a rank counts by its number of these labels",
    Composition.SUM: "the sums of all batches are added",
    Composition.GLOBAL: "it is not weighted again",
}


def tell_kind(name: str, opened: OpenLoss, everyone: list[SeenLoss]) -> None:
    """Says once what a loss was found to be, where it does not count by samples for sure."""
    kind, which = opened.guess, _called(name)
    if kind is Composition.UNKNOWN:
        unseen = "of a model whose forward cannot be seen, because it is compiled" if _is_unseen(everyone) else ""
        logger.warning(
            f"{which} is {unseen or 'not one that can be recognised'}, so it is taken for a mean over samples. "
            "If it is one, say so with loss_weighting='sample' (LSDPPlugin, or LSDP_LOSS_WEIGHTING=sample in the "
            "environment); a loss that is no mean over samples, as one that compares them with each other, or a mean "
            "over labels that are not in batch['labels'], is not exactly that of one process"
        )
    elif kind is not Composition.SAMPLES:
        by = ", as of other models of its class" if opened.by_class else ""
        logger.warning(f"{which} was found to be {kind.value}{by}, {_CONSEQUENCES[kind]}")
    if any(seen.has_auxiliary for seen in everyone):
        logger.warning(
            "the model adds an auxiliary loss (aux_loss) that is no mean over samples or labels; it counts like "
            "the rest, so it is not exactly that of one process"
        )


def tell_undecided(name: str, opened: OpenLoss, everyone: list[SeenLoss]) -> bool:
    """Says that it cannot be told what a loss is, if that makes a difference; returns whether it does."""
    possible = opened.possible or set()
    if opened.is_of_class(everyone) or not shares_differ(possible, everyone):
        return False
    fitting = " and ".join(kind.value for kind in Composition if kind in possible)
    logger.warning(
        f"it cannot be told yet what {_called(name)} is: the values so far fit {fitting} (as where micro-batches have "
        f"one row), which count differently here. It is taken for {opened.guess.value}. {_SAY_IT}"
    )
    return True


def require_known_labels_of_step(kind: Composition, totals: LabelCounts | None, everyone: list[SeenLoss]) -> None:
    """Raises RuntimeError if labels of micro-batches to come say by how much this one counts."""
    if kind.by_labels and totals is None and any(seen.dimensions for seen in everyone):
        raise RuntimeError(
            f"found a loss that is {kind.value}, but not all of these are in batch['labels'] of the prepared "
            "loader: those of the micro-batches that follow are not known yet, so nobody can tell by how much "
            "this one counts. Put the labels that the model is given into the batches (in the collator), or use "
            "a plan without accumulation"
        )


def refuse_uneven_labels(everyone: list[SeenLoss]) -> None:
    """Raises RuntimeError if labels and samples are divided differently over the ranks, or micro-batches."""
    if not all(seen.counted for seen in everyone) or not any(seen.ignored for seen in everyone):
        return
    shares = {seen.labels / seen.samples for seen in everyone if seen.samples}
    if len(shares) > 1 or not all(seen.even for seen in everyone):
        found = ", ".join(f"{seen.labels:.0f} labels in {seen.samples:.0f} samples" for seen in everyone)
        unseen = "that is that of a compiled model, whose forward cannot be seen"
        loss = unseen if _is_unseen(everyone) else "that is neither the model's own nor a mean that can be recognised"
        raise RuntimeError(
            f"found batches with different numbers of labels other than -100 ({found}; one entry a rank), and a "
            f"loss {loss}: it counts by samples or by labels, and nobody can tell. {_SAY_IT}"
        )


def refuse_unequal_looks(everyone: list[SeenLoss]) -> None:
    """Raises RuntimeError: ranks have losses of different batches, or not as many of one."""
    asking = ", ".join(f"rank {rank}" for rank, seen in enumerate(everyone) if seen.asks)
    raise RuntimeError(
        f"found ranks that are not in step: {asking} called backward on a loss of which the others have to say what "
        "they see, and they are at another batch, or at another loss of it. A rank has left out, or repeated, a batch "
        "or a backward that others have not: after an exception that was caught, or a condition that holds on one "
        "rank only. Let all ranks do the same (ask what the others found by accelerator.reduce), and go on from the "
        "last checkpoint"
    )


def refuse_different_kinds(everyone: list[SeenLoss]) -> None:
    """Raises RuntimeError: ranks know their losses to count in different ways."""
    found = ", ".join(
        f"rank {rank}: {kind_of(seen.known).value}" for rank, seen in enumerate(everyone) if seen.known >= 0
    )
    raise RuntimeError(
        f"found losses that are different things on the ranks ({found}), expected the same loss of the same model on "
        f"all of them. Let all ranks compute the same. {_SAY_IT}"
    )


def _called(name: str) -> str:
    """What a loss is called in a message."""
    return "the loss" if name == "loss 0" else f"another loss ({name}, counted from 0)"


def _is_unseen(everyone: list[SeenLoss]) -> bool:
    return any(seen.compiled for seen in everyone) and not any(seen.looked for seen in everyone)
