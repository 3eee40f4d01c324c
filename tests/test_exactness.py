"""Invariant 1: every strategy, mesh, split and accumulation gives the gradient and parameters of one process."""

from __future__ import annotations

import pytest
from exactness import Setting, check, train


QUICK = [
    Setting("ddp", (3, 2), (1, 1)),
    Setting("lsdp", (3, 2), (1, 1)),
    Setting("lsdp", (3, 2), (2,)),
    Setting("fsdp", (3, 2), (1, 1), model="gpt2"),
    Setting("zero2", (3, 2), (2,), model="gpt2"),
    Setting("fsdp_offload", (3, 2), (1, 1)),
    Setting("group_sharding", (3, 2), (2,), model="gpt2"),
]


@pytest.mark.parametrize("setting", QUICK, ids=str)
def test_equals_one_process(workers, setting):
    check(workers(setting.world_size).run(train, setting, nodes=setting.nodes, timeout=90), setting.dtype)
