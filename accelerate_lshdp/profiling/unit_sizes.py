# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`measure_on_fakes`: the sizes of the units of a user's model, from forwards of a copy that has no content.

The copy has fake tensors, of shapes and devices without memory, so that models are measured which fit nowhere whole.
Neither the model nor the random numbers of the script are changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import recursively_apply
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from accelerate_lshdp.data.random_numbers import kept_random_numbers
from accelerate_lshdp.documents.unit_sizes import ModelUnits
from accelerate_lshdp.engine.module_state import parameters_of
from accelerate_lshdp.engine.unit_measurement import LossOf, measure_units
from accelerate_lshdp.profiling.subject import Samples, Subject, copy_container


if TYPE_CHECKING:
    from accelerate_lshdp.profiling.process import ProfiledProcess

logger = get_logger(__name__)

#: Samples of one batch: of more, the longest one is rarely longer.
_SAMPLES = 8


class UnitsUnknown(RuntimeError):
    """The units of a model could not be measured; it says why."""


def measure_on_fakes(
    model: nn.Module,
    batches: Sequence[Any],
    samples: Sequence[int],
    loss_of: LossOf,
    *,
    device: torch.device,
    mixed_precision: str,
    autocast: Callable[[], AbstractContextManager[None]],
    block_names: Sequence[str] | None = None,
) -> ModelUnits:
    """Measures the units of a model that is not prepared.

    Args:
        model: on any device.
        batches: two of the same samples, of which the second one has them several times.
        samples: their numbers of samples.
        loss_of: makes a forward and returns what a backward begins with.
        device: on which the model will compute.
        mixed_precision: in which it will.
        autocast: makes the forward compute so.
        block_names: as for `choose_units`.

    Raises:
        UnitsUnknown: the model cannot be copied, or its forward needs the content of tensors.
    """

    def forward(fake: nn.Module, batch: Any) -> torch.Tensor:
        with autocast():
            return loss_of(fake, copy_container(batch))

    with kept_random_numbers(device):
        try:
            # Constants that the forward makes of numbers and arrays are no fakes by themselves.
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            fake = _copy_without_content(model, mode, device)
            with mode:
                fakes = [recursively_apply(lambda t: mode.from_tensor(t).to(device), batch) for batch in batches]
                units, _ = measure_units(
                    fake, fakes, samples, forward, block_names=block_names, mixed_precision=mixed_precision
                )
        except Exception as error:  # the model's code may raise anything
            text = str(error).strip().splitlines()
            raise UnitsUnknown(
                f"the forward of {type(model).__name__} cannot be followed without real tensors"
                f" ({type(error).__name__}: {text[0] if text else 'without a message'})"
            ) from error
    return units


def _copy_without_content(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> nn.Module:
    """A copy of a model, in training mode, whose parameters and buffers are fake tensors on a device."""
    copies: dict[int, Any] = {}  # of `deepcopy`, which takes what it finds there: tied parameters stay tied
    with mode:
        for tensor in (*parameters_of(model), *model.buffers()):
            fake = mode.from_tensor(tensor.detach()).to(device)
            is_parameter = isinstance(tensor, nn.Parameter)
            copies[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
    return copy.deepcopy(model, copies).train()


def units_of(
    subject: Subject, samples: Samples, process: ProfiledProcess, block_names: Sequence[str] | None
) -> ModelUnits | None:
    """The sizes of the units of a subject's model, on this rank alone.

    Args:
        subject: its model is not prepared.
        samples: of its data.
        process: gives device and precision, and the names of units where `block_names` is None.
        block_names: as for `choose_units`.

    Returns:
        None: they are not known, which a warning explains.
    """
    count = samples.available(_SAMPLES)
    if not count:
        return None  # the warm-up that follows says so
    try:
        return measure_on_fakes(
            subject.model,
            [samples.repeated(count, times) for times in (1, 2)],
            (count, 2 * count),
            subject.loss,
            device=process.device,
            mixed_precision=process.mixed_precision,
            autocast=process.autocast,
            block_names=block_names or process.lsdp_plugin.units,
        )
    except UnitsUnknown as error:
        logger.warning(f"the profile says nothing of single blocks, so they cannot be placed one by one: {error}")
        return None
