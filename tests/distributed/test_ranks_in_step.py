# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What one rank does differently is an error on all ranks before a wrong optimizer step."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from launching import TESTS, base_environment, free_port, rank_environment
from strategy_cells import CELLS, cells, gathers
from test_batch_identity import CASE, SIZES, Script, plan_of
from torch import nn
from torch.utils.data import DataLoader, Sampler
from training_cases import collate, make_optimizer

from accelerate_lshdp import LSHDPAccelerator
from accelerate_lshdp.accelerator.ranks_in_step import PROBLEMS, require_same_step
from accelerate_lshdp.runtime import agreement
from accelerate_lshdp.runtime.step_exchange import RankReport


class Noted:
    """The steps that the optimizer of this rank has made with gradients of one global batch."""

    def __init__(self, script: Script) -> None:
        self.steps = 0
        script.optimizer.optimizer.register_step_post_hook(self.stepped)

    def stepped(self, *_: object) -> None:
        self.steps += 1


def step(script: Script, batch: dict) -> None:
    script.accelerator.backward(CASE.loss(script.model, batch))
    script.optimizer.step()
    script.optimizer.zero_grad()


def skip_another_batch(script: Script) -> None:
    for number, batch in enumerate(script.loader):
        if number == 2 and script.accelerator.process_index == 1:
            continue
        step(script, batch)


def leave_out_a_step(script: Script) -> None:
    for number, batch in enumerate(script.loader):
        script.accelerator.backward(CASE.loss(script.model, batch))
        if number != 2 or script.accelerator.process_index != 1:
            script.optimizer.step()
        script.optimizer.zero_grad()


def catch_an_exception(script: Script) -> None:
    for number, batch in enumerate(script.loader):
        try:
            if number == 2 and script.accelerator.process_index == 1:
                raise ValueError("a damaged image")
            step(script, batch)
        except ValueError:
            continue


