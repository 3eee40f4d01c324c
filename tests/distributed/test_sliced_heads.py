# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A head in slices computes its loss without its logits, and its logits where something needs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import full
from live_bytes import LiveBytes
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from training_cases import relative_error

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator, Plan
from accelerate_lshdp.documents.placement import ModelPlacement, UnitPlacement, UnitStore
from accelerate_lshdp.runtime import agreement


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


def twice(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """One loss that needs no logits, and one that does."""
    return shifted(logits, labels) + shifted(2 * logits, labels)


#: Of which nobody can see what they are means over.
MIXED = (smoothed, copied, twice)


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


# Exact


def trained_once(plan: Plan, use: Use, tied: bool) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The gradient of one global batch, of a loss that nobody says anything about, and the kinds of its logits."""
    plugin = LSDPPlugin(loss_weighting="sample") if use in MIXED else None
    accelerator, model, _, loader = start(plan, Speaker(use, tied).double(), even=use in MIXED, lsdp_plugin=plugin)
    model.train()
    kinds = []
    for batch in loader:
        with accelerator.accumulate(model):
            output = model(**batch)
            kinds.append(type(output["logits"]).__name__)
            accelerator.backward(output["loss"])
    return gradients(model), kinds


USES = [
    *(shifted, padded, by_row, smoothed, after_a_metric, changed_in_place, copied),
    *(by_function, reversed_gradient, reversed_after_a_metric, only_where_labels_are),
    *(checkpointed, checkpointed_reentrant, twice),
]


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("use", USES)
def test_the_gradient_is_that_of_one_process(workers, use, tied):
    plan = osdp([3, 2, 2, 2])  # of one sample torch's contiguous makes no copy
    of_one = expected(use, tied, plan.total_batch_size)
    waits = use in (shifted, padded, by_row, twice)
    for found, kinds in workers(4).run(trained_once, plan, use, tied, nodes=(2, 2)):
        assert relative_error(found, of_one) <= 1e-12
        assert use is only_where_labels_are or kinds == ["SlicedLogits" if waits else "Tensor"] * len(kinds)


def test_micro_batches_and_uneven_nodes(workers):
    plan = osdp([(2, 2), (1, 2), (3, 2)], slices=2)
    of_one = expected(padded, True, plan.total_batch_size)
    for found, _ in workers(3).run(trained_once, plan, padded, True, nodes=(1, 2)):
        assert relative_error(found, of_one) <= 1e-12


def trained_in_bf16(plan: Plan) -> dict[str, torch.Tensor]:
    accelerator, model, _, loader = start(plan, Speaker(padded), mixed_precision="bf16")
    model.train()
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
    return gradients(model)


def test_low_precision_is_that_of_a_whole_head(workers):
    pool = workers(4)
    whole, parts = (pool.run(trained_in_bf16, osdp([3, 1, 2, 2], slices), nodes=(2, 2)) for slices in (1, 3))
    for one, other in zip(whole, parts, strict=True):
        assert all(gradient.dtype == torch.float32 for gradient in other.values())
        assert relative_error(other, one) <= 2e-2


class Checkpointing(Speaker):
    """Its head and loss are computed again in the backward, and so is a block after a layer that is in slices, too."""

    def __init__(self) -> None:
        super().__init__(shifted)
        self.before = nn.Linear(12, 12)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = checkpoint(self.blocks[0], self.before(self.words(tokens)), use_reentrant=False)
        return {"loss": checkpoint(lambda hidden: self.use(self.head(hidden), labels), hidden, use_reentrant=False)}


class HalfAutocast(Speaker):
    """Its head computes in fp32 although the rest does not."""

    def __init__(self) -> None:
        super().__init__(padded)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.blocks[0](self.words(tokens))
            with torch.autocast("cpu", enabled=False):
                logits = self.head(hidden.float())
            return {"loss": self.use(logits, labels)}


def trained_by(plan: Plan, make: Callable[[], Speaker], dtype: torch.dtype, **options: Any) -> dict[str, torch.Tensor]:
    accelerator, model, _, loader = start(
        plan, make().to(dtype), even=True, lsdp_plugin=LSDPPlugin(loss_weighting="sample"), **options
    )
    model.train()
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
    return gradients(model)


def test_checkpointing_around_a_head(workers):
    plan, texts, model = osdp([3, 1, 2, 2]), Texts(8, even=True), Checkpointing().double()
    model(texts.tokens, texts.labels)["loss"].backward()
    for found in workers(4).run(trained_by, plan, Checkpointing, torch.float64, nodes=(2, 2)):
        assert relative_error(found, gradients(model)) <= 1e-12


def test_a_head_computes_in_the_precision_of_its_call(workers):
    pool = workers(2)
    whole, parts = (
        pool.run(trained_by, osdp([2, 2], slices), HalfAutocast, torch.float32, nodes=(1, 1)) for slices in (1, 3)
    )
    for one, other in zip(whole, parts, strict=True):
        # Of the head alone: the gradient of what comes before it is rounded to bf16.
        assert relative_error({"": other["head.weight"]}, {"": one["head.weight"]}) <= 1e-5


# Logits that a script reads


class Autocast(Speaker):
    """Computes under an autocast of its own, and needs logits."""

    def __init__(self) -> None:
        super().__init__(smoothed)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(tokens, labels)


def test_logits_under_an_autocast_of_the_script(workers):
    pool = workers(2)
    whole, parts = (
        pool.run(trained_by, osdp([2, 2], slices), Autocast, torch.float32, nodes=(1, 1)) for slices in (1, 3)
    )
    for one, other in zip(whole, parts, strict=True):
        assert relative_error(other, one) <= 2e-2


def weighted(output: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    """A script's own loss, which needs logits."""
    weights = torch.linspace(0.5, 1.5, CLASSES, dtype=torch.float64)
    losses = functional.cross_entropy(output["logits"].flatten(0, 1), labels.flatten(), weights, reduction="none")
    return losses.view(labels.shape)[:, 1:].mean()


def trained_by_logits_alone(plan: Plan) -> dict[str, torch.Tensor]:
    """The blocks are frozen, so it is the head that autograd comes to, from what the model's own loss is not of."""
    model = Speaker(shifted).double()
    model.blocks.requires_grad_(False)
    accelerator, model, _, loader = start(plan, model, even=True, lsdp_plugin=LSDPPlugin(loss_weighting="sample"))
    model.train()
    model.head.register_full_backward_hook(lambda *_: None)
    for batch in loader:
        accelerator.backward(weighted(model(**batch), batch["labels"]))
    return gradients(model)


def test_a_loss_of_logits_alone(workers):
    plan, texts, model = osdp([3, 1, 2, 2]), Texts(8, even=True), Speaker(shifted).double()
    model.blocks.requires_grad_(False)
    weighted(model(texts.tokens, texts.labels), texts.labels).backward()
    assert "head.bias" in gradients(model)
    for found in workers(4).run(trained_by_logits_alone, plan, nodes=(2, 2)):
        assert relative_error(found, gradients(model)) <= 1e-12


def with_logits(output: dict[str, torch.Tensor]) -> torch.Tensor:
    return output["loss"] + output["logits"].square().mean()


def read_logits(plan: Plan) -> tuple[dict[str, torch.Tensor], list[str], torch.Tensor, torch.Tensor]:
    """Gradients of a loss of which a part is the script's, kinds of logits of further forwards, and values of some."""
    plugin = LSDPPlugin(loss_weighting="sample")
    accelerator, model, _, loader = start(plan, Speaker(shifted).double(), lsdp_plugin=plugin)
    model.train()
    tokens = Texts(2).tokens
    logits = model(tokens, tokens)["logits"]
    assert logits.shape == (2, LENGTH, CLASSES) and logits.dtype == torch.float64 and len(logits) == 2
    for batch in loader:
        accelerator.backward(with_logits(model(**batch)))
    found = gradients(model)
    read = logits.detach().clone()
    assert torch.equal(logits[..., :2], read[..., :2])
    gathered = accelerator.gather(model(tokens, tokens)["logits"])
    torch.testing.assert_close(gathered[:2], read, rtol=1e-12, atol=1e-12)
    kinds = [type(model(tokens, tokens)["logits"]).__name__ for _ in range(2)]
    return found, kinds, read, Speaker(shifted).double()(tokens)["logits"].detach()


def test_logits_have_their_values_where_a_script_reads_them(workers):
    plan = osdp([2, 2, 2, 2])
    model = Speaker(shifted).double()
    texts = Texts(plan.total_batch_size)
    for first in range(0, 8, 2):  # the mean of those of the ranks, as "sample" says
        rows = slice(first, first + 2)
        (with_logits(model(texts.tokens[rows], texts.labels[rows])) / 4).backward()
    for found, kinds, read, plain in workers(4).run(read_logits, plan, nodes=(2, 2)):
        assert relative_error(found, gradients(model)) <= 1e-12
        torch.testing.assert_close(read, plain, rtol=1e-12, atol=1e-12)
        assert kinds == ["Tensor"] * 2  # a script that reads them gets them at once


def read_too_late(plan: Plan, kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> str:
    accelerator = LSHDPAccelerator(plan=plan)
    model = Speaker(shifted).double()
    optimizer = kind(model.parameters(), **options)
    loader = DataLoader(Texts(plan.total_batch_size), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for batch in loader:
        output = model(**batch)
        accelerator.backward(output["loss"])
        optimizer.step()
    with pytest.raises(RuntimeError) as caught:
        output["logits"].argmax(-1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"foreach": False}),
        (torch.optim.SGD, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
    ],
    ids=["plain", "foreach", "fused"],
)
def test_logits_of_a_weight_that_has_changed_are_refused(workers, kind, options):
    for said in workers(2).run(read_too_late, osdp([3, 1]), kind, options, nodes=(1, 1)):
        assert "found the logits of head.weight in use after its weight had changed" in said


def read_on_one_rank(plan: Plan) -> str:
    _, model, _, _ = start(plan, Speaker(shifted).double())
    model.train()
    logits = model(Texts(2).tokens, Texts(2).labels)["logits"]
    if torch.distributed.get_rank() > 0:
        return ""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError) as caught:
        patch.setattr(agreement, "_APART_SECONDS", 1.0)
        logits.argmax(-1)
    return str(caught.value)


