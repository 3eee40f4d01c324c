# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Precision and settings of other engines, settled when an accelerator is made."""

from __future__ import annotations

from typing import Any

from accelerate.logging import get_logger

from accelerate_lshdp.accelerator.ddp_options import ddp_options_without_effect
from accelerate_lshdp.accelerator.other_engines import fsdp_choices_without_effect
from accelerate_lshdp.accelerator.plugin import LSDPPlugin
from accelerate_lshdp.documents.plan import Strategy
from accelerate_lshdp.runtime.option_advice import option_advice


logger = get_logger(__name__)


def choose_precision(options: LSDPPlugin, kwargs: dict[str, Any]) -> None:
    """Takes the precision of the options for accelerate's keyword.

    Raises:
        ValueError: the keyword says another one.
    """
    wanted = options.mixed_precision
    given = kwargs.get("mixed_precision")
    if wanted is not None and given is not None and str(given) != wanted:
        raise ValueError(
            f"mixed_precision={str(given)!r} contradicts {option_advice('mixed_precision', wanted)}; give only one"
        )
    if wanted is not None:
        kwargs["mixed_precision"] = wanted


def warn_of_options_without_effect(strategy: Strategy, ddp_handler: Any) -> None:
    """Warns of settings of other engines that have no effect.

    Args:
        strategy: of the plan.
        ddp_handler: accelerate's ``DistributedDataParallelKwargs``, or None.
    """
    if unused := fsdp_choices_without_effect():
        logger.warning(
            f"the FSDP settings {', '.join(unused)} have no effect: the strategy {strategy} of the plan "
            f"places the parameters. Choose the units by {option_advice('units')}, the checkpointing in the model"
        )
    if unused := ddp_options_without_effect([ddp_handler]):
        logger.warning(
            f"DistributedDataParallelKwargs({', '.join(unused)}) has no effect: torch's DDP is not used. The size "
            f"of gradient buckets is {option_advice('bucket_megabytes')}"
        )
