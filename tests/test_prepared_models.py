"""Prepared models beside each other, and what scripts do with a prepared model: exact, or a clear error everywhere."""

from __future__ import annotations

import pytest
import torch
from test_unusual_scripts import plan_of
from torch import nn

from accelerate_lshdp import LSHDPAccelerator


#: Where the parameters are whole, shared by the ranks of a node, or sharded over a node and over the world.
PLACES = [("ddp", (1, 1)), ("lsdp", (2,)), ("collectives", (2,)), ("fsdp", (2,))]
everywhere = pytest.mark.parametrize(("strategy", "nodes"), PLACES)


# Parameters of two prepared models


class Head(nn.Module):
    """A layer on top of a body that others may have, too."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.last = nn.Linear(4, 1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(values)).mean()


def sharing(how: str) -> tuple[nn.Module, nn.Module]:
    body = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    first, second = Head(body).double(), Head(body).double()
    if how == "part first":
        return body, first
    if how == "part last":
        return first, body
    if how == "tied":
        second = nn.Linear(4, 4).double()
        second.weight = body[0].weight
    return first, second


def prepare_shared(strategy: str) -> list[str]:
    messages = []
    for how in ("common part", "part first", "part last", "tied"):
        accelerator = LSHDPAccelerator(plan=plan_of(strategy))
        first, second = sharing(how)
        accelerator.prepare(first, torch.optim.SGD(first.parameters(), 0.1))
        with pytest.raises(RuntimeError) as error:
            accelerator.prepare(second)
        messages.append(str(error.value))
    return messages


@everywhere
def test_parameters_of_two_prepared_models_are_refused_on_all_ranks(workers, strategy, nodes):
    for messages in workers(2).run(prepare_shared, strategy, nodes=nodes):
        assert all("that was prepared before" in message and "ranks 0, 1" in message for message in messages)


def train_beside_frozen_part() -> list[float]:
    accelerator = LSHDPAccelerator(plan=plan_of("ddp"))
    torch.manual_seed(0)
    body = nn.Linear(4, 4).double().requires_grad_(False)
    heads = accelerator.prepare(Head(body).double(), Head(body).double())
    values = torch.full((2, 4), accelerator.process_index + 1.0, dtype=torch.float64)
    accelerator.backward(heads[0](values) + heads[1](values))
    expected = torch.stack([body(torch.full((4,), rank + 1.0, dtype=torch.float64)) for rank in (0, 1)]).mean(0)
    return [float((head.last.weight.grad - expected).abs().max()) for head in heads]


def test_frozen_parameters_of_two_models_are_shared(workers):
    for errors in workers(2).run(train_beside_frozen_part, nodes=(1, 1)):
        assert max(errors) <= 1e-12
