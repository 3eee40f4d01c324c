# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Logits of a head in slices have their values where something reads them, or are refused."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from sliced_head_cases import (
    CLASSES,
    LENGTH,
    Speaker,
    Texts,
    Use,
    aside,
    gradients,
    osdp,
    padded,
    shifted,
    smoothed,
    start,
    trained_by,
)
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from training_cases import relative_error

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator, Plan
from accelerate_lshdp.engine.stores.sliced.head_call import HeadCall
from accelerate_lshdp.runtime import agreement


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


def forwards_that_return_logits(plan: Plan) -> tuple[list[str], int]:
    """Kinds of the logits of some forwards, and how often any were computed."""
    accelerator, model, optimizer, loader = start(plan, Speaker(padded).double(), even=True)
    model.train()
    kinds, computed = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeadCall, "_compute", lambda call, made: computed.append(call))
        for _ in range(2):
            for batch in loader:
                with accelerator.accumulate(model):
                    output = model(**batch)
                    kinds.append(type(output["logits"]).__name__)
                    accelerator.backward(output["loss"])
                    optimizer.step()
                    optimizer.zero_grad()
    return kinds, len(computed)


def test_logits_that_are_returned_and_not_read_are_never_computed(workers):
    for kinds, computed in workers(2).run(forwards_that_return_logits, osdp([(1, 2), (1, 2)]), nodes=(1, 1)):
        assert kinds == ["SlicedLogits"] * 4 and computed == 0


def kept_by_forwards(plan: Plan) -> list[bool]:
    """Whether activations of forwards that no backward follows are freed when the script drops their outputs."""
    _, model, _, _ = start(plan, Speaker(shifted).double())
    model.train()
    alive = []
    model.blocks[0].register_forward_hook(lambda module, args, output: alive.append(weakref.ref(output)))
    for _ in range(3):
        model(Texts(2).tokens, Texts(2).labels)["logits"].argmax(-1)
    return [reference() is None for reference in alive]


def test_forwards_without_a_backward_keep_nothing(workers):
    for freed in workers(2).run(kept_by_forwards, osdp([1, 1]), nodes=(1, 1)):
        assert freed == [True] * 3


def saved_and_loaded(plan: Plan, path: str) -> tuple[torch.Tensor, torch.Tensor, str]:
    _, model, _, _ = start(plan, Speaker(shifted).double())
    model.train()
    logits = model(Texts(2).tokens, Texts(2).labels)["logits"]
    logits.note = "kept"
    own = f"{path}/{torch.distributed.get_rank()}.pt"
    torch.save(logits, own)
    return torch.load(own, weights_only=True), logits.detach().clone(), logits.note


def test_logits_can_be_saved_and_have_attributes(workers, tmp_path):
    for loaded, logits, note in workers(2).run(saved_and_loaded, osdp([1, 1]), str(tmp_path), nodes=(1, 1)):
        assert torch.equal(loaded, logits) and type(loaded) is torch.Tensor and note == "kept"


def watched(plan: Plan) -> bool:
    """A script's weak reference to logits, as tools that look for leaks have them."""
    _, model, _, _ = start(plan, Speaker(shifted).double())
    model.train()
    alive = []
    model.head.register_forward_hook(lambda module, args, output: alive.append(weakref.ref(output)))
    texts = Texts(2)
    logits = model(texts.tokens, texts.labels)["logits"]
    plain = Speaker(shifted).double()(texts.tokens)["logits"]
    return alive[0]() is logits and torch.allclose(logits.detach(), plain.detach(), rtol=1e-12, atol=1e-12)


def test_logits_that_a_script_has_a_weak_reference_to(workers):
    assert workers(2).run(watched, osdp([1, 1]), nodes=(1, 1)) == [True] * 2


