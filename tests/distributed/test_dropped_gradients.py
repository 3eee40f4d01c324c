# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Scripts that drop or clip gradients after each batch, under plans that divide a global batch: exact, or an error."""

from __future__ import annotations

import pytest
import torch
from exactness import full
from strategy_cells import cells
from torch.utils.data import DataLoader
from training_cases import CASES, collate, make_optimizer, reference_run, relative_error

from accelerate_lshdp import LSHDPAccelerator, Plan


CASE = CASES["vit"]
SAMPLES = 32
#: (micro-batch size, micro-batches) of a global batch of 8 or, on three ranks, of 10.
SIZES = {2: [(3, 2), (1, 2)], 3: [(2, 2), (2, 2), (1, 2)], 4: [(1, 2)] * 4}
HOW = ("the model's zero_grad", "zeros", "None")


def train(
    strategy: str, how: str, ranks: tuple[int, ...], at_the_end: bool = False, clip: dict[str, float] | None = None
) -> tuple[dict, int]:
    """Two epochs of a script that drops gradients on some ranks: after every batch, or after those that end a step.

    It clips them after every batch, if it is said how; or multiplies those of one parameter by a number.
    """
    placing = {"strategy": strategy}
    if strategy == "collectives":
        placing = {"strategy": "lsdp", "intra_node": "collectives"}
    world = LSHDPAccelerator(plan=Plan.equal(strategy="ddp"), cpu=True).num_processes
    accelerator = LSHDPAccelerator(plan=Plan.from_batch_sizes(SIZES[world], **placing), cpu=True)
    model = CASE.model().double()
    loader = DataLoader(CASE.dataset(SAMPLES, torch.float64), batch_size=4, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model, 1e-2, 0.0), loader)
    made = []
    optimizer.optimizer.register_step_post_hook(lambda *_: made.append(1))
    try:
        for batch in (batch for _ in range(2) for batch in loader):
            with accelerator.accumulate(model):
                accelerator.backward(CASE.loss(model, batch))
                if clip and "torch_max_norm" in clip:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), clip["torch_max_norm"])
                elif clip and "factor_of_the_last" in clip:
                    *_, last = (p.grad for p in model.parameters() if p.grad is not None)
                    last.mul_(clip["factor_of_the_last"])
                elif clip and "max_grad_norm" in clip:
                    accelerator.clip_grad_norm_(model.parameters(), clip["max_grad_norm"])
                elif clip:
                    accelerator.clip_grad_value_(model.parameters(), clip["clip_value"])
                optimizer.step()
                if at_the_end and not accelerator.sync_gradients:
                    continue
                if accelerator.process_index not in ranks:
                    optimizer.zero_grad()
                elif how == "None":
                    for parameter in model.parameters():
                        parameter.grad = None
                else:
                    model.zero_grad(set_to_none=how != "zeros")
    except RuntimeError as error:
        raise RuntimeError(f"after {len(made)} steps: {error}") from error
    return {name: full(parameter) for name, parameter in model.named_parameters()}, len(made)


PLACES = cells(("ddp", (1, 1)), ("lsdp", (2,)), ("fsdp", (2,)))


def reaches(strategy: str, how: str) -> bool:
    """Whether the script reaches the gradients: FSDP2 keeps those over the world by itself until they are summed."""
    return (strategy, how) != ("fsdp", "None")


@PLACES
@pytest.mark.parametrize("how", HOW)
def test_gradients_dropped_inside_a_global_batch_are_an_error_on_all_ranks(workers, how, strategy, nodes):
    ranks = tuple(range(sum(nodes)))
    if not reaches(strategy, how):
        assert_exact(workers(sum(nodes)).run(train, strategy, how, ranks, nodes=nodes))
        return
    errors = workers(sum(nodes)).run(train, strategy, how, ranks, nodes=nodes, expect_failure=True)
    told = [None if error is None else error.message for error in errors]
    assert all(text and "between two micro-batches of a global batch" in text for text in told), told
    assert all(text.startswith("after 0 steps") for text in told), told


@cells(("ddp", (1, 1)), ("lsdp", (2,)))
def test_so_are_those_of_one_rank(workers, strategy, nodes):
    errors = workers(sum(nodes)).run(train, strategy, HOW[0], (1,), nodes=nodes, expect_failure=True)
    told = [None if error is None else error.message for error in errors]
    assert all(text and "between two micro-batches of a global batch" in text for text in told), told


@PLACES
@pytest.mark.parametrize("how", HOW)
def test_dropped_after_a_step_they_leave_nothing_behind(workers, how, strategy, nodes):
    assert_exact(workers(sum(nodes)).run(train, strategy, how, tuple(range(sum(nodes))), True, nodes=nodes))