def catch_an_exception_of_backward(script: Script, ranks: tuple[int, ...] = (1,)) -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise MemoryError("the device is full")

    def fail_in_backward(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        output.register_hook(fail)

    for number, batch in enumerate(script.loader):
        failing = number == 2 and script.accelerator.process_index in ranks
        hook = script.model.vit.layers[0].register_forward_hook(fail_in_backward) if failing else None
        try:
            step(script, batch)
        except MemoryError:
            script.optimizer.zero_grad()
        finally:
            if hook is not None:
                hook.remove()


def train_a_batch_once_more(script: Script) -> None:
    for number, batch in enumerate(script.loader):
        if number == 2 and script.accelerator.process_index == 1:
            script.accelerator.backward(CASE.loss(script.model, batch))
        step(script, batch)


DEVIATIONS = (
    skip_another_batch,
    leave_out_a_step,
    catch_an_exception,
    catch_an_exception_of_backward,
    train_a_batch_once_more,
)


def deviate(name: str, strategy: str, weighting: str = "auto") -> None:
    """Runs on every rank; the error says how many steps were made before it."""
    script = Script(strategy, weighting=weighting)
    noted = Noted(script)
    try:
        globals()[name](script)
    except Exception as error:
        raise RuntimeError(f"after {noted.steps} steps: {error}") from error


def check(errors: list, steps: int) -> None:
    for rank, error in enumerate(errors):
        assert error is not None, f"rank {rank} went on"
        made = int(error.message.removeprefix("after ").split()[0])
        assert made <= steps, f"rank {rank} has made {made} steps, of which only {steps} are right"


#: Where every rank has parameters of its own, so that none of them is waited for in a forward.
APART = [cell for cell in CELLS if cell[0] == "ddp" or cell[1] == (1, 1) and not gathers(*cell)]
SHARDED = [cell for cell in CELLS if cell not in APART and cell[0] != "lsdp"]


@pytest.mark.parametrize("deviation", DEVIATIONS)
@cells(("ddp", (2,)), ("lsdp", (1, 1)), ("collectives", (1, 1)), among=APART)
def test_a_difference_is_the_same_error_on_all_ranks_within_one_step(workers, strategy, nodes, deviation):
    if strategy == "collectives" and deviation is catch_an_exception_of_backward:
        pytest.skip("a unit's collectives of FSDP2 cannot be made up for: see the test of forwards that gather")
    errors = workers(sum(nodes)).run(deviate, deviation.__name__, strategy, nodes=nodes, expect_failure=True)
    check(errors, 3)
    told = {error.message.partition(": ")[2] for error in errors}
    assert len(told) == 1, told
    assert "not in step" in told.pop() or deviation is catch_an_exception_of_backward


def train_once_more_when_the_loss_is_known(strategy: str) -> None:
    script = Script(strategy, weighting="auto")
    noted = Noted(script)
    try:
        for number, batch in enumerate(batch for _ in range(4) for batch in script.loader):
            if number == 14:
                assert "loss 0" in script.accelerator.session.losses.findings["loop"]
                if script.accelerator.process_index == 1:
                    script.accelerator.backward(CASE.loss(script.model, batch))
            step(script, batch)
    except Exception as error:
        raise RuntimeError(f"after {noted.steps} steps: {error}") from error


@pytest.mark.parametrize(("strategy", "nodes"), [("ddp", (2,)), ("lsdp", (1, 1))])
def test_a_backward_too_many_is_an_error_on_all_ranks_also_when_the_loss_is_known(workers, strategy, nodes):
    arguments = (train_once_more_when_the_loss_is_known, strategy)
    errors = workers(2).run(*arguments, nodes=nodes, expect_failure=True, timeout=60)
    check(errors, 15)
    assert all("not in step" in error.message for error in errors)


@pytest.mark.parametrize("deviation", DEVIATIONS)
def test_ranks_that_share_memory_notice_a_difference_in_seconds(workers, deviation):
    """No rank ends here, so the one that tells others what its loss is would wait for an answer."""
    errors = workers(2).run(deviate, deviation.__name__, "lsdp", "sample", nodes=(2,), expect_failure=True, timeout=40)
    check(errors, 3)


@pytest.mark.slow
@pytest.mark.parametrize("deviation", [each for each in DEVIATIONS if each is not catch_an_exception_of_backward])
@cells(("zero2", (2,)), among=SHARDED)
def test_where_forwards_gather_a_difference_is_an_error_within_a_minute(workers, strategy, nodes, deviation):
    arguments = (deviate, deviation.__name__, strategy)
    check(workers(sum(nodes)).run(*arguments, nodes=nodes, expect_failure=True, timeout=60), 3)


_PATHS = """
import sys
sys.path[:0] = [sys.argv[1], f"{sys.argv[1]}/distributed"]
"""
FAILS_TWICE = """
from test_ranks_in_step import catch_an_exception_of_backward
from test_batch_identity import Script
# Of an accelerator before it, of which all ranks failed and went on: its answers must not be taken for those of now.
catch_an_exception_of_backward(Script(sys.argv[2]), ranks=(0, 1))
print("went on", flush=True)
catch_an_exception_of_backward(Script(sys.argv[2]))
"""
DEVIATES = """
from test_ranks_in_step import deviate
deviate(sys.argv[2], "lsdp")
"""


def run_ranks_that_end(code: str, argument: str, nodes: tuple[int, ...]) -> tuple[list[str], list[str]]:
    """What processes of their own print and say when all of them end with an error."""
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _PATHS + code, str(TESTS), argument],
            env={**os.environ, **base_environment(), **rank_environment(rank, nodes, port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(sum(nodes))
    ]
    try:
        with ThreadPoolExecutor(len(ranks)) as readers:
            outputs, errors = zip(*readers.map(lambda rank: rank.communicate(timeout=150), ranks), strict=True)
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 1 for rank in ranks), errors
    return outputs, errors


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("strategy", ["fsdp", "zero2", "collectives"])
def test_where_forwards_gather_a_failed_backward_ends_all_ranks_within_a_minute(strategy):
    outputs, errors = run_ranks_that_end(FAILS_TWICE, strategy, (2,))
    assert all("went on" in output for output in outputs)
    assert "the device is full" in errors[1] and "cannot go on without its part" in errors[1]
    assert "the connection to another rank was lost" in errors[0]


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("nodes", [(1, 2), (2, 2)])
@pytest.mark.parametrize("deviation", DEVIATIONS)
def test_other_nodes_end_with_ranks_that_share_memory(nodes, deviation):
    """A node notices the difference among its ranks, which end; others wait for its gradients until then."""
    _, errors = run_ranks_that_end(DEVIATES, deviation.__name__, nodes)
    for error in errors:
        (made,) = re.findall(r"RuntimeError: after (\d+) steps: ", error)
        assert int(made) <= 3


