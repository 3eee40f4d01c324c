# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""One copy of parameters and gradients a node: what is shared, what is exact, what is refused (lsdp on CPUs)."""

from __future__ import annotations

import copy
import gc
import os
import re
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from node_shared_cases import TwoHeads, batch_of, start, values
from torch import nn
from training_cases import make_optimizer, relative_error

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator, Plan
from accelerate_lshdp.documents.bucket_sizes import WAITING_BUCKETS
from accelerate_lshdp.engine.stores.shared.ownership import NodeOwnership


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def identical(ranks: list[dict[str, torch.Tensor]]) -> bool:
    return all(
        rank.keys() == ranks[0].keys() and all(torch.equal(rank[n], value) for n, value in ranks[0].items())
        for rank in ranks
    )


def shared_mappings() -> int:
    return sum("memfd:lshdp" in line for line in Path("/proc/self/maps").read_text().splitlines())


def node_threads() -> int:
    return sum(thread.name == "lshdp-node" for thread in threading.enumerate())


# What is shared


def look_at_memory() -> dict:
    accelerator, model, optimizer, loader = start((2, 1, 1))
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    dist.barrier()
    if accelerator.topology.local_rank == 0:
        for parameter in model.parameters():
            parameter.data.fill_(7.0 + accelerator.topology.node)
    dist.barrier()
    seen = {value for parameter in model.parameters() for value in parameter.flatten().tolist()}
    dist.barrier()
    load = {name: torch.ones_like(parameter) for name, parameter in model.state_dict().items()}
    model.load_state_dict(load)
    for batch in loader:
        accelerator.backward(model(**batch))
        optimizer.step()
        optimizer.zero_grad()
    moments = {name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters() if p in optimizer.state}
    return {
        "seen": seen,
        "tied": model.inner[2].weight is model.inner[0].weight,
        "trainable": {name: size for name, size in sizes.items() if name != "frozen"},
        "state": {name: moment.numel() for name, moment in moments.items()},
    }


def test_a_node_has_one_copy_and_the_state_of_each_parameter_once(workers):
    alone, *together = workers(3).run(look_at_memory, nodes=(1, 2))
    assert [rank["seen"] for rank in (alone, *together)] == [{7.0}, {8.0}, {8.0}]
    assert all(rank["tied"] for rank in (alone, *together))
    assert alone["state"] == alone["trainable"]
    first, second = (rank["state"] for rank in together)
    assert first and second and not first.keys() & second.keys()
    assert first | second == alone["trainable"]


def make_and_free() -> list[tuple[int, int, int]]:
    seen = []
    for _ in range(2):
        accelerator, model, optimizer, loader = start()
        for batch in loader:
            accelerator.backward(model(**batch))
            optimizer.step()
        seen.append((shared_mappings(), node_threads(), len(os.listdir("/dev/shm"))))
        dist.barrier()
        model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
        del accelerator
        gc.collect()
        seen.append((shared_mappings(), node_threads(), len(os.listdir("/dev/shm"))))
        dist.barrier()
    return seen


def test_a_model_that_is_freed_leaves_nothing(workers):
    for seen in workers(2).run(make_and_free):
        assert [place[:2] for place in seen] == [(1, 1), (0, 0)] * 2
        assert len({place[2] for place in seen}) == 1


# What is exact


def clip(sizes: tuple) -> dict:
    """Gradients as every rank sees them: after the backward, after clipping their norm, after clipping values."""
    accelerator, model, _, loader = start(sizes)
    accelerator.backward(model(**next(iter(loader))))
    result = {"backward": gradients(model)}
    result["norm"] = {"": accelerator.clip_grad_norm_(model.parameters(), 0.01)}
    result["clipped"] = gradients(model)
    accelerator.clip_grad_value_(model.parameters(), 0.001)
    result["clamped"] = gradients(model)
    return result


