# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Mixed precision of a model in which some units are whole, and others are sharded by FSDP2.

Every unit computes as it does where all units are kept like it. FSDP2 casts the parameters that it gathers, and what
its units are called with; whole parameters stay in fp32, and autocast casts them operation by operation, but for
normalisations, softmax and losses. So autocast is on in the forwards of whole units alone: inside FSDP2's units it is
as the script has it around the whole model. At the borders both take what the other one gives: autocast casts the
inputs of its operations, and FSDP2 those of its units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from accelerate_lshdp.engine.attachments import Attachments


class UnitPrecision:
    """Autocast in the forwards of single units of one model, until the attachments are removed.

    Args:
        device_type: where the forward runs.
        dtype: of the operations that autocast casts.
        attachments: of the model.
    """

    def __init__(self, device_type: str, dtype: torch.dtype, attachments: Attachments) -> None:
        self._device_type = device_type
        self._dtype = dtype
        self._attachments = attachments
        self._around: list[tuple[bool, torch.dtype]] = []  # autocast of the script in the forwards that are under way
        self._last_around: tuple[bool, torch.dtype] | None = None  # in the newest one

    def cast_whole(self, modules: Iterable[nn.Module]) -> None:
        """Turns autocast on in the forwards of modules whose parameters are whole."""
        for module in modules:
            self._attach(module, lambda: torch.autocast(self._device_type, self._dtype))

    def cast_rest(self, model: nn.Module, sharded: Iterable[nn.Module]) -> None:
        """Turns autocast on in what is in no unit, and inside the units that FSDP2 casts as it was around the model.

        The model's floating-point outputs become fp32.

        Args:
            model: whose parameters in no unit are whole.
            sharded: the units of FSDP2.
        """
        self._attach(model, lambda: torch.autocast(self._device_type, self._dtype), self._around)
        # As accelerate and FSDP2's root do it, of which a model may have none.
        self._attachments.add(model.register_forward_hook(_outputs_in_fp32))
        for module in sharded:
            self._attach(module, self._as_around)

    def _as_around(self) -> AbstractContextManager[None]:
        # Activations that are computed again are so in the backward, as the forward was.
        enabled, dtype = self._around[-1] if self._around else self._last_around or self._state()
        return torch.autocast(self._device_type, dtype, enabled=enabled)

    def _state(self) -> tuple[bool, torch.dtype]:
        return torch.is_autocast_enabled(self._device_type), torch.get_autocast_dtype(self._device_type)

    def _attach(
        self,
        module: nn.Module,
        context: Callable[[], AbstractContextManager[None]],
        noted: list[tuple[bool, torch.dtype]] | None = None,
    ) -> None:
        """Enters a context in each forward of a module; in `noted` is then what autocast was before."""
        entered: list[AbstractContextManager[None]] = []  # several, where a module calls itself

        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            if noted is not None:
                noted.append(self._state())
                self._last_around = noted[-1]
            entered.append(context())
            entered[-1].__enter__()

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            # Also of a forward that failed; of one that failed in a hook before ours nothing was entered.
            if entered:
                entered.pop().__exit__(None, None, None)
                if noted is not None:
                    noted.pop()

        self._attachments.add(
            module.register_forward_pre_hook(before), module.register_forward_hook(after, always_call=True)
        )


def _outputs_in_fp32(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda t: t.float() if t.is_floating_point() else t, output)
