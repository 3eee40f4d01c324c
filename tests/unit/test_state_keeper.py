# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What the keeper of an elastic run's state notes of a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from accelerate_lshdp.accelerator import state_keeper
from accelerate_lshdp.accelerator.state_keeper import StateKeeper
from accelerate_lshdp.runtime.elastic_rank import ElasticRank


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2))


def test_those_of_a_compiled_block_are_found(tmp_path: Path) -> None:
    """Their names have no word of the wrapper."""
    block, norm = Block(), torch.nn.BatchNorm1d(2)
    model = torch.nn.Sequential(torch.compile(block), norm)
    keeper = StateKeeper(ElasticRank(str(tmp_path), 1, "founded", 1, ("machine",), 0.0), 0)
    found = keeper._buffers_of(model)
    expected = [block.table, norm.running_mean, norm.running_var, norm.num_batches_tracked]
    assert [id(each) for each in found] == [id(each) for each in expected]


def test_a_launcher_sees_steps_whose_state_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take such ranks for ones that do not reach each other, and end the run after a few losses."""
    rank = ElasticRank(str(tmp_path), 1, "founded", 1, ("machine",), 0.0)
    keeper, accelerator = StateKeeper(rank, 0), torch.nn.Module()
    monkeypatch.setattr(keeper, "_accelerator", lambda: accelerator)
    monkeypatch.setattr(state_keeper, "why_not_kept", lambda accelerator: "it is spread over ranks")
    keeper.step_begins()  # an optimizer that is tried out before the training
    keeper.step_ends()
    assert not rank.memory.stepped(1).exists()
    keeper.forward_begins()
    keeper.step_begins()
    keeper.step_ends()
    assert rank.memory.stepped(1).exists()