def run_ahead_of_the_first_rank() -> tuple[int, int]:
    accelerator, model, _, loader = start((2, 1), megabytes=0.00005)  # a bucket for each parameter
    reduction = NodeOwnership.of(model.heads[0].weight).reduction
    hand_in, waiting = reduction.ready, []

    def hand_in_and_count(*arguments) -> None:
        hand_in(*arguments)
        with reduction._changed:  # a bucket that has been added is in the queue for a moment longer than its gradients
            waiting.append(len(reduction._waiting()))

    reduction.ready = hand_in_and_count
    loss = model(**next(iter(loader)))
    if accelerator.topology.local_rank == 0:
        loss.register_hook(lambda _: time.sleep(0.5))
    accelerator.backward(loss)
    return len(waiting), max(waiting)


def test_a_rank_that_is_ahead_does_not_keep_all_of_its_gradients(workers):
    for buckets, most in workers(2).run(run_ahead_of_the_first_rank, nodes=(2,)):
        assert most <= WAITING_BUCKETS < buckets


def test_gradients_are_final_on_every_rank_and_clipping_is_the_same_everywhere(workers):
    model = TwoHeads().double()
    model(**batch_of(4)).backward()
    expected = {"backward": gradients(model)}
    expected["norm"] = {"": nn.utils.clip_grad_norm_(model.parameters(), 0.01)}
    expected["clipped"] = gradients(model)
    nn.utils.clip_grad_value_(model.parameters(), 0.001)
    expected["clamped"] = gradients(model)
    assert not torch.equal(expected["clipped"]["heads.0.weight"], expected["clamped"]["heads.0.weight"])
    ranks = workers(3).run(clip, (2, 1, 1), nodes=(1, 2))
    for what, reference in expected.items():
        assert identical([rank[what] for rank in ranks]), what
        assert relative_error(ranks[0][what], reference) <= 1e-12, what


