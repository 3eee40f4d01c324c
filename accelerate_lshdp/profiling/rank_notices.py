# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What ranks tell each other while they measure, without waiting for each other: that one is ready, or has failed."""

from __future__ import annotations

import secrets

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store


class RankNotices:
    """Notices of the ranks of one profiling run, in the store by which they met (collective to make).

    A notice is a message of a few bytes to the process that holds the store; it is posted between measurements only.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._posted: set[str] = set()
        if world_size > 1:
            token = [secrets.token_hex(8)]
            dist.broadcast_object_list(token, src=0)
            self._store = dist.PrefixStore(f"profiling-{token[0]}", _get_default_store())

    def post(self, notice: str) -> None:
        """Says something to all ranks, once."""
        if self._world_size > 1 and notice not in self._posted:
            self._store.add(notice, 1)
        self._posted.add(notice)

    def posted_by_any(self, notice: str) -> bool:
        """Whether any rank has said it."""
        return self._count(notice) > 0

    def posted_by_all(self, notice: str) -> bool:
        """Whether every rank has said it."""
        return self._count(notice) == self._world_size

    def _count(self, notice: str) -> int:
        return int(notice in self._posted) if self._world_size == 1 else self._store.add(notice, 0)
