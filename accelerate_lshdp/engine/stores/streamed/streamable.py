# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Which parameters can be streamed through a device."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from accelerate_lshdp.runtime.option_advice import option_advice


def require_plain(parameters: Iterable[nn.Parameter], mixes_devices: bool = False) -> None:
    """Checks that parameters can be streamed.

    Args:
        parameters: of a model.
        mixes_devices: whether nodes have different devices, so that nothing but streaming is possible.

    Raises:
        ValueError: one is of a class of its own.
    """
    for parameter in parameters:
        if type(parameter) is not nn.Parameter:
            other = f"{option_advice('intra_node', 'collectives')} or strategy ddp"
            raise ValueError(
                f"found a parameter of class {type(parameter).__name__}, expected torch.nn.Parameter: what is "
                "copied to the device would not have what that class adds. Use "
                f"{'nodes with devices of one type' if mixes_devices else other}"
            )
