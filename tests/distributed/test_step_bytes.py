# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Rows that a rank sends every other one in a step of an ordinary training, beside gradients: at most 128 bytes."""

from __future__ import annotations

import pytest
import torch
from exactness import prepared
from training_cases import CASES

from accelerate_lshdp import LSDPPlugin, Plan
from accelerate_lshdp.runtime.row_group import RowGroup


#: From more than 8 ranks on each row has a byte more, which says whether it has come.
OF_A_ROW = 1


def bytes_of_steps(name: str, sizes: list[tuple[int, int]], strategy: str, weighting: str) -> list[int]:
    """Bytes of the rows that this rank has sent in each step."""
    case, sent, gather = CASES[name], [0], RowGroup.gather

    def counted(self: RowGroup, row: torch.Tensor) -> object:
        sent[-1] += row.nbytes + OF_A_ROW
        return gather(self, row)

    plan = Plan.from_batch_sizes(sizes, strategy=strategy, allow_unequal_accumulation=True)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(RowGroup, "gather", counted)
        plugin = LSDPPlugin(loss_weighting=weighting)
        accelerator, model, optimizer, loader = prepared(
            plan, case.model().double(), case.dataset(52, torch.float64), plugin=plugin
        )
        model.train()
        sent[-1] = 0  # what preparing takes
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(case.loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                sent.append(0)
        accelerator.wait_for_everyone()
    return sent[:-1]


@pytest.mark.parametrize("weighting", ["auto", "tokens", "sample"])
@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        ("ddp", [(3, 1), (2, 1)]),
        ("lsdp", [(3, 1), (2, 1)]),
        ("fsdp", [(2, 2), (1, 2)]),
        ("ddp", [(2, 2), (2, 1)]),
    ],
)
@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_an_ordinary_step_takes_few_bytes(
    workers, name: str, strategy: str, sizes: list[tuple[int, int]], weighting: str
) -> None:
    for steps in workers(2).run(bytes_of_steps, name, sizes, strategy, weighting, nodes=(1, 1)):
        assert len(steps) >= 8 and min(steps) > 0
        assert max(steps) <= 128
