# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Refuses, with a message, what needs whole parameters and so does not work where FSDP2 shards them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.hooks import RemovableHandle

from accelerate_lshdp.engine.double_backward import refuse_gradients_of_gradients
from accelerate_lshdp.engine.stores.fsdp2.versions import param_groups


#: Optimizers that torch cannot run on shards, by the name of their class: transformers has an Adafactor, too.
_WHOLE_PARAMETERS = ("Adafactor", "Rprop", "SparseAdam")
_INSTEAD = "Use strategy ddp, or lsdp with the memory that the ranks of a node share"


def check_sharded_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Checks that an optimizer can update the parameters that it holds.

    Raises:
        ValueError: some are sharded, and it needs them whole.
    """
    sharded = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor)]
    if not sharded:
        return
    # By names and ancestors: subclasses have the same need, and transformers' optimizers are classes of their own.
    names = {ancestor.__name__ for ancestor in type(optimizer).__mro__}
    # On a mesh of one rank a DTensor is whole; LBFGS needs no more than that.
    cut = any(parameter.device_mesh.size() > 1 for parameter in sharded)
    if names & set(_WHOLE_PARAMETERS) or ("LBFGS" in names and cut):
        instead = "Use strategy ddp" if "LBFGS" in names else _INSTEAD
        raise ValueError(
            f"found the optimizer {type(optimizer).__name__}, which needs whole parameters, but the strategy shards "
            f"them. {instead}, or an optimizer that works on each element, such as AdamW"
        )


def shards_of_state(state: dict[str, Any], parameter: DTensor) -> dict[str, Any]:
    """Cuts an optimizer's state of a whole parameter as the parameter has been cut (no collective).

    Args:
        state: values by name; tensors of the parameter's shape are cut, others stay.
        parameter: the sharded one.
    """
    mesh, placements = parameter.device_mesh, parameter.placements

    def cut(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
            return value
        return distribute_tensor(value, mesh, placements, src_data_rank=None)  # all ranks have the same

    return {name: cut(value) for name, value in state.items()}


def refuse_sparse_gradients(model: nn.Module) -> None:
    """Checks that no embedding of a model has sparse gradients.

    Raises:
        ValueError: naming the first one.
    """
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            if module.weight.requires_grad:
                raise ValueError(
                    f"found sparse=True in {name or 'the model'} ({type(module).__name__}): gradients are summed over "
                    "the ranks as dense tensors. Use sparse=False"
                )


def refuse_double_backward(root: FSDPModule) -> None:
    """Lets gradients of gradients (``create_graph=True``) fail with a message: FSDP2 has freed what they need."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            for group in param_groups(module):
                _refuse_in(group)


def _refuse_in(group: Any) -> None:
    # Replaced in the instance: FSDP2 calls it by attribute at each unit's backward, and has no hook there.
    begin = group.pre_backward

    def pre_backward(*arguments: Any) -> None:
        refuse_gradients_of_gradients()
        begin(*arguments)

    group.pre_backward = pre_backward


class _Refusal:
    """Stands in for a method of a sharded module that would need whole parameters."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        raise RuntimeError(self._message)


class _SavePretrained:
    """``save_pretrained`` of a sharded module, which needs the whole state dict from its caller."""

    def __init__(self, save: Callable[..., Any]) -> None:
        self.save = save

    def __call__(self, save_directory: Any, *arguments: Any, **keywords: Any) -> Any:
        if keywords.get("state_dict") is None and (len(arguments) < 2 or arguments[1] is None):
            raise RuntimeError(
                "found save_pretrained without a state_dict on a sharded model, of which this rank has its shards "
                "only. Call state = accelerator.get_state_dict(model) on all ranks, and then "
                "save_pretrained(..., state_dict=state)"
            )
        return self.save(save_directory, *arguments, **keywords)


#: Takes the place of a shard's ``__reduce_ex__``: pickle looks that up in the object before the class.
_PICKLED = _Refusal(
    "found a shard of a parameter, or of an optimizer's state, that is to be saved (torch.save, accelerator.save, "
    "pickle): the file would have this rank's part alone. Call accelerator.get_state_dict(model) on all ranks and "
    "save what it gives, or use accelerator.save_model; accelerator.save_state saves optimizers, too"
)


def refuse_in_files(values: Iterable[Any]) -> None:
    """Makes pickling fail, with a message, for those of some values that are shards. They can be used in memory."""
    for value in values:
        if isinstance(value, DTensor):
            vars(value)["__reduce_ex__"] = _PICKLED


def refuse_shards_in_files(module: nn.Module) -> list[RemovableHandle]:
    """Lets pickling fail for shards that ``state_dict`` of a module, or of a part of it, has given.

    Returns:
        What ends that for later ones.
    """

    def refuse(own: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        refuse_in_files(state.get(prefix + name) for name in own._parameters)

    return [
        each.register_state_dict_post_hook(refuse)
        for each in module.modules()
        if any(isinstance(parameter, DTensor) for parameter in each._parameters.values())
    ]


def guard_methods(module: nn.Module) -> None:
    """Gives a sharded module methods that refuse, with what to do instead, where torch's own fail or mislead."""
    # In the instance, which hides the class's method and leaves the class to the other models of the script.
    vars(module)["__deepcopy__"] = _Refusal(
        "found copy.deepcopy (AveragedModel calls it, too) of a sharded model: its parameters are shards that only "
        "work in this place. Copy the model before prepare(), or make a new one and load "
        "accelerator.get_state_dict(model) into it"
    )
    save = getattr(module, "save_pretrained", None)
    if save is not None:
        vars(module)["save_pretrained"] = _SavePretrained(save)


@contextlib.contextmanager
def saving_allowed(module: nn.Module) -> Iterator[None]:
    """Inside, ``save_pretrained`` of a model and of its parts is what it was before `guard_methods`."""
    guards = [
        (vars(part), guard)
        for part in module.modules()
        if isinstance(guard := vars(part).get("save_pretrained"), _SavePretrained)
    ]
    for attributes, guard in guards:
        attributes["save_pretrained"] = guard.save
    try:
        yield
    finally:
        for attributes, guard in guards:
            attributes["save_pretrained"] = guard
