# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""One copy of parameters and gradients a node: what is shared, what is exact, what is refused (lsdp on CPUs)."""

from __future__ import annotations

import copy
import gc
import os
import re
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import run_until_killed
from torch import nn
from torch.utils.data import DataLoader, Dataset
from training_cases import collate, make_optimizer, relative_error

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator, Plan
from accelerate_lshdp.engine import node_memory
from accelerate_lshdp.engine.node_memory import NodeMemory
from accelerate_lshdp.engine.policies import Mechanism
from accelerate_lshdp.engine.topology import Topology


class TwoHeads(nn.Module):
    """Tied and frozen parameters; each head can be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.inner[2].weight = self.inner[0].weight
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(2))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)

    def forward(self, inputs: torch.Tensor, head: int | None = None) -> torch.Tensor:
        for layer in self.inner:
            inputs = torch.tanh(layer(inputs)) * self.frozen
        return sum(self.heads[i](inputs).square().mean() for i in ((0, 1) if head is None else (head,)))


class Points(Dataset):
    def __init__(self, count: int = 12) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": torch.sin(torch.arange(4, dtype=torch.float64) + index)}


def batch_of(*indices: int) -> dict[str, torch.Tensor]:
    return collate([Points()[index] for index in range(*indices)])


def start(sizes: tuple = (2, 1), dataset: Dataset | None = None, optimizer_class=None, **loading):
    """An accelerator, and a model, an optimizer and a loader prepared by it."""
    accelerator = LSHDPAccelerator(
        plan=Plan.from_batch_sizes(sizes, strategy="lsdp"), lsdp_plugin=LSDPPlugin(bucket_megabytes=0.0002)
    )
    assert accelerator.policies.mechanism is Mechanism.NODE_SHARED and accelerator.policies.notice is None
    model = TwoHeads().double()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(model, 1e-2, 0.1) if optimizer_class is None else optimizer_class(trained, lr=1e-2)
    loader = DataLoader(dataset or Points(), batch_size=1, collate_fn=collate, **loading)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    return accelerator, model.train(), optimizer, loader


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


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


def test_loading_a_state_on_all_ranks_is_allowed(workers):
    workers(2).run(misuse, "allowed")


class OwnOptimizer(torch.optim.SGD):
    pass


def train_with_own_optimizer() -> list[str]:
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("accelerate_lshdp.preparing.logger.warning_once", told.append)
        start(optimizer_class=OwnOptimizer)
    return told


def test_an_optimizer_of_others_is_told_of(workers):
    for told in workers(2).run(train_with_own_optimizer):
        assert len(told) == 1 and "OwnOptimizer has to treat them one by one" in told[0]


# Processes


def end_early(how: str, folder: Path) -> None:
    """Rank 1 ends in its second step, in the middle of the backward if it does not just leave the loop."""
    accelerator, model, optimizer, loader = start()
    rank = accelerator.process_index
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())

    def end(gradient: torch.Tensor) -> None:
        if how == "raises":
            raise ValueError("a mistake of the script")
        os.kill(os.getpid(), {"is killed": signal.SIGKILL, "hangs": signal.SIGSTOP}[how])

    try:
        for step, batch in enumerate(loader):
            if step == 1 and rank == 1:
                if how == "leaves":
                    break
                model.inner[1].weight.register_hook(end)
            accelerator.backward(model(**batch))
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        (folder / f"error-{rank}").write_text(str(error))
        if how == "hangs":
            os.kill(pids[1], signal.SIGKILL)
        raise


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("is killed", -signal.SIGKILL, "local rank 1 of this node has ended, but was to"),
        ("raises", 1, "local rank 1 of this node (failed|has ended)"),
        ("leaves", 0, "local rank 1 of this node has ended, but was to"),
        ("hangs", -signal.SIGKILL, "waited 5 s for the other ranks of this node to .* One of them hangs"),
    ],
)
def test_the_others_notice_that_a_rank_has_ended(tmp_path, how, code, message):
    timeout = 5 if how == "hangs" else 60
    codes = run_until_killed(end_early, how, tmp_path, nodes=(2,), folder=tmp_path, timeout=timeout)
    assert codes == [1, code]
    assert re.search(message, (tmp_path / "error-0").read_text())


class Connections(Dataset):
    """How many connections between ranks a worker of a loader keeps open."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ends = [end for memory in node_memory._memories for end in memory._peers.values()]
        assert len(ends) == 1
        return {"inputs": torch.full((4,), float(ends[0].fileno()), dtype=torch.float64)}


def train_with_loading_processes() -> list[float]:
    accelerator, model, optimizer, _ = start()
    loader = accelerator.prepare(DataLoader(Connections(), batch_size=1, collate_fn=collate, num_workers=1))
    seen = []
    for batch in loader:
        accelerator.backward(model(**batch))
        optimizer.step()
        seen += batch["inputs"].flatten().tolist()
    return seen


def test_processes_that_load_data_keep_no_connection_open(workers):
    for seen in workers(2).run(train_with_loading_processes):
        assert seen and set(seen) == {-1.0}


def make_memory(trouble: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0 and trouble == "no memory":
            patch.setattr(os, "posix_fallocate", refuse)
        if rank == 1 and trouble == "no socket":
            patch.setattr(node_memory, "_listener", refuse)
        patch.setattr(node_memory, "_CONNECT_SECONDS", 1.0)
        NodeMemory.create(Topology(rank, (world,)), 4096)


def refuse(*_: object) -> None:
    raise OSError(28, "nothing left")


@pytest.mark.parametrize("trouble", ["no memory", "no socket"])
def test_a_node_that_cannot_share_memory_says_so_on_all_ranks(workers, trouble):
    errors = workers(2).run(make_memory, trouble, expect_failure=True, timeout=20)
    assert all("cannot share memory" in error.message and "nothing left" in error.message for error in errors)
    assert all("intra_node='collectives'" in error.message for error in errors)