class Chain(nn.Module):
    """More layers than buckets may wait; the last one, whose gradients come first, may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(WAITING_BUCKETS + 2)))
        self.last = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor, whole: bool = True) -> torch.Tensor:
        judged = self.layers(inputs)
        return judged + self.last(judged) if whole else judged


def leave_a_layer_out(rank_that_does: int) -> dict[str, torch.Tensor]:
    accelerator, _, _, _ = start((1, 1), megabytes=0.00005)  # a bucket for each parameter
    maker, judge = accelerator.prepare(Chain().double(), Chain().double())
    inputs = torch.ones(1, 4, dtype=torch.float64)
    loss = judge(maker(inputs), whole=accelerator.process_index != rank_that_does).square().mean()
    accelerator.backward(loss)
    return gradients(judge)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_ahead_in_one_of_two_models_goes_on(workers, rank):
    """Ranks tell each other what models their losses are of after autograd, so none may wait for others inside."""
    maker, judge, inputs = Chain().double(), Chain().double(), torch.ones(1, 4, dtype=torch.float64)
    for whole in (True, False):
        (judge(maker(inputs), whole).square().mean() / 2).backward()
    found = workers(2).run(leave_a_layer_out, rank, nodes=(2,), timeout=60)
    assert identical(found)
    assert relative_error(found[0], gradients(judge)) <= 1e-12


def steps_of_every_kind(accelerate: bool, sizes: tuple = (2, 1)) -> dict:
    """Two backwards before a step, with other heads; a step that is left out; a closure; gradients kept as zeros."""
    if accelerate:
        accelerator, model, optimizer, loader = start(sizes)
        backward, batches = accelerator.backward, list(loader)
    else:
        model = TwoHeads().double()
        optimizer, backward = make_optimizer(model, 1e-2, 0.1), torch.Tensor.backward
        batches = [batch_of(i, i + sum(sizes)) for i in range(0, 12, sum(sizes))]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(**batches[2])
        backward(loss)
        return loss

    backward(model(**batches[0], head=0))
    backward(model(**batches[0], head=1))
    optimizer.step()
    backward(model(**batches[1]))  # not stepped
    optimizer.step(closure)
    optimizer.zero_grad(set_to_none=False)
    backward(model(**batches[3], head=0))
    with torch.no_grad():
        model(**batches[3])
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    backward(model(**batches[3], head=1))
    optimizer.step()
    return values(model)


def test_unusual_steps_equal_one_process(workers):
    expected = steps_of_every_kind(False)
    for parameters in workers(2).run(steps_of_every_kind, True):
        assert relative_error(parameters, expected) <= 1e-12


def fail_again_and_again() -> dict:
    """Each backward fails once, on all ranks, when some of its gradients travel already."""
    accelerator, model, optimizer, loader = start((1, 1, 1, 1))

    def fail(gradient: torch.Tensor) -> None:
        raise MemoryError("the device is full")

    for batch in loader:
        hook = model.inner[1].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
        with pytest.raises(MemoryError):
            accelerator.backward(model(**batch))
        hook.remove()
        accelerator.backward(model(**batch))
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def test_backwards_that_failed_on_all_ranks_can_be_repeated(workers):
    model = TwoHeads().double()
    optimizer = make_optimizer(model, 1e-2, 0.1)
    for first in range(0, 12, 4):
        model(**batch_of(first, first + 4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for parameters in workers(4).run(fail_again_and_again, nodes=(2, 2)):
        assert relative_error(parameters, values(model)) <= 1e-12


def fail_on_one_rank() -> None:
    accelerator, model, _, loader = start()
    loss = model(**next(iter(loader)))
    if accelerator.process_index == 1:
        model.inner[1].weight.register_hook(lambda gradient: 1 / 0)
    accelerator.backward(loss)


def test_the_others_are_told_of_a_backward_that_failed_on_one_rank(workers):
    other, failed = workers(2).run(fail_on_one_rank, timeout=20, expect_failure=True)
    assert failed.type == "ZeroDivisionError"
    assert "backward of local rank 1 of this node failed" in other.message


# What is refused, and what is not


def misuse(what: str) -> None:
    optimizer_class = torch.optim.LBFGS if what == "an optimizer of one vector" else None
    accelerator, model, optimizer, loader = start(((2, 2), (1, 2)), optimizer_class=optimizer_class)
    before = copy.deepcopy(model.state_dict())
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch))
            if what == "gradients of a micro-batch" and not accelerator.sync_gradients:
                model.heads[0].weight.grad = 2 * model.heads[0].weight.grad
            if what == "gradients" and accelerator.sync_gradients:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if what == "gradients' data" and accelerator.sync_gradients:
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.data.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        if what == "parameters":
            with torch.no_grad():
                model.inner[1].bias[0] += 1
        elif what == "frozen data":
            model.frozen.data.mul_(0.9)
        elif what == "data on one rank":
            dist.barrier()
            if accelerator.process_index == 0:
                for name, parameter in model.named_parameters():
                    parameter.data.copy_(before[name])
            dist.barrier()
        elif what == "place":
            model.float()
        elif what == "allowed":
            model.load_state_dict({name: value * 0.9 for name, value in before.items()})
            with torch.no_grad():
                assert model(**batch).isfinite()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("gradients", "gradients changed in place outside accelerator.clip_grad_norm_"),
        ("gradients' data", "gradients changed in place outside accelerator.clip_grad_norm_"),
        ("gradients of a micro-batch", "new tensor in .grad .* between micro-batches"),
        ("parameters", r"1 parameters changed outside their optimizer \(the first of shape \(4,\)\)"),
        ("frozen data", r"1 parameters changed outside their optimizer \(the first of shape \(4,\)\)"),
        ("data on one rank", "parameters changed outside their optimizer .* by another one of its node"),
        ("place", "lies elsewhere than prepare"),
        ("an optimizer of one vector", "LBFGS treats all parameters as one vector"),
    ],
)
def test_what_would_be_done_once_a_rank_is_refused(workers, what, message):
    errors = workers(2).run(misuse, what, expect_failure=True)
    # One of them may be the first, and the other one notices that it is gone.
    assert any(re.search(message, error.message) for error in errors), errors


READS = {
    "get_state_dict": lambda accelerator, model, folder: accelerator.get_state_dict(model),
    "state_dict": lambda accelerator, model, folder: model.state_dict(),
    "state_dict of a part": lambda accelerator, model, folder: model.heads.state_dict(),
    "save_model": lambda accelerator, model, folder: accelerator.save_model(model, folder),
    "save_state": lambda accelerator, model, folder: accelerator.save_state(folder),
}


def read_after_a_change(how: str, folder: str, changing: tuple[int, ...]) -> None:
    accelerator, model, optimizer, loader = start(((2, 2), (1, 2)))
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch))
            optimizer.step()
            optimizer.zero_grad()
    if accelerator.process_index in changing:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
    accelerator.wait_for_everyone()
    READS[how](accelerator, model, folder)


@pytest.mark.parametrize("how", READS)
def test_what_was_done_once_a_rank_is_not_saved(workers, tmp_path, how):
    """No forward follows the change, which would find it."""
    for error in workers(2).run(read_after_a_change, how, f"{tmp_path}/all", (0, 1), expect_failure=True):
        assert "parameters changed outside their optimizer" in error.message


@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize("changing", [(), (0,)], ids=str)
def test_what_one_rank_has_changed_is_saved(workers, tmp_path, how, changing):
    """As the main process does that takes over averaged weights at the end."""
    workers(2).run(read_after_a_change, how, str(tmp_path / how), changing)


def change_and_load(folder: str) -> None:
    accelerator, model, optimizer, loader = start(((2, 2), (1, 2)))
    accelerator.save_state(folder)
    before = copy.deepcopy(model.state_dict())
    accelerator.wait_for_everyone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch))
            optimizer.step()
            optimizer.zero_grad()


def test_what_is_replaced_may_be_changed(workers, tmp_path):
    workers(2).run(change_and_load, str(tmp_path / "saved"))


def test_loading_a_state_on_all_ranks_is_allowed(workers):
    workers(2).run(misuse, "allowed")


class OwnOptimizer(torch.optim.SGD):
    pass


def train_with_own_optimizer() -> list[str]:
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("accelerate_lshdp.accelerator.session.logger.warning_once", told.append)
        start(optimizer_class=OwnOptimizer)
    return told


def test_an_optimizer_of_others_is_told_of(workers):
    for told in workers(2).run(train_with_own_optimizer):
        assert len(told) == 1 and "OwnOptimizer has to treat them one by one" in told[0]


def states_of_optimizer(strategy: str) -> tuple[int, int | str, str]:
    """How many states an optimizer has before its first step and after it, or what is said; and the rank's device."""
    accelerator = LSHDPAccelerator(
        plan=Plan.from_batch_sizes([1, 1], strategy=strategy), lsdp_plugin=LSDPPlugin(bucket_megabytes=0.0001)
    )
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    before = len(optimizer.state_dict()["state"])
    accelerator.backward(model(torch.ones(1, 4)).square().mean())
    optimizer.step()
    try:
        after = len(optimizer.state_dict()["state"])
    except RuntimeError as error:
        after = str(error)
    return before, after, str(accelerator.device)


def test_a_part_of_the_optimizers_states_is_not_taken_for_all(workers):
    assert workers(2).run(states_of_optimizer, "ddp", nodes=(2,)) == [(0, 12, "cpu")] * 2
    for before, said, _ in workers(2).run(states_of_optimizer, "lsdp", nodes=(2,)):
        assert before == 0
        assert re.search(r"has the states of \d+ of 12 parameters.* Use accelerator.save_state\(\)", said)
    assert workers(2).run(states_of_optimizer, "lsdp", nodes=(1, 1)) == [(0, 12, "cpu")] * 2
