# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Process groups: shared by what trains in a world, and gone after what was only measured."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from accelerate_lshdp.runtime.groups import ProcessGroups, temporary_group


def ask_twice() -> tuple[bool, bool, bool, int]:
    """Whether a second one knows the first one's group; whether it is another after forgetting; whether both sum."""
    nodes, rank = [(0, 1), (2,)], dist.get_rank()
    first, again = (ProcessGroups().of_partition(nodes, rank) for _ in range(2))
    ProcessGroups.forget()
    other = ProcessGroups().of_partition(nodes, rank)
    sums = []
    for group in (first, other):
        value = torch.tensor(float(rank + 1))
        dist.all_reduce(value, group=group)
        sums.append(value.item())
    return again is first, other is first, sums[0] == sums[1], int(sums[0])


def test_groups_are_shared_until_they_are_forgotten(workers):
    assert workers(3).run(ask_twice) == [(True, False, True, total) for total in (3, 3, 3)]


def test_a_new_world_has_new_groups() -> None:
    kept = []
    for _ in range(2):
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        try:
            ProcessGroups._made_in[dist.group.WORLD] = {(0, 7): len(kept)}
            kept.append(dict(ProcessGroups._made_in[dist.group.WORLD]))
        finally:
            dist.destroy_process_group()
        gc.collect()
        assert not ProcessGroups._made_in


def count_groups() -> tuple[int, int]:
    """Groups before and after one that is temporary."""
    before = len(_world.pg_map)
    with temporary_group([(0, 2), (1,)]) as group:
        assert group.size() == (1 if dist.get_rank() == 1 else 2)
    return before, len(_world.pg_map)


def test_a_temporary_group_is_gone_afterwards(workers):
    for before, after in workers(3).run(count_groups):
        assert after == before
