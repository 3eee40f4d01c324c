# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Heterogeneous data loading: every rank reads its own number of samples of each global batch.

`prepare_loader` turns a user's DataLoader into a `HeterogeneousDataLoader`; `skip_first_batches` and the loader's
`state_dict`, `load_state_dict` and `resume` start a pass in the middle of an epoch. The modules beside this one hold
the parts: `cut` the arithmetic, `size_switch` sizes that change within a pass, `order` shuffling, `place` what the
accelerator is told.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.data_loader import _PYTORCH_DATALOADER_KWARGS, prepare_data_loader
from accelerate.data_loader import skip_first_batches as stock_skip_first_batches
from torch.utils.data import DataLoader, IterableDataset

from accelerate_lshdp.data.context import LoaderContext
from accelerate_lshdp.data.loader import HeterogeneousDataLoader
from accelerate_lshdp.data.order import SampleOrder
from accelerate_lshdp.data.place import MicroBatchPlace
from accelerate_lshdp.data.position import LoaderPosition
from accelerate_lshdp.data.random_numbers import WorkerStart
from accelerate_lshdp.data.sampler import MapSource
from accelerate_lshdp.data.sampler_checks import refuse_sharded_order
from accelerate_lshdp.data.stream import StreamSource


__all__ = [
    "HeterogeneousDataLoader",
    "LoaderContext",
    "LoaderPosition",
    "MicroBatchPlace",
    "prepare_loader",
    "skip_first_batches",
]

REPLACED = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator")
"""Arguments of a user's DataLoader that are not handed on: our sampler and our seeds stand for them."""


def _base_loader_class(use_stateful_dataloader: bool) -> type[DataLoader]:
    if not use_stateful_dataloader:
        return DataLoader
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError as error:
        raise ImportError(
            "use_stateful_dataloader=True needs torchdata, which is not installed. Install torchdata>=0.11, or leave"
            " the option out: positions are kept without it."
        ) from error
    return StatefulDataLoader


def _describe(loader: DataLoader) -> str:
    try:
        length = len(loader.dataset)
    except TypeError:
        length = None
    text = f"{type(loader.sampler).__name__} n={length} batch_size={loader.batch_size} drop_last={loader.drop_last}"
    if isinstance(loader.dataset, IterableDataset):
        # What a global batch of a stream is made of depends on its workers.
        text += f" workers={max(1, loader.num_workers)}"
    return text


def prepare_loader(
    loader: DataLoader,
    context: LoaderContext,
    *,
    device: torch.device | None = None,
    put_on_device: bool = True,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    split_batches: bool = False,
    even_batches: bool = True,
    dispatch_batches: bool | None = None,
    rng_types: list[Any] | None = None,
    slice_fn_for_dispatch: Any = None,
    use_seedable_sampler: bool = True,
) -> DataLoader:
    """Prepare a user's DataLoader. Collective: ranks check that they prepare equal loaders.

    `use_seedable_sampler` only concerns `dispatch_batches=True` without batch sizes, where the loader is left to stock
    accelerate.

    Raises ValueError for `dispatch_batches=True` with the plan's batch sizes, a sampler that shards by rank,
    `in_order=False`, or `batch_size=None` without a `BatchSampler`; ImportError if a StatefulDataLoader is asked for
    without torchdata.
    """
    refuse_sharded_order(loader)
    if dispatch_batches:
        if context.rank_batches is not None or context.follows_script:
            raise ValueError(
                "found dispatch_batches=True together with batch sizes in the plan, expected one or the other: a batch"
                " that the main process reads and splits is split equally. Set dispatch_batches=False (every rank then"
                " reads its own part), or use Plan.equal."
            )
        return prepare_data_loader(
            loader,
            device,
            num_processes=context.world_size,
            process_index=context.rank,
            split_batches=split_batches,
            put_on_device=put_on_device,
            rng_types=rng_types,
            dispatch_batches=True,
            even_batches=even_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=use_seedable_sampler,
            data_seed=context.seed,
            non_blocking=non_blocking,
            use_stateful_dataloader=use_stateful_dataloader,
        )
    if not getattr(loader, "in_order", True):
        raise ValueError(
            "found a DataLoader with in_order=False, expected in_order=True: batches that arrive in any order have no"
            " place in an optimizer step, and ranks would train on different samples. Leave in_order out."
        )
    context.check_agreement(f"{_describe(loader)} seed={context.seed}", "the prepared DataLoader and its dataset")
    loader_class = _base_loader_class(use_stateful_dataloader)
    generator = torch.Generator(device=torch.get_default_device())
    options = {
        name: getattr(loader, name, default)
        for name, default in _PYTORCH_DATALOADER_KWARGS.items()
        if name not in REPLACED
    }

    def make_loader(dataset: Any, *, wrapped: bool = False, **changes: Any) -> DataLoader:
        if wrapped and loader.num_workers:
            changes["worker_init_fn"] = WorkerStart(loader.worker_init_fn)
        return loader_class(dataset, **{**options, "generator": generator, **changes})

    layout = {"rank": context.rank, "world_size": context.world_size, "split_batches": split_batches}
    source: MapSource | StreamSource
    if isinstance(loader.dataset, IterableDataset):
        source = StreamSource(loader, make_loader, **layout)
    else:
        order = SampleOrder(loader, context.seed)
        source = MapSource(loader, order, make_loader, even_batches=even_batches, **layout)
    return HeterogeneousDataLoader(
        source,
        context,
        device=device if put_on_device else None,
        non_blocking=non_blocking,
        rng_types=[kind for kind in rng_types or () if kind != "generator"],
        use_stateful_dataloader=use_stateful_dataloader,
        generator=generator,
        seed=context.seed,
    )


def skip_first_batches(loader: DataLoader, num_batches: int | None = 0) -> DataLoader:
    """A loader for one pass that leaves out the first `num_batches` batches of this rank (in training: micro-batches).

    None skips to the position that was restored, which may have been written under another plan. So does the number of
    batches that a rank of the run that saved had read up to there; another number wins over a restored position. Any
    other loader than ours is left to stock accelerate.

    Raises ValueError when the pass starts if the number falls inside a global batch, or here if it is None and no
    position was restored.
    """
    if isinstance(loader, HeterogeneousDataLoader):
        return loader.skipping(num_batches)
    if num_batches is None:
        raise ValueError(
            f"found a {type(loader).__name__}, which keeps no position, expected a loader that LSHDPAccelerator"
            " prepared. Say how many batches to skip."
        )
    return stock_skip_first_batches(loader, num_batches)
