# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Accumulated steps that a script leaves open, or begins inside: exact, or an error on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from exactness import full
from strategy_cells import cells
from test_batch_identity import BATCHES, CASE, Script, error_of, fetched_ahead
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset
from training_cases import collate, relative_error

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator, Plan
from accelerate_lshdp.accelerator import accumulation
from accelerate_lshdp.engine.prepared import PreparedModel


PLACES = [("ddp", (1,)), ("ddp", (1, 1)), ("lsdp", (2,)), ("collectives", (1, 1)), ("fsdp", (2,))]
everywhere = cells(*PLACES)


# Windows of which a batch is left out


def leave_out_the_middle(strategy: str, on_one_rank: bool) -> None:
    script = Script(strategy, accumulation=3, equal=True)
    made = []
    script.optimizer.optimizer.register_step_post_hook(lambda *_: made.append(1))
    try:
        for number, batch in enumerate(script.loader):
            if number != 4 or (on_one_rank and script.accelerator.is_main_process):
                script.train_on(batch)
    except RuntimeError as error:
        raise RuntimeError(f"after {len(made)} steps: {error}") from error


@cells(("ddp", (1, 1)), ("lsdp", (2,)))
@pytest.mark.parametrize("on_one_rank", [False, True])
def test_a_batch_left_out_in_the_middle_of_a_window_is_an_error_on_all_ranks(workers, strategy, nodes, on_one_rank):
    errors = workers(sum(nodes)).run(leave_out_the_middle, strategy, on_one_rank, nodes=nodes, expect_failure=True)
    told = [None if error is None else error.message for error in errors]
    expected = ("in the middle of those", "not in step") if on_one_rank else ("in the middle of those",)
    assert all(message is not None and any(text in message for text in expected) for message in told), told
    assert all(message.startswith("after 1 steps") for message in told)


# Windows that are left open


def take_each_batch_from_a_new_iterator(script: Script) -> None:
    for _ in range(8):
        script.train_on(next(iter(script.loader)))


def leave_epochs_inside_a_window(script: Script) -> None:
    for _ in range(3):
        for batch in islice(script.loader, 3):
            script.train_on(batch)


def leave_out_the_end_of_a_window(script: Script) -> None:
    for number, batch in enumerate(script.loader):
        if number != 1:
            script.train_on(batch)


def leave_out_the_end_on_one_rank(script: Script) -> None:
    for number, batch in enumerate(script.loader):
        if number != 1 or script.accelerator.process_index != script.accelerator.num_processes - 1:
            script.train_on(batch)


def train_one_batch_again_and_again(script: Script) -> None:
    batch = next(iter(script.loader))
    for _ in range(8):
        script.train_on(batch)


def train_two_loaders_in_turns(script: Script) -> None:
    other = script.accelerator.prepare(script.new_loader(range(33)))
    for one, two in zip(script.loader, other, strict=True):
        script.train_on(one)
        script.train_on(two)


LEAVING = (
    take_each_batch_from_a_new_iterator,
    leave_epochs_inside_a_window,
    leave_out_the_end_of_a_window,
    leave_out_the_end_on_one_rank,
    train_one_batch_again_and_again,
    train_two_loaders_in_turns,
)


def leave(name: str, strategy: str) -> None:
    script = Script(strategy, accumulation=2, equal=True)
    made = []
    script.optimizer.optimizer.register_step_post_hook(lambda *_: made.append(1))
    try:
        globals()[name](script)
    except RuntimeError as error:
        raise RuntimeError(f"after {len(made)} steps: {error}") from error


@everywhere
@pytest.mark.parametrize("leaving", LEAVING)
def test_a_window_that_is_left_open_is_an_error_on_all_ranks_before_a_wrong_step(workers, leaving, strategy, nodes):
    errors = workers(sum(nodes)).run(leave, leaving.__name__, strategy, nodes=nodes, expect_failure=True)
    told = [None if error is None else error.message for error in errors]
    expected = ["whose last batches were left out"]
    if leaving is leave_out_the_end_on_one_rank:
        expected.append("not in step")  # found before by what ranks tell each other of a loss, where they do
    assert all(message is not None and any(text in message for text in expected) for message in told), told
    right = 1 if leaving is leave_epochs_inside_a_window else 0
    assert all(error.message.startswith(f"after {right} steps") for error in errors)


# Models that were wrapped after prepare


