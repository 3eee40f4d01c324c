# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Exchange between ranks while they save or load: small objects, tensors, and whether something failed.

Ranks are counted among those with which a thread exchanges (`participants`), which mostly are all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from accelerate_lshdp.runtime.agreement import raise_on_all_ranks
from accelerate_lshdp.runtime.groups import host_backend
from accelerate_lshdp.runtime.participants import has_others, participants


_T = TypeVar("_T")


@dataclass(frozen=True)
class NodeLayout:
    """The place of this rank among those that exchange. The one with local rank 0 reads and writes its node's files.

    Raises:
        ValueError: if it contradicts the process group.
    """

    rank: int
    world_size: int
    node: int
    num_nodes: int
    local_rank: int
    device: torch.device

    def __post_init__(self) -> None:
        group = participants() if has_others() else None
        found = (dist.get_rank(group), dist.get_world_size(group)) if has_others() else (0, 1)
        if (self.rank, self.world_size) != found:
            raise ValueError(
                f"the layout says rank {self.rank} of {self.world_size}, "
                f"the process group says {found[0]} of {found[1]}"
            )

    @property
    def is_writer(self) -> bool:
        return self.local_rank == 0


@contextmanager
def errors_on_all_ranks(what: str) -> Iterator[None]:
    """Runs a block without collectives; what it raises on any rank is raised on all ranks (collective at its end)."""
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    raise_failure_on_all_ranks(what, error)


def raise_failure_on_all_ranks(what: str, error: BaseException | str | None) -> None:
    """`raise_on_all_ranks` with a message that says what this rank was doing when it failed."""
    if isinstance(error, BaseException):
        message = f"{what} failed: {type(error).__name__}: {error}"
    else:
        message = error and f"{what} failed: {error}"
    # A text is passed, so that all ranks compare the same kind of message; the exception stays the cause on its own
    # rank.
    try:
        raise_on_all_ranks(message)
    except RuntimeError as agreed:
        raise RuntimeError(str(agreed)) from (error if isinstance(error, BaseException) else None)


class Attempt:
    """Carries on after a failure: runs one local action after another until one fails, and keeps what it raised.

    A rank that fails between collectives has to take part in the rest of them, or the others wait for it in vain.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __call__(self, action: Callable[[], _T]) -> _T | None:
        """Runs an action and returns its result; None if it or an earlier one failed."""
        # After a failure nothing more is done on this rank; its collectives are outside of the actions, and go on.
        if self.error is None:
            try:
                return action()
            except Exception as caught:
                self.error = caught
        return None

    def always(self, action: Callable[[], object]) -> None:
        """Runs an action even after a failure; the first failure is kept."""
        try:
            action()
        except Exception as caught:
            self.error = self.error or caught


def all_objects(value: Any) -> list[Any]:
    """Gathers one picklable value a rank, in rank order, on every rank (collective)."""
    if not has_others():
        return [value]
    group = participants()
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def object_from(source: int, value: Any) -> Any:
    """Broadcasts rank `source`'s picklable value; the other ranks' values are ignored (collective)."""
    if not has_others():
        return value
    group = participants()
    box = [value if dist.get_rank(group) == source else None]
    dist.broadcast_object_list(box, group=group, group_src=source)
    return box[0]


def broadcast_bytes(
    buffer: torch.Tensor, source: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> None:
    """Fills a one-dimensional uint8 CPU tensor on every rank (of the group) with rank `source`'s.

    A world without a backend for CPU tensors (nccl alone) is served through `device`.

    Args:
        buffer: of the same size on all ranks.
        source: the rank.
        device: of this rank.
        group: the ranks that take part; None, or inside `among`: those with which this thread exchanges.
    """
    # Sizes are the same on all ranks, so all of them skip an empty buffer.
    if not has_others() or buffer.numel() == 0:
        return
    if participants() is not None:
        dist.broadcast(buffer, group=participants(), group_src=source)
    elif host_backend() is None:
        dist.broadcast(buffer, src=source, group=group)
    else:
        # A copy on the device, so the result has to come back to the buffer on the ranks that receive.
        staged = buffer.to(device)
        dist.broadcast(staged, src=source, group=group)
        if dist.get_rank() != source:
            buffer.copy_(staged)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor's elements as a one-dimensional uint8 tensor; shares memory where the tensor is contiguous."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def broadcast_tensor(
    tensor: torch.Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    source: int,
    layout: NodeLayout,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Broadcasts rank `source`'s plain tensor as a CPU tensor to every rank (of the group), whatever its dtype.

    Args:
        tensor: on rank `source`; others may pass None.
        shape: of the tensor, known on all ranks.
        dtype: of the tensor, known on all ranks.
        source: the rank.
        layout: the place of this rank.
        group: as for `broadcast_bytes`.
    """
    if layout.rank == source:
        value = tensor.detach().cpu().contiguous()
    else:
        value = torch.empty(shape, dtype=dtype)
    # As bytes, because no backend reduces or copies every dtype that a checkpoint can hold.
    broadcast_bytes(as_bytes(value), source, layout.device, group)
    return value