def test_what_several_ranks_have_found_is_said_once():
    reports = [RankReport(0, 0, 0, 0, problem=problem) for problem in (3, 0, 3, 3)]
    with pytest.raises(RuntimeError) as raised:
        require_same_step(reports)
    assert str(raised.value) == f"rank 0 and rank 2 and rank 3 {PROBLEMS[2]}"


class LazySampler(Sampler):
    """Draws each index when it is asked for it, from the generator that dropout draws from, too."""

    def __len__(self) -> int:
        return 66

    def __iter__(self):  # noqa: ANN204 - as a script writes it
        for _ in range(66):
            yield int(torch.randint(33, ()))


def draw_lazily(strategy: str) -> None:
    ranks = LSHDPAccelerator(plan=plan_of("ddp", None)).num_processes
    accelerator = LSHDPAccelerator(plan=plan_of(strategy, SIZES[ranks]))
    torch.manual_seed(3)
    model = CASE.model().double()
    optimizer = make_optimizer(model, 1e-2, 0.0)
    dataset = CASE.dataset(33, torch.float64)
    loader = DataLoader(dataset, batch_size=3, sampler=LazySampler(), collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for batch in loader:
        # Dropout over each rank's own, unequal batch: from here on their generators differ.
        torch.nn.functional.dropout(batch["pixel_values"], 0.1)
        accelerator.backward(CASE.loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()


@cells(("ddp", (2,)), ("lsdp", (2,)))
def test_ranks_that_draw_different_samples_are_told_which_batch_differs(workers, strategy, nodes):
    errors = workers(sum(nodes)).run(draw_lazily, strategy, expect_failure=True, nodes=nodes)
    assert len({error.message for error in errors}) == 1 and "different samples" in errors[0].message


def save_after_a_step_of_one_rank(folder: str) -> None:
    script = Script("ddp")
    for batch in script.loader:
        script.accelerator.backward(CASE.loss(script.model, batch))
        if script.accelerator.process_index == 0:
            script.optimizer.step()
        script.optimizer.zero_grad()
        script.accelerator.save_state(folder)


def test_a_checkpoint_of_ranks_that_are_not_in_step_is_refused(workers, tmp_path):
    """Two ranks of one parameter set would save what no run of this plan has ever had."""
    errors = workers(2).run(save_after_a_step_of_one_rank, str(tmp_path / "a"), expect_failure=True, nodes=(1, 1))
    for error in errors:
        assert "how many steps their optimizers have made. rank 0: 1; rank 1: 0" in error.message
        assert "Let all ranks do the same" in error.message and "files and options" not in error.message
    assert not (tmp_path / "a").exists()


def go_on_from_the_last_checkpoint(strategy: str, folder: str, deviation: str | None) -> dict[str, torch.Tensor]:
    """Trains an epoch; if the ranks differ in its third batch, all catch the error and load a checkpoint."""
    script = Script(strategy)
    batches = iter(script.loader)
    step(script, next(batches))
    script.accelerator.save_state(folder)
    if deviation is not None:
        del batches
        script.accelerator.load_state(folder)
        script.loader = script.accelerator.skip_first_batches(script.loader)
        try:
            globals()[deviation](script)
        except RuntimeError as error:
            assert "not in step" in str(error) or "rank 1" in str(error) and "failed" in str(error)
        else:
            raise AssertionError("there was no error")
        script.accelerator.load_state(folder)
        batches = script.accelerator.skip_first_batches(script.accelerator._dataloaders[0])
    for batch in batches:
        step(script, batch)
    script.accelerator.save_state(folder)
    assert script.accelerator.completed_steps == 6
    return script.parameters


@pytest.mark.parametrize(
    ("strategy", "nodes", "deviation"),
    [
        ("ddp", (1, 1), leave_out_a_step),
        ("lsdp", (1, 1), leave_out_a_step),
        ("ddp", (1, 1), catch_an_exception_of_backward),
        ("lsdp", (2,), catch_an_exception_of_backward),
    ],
)
def test_ranks_that_load_the_last_checkpoint_are_in_step_again(workers, tmp_path, strategy, nodes, deviation):
    pool = workers(2)
    whole = pool.run(go_on_from_the_last_checkpoint, strategy, str(tmp_path / "a"), None, nodes=nodes)
    again = pool.run(go_on_from_the_last_checkpoint, strategy, str(tmp_path / "b"), deviation.__name__, nodes=nodes)
    for expected, found in zip(whole, again, strict=True):
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def load_inside_a_step(folder: str) -> None:
    script = Script("lsdp", accumulation=2)
    script.accelerator.save_state(folder)
    for number, batch in enumerate(script.loader):
        if number == 1:
            script.accelerator.load_state(folder)
        script.train_on(batch)


def test_the_rest_of_a_step_whose_gradients_load_state_has_dropped_is_refused(workers, tmp_path):
    errors = workers(2).run(load_inside_a_step, str(tmp_path / "state"), nodes=(2,), expect_failure=True)
    assert len({error.message for error in errors}) == 1
    assert "begins in the middle of the batches that are accumulated" in errors[0].message


def call_late(call: str, strategy: str, folder: str, late: float, apart: float) -> list[str]:
    """What ranks are told after `apart` seconds if rank 1 makes a call `late` seconds after rank 0."""
    script = Script(strategy)
    accelerator = script.accelerator
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    agreement.logger.addHandler(handler)
    before, agreement._APART_SECONDS = agreement._APART_SECONDS, apart
    try:
        if call == "load_state":
            accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        time.sleep(late * accelerator.process_index)
        arguments = {"get_state_dict": (script.model,), "save_model": (script.model, folder)}
        getattr(accelerator, call)(*arguments.get(call, (folder,)))
    finally:
        agreement._APART_SECONDS = before
        agreement.logger.removeHandler(handler)
    return said


@pytest.mark.parametrize("call", ["save_state", "load_state", "get_state_dict", "save_model"])
def test_a_rank_that_waits_for_a_call_of_others_says_so(workers, tmp_path, call):
    """A call under `if accelerator.is_main_process` would wait in silence, and so would the others in their step."""
    strategy = "ddp" if call.endswith("state") else "fsdp"
    said = workers(2).run(call_late, call, strategy, str(tmp_path / "a"), 1.5, 0.5, nodes=(1, 1))
    assert len(said[0]) == 1 and said[1] == []
    assert f"rank 0 has waited 0.5 s in {call}, which rank 1 has not called" in said[0][0]
    assert "outside of `if accelerator.is_main_process`" in said[0][0]
    assert workers(2).run(call_late, call, strategy, str(tmp_path / "b"), 0.0, 30.0, nodes=(1, 1)) == [[], []]
