# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Batch normalisation under equal batches: each rank's own micro-batch, rank 0's running statistics."""

from __future__ import annotations

import copy

import pytest
import torch
from exactness import full
from node_shared_cases import Points
from test_unusual_scripts import plan_of
from torch import nn
from torch.utils.data import DataLoader
from training_cases import collate, relative_error

from accelerate_lshdp import LSHDPAccelerator


#: Two ranks with two samples each; of the last global batch rank 0 has one, and rank 1 repeats one.
SAMPLES = 13


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs).square().mean()


def reference() -> tuple[dict, dict]:
    """Two copies of the model, each with its half of a batch; the first one's statistics go to the second."""
    replicas = [Normalised(), Normalised()]
    optimizers = [torch.optim.SGD(replica.parameters(), 0.1) for replica in replicas]
    data = Points(SAMPLES)
    for begin in range(0, SAMPLES, 4):
        shares = [
            [index for index in range(begin + 2 * rank, begin + 2 * rank + 2) if index < SAMPLES] for rank in (0, 1)
        ]
        total = sum(map(len, shares))
        gradients = []
        for replica, share in zip(replicas, shares, strict=True):
            replica.train(total > 1)
            loss = (
                replica(**collate([data[index] for index in share])) if share else 0.0 * replica(**collate([data[0]]))
            )
            gradients.append(torch.autograd.grad(loss * len(share) / total, list(replica.parameters())))
        for replica, optimizer in zip(replicas, optimizers, strict=True):
            for parameter, *parts in zip(replica.parameters(), *gradients, strict=True):
                parameter.grad = sum(parts)
            optimizer.step()
        for buffer, first in zip(replicas[1].buffers(), replicas[0].buffers(), strict=True):
            buffer.copy_(first)
    return dict(replicas[0].named_parameters()), dict(replicas[0].named_buffers())


def train(strategy: str, folder: str) -> tuple[dict, dict, dict, dict]:
    accelerator = LSHDPAccelerator(plan=plan_of(strategy))
    model = Normalised()
    loader = DataLoader(Points(SAMPLES), batch_size=2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    model.train()
    for batch in loader:
        accelerator.backward(model(**batch))
        optimizer.step()
        optimizer.zero_grad()
    assert all(module.training for module in model.modules())
    parameters = {name: full(parameter) for name, parameter in model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():  # in train mode, as some scripts take metrics
        model(inputs=torch.full((2, 4), float(accelerator.process_index), dtype=torch.float64) + torch.eye(4)[:2])
    own = {name: buffer.clone() for name, buffer in model.named_buffers()}
    accelerator.save_state(folder)
    for buffer in model.buffers():
        buffer.zero_()
    accelerator.load_state(folder)
    return parameters, buffers, own, dict(model.named_buffers())


@pytest.mark.parametrize(("strategy", "nodes"), [("ddp", (1, 1)), ("lsdp", (2,)), ("fsdp", (2,))])
def test_running_statistics_are_those_of_rank_0_and_a_batch_of_one_sample_is_trained(
    workers, tmp_path, strategy, nodes
):
    expected, expected_buffers = reference()
    ranks = workers(2).run(train, strategy, str(tmp_path / "state"), nodes=nodes)
    for parameters, buffers, _, saved in ranks:
        assert relative_error(parameters, expected) <= 1e-12
        assert relative_error(buffers, expected_buffers) <= 1e-12
        assert all(torch.equal(saved[name], value) for name, value in ranks[0][2].items())


def train_all_but_the_last(folder: str) -> None:
    accelerator = LSHDPAccelerator(plan=plan_of("ddp"))
    model = Normalised()
    loader = DataLoader(Points(SAMPLES), batch_size=2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    for number, batch in enumerate(loader, start=1):
        accelerator.backward(model.train()(**batch))
        optimizer.step()
        optimizer.zero_grad()
        if number == len(loader) - 1:
            accelerator.save_state(folder)
            break


def train_the_last(folder: str) -> tuple[dict, dict]:
    accelerator = LSHDPAccelerator(plan=plan_of("ddp"))
    model = Normalised()
    loader = DataLoader(Points(SAMPLES), batch_size=2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    accelerator.load_state(folder)
    for batch in accelerator.skip_first_batches(loader):
        # Nothing of the batch itself: it is told from others when it is trained only.
        accelerator.backward(model.train()(inputs=batch["inputs"] + 0.0))
        optimizer.step()
    return {name: full(p) for name, p in model.named_parameters()}, dict(model.named_buffers())


def test_a_run_is_resumed_at_a_batch_of_one_sample(workers, tmp_path):
    """Which was an error on the rank that had it: what it had had before was not in the checkpoint."""
    workers(2).run(train_all_but_the_last, str(tmp_path / "state"), nodes=(1, 1))
    expected, expected_buffers = reference()
    for parameters, buffers in workers(2).run(train_the_last, str(tmp_path / "state"), nodes=(1, 1)):
        assert relative_error(parameters, expected) <= 1e-12
        assert relative_error(buffers, expected_buffers) <= 1e-12


def train_with_single_samples() -> None:
    accelerator = LSHDPAccelerator(plan=plan_of("ddp"))
    model, loader = accelerator.prepare(Normalised(), DataLoader(Points(4), batch_size=1, collate_fn=collate))
    for batch in loader:
        accelerator.backward(model.train()(**batch))


def test_batches_that_are_too_small_throughout_are_an_error_as_in_torch(workers):
    errors = workers(2).run(train_with_single_samples, expect_failure=True)
    assert all("Expected more than 1 value per channel" in error.message for error in errors)


def copied_hooks() -> int:
    accelerator = LSHDPAccelerator(plan=plan_of("ddp"))
    model = accelerator.prepare(Normalised())
    copied = copy.deepcopy(accelerator.unwrap_model(model))
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in copied.modules())


def test_copies_have_no_hooks(workers):
    assert workers(2).run(copied_hooks) == [0, 0]
