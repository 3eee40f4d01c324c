# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Whole copies whose gradients a node sums in memory of its first rank: each rank's `.grad` stays its own."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from checkpoint_cases import run_until_killed
from node_shared_cases import Points, TwoHeads, batch_of, values
from torch import nn
from torch.utils.data import DataLoader
from training_cases import CASES, collate, make_optimizer, relative_error

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator, Plan
from accelerate_lshdp.documents.placement import ModelPlacement, UnitPlacement, UnitStore
from accelerate_lshdp.engine.stores.shared.memory import NodeMemory, NodeMemoryError
from accelerate_lshdp.engine.stores.shared.node_sums import NodeSums, _PendingSum
from accelerate_lshdp.engine.wire.node_first import NodeFirstReduction


BOTH = pytest.mark.parametrize(("intra_node", "kind"), [("auto", NodeSums), ("collectives", NodeFirstReduction)])


def start(sizes: tuple, intra_node: str = "auto"):
    """As `node_shared_cases.start`, under ddp."""
    plan = Plan.from_batch_sizes(sizes, strategy="ddp", intra_node=intra_node)
    plugin = LSDPPlugin(bucket_megabytes=0.0002, loss_weighting="sample")
    accelerator = LSHDPAccelerator(plan=plan, lsdp_plugin=plugin)
    model = TwoHeads().double()
    loader = DataLoader(Points(), batch_size=1, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model, 1e-2, 0.1), loader)
    return accelerator, model.train(), optimizer, loader


def reduction_of(accelerator: LSHDPAccelerator):
    return accelerator.session.engine.models[0].stores[0]._reductions.reduction


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def in_one_process(*batches: tuple[int, int]) -> dict[str, torch.Tensor]:
    """The sum of the gradients of some batches, each a mean over its samples."""
    model = TwoHeads().double()
    for batch in batches:
        model(**batch_of(*batch)).backward()
    return gradients(model)


# Gradients of a rank


def change_gradients_at_once(sizes: tuple) -> tuple[dict, dict]:
    """The first rank of each node zeroes its gradients as soon as it may; the others copy the sums slowly."""
    accelerator, model, _, loader = start(sizes)
    copy = _PendingSum._copy

    def copy_slowly(self: _PendingSum) -> None:
        time.sleep(0.05)
        copy(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_PendingSum, "_copy", copy_slowly)
        accelerator.backward(model(**next(iter(loader))))
    if accelerator.topology.local_rank == 0:
        summed = gradients(model)
        model.zero_grad(set_to_none=False)
    else:
        time.sleep(0.2)  # the first rank has done it
        summed = gradients(model)
    accelerator.wait_for_everyone()
    return summed, gradients(model)


@pytest.mark.parametrize(("sizes", "nodes"), [((3, 1), (2,)), ((2, 1, 1), (1, 2)), ((1, 1, 1, 1), (2, 2))])
def test_what_one_rank_does_to_its_gradients_leaves_those_of_others(workers, sizes, nodes):
    expected = in_one_process((0, 4))
    firsts = {sum(nodes[:number]) for number in range(len(nodes))}
    for rank, (summed, kept) in enumerate(workers(len(sizes)).run(change_gradients_at_once, sizes, nodes=nodes)):
        assert relative_error(summed, expected) <= 1e-12
        left = sum(float(gradient.abs().sum()) for gradient in kept.values())
        assert left == 0 if rank in firsts else relative_error(kept, expected) <= 1e-12


def accumulate_apart(intra_node: str) -> tuple[dict, dict]:
    """Gradients of this rank inside no_sync, while another rank may sum its own, and after a summed backward."""
    accelerator, model, _, loader = start((3, 1), intra_node)
    batches = list(loader)
    with model.no_sync():
        accelerator.backward(model(**batches[0]))
    own = gradients(model)
    accelerator.wait_for_everyone()
    accelerator.backward(model(**batches[1]))
    return own, gradients(model)


@BOTH
def test_gradients_inside_no_sync_are_those_of_the_rank(workers, intra_node, kind):
    both = in_one_process((0, 4), (4, 8))
    for rank, (own, summed) in enumerate(workers(2).run(accumulate_apart, intra_node, nodes=(2,))):
        # Times the number of ranks, by which a sum is divided.
        mine = {name: 2 * (3, 1)[rank] / 4 * g for name, g in in_one_process(((0, 3), (3, 4))[rank]).items()}
        assert relative_error(own, mine) <= 1e-12
        assert relative_error(summed, both) <= 1e-12


