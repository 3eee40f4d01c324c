# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`RankNotices`: flags that ranks set for all others while they measure, without waiting for each other."""

from __future__ import annotations

import secrets

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store


class RankNotices:
    """Notices of the ranks of one profiling run, in the key-value store of the process group (collective to make).

    Posting or reading one is a message of a few bytes to the process that holds the store, so it happens between
    measurements only.

    Args:
        world_size: number of ranks; a single rank needs no store.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._posted: set[str] = set()
        if world_size > 1:
            # A prefix of its own for each run: counters of an earlier profiling run stay in the store.
            token = [secrets.token_hex(8)]
            dist.broadcast_object_list(token, src=0)
            self._store = dist.PrefixStore(f"profiling-{token[0]}", _get_default_store())

    def post(self, notice: str) -> None:
        """Posts a notice for all ranks; a second call with the same notice does nothing."""
        if self._world_size > 1 and notice not in self._posted:
            self._store.add(notice, 1)
        self._posted.add(notice)

    def posted_by_any(self, notice: str) -> bool:
        """Whether any rank has posted the notice."""
        return self._count(notice) > 0

    def posted_by_all(self, notice: str) -> bool:
        """Whether every rank has posted the notice."""
        return self._count(notice) == self._world_size

    def _count(self, notice: str) -> int:
        # Adding 0 reads the counter without waiting; `get` would block until some rank has posted.
        return int(notice in self._posted) if self._world_size == 1 else self._store.add(notice, 0)
