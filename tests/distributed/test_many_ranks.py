# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Many ranks tell each other the same in few messages as few ranks do in one each, and train the same."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist
from exactness import full, prepared
from training_cases import CASES

from accelerate_lshdp import LSDPPlugin, Plan
from accelerate_lshdp.runtime import row_group, step_exchange
from accelerate_lshdp.runtime.dissemination import Dissemination


def trained(sizes: list, strategy: str, weighting: str, direct_ranks: int) -> tuple[dict[str, torch.Tensor], int]:
    """Parameters after an epoch, and how many rows were gathered in several rounds."""
    case, gathered, gather = CASES["gpt2"], [], Dissemination.gather

    def counted(self: Dissemination, row: torch.Tensor) -> object:
        gathered.append(row)
        return gather(self, row)

    plan = Plan.from_batch_sizes(sizes, strategy=strategy, allow_unequal_accumulation=True)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(row_group, "DIRECT_RANKS", direct_ranks)
        # One that this process has made before would be taken again.
        monkeypatch.setattr(step_exchange, "_loss_rows", WeakKeyDictionary())
        monkeypatch.setattr(Dissemination, "gather", counted)
        accelerator, model, optimizer, loader = prepared(
            plan, case.model().double(), case.dataset(26, torch.float64), plugin=LSDPPlugin(loss_weighting=weighting)
        )
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(case.loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
        accelerator.wait_for_everyone()
        dist.barrier()
        return {name: full(each) for name, each in model.named_parameters()}, len(gathered)


@pytest.mark.parametrize("weighting", ["auto", "tokens"])
@pytest.mark.parametrize("strategy", ["ddp", "lsdp", "fsdp"])
def test_training_is_the_same_bit_by_bit(workers, strategy: str, weighting: str) -> None:
    sizes = [(3, 1), (2, 1), (2, 1)] if strategy == "fsdp" else [(2, 2), (1, 2), (2, 1)]
    few = workers(3).run(trained, sizes, strategy, weighting, 8, nodes=(2, 1))
    many = workers(3).run(trained, sizes, strategy, weighting, 1, nodes=(2, 1))
    for (expected, direct), (found, in_rounds) in zip(few, many, strict=True):
        assert not direct and in_rounds
        assert found.keys() == expected.keys()
        for name, parameter in found.items():
            assert torch.equal(parameter, expected[name]), name