def sum_one_by_one(sizes: tuple, intra_node: str) -> tuple[str, dict]:
    accelerator, model, _, loader = start(sizes, intra_node)
    for number, batch in enumerate(loader):
        if number < 3:
            accelerator.backward(model(**batch))
    return type(reduction_of(accelerator)).__name__, gradients(model)


@BOTH
def test_a_final_gradient_is_not_summed_again(workers, intra_node, kind):
    expected = in_one_process((0, 4), (4, 8), (8, 12))
    for used, summed in workers(3).run(sum_one_by_one, (2, 1, 1), intra_node, nodes=(1, 2)):
        assert used == kind.__name__
        assert relative_error(summed, expected) <= 1e-12


def train_with_a_head_each(intra_node: str) -> dict:
    accelerator, model, optimizer, loader = start((2, 1, 1), intra_node)
    for batch in loader:
        accelerator.backward(model(**batch, head=accelerator.process_index % 2))
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@BOTH
def test_a_rank_may_leave_parameters_out(workers, intra_node, kind):
    model = TwoHeads().double()
    optimizer = make_optimizer(model, 1e-2, 0.1)
    for first in range(0, 12, 4):
        parts = [(first, first + 2, 0), (first + 2, first + 3, 1), (first + 3, first + 4, 0)]
        for begin, end, head in parts:
            (model(**batch_of(begin, end), head=head) * (end - begin) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = workers(3).run(train_with_a_head_each, intra_node, nodes=(1, 2))
    for parameters in trained:
        assert relative_error(parameters, values(model)) <= 1e-12
        assert all(torch.equal(value, trained[0][name]) for name, value in parameters.items())


def train_two_models(intra_node: str) -> list[dict]:
    """Rank 1 leaves one of two models out of its losses."""
    accelerator, first, optimizer, loader = start((2, 1, 1), intra_node)
    second = TwoHeads().double()
    second, other_optimizer = accelerator.prepare(second, make_optimizer(second, 1e-2, 0.1))
    for batch in loader:
        loss = first(**batch)
        if accelerator.process_index != 1:
            loss = loss + second(**batch)
        accelerator.backward(loss)
        for used in (optimizer, other_optimizer):
            used.step()
            used.zero_grad()
    return [values(first), values(second.train())]


@BOTH
def test_a_rank_may_leave_a_model_out(workers, intra_node, kind):
    models = [TwoHeads().double() for _ in range(2)]
    optimizers = [make_optimizer(model, 1e-2, 0.1) for model in models]
    for first in range(0, 12, 4):
        models[0](**batch_of(first, first + 4)).backward()
        for begin, end in ((first, first + 2), (first + 3, first + 4)):
            (models[1](**batch_of(begin, end)) * (end - begin) / 4).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for trained in workers(3).run(train_two_models, intra_node, nodes=(1, 2)):
        for found, model in zip(trained, models, strict=True):
            assert relative_error(found, values(model)) <= 1e-12


# Errors


def fail_in_backward(everywhere: bool) -> dict:
    accelerator, model, optimizer, loader = start((1, 1, 1, 1))
    batches = list(loader)
    loss = model(**batches[0])
    if everywhere or accelerator.process_index == 1:
        handle = model.inner[1].weight.register_hook(lambda gradient: 1 / 0)
    try:
        accelerator.backward(loss)
    except ZeroDivisionError:
        if not everywhere:
            raise
    handle.remove()
    model.zero_grad()
    accelerator.backward(model(**batches[1]))
    return gradients(model)


def test_a_backward_that_fails_on_one_rank_is_an_error_on_all(workers):
    errors = workers(4).run(fail_in_backward, False, nodes=(2, 2), timeout=20, expect_failure=True)
    assert errors[1].type == "ZeroDivisionError"
    for rank in (0, 2, 3):
        assert "backward of rank 1 failed" in errors[rank].message


def fail_beside_sharded_units() -> None:
    """The last gradient of the backward, of a whole parameter, fails on rank 1; what FSDP2 does is over by then."""
    whole = UnitPlacement(UnitStore.REPLICATE)
    placement = ModelPlacement({"": whole, "vit.embeddings": whole}, UnitPlacement(UnitStore.WORLD))
    plan = Plan.from_batch_sizes([2, 2], strategy="osdp", placement=placement)
    case = CASES["vit"]
    accelerator = LSHDPAccelerator(plan=plan)
    model = case.model()
    loader = DataLoader(case.dataset(8, torch.float32), batch_size=2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model, 1e-2, 0.1), loader)
    loss = case.loss(model.train(), next(iter(loader)))
    if accelerator.process_index == 1:
        model.vit.embeddings.cls_token.register_hook(lambda gradient: 1 / 0)
    accelerator.backward(loss)


