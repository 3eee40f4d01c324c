# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Activation checkpointing of single units: activations are computed again in the backward instead of kept.

Chen et al., 2016 (https://arxiv.org/abs/1604.06174); torch's non-reentrant form, which saves and restores the random
numbers of dropout, so that gradients stay the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from accelerate_lshdp.engine.attachments import Attachments


#: Recomputes whatever it is called with; gradients of tensors in keywords and closures are kept, too.
_RECOMPUTED = functools.partial(checkpoint, use_reentrant=False)


def recompute_activations(modules: Sequence[nn.Module], attachments: Attachments) -> None:
    """Lets modules recompute their activations in the backward, until the attachments are removed.

    Args:
        modules: of a unit; the hooks of each one itself (those that gather its parameters, too) run once.
        attachments: of the model.
    """
    for module in modules:
        if _knows_how(module):
            # transformers' layers leave out their cache of keys and values then, which a second forward would extend.
            changes = {"gradient_checkpointing": True, "_gradient_checkpointing_func": _RECOMPUTED}
        else:
            changes = {"forward": functools.partial(_RECOMPUTED, module.forward)}
        for name, value in changes.items():
            _set(module, name, value, attachments)


def _knows_how(module: nn.Module) -> bool:
    # By the class's name: a custom loop without a model of transformers never loads it.
    return any(ancestor.__name__ == "GradientCheckpointingLayer" for ancestor in type(module).__mro__)


def _set(module: nn.Module, name: str, value: Any, attachments: Attachments) -> None:
    """Sets an attribute of the instance, as it was again when the attachments are removed."""
    own = vars(module)
    had, before = name in own, own.get(name)

    def undo() -> None:
        if had:
            own[name] = before
        else:
            own.pop(name, None)

    attachments.at_removal(undo)
    own[name] = value
