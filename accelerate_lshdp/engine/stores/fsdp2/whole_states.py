# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`whole_states`: a sharded model saves itself as if it were whole, for code that saves it in a way of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from accelerate_lshdp.engine.stores.fsdp2.limits import saving_allowed


@contextlib.contextmanager
def whole_states(
    module: nn.Module, whole: Mapping[str, torch.Tensor], plain_name: Callable[[str], str]
) -> Iterator[None]:
    """Inside, ``state_dict`` and ``save_pretrained`` of a sharded model and of its parts give whole tensors.

    For one rank, which saves while the others go on: nothing in here is a collective, and what would be one, a
    forward, is an error.

    Args:
        module: unwrapped; its parts may be plain.
        whole: its full tensors under the names of its state dict.
        plain_name: of a parameter, without what wrappers have added to its name in the module.

    Raises:
        RuntimeError: a sharded parameter is not among the full tensors.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(saving_allowed(module))
        for name, part in module.named_modules():
            prefix = f"{name}." if name else ""
            names = {key: plain_name(prefix + key) for key, p in part._parameters.items() if isinstance(p, DTensor)}
            missing = sorted(set(names.values()) - whole.keys())
            if missing:
                raise RuntimeError(
                    f"found no full tensor of the sharded parameters {missing[:3]} while the model is saved, expected "
                    "one of each. Save what accelerator.get_state_dict(model) gives, or use accelerator.save_model"
                )
            own = {key: whole[plain] for key, plain in names.items()}
            if own:
                stack.callback(part.register_state_dict_post_hook(_Completion(own)).remove)
            if isinstance(part, FSDPModule):
                # Before FSDP2's own hook, which gathers.
                stack.callback(part.register_forward_pre_hook(_refuse_forward, prepend=True).remove)
        yield


class _Completion:
    """Puts whole tensors into what ``state_dict`` of one module has given of its own parameters."""

    def __init__(self, whole: Mapping[str, torch.Tensor]) -> None:
        self._whole = whole

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name, tensor in self._whole.items():
            if prefix + name in state:
                state[prefix + name] = tensor


def _refuse_forward(module: nn.Module, _: Any) -> None:
    raise RuntimeError(
        "found a forward of a sharded model while one rank saves it: the parameters would have to be gathered from "
        "ranks that do not save. Compute what belongs to the saved model before it is saved, on all ranks"
    )
