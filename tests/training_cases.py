# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Tiny real models, deterministic data, and one process in plain torch that says what training must give.

`reference_run` is the oracle of invariant 1: it uses nothing of this package. Losses are written out here, because
transformers computes causal losses in fp32 whatever the model's dtype, which hides errors below 1e-7.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset


CLASSES = 10
VOCABULARY = 64
TEXT_LENGTH = 12
IGNORED = -100
# The gradient of a key bias is mathematically zero, in fp32 1e-9 of noise; Adam's division by |g| + eps makes steps of
# it: after 20 of them two exact fp32 runs differ by 4e-6 with the default eps of 1e-8, by 5e-8 with this one.
ADAM_EPS = 1e-6

Batch = Mapping[str, Tensor]


def tiny_vit(layers: int = 2, seed: int = 0, hidden: int = 32) -> nn.Module:
    """ViTForImageClassification for 8x8 images of one channel; the same weights in every process."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=2 * hidden,
        image_size=8,
        patch_size=4,
        num_channels=1,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return _build(lambda: ViTForImageClassification(config), seed)


def tiny_gpt2(layers: int = 2, seed: int = 0) -> nn.Module:
    """GPT2LMHeadModel, hidden 32, input and output embeddings tied; the same weights in every process."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=32,
        n_layer=layers,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return _build(lambda: GPT2LMHeadModel(config), seed)


def _build(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make()
        # As initialised, biases are 0 and norms 1: a bug that loses them would not show.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape))
    return model.train()


class Samples(Dataset):
    """Map-style; sample i depends on i alone, so a longer dataset starts with the samples of a shorter one."""

    def __init__(self, size: int, make: Callable[[int, torch.Generator], dict[str, Tensor]]) -> None:
        self.size = size
        self.make = make

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.size:
            raise IndexError(f"sample {index} of {self.size}")
        return self.make(index, torch.Generator().manual_seed(7919 * index + 17))


def image_dataset(size: int, dtype: torch.dtype = torch.float32) -> Samples:
    """Samples {"pixel_values": (1, 8, 8) of `dtype`, "labels": () int64}; the same numbers in every dtype."""

    def make(index: int, generator: torch.Generator) -> dict[str, Tensor]:
        pixels = torch.randn(1, 8, 8, generator=generator, dtype=torch.float32)
        label = torch.randint(CLASSES, (), generator=generator)
        return {"pixel_values": pixels.to(dtype), "labels": label}

    return Samples(size, make)


def text_dataset(size: int, length: int = TEXT_LENGTH, without_tokens: Iterable[int] = ()) -> Samples:
    """Samples {"input_ids", "attention_mask", "labels"}, each (length,) int64: 2 to `length` tokens, then padding.

    Labels are the input ids, -100 on padding. Samples in `without_tokens` have one token, so no label is left after
    the model's shift.
    """
    empty = frozenset(without_tokens)

    def make(index: int, generator: torch.Generator) -> dict[str, Tensor]:
        tokens = 1 if index in empty else int(torch.randint(2, length + 1, (), generator=generator))
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator)
        mask = (torch.arange(length) < tokens).long()
        return {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.where(mask == 1, ids, IGNORED)}

    return Samples(size, make)


