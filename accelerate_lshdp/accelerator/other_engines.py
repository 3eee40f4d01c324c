# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Engines that place a model's parameters themselves cannot share it with ours. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping

from accelerate_lshdp.runtime.option_advice import option_advice


#: What accelerate's own launcher sets for engines other than ours.
_SWITCHES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "accelerate's ParallelismConfig",
}
#: Keywords of ``Accelerator``, and the argument of ``TrainingArguments`` from which a Trainer makes them.
_KEYWORDS = {
    "deepspeed_plugin": "deepspeed",
    "deepspeed_plugins": "deepspeed",
    "fsdp_plugin": "fsdp",
    "megatron_lm_plugin": None,
    "parallelism_config": "parallelism_config",
}
#: Values that the launcher hands on from any FSDP configuration, ours included.
_NO_CHOICE = ("", "0", "false", "none")
_FSDP_CHOICES = (
    "FSDP_ACTIVATION_CHECKPOINTING",
    "FSDP_AUTO_WRAP_POLICY",
    "FSDP_OFFLOAD_PARAMS",
    "FSDP_TRANSFORMER_CLS_TO_WRAP",
)


def refuse_configured_engines() -> None:
    """Raises ValueError if the launcher was told to use another engine."""
    configured = [name for name in _SWITCHES if os.environ.get(name, "false").lower() in ("1", "true", "yes", "on")]
    if configured:
        raise ValueError(
            f"{' and '.join(_SWITCHES[name] for name in configured)} is switched on by {', '.join(configured)}; "
            "LSHDP cannot share a model with it. Use a config file of `accelerate-lshdp config`"
        )


def refuse_other_engines(keywords: Mapping[str, object]) -> None:
    """Raises ValueError if another engine is configured for the same model.

    Args:
        keywords: of ``Accelerator``.
    """
    given = [name for name in _KEYWORDS if keywords.get(name) is not None]
    if given:
        made_from = " or ".join(sorted({f"{_KEYWORDS[name]}=" for name in given if _KEYWORDS[name]}))
        raise ValueError(
            f"{', '.join(given)} cannot be combined with LSHDPAccelerator, which places parameters itself; choose a "
            f"strategy in the plan or by {option_advice('strategy')} instead"
            + (f". In a script with a Trainer, take {made_from} out of TrainingArguments" if made_from else "")
        )
    refuse_configured_engines()


def switch_off_other_engines() -> None:
    """Lets accelerate start without the engines that ``refuse_other_engines`` refused, so that ranks can meet."""
    for name in _SWITCHES:
        os.environ.pop(name, None)


def fsdp_choices_without_effect() -> list[str]:
    """Settings of an FSDP configuration that ask for more than several processes, as ``NAME=value``.

    A configuration of type FSDP is how accelerate starts several CPU processes on a node, so it is no mistake by
    itself. How parameters are placed is the strategy's; what it says about that is lost.
    """
    chosen = [(name, os.environ.get(name, "")) for name in _FSDP_CHOICES]
    return [f"{name}={value}" for name, value in chosen if value.lower() not in _NO_CHOICE]