@pytest.mark.slow  # the rank that failed waits 30 s for the others to fail, too
def test_ranks_of_a_node_do_not_wait_for_one_whose_backward_failed_beside_sharded_units(workers):
    errors = workers(2).run(fail_beside_sharded_units, nodes=(2,), timeout=40, expect_failure=True)
    assert "a backward failed on rank 1 and not on the others" in errors[1].message
    assert "the backward of local rank 1 of this node failed" in errors[0].message


def test_a_backward_that_failed_on_all_ranks_can_be_repeated(workers):
    for found in workers(4).run(fail_in_backward, True, nodes=(2, 2)):
        assert relative_error(found, in_one_process((4, 8))) <= 1e-12


def end_in_backward(victim: int, folder: Path) -> None:
    accelerator, model, optimizer, loader = start((2, 1, 1))
    rank = accelerator.process_index
    try:
        for step, batch in enumerate(loader):
            if step == 1 and rank == victim:
                model.inner[1].weight.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
            accelerator.backward(model(**batch))
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        (folder / f"error-{rank}").write_text(str(error))
        raise


@pytest.mark.parametrize("victim", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_others_notice_that_a_rank_was_killed(tmp_path, victim):
    """The first rank of its node, whose buffers are those of the node, or the one that adds to them."""
    codes = run_until_killed(end_in_backward, victim, tmp_path, nodes=(1, 2), folder=tmp_path, timeout=60)
    assert codes == [-signal.SIGKILL if rank == victim else 1 for rank in range(3)]
    for rank in {0, 1, 2} - {victim}:
        message = (tmp_path / f"error-{rank}").read_text()
        assert re.search("local rank . of this node has ended|connection to another rank was lost", message)


# Where memory cannot be shared


def parameters_without_memory() -> tuple[str, dict[str, torch.Tensor]]:
    """What sums gradients where ranks cannot map each other's memory, and the parameters after three steps."""

    def refuse(*_: object) -> NodeMemory:
        raise NodeMemoryError("the memory of another rank of this node cannot be opened")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NodeMemory, "create", refuse)
        accelerator, model, optimizer, loader = start((2, 1, 1))
    return type(reduction_of(accelerator)).__name__, steps_of(accelerator, model, optimizer, loader)


def parameters_with_memory() -> dict[str, torch.Tensor]:
    return steps_of(*start((2, 1, 1)))


def steps_of(accelerator: LSHDPAccelerator, model: nn.Module, optimizer, loader) -> dict[str, torch.Tensor]:
    for step, batch in enumerate(loader):
        if step == 3:
            break
        accelerator.backward(model(**batch))
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def test_ranks_that_cannot_share_memory_sum_by_collectives(workers):
    pool = workers(3)
    expected = pool.run(parameters_with_memory, nodes=(1, 2))
    for (kind, found), wanted in zip(pool.run(parameters_without_memory, nodes=(1, 2)), expected, strict=True):
        assert kind == "NodeFirstReduction"
        assert relative_error(found, wanted) <= 1e-12


def end_before_another_has_the_sum() -> float:
    """One step, after which rank 2 frees its model at once while rank 1 has not copied the sum yet."""
    accelerator = LSHDPAccelerator(plan=Plan.equal(strategy="ddp"), cpu=True)
    model = accelerator.prepare(nn.Linear(4, 1))
    if accelerator.process_index == 1:
        copy = _PendingSum._copy

        def copy_late(pending: _PendingSum) -> None:
            time.sleep(1.0)
            copy(pending)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_PendingSum, "_copy", copy_late)
            accelerator.backward(model(torch.ones(2, 4)).mean())
    else:
        accelerator.backward(model(torch.ones(2, 4)).mean())
    return model.weight.grad[0, 0].item()


def test_a_rank_that_has_the_last_sum_may_end_before_the_others_have_it(workers):
    assert workers(3).run(end_before_another_has_the_sum, nodes=(3,), timeout=30) == [1.0] * 3
