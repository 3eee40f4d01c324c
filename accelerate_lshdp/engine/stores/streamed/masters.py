# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Refuses changes of a model after ``prepare()`` that what is computed with on the device cannot follow."""

from __future__ import annotations

from torch import nn

from accelerate_lshdp.runtime.option_advice import option_advice


def require_registered(module: nn.Module, name: str, master: nn.Parameter) -> None:
    """Checks that a module has the parameter in host memory that ``prepare()`` has found there.

    Raises:
        RuntimeError: it has another tensor.
    """
    if module._parameters.get(name) is not master:
        raise RuntimeError(
            f"found another tensor in the place of {name} of {type(module).__name__} (functional_call, "
            "load_state_dict with assign=True, or a new parameter): the forward would compute with the one that "
            "prepare() has found. Use load_state_dict, or a copy.deepcopy of the model for other weights, and change "
            "modules before prepare()"
        )


def require_followable(master: nn.Parameter, trains: bool) -> None:
    """Checks what a script may have done with a parameter since.

    Args:
        master: the parameter in host memory.
        trains: whether it had gradients when the model was prepared.

    Raises:
        RuntimeError: it has gradients now that have no place, or hooks that autograd will not call.
    """
    if master.requires_grad and not trains:
        raise RuntimeError(
            "found parameters unfrozen that were frozen when the model was prepared, so their gradients have no place "
            "in what is summed over nodes. Unfreeze them before prepare(); freezing is possible later, too"
        )
    # Ours is the only one of these that autograd need not call.
    if len(master._post_accumulate_grad_hooks or ()) > int(trains):
        raise RuntimeError(
            "found hooks of register_post_accumulate_grad_hook on parameters in host memory, whose gradients are "
            f"computed on the device, and are there when all ranks have added theirs. Use "
            f"{option_advice('intra_node', 'collectives')}, or strategy ddp"
        )