def of_two_forwards(plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    _, model, _, _ = start(plan, Speaker(shifted).double())
    model.train()
    texts = Texts(4)
    one, other = (model(texts.tokens[rows], texts.labels[rows])["logits"] for rows in (slice(2), slice(2, 4)))
    one.argmax(-1)
    difference = (one - other).detach()
    plain = Speaker(shifted).double()(texts.tokens)["logits"].detach()
    return difference, plain[:2] - plain[2:]


def test_logits_that_have_values_and_such_that_have_none_together(workers):
    for found, expected in workers(2).run(of_two_forwards, osdp([1, 1]), nodes=(1, 1)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


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


def asked_for_their_gradient(plan: Plan, use: Use) -> list[str]:
    _, model, _, _ = start(plan, Speaker(use).double())
    model.train()
    output, said = model(Texts(2).tokens, Texts(2).labels), []
    logits = output["logits"]
    asking = (
        lambda: logits.register_hook(lambda gradient: None),
        logits.retain_grad,
        lambda: torch.autograd.grad(output["loss"], logits, allow_unused=True),
    )
    for ask in asking:
        with pytest.raises(RuntimeError) as caught:
            ask()
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("use", [shifted, aside])
def test_gradients_of_logits_that_have_none_are_refused(workers, use):
    for said in workers(2).run(asked_for_their_gradient, osdp([3, 1]), use, nodes=(1, 1)):
        for function, each in zip(("register_hook", "retain_grad", "grad"), said, strict=True):
            assert f"found {function} of logits of a head in slices, after the model had" in each


def hooked_after_the_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = shifted(logits, labels)
    logits.register_hook(lambda gradient: 3 * gradient)
    return loss


class Changing(torch.autograd.Function):
    """Changes in place what it is given, and its gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(logits)
        logits.mul_(2)
        return logits

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


def changed_by_function(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    Changing.apply(logits)
    return shifted(logits, labels)


def refused(plan: Plan, use: Use) -> str:
    accelerator, model, _, loader = start(plan, Speaker(use).double())
    model.train()
    with pytest.raises(RuntimeError) as caught:
        for batch in loader:
            accelerator.backward(model(**batch)["loss"])
    return str(caught.value)


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (changed_by_function, "found the logits of head.weight, which is in slices, changed or held by a function of"),
        (hooked_after_the_loss, "found register_hook of logits of a head in slices, after the model had computed its"),
    ],
)
def test_what_cannot_be_done_with_logits_without_values_is_refused(workers, use, expected):
    for said in workers(2).run(refused, osdp([3, 1]), use, nodes=(1, 1)):
        assert expected in said


class Critic(nn.Module):
    """Scores, as a judge of another model's logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.score = nn.Linear(CLASSES, 7)

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return self.score(logits).mean()


def judged(plan: Plan | None) -> dict[str, torch.Tensor]:
    """As GANs do it: the critic's optimizer steps between a forward of the other model and its backward."""
    speaker, critic, tokens = Speaker(shifted).double(), Critic().double(), Texts(2).tokens
    step_of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
    backward: Any = torch.Tensor.backward
    if plan is not None:
        accelerator = LSHDPAccelerator(plan=plan, lsdp_plugin=LSDPPlugin(loss_weighting="sample"))
        speaker, critic, step_of_critic = accelerator.prepare(speaker, critic, step_of_critic)
        backward = accelerator.backward
    logits = speaker(tokens)["logits"]
    backward(critic(logits.detach()))
    step_of_critic.step()
    backward(critic(logits))
    return gradients(speaker)


def test_an_optimizer_of_another_model_may_step_between_forward_and_backward(workers):
    one = judged(None)
    for found in workers(2).run(judged, osdp([1, 1]), nodes=(1, 1)):
        assert relative_error(found, one) <= 1e-12


@dataclass
class Output:
    """What no tree of torch knows."""

    logits: torch.Tensor


class InAContainer(Speaker):
    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> Output:
        return Output(super().forward(tokens)["logits"])


def kind_in_a_container(plan: Plan) -> str:
    _, model, _, _ = start(plan, InAContainer(shifted).double())
    model.train()
    return type(model(Texts(2).tokens).logits).__name__


def test_logits_without_a_loss_are_tensors_in_any_container(workers):
    assert workers(2).run(kind_in_a_container, osdp([1, 1]), nodes=(1, 1)) == ["Tensor"] * 2


class Reply:
    """What FSDP2 does not look into either, in no version of torch."""

    def __init__(self, found: dict[str, torch.Tensor]) -> None:
        self.found = found


class Replies(Speaker):
    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Reply:
        return Reply(super().forward(tokens, labels))


def trained_by_replies(plan: Plan) -> tuple[dict[str, torch.Tensor], str]:
    plugin = LSDPPlugin(loss_weighting="sample")
    accelerator, model, _, loader = start(plan, Replies(shifted).double(), even=True, lsdp_plugin=plugin)
    model.train()
    for batch in loader:
        reply = model(**batch)
        kind = type(reply.found["logits"]).__name__
        accelerator.backward(reply.found["loss"])
    return gradients(model), kind


def test_objects_that_nobody_knows_are_no_reason_to_compute_logits(workers):
    plan, texts, model = osdp([3, 1]), Texts(4, even=True), Speaker(shifted).double()
    model(texts.tokens, texts.labels)["loss"].backward()
    for found, kind in workers(2).run(trained_by_replies, plan, nodes=(1, 1)):
        assert relative_error(found, gradients(model)) <= 1e-12
        assert kind == "SlicedLogits"


def interrupted(plan: Plan) -> tuple[list[str], bool]:
    """A forward that Ctrl-C ends, of which no hook is told; then two forwards, and whether the first one is freed."""
    _, model, _, _ = start(plan, Speaker(shifted).double())
    model.train()
    kept = []

    def interrupt(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        kept.append(weakref.ref(args[0]))
        raise KeyboardInterrupt

    handle = model.head.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(Texts(2).tokens, Texts(2).labels)
    handle.remove()
    kinds = [type(model(Texts(2).tokens)["logits"]).__name__ for _ in range(2)]
    return kinds, kept[0]() is None


def test_after_an_interrupted_forward_logits_have_values_as_before(workers):
    for kinds, freed in workers(2).run(interrupted, osdp([1, 1]), nodes=(1, 1)):
        assert kinds == ["Tensor"] * 2 and freed


class Nested(Speaker):
    """Calls itself, as models with several passes do."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if labels is None:
            return super().forward(tokens)
        inner = self(tokens)["logits"]
        return {"loss": super().forward(tokens, labels)["loss"] + inner.square().mean()}


def test_a_model_that_calls_itself(workers):
    plan, texts, model = osdp([2, 2]), Texts(4, even=True), Nested(shifted).double()
    model(texts.tokens, texts.labels)["loss"].backward()
    for found in workers(2).run(trained_by, plan, partial(Nested, shifted), torch.float64, nodes=(1, 1)):
        assert relative_error(found, gradients(model)) <= 1e-12


def stepped_before_the_backward(plan: Plan, use: Use) -> str:
    accelerator, model, optimizer, loader = start(
        plan, Speaker(use).double(), even=True, lsdp_plugin=LSDPPlugin(loss_weighting="sample")
    )
    model.train()
    for batch in loader:
        old = model(**batch)["loss"]
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        with pytest.raises(RuntimeError) as caught:
            accelerator.backward(old)
    return str(caught.value)


@pytest.mark.parametrize("use", [shifted, smoothed])
def test_a_backward_with_another_weight_than_its_forward_is_refused(workers, use):
    for said in workers(2).run(stepped_before_the_backward, osdp([3, 1]), use, nodes=(1, 1)):
        assert "found head.weight, which is in slices, changed after a forward whose backward needs it" in said


def wrong_label(plan: Plan) -> str:
    _, model, _, _ = start(plan, Speaker(shifted).double())
    model.train()
    with pytest.raises(IndexError) as caught:
        model(torch.zeros(1, LENGTH, dtype=torch.long), torch.full((1, LENGTH), CLASSES))
    return str(caught.value)


def test_a_label_that_is_no_class_is_an_error(workers):
    for said in workers(2).run(wrong_label, osdp([1, 1]), nodes=(1, 1)):
        assert f"found label {CLASSES}, expected one from 0 to {CLASSES - 1}, or -100" in said
