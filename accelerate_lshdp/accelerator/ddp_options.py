# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What becomes of ``DistributedDataParallelKwargs``: torch's DDP, which they are for, wraps no model here."""

from __future__ import annotations

from dataclasses import fields

from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

from accelerate_lshdp.documents.wire_format import WIRE_FORMATS
from accelerate_lshdp.runtime.option_advice import option_advice


#: Options that change what travels, with what chooses it here.
_REFUSED = ("comm_hook", "comm_wrapper")
#: Options that hold here whatever they say.
_ALWAYS = ("find_unused_parameters", "gradient_as_bucket_view", "comm_state_option")


def refuse_ddp_options(handlers: list[object] | None) -> None:
    """Raises ValueError for options of DDP that would change the gradients, and would be lost here.

    Args:
        handlers: the accelerator's ``kwargs_handlers``.
    """
    for handler in _of_ddp(handlers):
        given = [name for name in _REFUSED if getattr(handler, name) not in (DDPCommunicationHookType.NO, "no", None)]
        if given:
            found = ", ".join(f"{name}={getattr(handler, name)}" for name in given)
            raise ValueError(
                f"DistributedDataParallelKwargs({found}) is a hook of torch's DDP, which is not used here; choose how "
                f"gradients travel ({', '.join(WIRE_FORMATS)}) by {option_advice('communication_dtype')}"
            )


def ddp_options_without_effect(handlers: list[object] | None) -> list[str]:
    """Options of DDP that were changed and change nothing here, as ``name=value``."""
    return [
        f"{option.name}={getattr(handler, option.name)!r}"
        for handler in _of_ddp(handlers)
        for option in fields(DistributedDataParallelKwargs)
        if option.name not in (*_REFUSED, *_ALWAYS) and getattr(handler, option.name) != option.default
    ]


def _of_ddp(handlers: list[object] | None) -> list[DistributedDataParallelKwargs]:
    return [handler for handler in handlers or () if isinstance(handler, DistributedDataParallelKwargs)]