def test_logits_that_one_rank_alone_reads_are_refused(workers):
    """The others are told of its end, as of that of any rank."""
    said, _ = workers(2).run(read_on_one_rank, osdp([3, 1]), nodes=(1, 1))
    assert "found the logits of head.weight in use on this rank and not on all" in said


def wrong_label(plan: Plan) -> str:
    _, model, _, _ = start(plan, Speaker(shifted).double())
    model.train()
    with pytest.raises(IndexError) as caught:
        model(torch.zeros(1, LENGTH, dtype=torch.long), torch.full((1, LENGTH), CLASSES))
    return str(caught.value)


def test_a_label_that_is_no_class_is_an_error(workers):
    for said in workers(2).run(wrong_label, osdp([1, 1]), nodes=(1, 1)):
        assert f"found label {CLASSES}, expected one from 0 to {CLASSES - 1}, or -100" in said


# Memory


class Large(nn.Module):
    """A head with many classes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16))])
        self.head = nn.Linear(16, 8192)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.blocks[0](x)).float(), labels)


def peaks(slices: int) -> tuple[int, int]:
    """Peaks of forward and backward of a head and its loss."""
    accelerator = LSHDPAccelerator(plan=osdp([1] * 4, slices), lsdp_plugin=LSDPPlugin(loss_weighting="sample"))
    model = accelerator.prepare(Large())
    model.train()
    x, labels = torch.ones(256, 16), torch.arange(256)
    accelerator.backward(model(x, labels))  # sets up what stays
    model.zero_grad()
    with LiveBytes(model) as forward:
        loss = model(x, labels)
    with LiveBytes(model) as backward:
        accelerator.backward(loss)
    return forward.most, backward.most


def test_a_head_and_its_loss_need_the_memory_of_a_slice(workers):
    pool = workers(4)
    whole, parts = (pool.run(peaks, slices, nodes=(2, 2)) for slices in (1, 8))
    logits = 256 * 8192 * 4
    for most, most_ in zip(whole, parts, strict=True):
        for one, other in zip(most, most_, strict=True):
            assert one > 2 * logits  # what is to be divided is seen
            assert other <= (1 / 8 + 0.1) * one