def image_loss_sum(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """Sum of the samples' cross entropies, and their number."""
    logits = model(pixel_values=batch["pixel_values"]).logits
    return cross_entropy(logits, batch["labels"], reduction="sum"), len(batch["labels"])


def text_loss_sum(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """Sum of the cross entropies of the tokens that have a label after the shift, and their number."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, int((labels != IGNORED).sum())


def image_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean over the samples of the batch: what a user's loop hands to `backward`."""
    total, samples = image_loss_sum(model, batch)
    return total / samples


def text_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean over the labelled tokens of the batch, as transformers computes it: NaN where there is none."""
    total, tokens = text_loss_sum(model, batch)
    return total / tokens


@dataclass(frozen=True)
class Case:
    """A model with its data and losses; `weighting` is the only one under which its mean loss is exact."""

    model: Callable[..., nn.Module]
    dataset: Callable[[int, torch.dtype], Samples]
    loss: Callable[[nn.Module, Batch], Tensor]
    loss_sum: Callable[[nn.Module, Batch], tuple[Tensor, int]]
    weighting: str


CASES = {
    "vit": Case(tiny_vit, image_dataset, image_loss, image_loss_sum, "sample"),
    "gpt2": Case(tiny_gpt2, lambda size, dtype: text_dataset(size), text_loss, text_loss_sum, "tokens"),
}


def collate(samples: Sequence[Batch]) -> dict[str, Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def freeze(model: nn.Module, frozen: Iterable[str] | None) -> nn.Module:
    """Stop the gradients of all parameters whose name contains one of `frozen`; each must match something."""
    for part in frozen or ():
        matching = [parameter for name, parameter in model.named_parameters() if part in name]
        if not matching:
            raise ValueError(f"no parameter name contains {part!r}")
        for parameter in matching:
            parameter.requires_grad_(False)
    return model


def make_optimizer(model: nn.Module, lr: float, weight_decay: float, **options: bool) -> torch.optim.AdamW:
    """AdamW over the parameters that are trained, with the eps of `ADAM_EPS`, in one group."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=lr, weight_decay=weight_decay, eps=ADAM_EPS, **options)


@dataclass(frozen=True)
class ReferenceResult:
    """What one process gives. Tensors are in the run's dtype, by parameter name, tied parameters once.

    `first_gradient` is that of the first step before clipping, for trained parameters; `losses` and `grad_norms`
    (2-norms before clipping) have one number an optimizer step.
    """

    first_gradient: dict[str, Tensor]
    parameters: dict[str, Tensor]
    losses: list[float]
    grad_norms: list[float]


def reference_run(
    model_name: str,
    dtype: torch.dtype,
    batches: Sequence[Sequence[int]],
    *,
    weighting: str,
    steps: int,
    lr: float,
    weight_decay: float,
    max_grad_norm: float | None,
    gradient_accumulation_steps: int = 1,
    clip_value: float | None = None,
    frozen: Iterable[str] | None = None,
    dataset: Dataset | None = None,
    model: nn.Module | None = None,
) -> ReferenceResult:
    """Train in one process on whole global batches; step s takes batches s*g to s*g + g - 1.

    weighting="sample": the loss of a step is the mean over its g batches of each one's mean over samples;
    "tokens": the mean over all labelled tokens of the step. Clipping is by norm first, then by value.

    Args:
        batches: sample indices of every global batch, at least steps * gradient_accumulation_steps of them.
        dataset, model: others than the model's own; `model` is trained in place.
    """
    case = CASES[model_name]
    if weighting != case.weighting:
        raise ValueError(
            f"the mean loss of {model_name} is exact under {case.weighting!r} weighting, not {weighting!r}"
        )
    if len(batches) < steps * gradient_accumulation_steps:
        raise ValueError(f"{len(batches)} batches, needed {steps} steps x {gradient_accumulation_steps}")
    if dataset is None:
        dataset = case.dataset(1 + max(index for batch in batches for index in batch), dtype)
    model = freeze((case.model() if model is None else model).to(dtype), frozen)
    optimizer = make_optimizer(model, lr, weight_decay)
    first_gradient: dict[str, Tensor] = {}
    losses, grad_norms = [], []
    for step in range(steps):
        first = step * gradient_accumulation_steps
        window = batches[first : first + gradient_accumulation_steps]
        sums = [case.loss_sum(model, collate([dataset[index] for index in batch])) for batch in window]
        if weighting == "tokens":
            loss = torch.stack([total for total, _ in sums]).sum() / sum(tokens for _, tokens in sums)
        else:
            loss = torch.stack([total / samples for total, samples in sums]).mean()
        loss.backward()
        if step == 0:
            first_gradient = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        norm = nn.utils.clip_grad_norm_(trained, math.inf if max_grad_norm is None else max_grad_norm)
        if clip_value is not None:
            nn.utils.clip_grad_value_(trained, clip_value)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        grad_norms.append(norm.item())
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return ReferenceResult(first_gradient, parameters, losses, grad_norms)


def relative_error(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """||actual - expected|| / ||expected|| over all tensors together, in fp64.

    Raises:
        AssertionError: names or shapes differ, a value is not finite, or `expected` is zero.
    """
    if actual.keys() != expected.keys():
        missing, surplus = sorted(expected.keys() - actual.keys()), sorted(actual.keys() - expected.keys())
        raise AssertionError(f"names differ: missing {missing}, surplus {surplus}")
    difference = magnitude = 0.0
    for name, reference in expected.items():
        if actual[name].shape != reference.shape:
            raise AssertionError(f"{name}: shape {tuple(actual[name].shape)}, expected {tuple(reference.shape)}")
        a, b = actual[name].detach().double(), reference.detach().double()
        if not (a.isfinite().all() and b.isfinite().all()):
            raise AssertionError(f"{name} has values that are not finite")
        difference += float((a - b).square().sum())
        magnitude += float(b.square().sum())
    if magnitude == 0.0:
        raise AssertionError("the expected tensors are all zero: nothing is compared")
    return math.sqrt(difference / magnitude)
