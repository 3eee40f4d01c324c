# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What the own losses of the models of transformers are means over, as far as their classes say."""

from __future__ import annotations

import sys

from torch import nn
from torch.distributed.fsdp import FSDPModule

from accelerate_lshdp.accelerator.losses.parts import Composition


_MEAN_OVER_SAMPLES = (
    "ForSequenceClassification",
    "ForImageClassification",
    "ForVideoClassification",
    "ForAudioClassification",
    "ForQuestionAnswering",
)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside what ``torch.compile`` and PEFT make of it."""
    model = getattr(model, "_orig_mod", model)
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) else model


def class_name(model: nn.Module) -> str:
    """The name of the class of a model as the script knows it: FSDP2 makes another one of it."""
    return next(base.__name__ for base in type(unwrapped(model)).__mro__ if not issubclass(base, FSDPModule))


def kind_of_class(model: nn.Module) -> Composition | None:
    """What the own loss of a model of transformers is, where its class is one of those of a known loss.

    Classes that name no loss have that of causal models only if they are listed among these: others, such as those
    for pretraining, compute sums of several losses.
    """
    model = unwrapped(model)
    if not hasattr(model, "loss_type"):
        return None
    if model.loss_type in _MEAN_OVER_SAMPLES:
        return Composition.SAMPLES
    if model.loss_type in ("ForMaskedLM", "ForTokenClassification"):
        return Composition.LABELS
    if any(base.__name__.endswith("ForPreTraining") for base in type(model).__mro__):
        return None
    if _is_encoder_decoder(model):
        return Composition.LABELS
    if loss_shifts_labels(model) and (model.loss_type is not None or _is_listed_as_causal(model)):
        return Composition.SHIFTED_LABELS
    return None


def loss_shifts_labels(model: nn.Module) -> bool:
    """Whether a model of transformers predicts each label from the entry before it, as far as its class says.

    Decoders of encoder-decoders get shifted inputs instead. Classes that name no loss have that of causal models.
    """
    if _is_encoder_decoder(model):
        return False
    losses = sys.modules.get("transformers.loss.loss_utils")
    causal = getattr(losses, "ForCausalLMLoss", None)
    kind = getattr(model, "loss_type", None)
    return kind in (None, "ForCausalLM") or (causal is not None and losses.LOSS_MAPPING.get(kind) is causal)


def _is_listed_as_causal(model: nn.Module) -> bool:
    listed = sys.modules.get("transformers.models.auto.modeling_auto")
    names = getattr(listed, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", {}).values()
    return any(base.__name__ in names for base in type(model).__mro__)


def _is_encoder_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
