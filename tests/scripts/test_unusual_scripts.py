# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What scripts do beside the plain loop gives the gradient of the global batch or an error, never a wrong number."""

from __future__ import annotations

import copy
import logging
import time

import pytest
import torch
from exactness import full, prepared
from torch import nn
from torch.utils.data import DataLoader, Subset
from training_cases import CASES, collate, make_optimizer, reference_run, relative_error

from accelerate_lshdp import LSHDPAccelerator, Plan
from accelerate_lshdp.engine.prepared import PreparedModel
from accelerate_lshdp.engine.stores.shared.bucket import Contribution
from accelerate_lshdp.engine.stores.shared.reduction import NodeReduction


CASE = CASES["vit"]
BATCHES = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
#: "collectives" is lsdp as on GPUs.
PLACES = [("ddp", (1, 1)), ("collectives", (1, 1)), ("lsdp", (2,)), ("fsdp", (2,)), ("zero2", (2,))]
everywhere = pytest.mark.parametrize(("strategy", "nodes"), PLACES)


def plain(batches: list[list[int]] = BATCHES, accumulation: int = 1) -> dict:
    return reference_run(
        "vit",
        torch.float64,
        batches,
        weighting="sample",
        steps=len(batches) // accumulation,
        lr=1e-2,
        weight_decay=0.0,
        max_grad_norm=None,
        gradient_accumulation_steps=accumulation,
    ).parameters


def values(model: nn.Module) -> dict:
    return {name: full(parameter) for name, parameter in model.named_parameters()}


def loader_of(*indices: int) -> DataLoader:
    return DataLoader(Subset(CASE.dataset(24, torch.float64), range(*indices)), batch_size=2, collate_fn=collate)


def plan_of(strategy: str, sizes: tuple | None = None) -> Plan:
    placing = {"strategy": strategy}
    if strategy == "collectives":
        placing = {"strategy": "lsdp", "intra_node": "collectives"}
    return Plan.equal(**placing) if sizes is None else Plan.from_batch_sizes(sizes, **placing)


def start(strategy: str, sizes: tuple = (2, 1), **options) -> tuple:
    plan = plan_of(strategy, sizes)
    return prepared(plan, CASE.model().double(), CASE.dataset(9, torch.float64), **options)


# Forwards and backwards that are not one after the other


def train_with_metrics(strategy: str) -> dict:
    accelerator, model, optimizer, loader = start(strategy)
    model.train()
    for batch in loader:
        accelerator.backward(CASE.loss(model, batch))
        with torch.no_grad():
            CASE.loss(model, batch)
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@everywhere
def test_a_forward_between_backward_and_step_leaves_no_old_parameters(workers, strategy, nodes):
    for parameters in workers(2).run(train_with_metrics, strategy, nodes=nodes):
        assert relative_error(parameters, plain()) <= 1e-12


