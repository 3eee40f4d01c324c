# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What the tests of output heads in slices have in common: a small model, and what a model may do with its logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from exactness import full
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator, Plan
from accelerate_lshdp.documents.placement import ModelPlacement, UnitPlacement, UnitStore


CLASSES, LENGTH = 37, 5


class Texts(Dataset):
    """Token ids, and labels: those of the rows differ in number, or do not."""

    def __init__(self, size: int, even: bool = False) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(CLASSES, (size, LENGTH), generator=generator)
        self.labels = self.tokens.clone()
        for row in range(size):
            self.labels[row, : 1 if even else row % LENGTH] = -100

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"tokens": self.tokens[index], "labels": self.labels[index]}


#: What a model does with its logits, and the labels, before its loss.
Use = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def shifted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As causal models did it."""
    short = logits[..., :-1, :].contiguous()
    return functional.cross_entropy(short.view(-1, short.size(-1)), labels[..., 1:].reshape(-1))


def padded(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As those of transformers do it: labels are shifted, and the sum is divided."""
    labels = functional.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).view(-1, logits.shape[-1])
    return functional.cross_entropy(logits, labels, reduction="sum") / labels.ne(-100).sum()


def by_row(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = nn.CrossEntropyLoss(reduction="none", ignore_index=-100)(logits.flatten(0, 1), labels.flatten())
    return losses.sum() / labels.ne(-100).sum()


def smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """An option that needs logits."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def after_a_metric(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """What needs their values first needs no gradient, and the loss does."""
    with torch.no_grad():
        logits.argmax(-1)
    return shifted(logits, labels)


def changed_in_place(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    short = logits[..., :-1, :]
    logits.div_(2)
    logits[..., 0] = -3.0
    return functional.cross_entropy(short.reshape(-1, short.size(-1)), labels[..., 1:].reshape(-1))


def copied(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A copy does not see what is changed after it."""
    short = logits[..., :-1, :].contiguous()
    logits.div_(2)
    return functional.cross_entropy(short.view(-1, short.size(-1)), labels[..., 1:].reshape(-1))


class OwnLoss(torch.autograd.Function):
    """A cross entropy as kernels of others are: a function of autograd, which is given what is not computed yet."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        counts = labels.ne(-100)
        logs = logits.log_softmax(-1)
        ctx.save_for_backward(logs.detach(), labels, counts)
        return -(logs.gather(1, labels.where(counts, 0)[:, None])[:, 0] * counts).sum() / counts.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        logs, labels, counts = ctx.saved_tensors
        of_logits = logs.exp()
        of_logits[torch.arange(len(labels)), labels.where(counts, 0)] -= 1
        return gradient * of_logits * counts[:, None] / counts.sum(), None


def by_function(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return OwnLoss.apply(logits.flatten(0, 1), labels.flatten())


def by_function_after_changes(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The function is given what was changed in place, by itself and through views."""
    short = logits[..., :-1, :]
    logits.add_(1).mul_(2)
    logits[..., 3].zero_()
    with torch.no_grad():
        logits[..., 4].sub_(1)
    one, other = OwnLoss.apply(logits.flatten(0, 1), labels.flatten()), short.flatten(0, 1)
    return one + OwnLoss.apply(other, labels[..., 1:].flatten()) + Totals.apply(logits)


def of_another_shape(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits.unsqueeze_(0)
    assert logits.shape == (1, *labels.shape, CLASSES)
    return shifted(logits[0], labels)


def after_a_metric_in_inference_mode(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits.argmax(-1)
    return shifted(logits, labels)


def in_pieces(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss of each sample: ranks have different numbers of them."""
    rows = range(len(labels))
    losses = [functional.cross_entropy(logits[row], labels[row], reduction="sum") for row in rows]
    return sum(losses) / labels.ne(-100).sum()


def hooked(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits.register_hook(lambda gradient: 3 * gradient)
    return shifted(logits, labels)


def aside(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A metric after the loss, which is computed without logits."""
    loss = shifted(logits, labels)
    assert logits.argmax(-1).shape == labels.shape
    return loss


@torch.jit.script
def scripted(logits: torch.Tensor) -> torch.Tensor:
    return logits * 2


def by_script(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return shifted(scripted(logits), labels)


class Surrogate(torch.autograd.Function):
    """A value of its own, and a gradient for what it does not look at."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return gradient.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


def by_surrogate(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return Surrogate.apply(logits, torch.full(logits.shape, 0.5, dtype=logits.dtype) / len(logits)) + shifted(
        logits, labels
    )


class Totals(torch.autograd.Function):
    """Half the sum of squares of a sample's logits, in the mean."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        return logits.square().sum() / len(logits) / 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0] / len(ctx.saved_tensors[0])


class Reversed(torch.autograd.Function):
    """Returns what it is given, and changes its gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -2 * gradient


def reversed_gradient(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return shifted(Reversed.apply(logits), labels)


def reversed_after_a_metric(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits.argmax(-1)
    return shifted(Reversed.apply(logits), labels)


def only_where_labels_are(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of the rows with few labels only, as ranks with others have no such loss."""
    return shifted(logits, labels) if (labels == -100).sum() < 3 else logits.sum() * 0 + shifted(logits, labels)


def checkpointed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return checkpoint(by_row, logits, labels, use_reentrant=False)


def checkpointed_reentrant(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return checkpoint(by_row, logits, labels, use_reentrant=True)


def copy_of_one_sample(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of one sample what is contiguous already is no copy, and is alive while a loss needs values."""
    short = logits[..., :-1, :].contiguous()
    same = logits.contiguous()
    labels = labels[..., 1:].flatten()
    loss = functional.cross_entropy(short.view(-1, CLASSES), labels, label_smoothing=0.1)
    logits.add_(1)
    return loss + (same - 1).square().mean() * 0.1


def twice(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """One loss that needs no logits, and one that does."""
    return shifted(logits, labels) + shifted(2 * logits, labels)


#: Of which nobody can see what they are means over.
MIXED = (
    *(smoothed, copied, twice, copy_of_one_sample, of_another_shape),
    *(by_function_after_changes, by_surrogate, by_script),
)


class Speaker(nn.Module):
    """An embedding, a block and a head.

    Args:
        use: makes the loss.
        tied: whether the head has the embedding's weight.
    """

    def __init__(self, use: Use, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(CLASSES, 12)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(12, 12), nn.Tanh())])
        self.head = nn.Linear(12, CLASSES)
        if tied:
            self.head.weight = self.words.weight
        self.use = use

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.blocks[0](self.words(tokens)))
        if labels is None:
            return {"logits": logits}
        return {"loss": self.use(logits, labels), "logits": logits}


def osdp(sizes: list, slices: int = 3) -> Plan:
    units = {"": UnitPlacement(UnitStore.WORLD, False, slices)}
    placement = ModelPlacement(units, UnitPlacement(UnitStore.WORLD))
    return Plan.from_batch_sizes(sizes, strategy="osdp", placement=placement)


def start(plan: Plan, model: Speaker, even: bool = False, **options: Any) -> tuple:
    accelerator = LSHDPAccelerator(plan=plan, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Texts(plan.total_batch_size, even), batch_size=1)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def expected(use: Use, tied: bool, samples: int) -> dict[str, torch.Tensor]:
    """The gradients of one process in plain torch."""
    model = Speaker(use, tied).double()
    texts = Texts(samples, even=use in MIXED)
    model(texts.tokens, texts.labels)["loss"].backward()
    return gradients(model)


def trained_by(plan: Plan, make: Callable[[], Speaker], dtype: torch.dtype, **options: Any) -> dict[str, torch.Tensor]:
    accelerator, model, _, loader = start(
        plan, make().to(dtype), even=True, lsdp_plugin=LSDPPlugin(loss_weighting="sample"), **options
    )
    model.train()
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
    return gradients(model)
