# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Activation checkpointing of single units: activations are computed again in the backward instead of kept.

Chen et al., 2016 (https://arxiv.org/abs/1604.06174); torch's non-reentrant form, which saves and restores the random
numbers of dropout, so that gradients stay the same.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from accelerate_lshdp.engine.attachments import Attachments
from accelerate_lshdp.engine.module_state import change, exclude_hooks_from_pickles


logger = logging.getLogger(__name__)

#: Recomputes whatever it is called with; gradients of tensors in keywords and closures are kept, too.
_RECOMPUTED = functools.partial(checkpoint, use_reentrant=False)


def recompute_activations(model: nn.Module, modules: Sequence[nn.Module], attachments: Attachments) -> None:
    """Lets modules recompute their activations in the backward, until the attachments are removed.

    Args:
        model: they are parts of it.
        modules: of units; the hooks of each one itself (those that gather its parameters, too) run once.
        attachments: of the model.
    """
    for module in modules:
        for name, value in _changes(module).items():
            change(module, name, value, attachments)
        exclude_hooks_from_pickles(module)  # so that copies of it compute as it did before
    if modules:
        attachments.add(model.register_forward_pre_hook(_Again(modules)))


def _changes(module: nn.Module) -> dict[str, Any]:
    """The attributes by which a module recomputes."""
    if _knows_how(module):
        # transformers' layers leave out their cache of keys and values then, which a second forward would extend.
        return {"gradient_checkpointing": True, "_gradient_checkpointing_func": _RECOMPUTED}
    return {"forward": functools.partial(_RECOMPUTED, module.forward)}


def _knows_how(module: nn.Module) -> bool:
    # By the class's name: a custom loop without a model of transformers never loads it.
    return any(ancestor.__name__ == "GradientCheckpointingLayer" for ancestor in type(module).__mro__)


class _Again:
    """A hook of a model: lets units that recompute go on with it where the script has switched it off for all."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._layers = [module for module in modules if _knows_how(module)]

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        for layer in self._layers:
            if not layer.gradient_checkpointing:
                # On every rank alike: ranks of which some recompute and others do not would still agree on gradients.
                logger.warning(
                    "gradient_checkpointing_disable() was called on a model whose placement says checkpoint: true of "
                    "some units, which go on recomputing their activations: the memory was planned for it. Write "
                    "checkpoint: false in the placement to keep them"
                )
                for each in self._layers:
                    vars(each).update(_changes(each))
                return
