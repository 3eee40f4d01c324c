# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The buffers that the state of an elastic run notes before each step."""

from __future__ import annotations

from pathlib import Path

import torch

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