def train_with_failed_backward(strategy: str) -> dict:
    def fail(gradient: torch.Tensor) -> None:
        raise MemoryError("the device is full")

    def fail_in_backward(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        output.register_hook(fail)

    accelerator, model, optimizer, loader = start(strategy)
    model.train()
    for step, batch in enumerate(loader):
        if step == 1:
            hook = model.vit.layers[0].register_forward_hook(fail_in_backward)
            with pytest.raises(MemoryError):
                accelerator.backward(CASE.loss(model, batch))
            hook.remove()
            optimizer.zero_grad()
        accelerator.backward(CASE.loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@everywhere
def test_a_backward_that_failed_can_be_repeated(workers, strategy, nodes):
    for parameters in workers(2).run(train_with_failed_backward, strategy, nodes=nodes):
        assert relative_error(parameters, plain()) <= 1e-12


def train_with_failed_backward_and_slow_thread() -> dict:
    """As above; the first rank gives up while the node's thread of the second one has yet to note what it has done."""
    add = NodeReduction._add

    def add_slowly(self: NodeReduction, contribution: Contribution) -> None:
        add(self, contribution)
        time.sleep(1.5 * self._rank * (contribution.backward == 2))  # longer than a nap

    NodeReduction._add = add_slowly
    try:
        return train_with_failed_backward("lsdp")
    finally:
        NodeReduction._add = add


def test_a_rank_that_gave_up_when_all_was_added_holds_nobody_up(workers):
    for parameters in workers(2).run(train_with_failed_backward_and_slow_thread, nodes=(2,)):
        assert relative_error(parameters, plain()) <= 1e-12


def fail_before_one_model_ran() -> None:
    accelerator, model, *_ = start("lsdp")
    other = nn.Linear(4, 4).double()
    accelerator.prepare(other)
    loader = accelerator.prepare(loader_of(0, 9))
    model.train()
    for batch in loader:
        accelerator.backward(CASE.loss(model, batch).detach())


def test_a_backward_that_fails_says_why_when_a_model_has_not_run_yet(workers):
    errors = workers(2).run(fail_before_one_model_ran, expect_failure=True)
    assert all("does not require grad" in error.message for error in errors)


# Models that are prepared again, copied, or not prepared


def train_again(strategy: str, before: str) -> dict:
    accelerator = LSHDPAccelerator(plan=plan_of(strategy, (2, 1)))
    model = accelerator.prepare_model(CASE.model().double(), evaluation_mode="evaluation" in before)
    if before != "evaluation without free_memory":
        accelerator.free_memory()
    optimizer = make_optimizer(model, 1e-2, 0.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader_of(0, 9))
    model.train()
    for batch in loader:
        accelerator.backward(CASE.loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    assert len(accelerator._models) == 1
    return values(model)


@pytest.mark.parametrize("before", ["training", "evaluation", "evaluation without free_memory"])
@pytest.mark.parametrize(("strategy", "nodes"), PLACES[:3])
def test_a_model_that_was_prepared_before_is_trained(workers, strategy, nodes, before):
    for parameters in workers(2).run(train_again, strategy, before, nodes=nodes):
        assert relative_error(parameters, plain()) <= 1e-12


def train_stages(strategy: str, kept: bool, evaluated: bool = False) -> dict:
    """Three global batches, each by an accelerator of its own, as scripts of two stages have it."""
    model, stages, hooks = CASE.model().double(), [], []
    for batch in range(3):
        accelerator = LSHDPAccelerator(plan=plan_of(strategy, (2, 1)))
        loader = loader_of(3 * batch, 3 * batch + 3)
        if evaluated and batch:
            accelerator.prepare_model(model, evaluation_mode=True)
            CASE.loss(model.eval(), next(iter(loader)))
        model, optimizer, loader = accelerator.prepare(model, make_optimizer(model, 1e-2, 0.0), loader)
        model.train()
        for inputs in loader:
            accelerator.backward(CASE.loss(model, inputs))
            optimizer.step()
            optimizer.zero_grad()
        stages += [(accelerator, optimizer, loader)] if kept else []
        hooks.append(sum(len(value) for name, value in vars(model).items() if name.endswith("_hooks")))
    assert len(set(hooks)) == 1  # those of the accelerators before were taken off
    if kept:  # the first one trains no more, unless it prepares the model again
        accelerator, optimizer, loader = stages[0]
        with pytest.raises(RuntimeError, match="another accelerator has prepared"):
            accelerator.backward(CASE.loss(model, next(iter(loader))))
            optimizer.step()
    return values(model)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "lsdp"])
def test_a_model_is_trained_by_one_accelerator_after_another(workers, strategy, kept):
    expected = plain_stages()
    for parameters in workers(2).run(train_stages, strategy, kept, kept, nodes=(1, 1)):
        assert relative_error(parameters, expected) <= 1e-12


def plain_stages() -> dict:
    """In one process: each stage has an optimizer of its own."""
    model = CASE.model().double().train()
    for indices in BATCHES:
        optimizer = make_optimizer(model, 1e-2, 0.0)
        CASE.loss(model, collate([CASE.dataset(24, torch.float64)[index] for index in indices])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def prepare_twice(strategy: str) -> None:
    _, model, *_ = start(strategy)
    LSHDPAccelerator(plan=plan_of(strategy, (2, 1))).prepare(model)


@pytest.mark.parametrize(("strategy", "nodes"), PLACES[1:])
def test_a_divided_model_of_another_accelerator_is_refused(workers, strategy, nodes):
    errors = workers(2).run(prepare_twice, strategy, nodes=nodes, expect_failure=True)
    assert all("another accelerator of this process prepared" in error.message for error in errors)


def step_without_sum(strategy: str, reason: str) -> None:
    model = CASE.model().double()
    for parameter in model.vit.parameters():
        parameter.requires_grad_(reason != "frozen")
    accelerator = LSHDPAccelerator(plan=plan_of(strategy))
    optimizer, loader = accelerator.prepare(torch.optim.SGD(model.parameters(), 1e-2), loader_of(0, 9))
    if reason != "forgotten":
        model = accelerator.prepare(model)
    model.requires_grad_(True).train()
    for batch in loader:
        accelerator.backward(CASE.loss(model, batch))
        optimizer.step()


@pytest.mark.parametrize(
    ("strategy", "nodes", "reason", "message"),
    [
        ("ddp", (1, 1), "forgotten", "a gradient of this rank only"),
        ("ddp", (1, 1), "frozen", "a gradient of this rank only"),
        ("lsdp", (2,), "forgotten", "a gradient of this rank only"),
        ("lsdp", (2,), "frozen", "a gradient of this rank only"),
        ("collectives", (1, 1), "frozen", "unfrozen that were frozen"),
    ],
)
def test_a_step_with_gradients_of_one_rank_is_refused(workers, strategy, nodes, reason, message):
    errors = workers(2).run(step_without_sum, strategy, reason, nodes=nodes, expect_failure=True)
    assert all(message in error.message for error in errors)


def train_with_late_freeze(strategy: str, when: int) -> dict:
    accelerator, model, optimizer, loader = start(strategy, ((2, 3), (1, 3)))
    model.train()
    for epoch in range(2):
        if epoch == when:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("bias" in name)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(CASE.loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
    return values(model)


@pytest.mark.parametrize("when", [0, 1])
@everywhere
def test_parameters_that_are_frozen_after_prepare(workers, strategy, nodes, when):
    model = CASE.model().double()
    optimizer = make_optimizer(model, 1e-2, 0.0)
    data = CASE.dataset(9, torch.float64)
    for epoch in range(2):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(epoch < when or "bias" in name)
        CASE.loss(model, collate(list(data))).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for parameters in workers(2).run(train_with_late_freeze, strategy, when, nodes=nodes):
        assert relative_error(parameters, expected) <= 1e-12


def train_beside_copy() -> tuple[dict, bool]:
    accelerator, model, optimizer, loader = start("ddp")
    average = copy.deepcopy(model)
    model.train()
    for batch in loader:
        loss = CASE.loss(model, batch)
        with accelerator.no_sync(model):
            CASE.loss(average, batch)  # a forward of the copy says nothing about the model
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return values(model), PreparedModel.of(average) is None


def test_a_copy_of_a_model_is_a_model_of_its_own(workers):
    for parameters, is_apart in workers(2).run(train_beside_copy):
        assert relative_error(parameters, plain()) <= 1e-12 and is_apart


class Buffered(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("expanded", torch.full((1, 4), float(rank)).expand(3, 4))
        self.register_buffer("transposed", torch.full((2, 3), float(rank)).t())
        self.register_buffer("flags", torch.full((3,), bool(rank)))
        self.register_buffer("short", torch.full((3,), rank, dtype=torch.int16))
        self.register_buffer("complex", torch.full((2,), complex(rank, rank)))
        self.register_buffer("number", torch.full((), float(rank), dtype=torch.bfloat16))
        self.register_buffer("nothing", torch.zeros(0))


def prepare_buffers(strategy: str) -> dict:
    accelerator = LSHDPAccelerator(plan=Plan.equal(strategy=strategy))
    model = accelerator.prepare(Buffered(accelerator.process_index))
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("strategy", ["ddp", "lsdp"])
def test_buffers_of_every_kind_are_those_of_rank_0(workers, strategy):
    expected = dict(Buffered(0).named_buffers())
    for buffers in workers(2).run(prepare_buffers, strategy):
        assert all(torch.equal(buffers[name], value) for name, value in expected.items())


# Loaders


def train_on_two_loaders(sizes: list, lengths: tuple[int, int]) -> dict:
    accelerator = LSHDPAccelerator(plan=Plan.from_batch_sizes(sizes, strategy="lsdp"))
    model = CASE.model().double()
    optimizer = make_optimizer(model, 1e-2, 0.0)
    loaders = loader_of(0, lengths[0]), loader_of(12, 12 + lengths[1])
    model, optimizer, *loaders = accelerator.prepare(model, optimizer, *loaders)
    model.train()
    for first, second in zip(*loaders, strict=True):
        with accelerator.accumulate(model):
            accelerator.backward(CASE.loss(model, first) + CASE.loss(model, second))
            optimizer.step()
            optimizer.zero_grad()
    return values(model)


@pytest.mark.parametrize("sizes", [[2, 1], [(2, 2), (1, 2)]], ids=["plain", "accumulated"])
@pytest.mark.parametrize("length", [12, 10])
def test_two_loaders_in_one_step(workers, sizes, length):
    total = Plan.from_batch_sizes(sizes).total_batch_size
    model = CASE.model().double()
    optimizer = make_optimizer(model, 1e-2, 0.0)
    data = CASE.dataset(24, torch.float64)
    for begin in range(0, length, total):
        indices = range(begin, min(begin + total, length))
        for offset in (0, 12):
            CASE.loss(model, collate([data[offset + index] for index in indices])).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for parameters in workers(2).run(train_on_two_loaders, sizes, (length, length), nodes=(1, 1)):
        assert relative_error(parameters, expected) <= 1e-12


def test_two_loaders_whose_batches_count_differently_are_refused(workers):
    errors = workers(2).run(train_on_two_loaders, [2, 1], (12, 11), nodes=(1, 1), expect_failure=True)
    assert any("fetched together, but count differently" in error.message for error in errors)


def train_with_changed_accumulation() -> tuple[dict, list[bool]]:
    accelerator, model, optimizer, loader = start("lsdp")
    model.train()
    synchronised = []
    for epoch in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                if epoch == 0:
                    accelerator.gradient_accumulation_steps = 3
                accelerator.backward(CASE.loss(model, batch))
                synchronised.append(accelerator.sync_gradients)
                optimizer.step()
                optimizer.zero_grad()
    return values(model), synchronised


def test_accumulation_that_is_changed_in_a_pass_is_used_from_the_next_on(workers):
    model = CASE.model().double()
    optimizer = make_optimizer(model, 1e-2, 0.0)
    data = CASE.dataset(9, torch.float64)
    for step in ([BATCHES[0]], [BATCHES[1]], [BATCHES[2]], BATCHES):
        for batch in step:
            (CASE.loss(model, collate([data[index] for index in batch])) / len(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for parameters, synchronised in workers(2).run(train_with_changed_accumulation, nodes=(1, 1)):
        assert synchronised == [True, True, True, False, False, True]
        assert relative_error(parameters, expected) <= 1e-12


def train_after_the_pass(sizes: list) -> dict:
    accelerator, model, optimizer, loader = start("ddp", sizes)
    model.train()
    for batch in loader:
        accelerator.backward(CASE.loss(model, batch))
        optimizer.zero_grad()
    whole = collate(list(CASE.dataset(9, torch.float64)))
    accelerator.backward(CASE.loss(model, whole))
    optimizer.step()
    return values(model)


def train_on_a_generator() -> list[str]:
    """The script prepares a generator that reads its loader, which no plan can divide."""
    accelerator, model, _, _ = start("ddp", [2, 2])
    generator = accelerator.prepare(iter(DataLoader(CASE.dataset(9, torch.float64), batch_size=3, collate_fn=collate)))
    model.train()
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("accelerate_lshdp.accelerator.backward").addHandler(handler)
    accelerator.backward(CASE.loss(model, next(generator)))
    return told


def test_a_plan_that_changes_nothing_says_so(workers):
    told, _ = workers(2).run(train_on_a_generator)
    assert any("so the plan's batch sizes [2, 2] change nothing" in line for line in told)


def test_a_batch_of_no_loader_counts_the_same_on_all_ranks_or_is_refused(workers):
    for parameters in workers(2).run(train_after_the_pass, [2, 2]):
        assert relative_error(parameters, plain([list(range(9))])) <= 1e-12
    errors = workers(2).run(train_after_the_pass, [2, 1], expect_failure=True)
    assert all("of no batch of a prepared loader" in error.message for error in errors)


# Evaluation beside training


def evaluate_in_between(strategy: str) -> tuple[dict, list[int]]:
    accelerator, model, optimizer, loader = start(strategy, ((2, 3), (1, 3)))
    evaluation = accelerator.prepare(loader_of(0, 5))
    model.train()
    counts = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(CASE.loss(model, batch))
            model.eval()
            with torch.no_grad():
                seen = [
                    accelerator.gather_for_metrics(model(pixel_values=other["pixel_values"]).logits)
                    for other in evaluation
                ]
            counts.append(sum(map(len, seen)))
            model.train()
            optimizer.step()
            optimizer.zero_grad()
    return values(model), counts


@everywhere
def test_evaluation_inside_of_accumulate(workers, strategy, nodes):
    for parameters, counts in workers(2).run(evaluate_in_between, strategy, nodes=nodes):
        assert counts == [5, 5, 5]
        assert relative_error(parameters, plain([list(range(9))])) <= 1e-12


def train_beside_open_evaluation() -> dict:
    accelerator, model, optimizer, loader = start("lsdp")
    evaluation = accelerator.prepare(loader_of(0, 12))
    model.eval()
    open_pass = iter(evaluation)
    next(open_pass)
    model.train()
    for batch in loader:
        accelerator.backward(CASE.loss(model, batch))
        next(open_pass, None)
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def test_training_beside_an_evaluation_pass_that_was_left_open(workers):
    for parameters in workers(2).run(train_beside_open_evaluation, nodes=(1, 1)):
        assert relative_error(parameters, plain()) <= 1e-12