class Wrapper(nn.Module):
    """As PEFT and models of a script's own around a prepared one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.inner(*args, **kwargs)


class Holder:
    """No module at all."""

    def __init__(self, model: nn.Module) -> None:
        self.inner = model

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.inner(*args, **kwargs)


def wrapped(model: nn.Module, how: str) -> object:
    if how == "compiled":
        return torch.compile(model, backend="eager")
    return {"module": Wrapper, "object": Holder}[how](model)


def leave_wrapped(how: str, strategy: str) -> None:
    script = Script(strategy, accumulation=2, equal=True)
    script.model = wrapped(script.model, how)
    leave_epochs_inside_a_window(script)


WRAPPED = [
    pytest.param("compiled", "ddp", (1, 1), marks=pytest.mark.slow),
    ("module", "ddp", (1, 1)),
    ("object", "ddp", (1, 1)),
]
WRAPPED += [("compiled", "lsdp", (2,)), pytest.param("compiled", "fsdp", (2,), marks=pytest.mark.slow)]


@pytest.mark.parametrize(("how", "strategy", "nodes"), WRAPPED)
def test_a_window_of_a_wrapped_model_that_is_left_open_is_an_error_on_all_ranks(workers, how, strategy, nodes):
    errors = workers(2).run(leave_wrapped, how, strategy, nodes=nodes, expect_failure=True)
    assert all("whose last batches were left out" in error.message for error in errors), errors


def train_wrapped(how: str, strategy: str) -> tuple[dict, list[bool], list[bool]]:
    """One accumulated step; whether its backwards synchronised, and what a forward in ``no_sync`` has for its own."""
    script = Script(strategy, accumulation=2)
    prepared = PreparedModel.of(script.model)
    outer = wrapped(script.model, how)
    synchronised = []
    for batch in islice(script.loader, 2):
        with script.accelerator.accumulate(outer):
            loss = CASE.loss(outer, batch)
            synchronised.append(prepared.synchronise_next)
            script.accelerator.backward(loss)
    gradients = {name: full(parameter.grad) for name, parameter in script.model.named_parameters()}
    with script.accelerator.no_sync(outer):
        CASE.loss(outer, batch)
        kept = [prepared.synchronise_next]
    with script.accelerator.trigger_sync_in_backward(outer):
        kept.append(prepared.synchronise_next)
    return gradients, synchronised, kept


@pytest.mark.parametrize(("how", "strategy", "nodes"), WRAPPED)
def test_an_accumulated_step_of_a_wrapped_model_is_that_of_one_process(workers, how, strategy, nodes):
    model = CASE.model().double()
    data = CASE.dataset(33, torch.float64)
    for indices in BATCHES[:2]:
        (CASE.loss(model, collate([data[index] for index in indices])) / 2).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for gradients, synchronised, kept in workers(2).run(train_wrapped, how, strategy, nodes=nodes):
        assert relative_error(gradients, expected) <= 1e-9
        assert synchronised == [False, True]
        assert how == "object" or kept == [False, True]


def accumulate_unknown(several: bool) -> list[str]:
    """What is warned of, where it cannot be told which of the prepared models are meant."""
    script = Script("ddp", accumulation=2, equal=True)
    if several:
        script.accelerator.prepare(nn.Linear(1, 1, dtype=torch.float64))
    warned = []
    accumulation.logger.warning_once = warned.append
    try:
        with script.accelerator.accumulate(nn.Linear(1, 1)):
            assert script.accelerator._accumulation.models == script.accelerator.session.engine.models
    finally:
        del accumulation.logger.warning_once
    return warned


@pytest.mark.parametrize("several", [False, True])
def test_models_that_are_not_known_are_all_that_were_prepared(workers, several):
    (warned,) = workers(1).run(accumulate_unknown, several)
    assert len(warned) == several and all("found Linear" in message for message in warned)


def drop_gradients_of_a_window(strategy: str, set_to_none: bool) -> tuple[Script, list, int]:
    script = Script(strategy, accumulation=2)
    for batch in islice(script.loader, 3):
        script.train_on(batch)
    script.model.zero_grad(set_to_none=set_to_none)
    for batch in script.loader:
        script.train_on(batch)
    return script, BATCHES[:2] + BATCHES, 2


def drop_to_none(strategy: str) -> tuple[Script, list, int]:
    return drop_gradients_of_a_window(strategy, True)


def drop_to_zeros(strategy: str) -> tuple[Script, list, int]:
    return drop_gradients_of_a_window(strategy, False)


def pattern_error(name: str, strategy: str) -> float:
    import test_batch_identity

    setattr(test_batch_identity, name, globals()[name])
    return error_of(name, strategy)


DROPPING = [(drop_to_none, "ddp", (1, 1)), (drop_to_none, "lsdp", (2,)), (drop_to_none, "collectives", (1, 1))]
DROPPING += [(drop_to_zeros, "ddp", (1, 1)), (drop_to_zeros, "lsdp", (2,))]


@pytest.mark.parametrize(("drop", "strategy", "nodes"), DROPPING)
def test_gradients_that_were_dropped_leave_nothing_behind(workers, drop, strategy, nodes):
    for error in workers(2).run(pattern_error, drop.__name__, strategy, nodes=nodes):
        assert error <= 1e-12


# What leaves no window open


def looks_at_another_loader(strategy: str) -> tuple[Script, list, int]:
    script = Script(strategy, accumulation=2)
    held_out = script.accelerator.prepare(script.new_loader(range(11)))
    sample = next(iter(held_out))
    for batch in script.loader:
        script.train_on(batch)
    assert sample
    return script, BATCHES, 2


def validates_in_train_mode(strategy: str) -> tuple[Script, list, int]:
    script = Script(strategy, accumulation=2)
    held_out = script.accelerator.prepare(script.new_loader(range(12)))
    for number, batch in enumerate(script.loader):
        script.train_on(batch)
        if number == 1:
            with torch.no_grad():
                for validated in held_out:  # whose variable stays
                    CASE.loss(script.model, validated)
    return script, BATCHES, 2


def endless(loader: DataLoader) -> Iterator[dict]:
    while True:
        yield from loader


def looks_ahead_over_epochs(strategy: str) -> tuple[Script, list, int]:
    script = Script(strategy, accumulation=2)
    for batch in islice(fetched_ahead(endless(script.loader)), 14):
        script.train_on(batch)
    return script, (BATCHES * 3)[:14], 2


def leaves_out_a_loss(strategy: str) -> tuple[Script, list, int]:
    """Inside ``accumulate``, as for a loss that is NaN: the batch counts as if its loss were 0."""
    script = Script(strategy, accumulation=2)
    for number, batch in enumerate(script.loader):
        with script.accelerator.accumulate(script.model):
            loss = CASE.loss(script.model, batch)
            if number < 4 and number % 2 == 0:
                continue
            if number % 2 == 1 and number < 4:
                loss = loss * 2
            script.accelerator.backward(loss)
            script.optimizer.step()
            script.optimizer.zero_grad()
    return script, [BATCHES[1], BATCHES[1], BATCHES[3], BATCHES[3], *BATCHES[4:]], 2


@pytest.mark.parametrize(
    "pattern", [looks_at_another_loader, validates_in_train_mode, looks_ahead_over_epochs, leaves_out_a_loss]
)
@pytest.mark.parametrize(("strategy", "nodes"), [("ddp", (1, 1)), ("lsdp", (2,))])
def test_what_else_a_script_reads_belongs_to_no_window(workers, pattern, strategy, nodes):
    for error in workers(2).run(pattern_error, pattern.__name__, strategy, nodes=nodes):
        assert error <= 1e-12


def train_two_loaders_in_the_other_order(strategy: str, turned: bool) -> dict:
    script = Script(strategy, accumulation=2, equal=True)
    other = script.accelerator.prepare(script.new_loader(range(33)))
    for one, two in zip(script.loader, other, strict=True):
        with script.accelerator.accumulate(script.model):
            parts = (two, one) if turned else (one, two)
            script.accelerator.backward(sum(CASE.loss(script.model, part) for part in parts))
            script.optimizer.step()
            script.optimizer.zero_grad()
    return script.parameters


def test_batches_of_one_loss_may_go_through_the_model_in_any_order(workers):
    straight = workers(2).run(train_two_loaders_in_the_other_order, "ddp", False, nodes=(1, 1))
    turned = workers(2).run(train_two_loaders_in_the_other_order, "ddp", True, nodes=(1, 1))
    for one, two in zip(straight, turned, strict=True):
        assert relative_error(one, two) <= 1e-12


def train_two_models_on_loaders_of_their_own(strategy: str) -> list[dict]:
    """In turns, as a generator and a discriminator; with the other one's loader, or alone."""
    results = []
    for alone in (False, True):
        script = Script(strategy, accumulation=2)
        torch.manual_seed(1)
        second = nn.Linear(1, 1, dtype=torch.float64)
        second, optimizer = script.accelerator.prepare(second, torch.optim.SGD(second.parameters(), lr=0.1))
        second.train()
        other = script.accelerator.prepare(script.new_loader(range(33)))
        for one, two in zip(script.loader, other, strict=True):
            if not alone:
                with script.accelerator.accumulate(second):
                    script.accelerator.backward(second(two["pixel_values"][:, :1, :1, 0]).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
            script.train_on(one)
        results.append(script.parameters)
        results.append({name: full(parameter) for name, parameter in second.named_parameters()})
    return results


def test_each_model_has_windows_of_its_own(workers):
    for together, moved, alone, _ in workers(2).run(train_two_models_on_loaders_of_their_own, "ddp", nodes=(1, 1)):
        assert relative_error(together, alone) <= 1e-12
        assert all(value.isfinite().all() for value in moved.values())


# Several models under unequal numbers of micro-batches

NOISE, REAL = slice(0, 2), slice(2, 4)


def two_networks() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    judge = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return made, judge, torch.optim.Adam(made.parameters(), 1e-2), torch.optim.Adam(judge.parameters(), 1e-2)


def loss_of_judge(made: nn.Module, judge: nn.Module, batch: torch.Tensor, how: str) -> torch.Tensor:
    """The generator has a forward in the discriminator's block, or none."""
    fake = batch[:, NOISE] if how == "apart" else made(batch[:, NOISE])
    fake = fake if how == "joined" else fake.detach()
    return softplus(-judge(batch[:, REAL])).mean() + softplus(judge(fake)).mean()


def loss_of_made(made: nn.Module, judge: nn.Module, batch: torch.Tensor, how: str) -> torch.Tensor:
    if how == "apart":
        return (made(batch[:, NOISE]) - batch[:, REAL]).square().mean()
    judge.requires_grad_(False)
    try:
        return softplus(-judge(made(batch[:, NOISE]))).mean()
    finally:
        judge.requires_grad_(True)


def thirteens() -> torch.Tensor:
    return torch.randn(5 * 13 + 4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def train_two_models_in_blocks_of_their_own(
    strategy: str, how: str, accumulation: int, sizes: tuple = ((8, 1), (5, 2)), weighting: str = "sample"
) -> list[dict]:
    plan = Plan.from_batch_sizes(sizes, strategy=strategy, allow_unequal_accumulation=True)
    accelerator = LSHDPAccelerator(
        plan=plan, lsdp_plugin=LSDPPlugin(loss_weighting=weighting), gradient_accumulation_steps=accumulation
    )
    made, judge, step_made, step_judge, loader = accelerator.prepare(
        *two_networks(), DataLoader(TensorDataset(thirteens()), batch_size=9)
    )
    for (batch,) in loader:
        with accelerator.accumulate(judge):
            accelerator.backward(loss_of_judge(made, judge, batch, how))
            step_judge.step()
            step_judge.zero_grad()
        with accelerator.accumulate(made):
            accelerator.backward(loss_of_made(made, judge, batch, how))
            step_made.step()
            step_made.zero_grad()
    return [{name: full(p) for name, p in model.named_parameters()} for model in (made, judge)]


def in_one_process(how: str, accumulation: int) -> list[dict]:
    made, judge, step_made, step_judge = two_networks()
    batches = thirteens().split(18)
    for number, batch in enumerate(batches):
        for loss, optimizer in ((loss_of_judge, step_judge), (loss_of_made, step_made)):
            (loss(made, judge, batch, how) / accumulation).backward()
            if (number + 1) % accumulation == 0 or number + 1 == len(batches):
                optimizer.step()
                optimizer.zero_grad()
    return [{name: full(p) for name, p in model.named_parameters()} for model in (made, judge)]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("how", ["apart"])
def test_a_block_of_one_model_does_not_wait_for_another_one(workers, how, accumulation):
    expected = in_one_process(how, accumulation)
    found = workers(2).run(
        train_two_models_in_blocks_of_their_own, "ddp", how, accumulation, nodes=(1, 1), timeout=12.0
    )
    for models in found:
        assert all(relative_error(*both) <= 1e-9 for both in zip(models, expected, strict=True))


@pytest.mark.parametrize("how", ["joined", "detached"])
def test_a_forward_of_a_model_that_accumulate_was_not_given_is_an_error_on_all_ranks(workers, how):
    errors = workers(2).run(train_two_models_in_blocks_of_their_own, "ddp", how, 1, nodes=(1, 1), expect_failure=True)
    assert len({error.message for error in errors}) == 1
    assert "give accumulate() all models that the loss depends on" in errors[0].message


@pytest.mark.parametrize("how", ["joined", "detached"])
@pytest.mark.parametrize(("strategy", "nodes"), [("ddp", (1, 1)), ("lsdp", (2,))])
def test_a_forward_of_another_model_in_a_block_changes_nothing(workers, how, strategy, nodes):
    expected = in_one_process(how, 2)
    arguments = (strategy, how, 2, (12, 6), "auto")
    for models in workers(2).run(train_two_models_in_blocks_of_their_own, *arguments, nodes=nodes, timeout=30.0):
        assert all(relative_error(*both) <= 1e-9 for both in zip(models, expected, strict=True))


def test_a_second_loss_that_is_not_known_is_an_error_where_ranks_cannot_ask_each_other(workers):
    arguments = ("ddp", "apart", 1, ((8, 1), (5, 2)), "auto")
    errors = workers(2).run(
        train_two_models_in_blocks_of_their_own, *arguments, nodes=(1, 1), timeout=30.0, expect_failure=True
    )
    assert len({error.message for error in errors}) == 1
    assert "a second loss that is not known yet" in errors[0].message and "loss_weighting" in errors[0].message
