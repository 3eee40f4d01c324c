# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What a script's own sampler does that the plan's batch sizes would undo, told when its loader is prepared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset


# What samplers of torch, transformers, timm, Megatron and accelerate call the number of ranks and the own one.
_COUNTS = ("num_replicas", "num_processes", "world_size", "dp_size", "data_parallel_size")
_RANKS = ("rank", "process_index", "dp_rank", "data_parallel_rank")


def refuse_sharded_order(loader: DataLoader) -> None:
    """Raises ValueError if the loader's sampler, batch sampler or stream hands each rank a part of the data.

    `prepare` divides each global batch among the ranks: a part of a part would leave samples out. A sampler whose
    attributes do not tell is found by its order, which ranks compare when a training pass starts.
    """
    for part in _parts(loader):
        count = next((name for name in _COUNTS if _number(part, name) > 1), None)
        rank = next((name for name in _RANKS if _number(part, name) >= 0), None)
        if count is not None and rank is not None:
            raise ValueError(
                f"found a {type(part).__name__} with {count}={getattr(part, count)}, which gives each rank a part of"
                " the data, expected one that gives every rank all of it: prepare() divides each global batch by the"
                f" plan's batch sizes. Leave it out (shuffle=True is enough), or make it with {count}=1 and {rank}=0."
            )


def own_batch_sampler(loader: DataLoader) -> str | None:
    """The name of a batch sampler of the script's own; None for torch's, whose batches mean nothing by themselves."""
    batch_sampler = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    return None if batch_sampler is None or type(batch_sampler) is BatchSampler else type(batch_sampler).__name__


def _parts(loader: DataLoader) -> Iterator[Any]:
    """The loader's stream, or its batch sampler and all samplers inside it, outermost first."""
    if isinstance(loader.dataset, IterableDataset):
        yield loader.dataset
        return
    waiting, seen = [loader.batch_sampler, loader.sampler], []
    while waiting:
        part = waiting.pop(0)
        if part is not None and not any(part is other for other in seen):
            seen.append(part)
            yield part
            waiting += [getattr(part, name, None) for name in ("batch_sampler", "sampler")]


def _number(part: Any, name: str) -> int:
    """An attribute that is a number; -1 if there is none."""
    value = getattr(part, name, None)
    return value if type(value) is int else -1