@PLACES
@pytest.mark.parametrize("clip", [{"max_grad_norm": 0.05}, {"clip_value": 1e-3}], ids=["norm", "value"])
def test_clipping_after_every_batch_clips_the_sum(workers, clip, strategy, nodes):
    assert_exact(workers(sum(nodes)).run(train, strategy, HOW[0], (), True, clip, nodes=nodes), **clip)


@cells(("ddp", (1, 1)), ("ddp", (2, 2)), ("lsdp", (2,)), ("group_sharding", (2,)))
@pytest.mark.parametrize("change", [{"torch_max_norm": 0.05}, {"factor_of_the_last": 0.5}], ids=["clipped", "one"])
def test_gradients_changed_inside_a_global_batch_are_an_error_on_all_ranks(workers, change, strategy, nodes):
    errors = workers(sum(nodes)).run(train, strategy, HOW[0], (), True, change, nodes=nodes, expect_failure=True)
    told = [None if error is None else error.message for error in errors]
    assert all(text and "changed between two micro-batches of an optimizer step" in text for text in told), told
    assert all(text.startswith("after 0 steps") for text in told), told


def accumulate(strategy: str, how: str) -> dict | None:
    """Steps of two global batches, of a script that does not ask whether a batch is the last one of its step.

    Args:
        how: what it does after each: "clip", "clip value" and "torch's clip"; or "two losses", between which it drops
            the gradients of the model.
    """
    drops = how.startswith("two losses")
    world = LSHDPAccelerator(plan=Plan.equal(strategy="ddp"), cpu=True).num_processes
    sizes = [(2, 2)] * world if drops else [4] * world
    accelerator = LSHDPAccelerator(
        plan=Plan.from_batch_sizes(sizes, strategy=strategy), cpu=True, gradient_accumulation_steps=1 if drops else 2
    )
    model = CASE.model().double()
    loader = DataLoader(CASE.dataset(SAMPLES, torch.float64), batch_size=4, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for batch in loader:
        with accelerator.accumulate(model):
            if drops:
                accelerator.backward(0.5 * CASE.loss(model, batch))
                if how == "two losses" or accelerator.sync_gradients:
                    model.zero_grad()
            accelerator.backward(CASE.loss(model, batch))
            if how == "clip":
                accelerator.clip_grad_norm_(model.parameters(), 0.05)
            elif how == "clip value":
                accelerator.clip_grad_value_(model.parameters(), 1e-3)
            elif how == "torch's clip":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    return {name: full(parameter) for name, parameter in model.named_parameters()}


@cells(("ddp", (1, 1)), ("ddp", (2, 2)), ("lsdp", (2,)))
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("clip", "in the middle of an optimizer step"),
        ("clip value", "in the middle of an optimizer step"),
        ("torch's clip", "changed between two micro-batches of an optimizer step"),
        ("two losses", "dropped between two micro-batches of a global batch"),
        ("two losses, and drops in the last micro-batch", "dropped between two micro-batches of a global batch"),
    ],
)
def test_parts_of_gradients_are_neither_clipped_nor_dropped(workers, how, message, strategy, nodes):
    if strategy == "collectives" or (strategy == "fsdp" and how == "torch's clip"):
        pytest.skip("a plan option of its own; FSDP2 keeps parts where torch does not clip them")
    errors = workers(sum(nodes)).run(accumulate, strategy, how, nodes=nodes, expect_failure=True)
    told = [None if error is None else error.message for error in errors]
    assert all(text and message in text for text in told), told


@pytest.mark.parametrize("how", ["clip", "clip value", "torch's clip"])
def test_one_process_clips_what_it_has(workers, how):
    (parameters,) = workers(1).run(accumulate, "ddp", how, nodes=(1,))
    model = CASE.model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = CASE.dataset(SAMPLES, torch.float64)
    for first in range(0, SAMPLES, 4):
        loss = CASE.loss(model, collate([data[index] for index in range(first, first + 4)]))
        (loss / 2).backward()
        if how == "clip value":
            torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        if first % 8:
            optimizer.step()
            optimizer.zero_grad()
    assert relative_error(parameters, {name: p.detach() for name, p in model.named_parameters()}) <= 1e-12


def assert_exact(results: list[tuple[dict, int]], **clip: float) -> None:
    """The parameters of all ranks are those of one process."""
    total = sum(size * steps for size, steps in SIZES[len(results)])
    batches = [list(range(first, min(first + total, SAMPLES))) for first in range(0, SAMPLES, total)] * 2
    expected = reference_run(
        "vit",
        torch.float64,
        batches,
        weighting="sample",
        steps=len(batches),
        lr=1e-2,
        weight_decay=0.0,
        **{"max_grad_norm": None, **clip},
    ).parameters
    for parameters, steps in results:
        assert steps == len(batches)
        assert relative_error(parameters, expected) <= 1e-12
