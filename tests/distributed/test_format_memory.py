# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Memory that wire formats keep, counted from their tensors, against the table of formats."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from lossy_reductions import gradient, new_reduction

from accelerate_lshdp.documents.plan import Communication
from accelerate_lshdp.documents.wire_format import WIRE_FORMATS


#: 4 M elements, so that scratch tensors of two megabytes are little beside them.
SHAPES = ((1024, 1024),) * 4
SCRATCH = 2.2e6  # bytes that do not grow with the buffer


def storages() -> dict[int, int]:
    """The bytes of every tensor's memory, by its address."""
    gc.collect()
    # By type, as `isinstance` would ask lazy objects of other libraries for a class.
    tensors = [found for found in gc.get_objects() if type(found) is torch.Tensor]
    return {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}


def largest_kept(dtype: str) -> tuple[int, int]:
    """The most bytes beside the gradient in two steps, and those of the gradient."""
    before = storages()
    reduction = new_reduction(Communication(dtype, **({"powersgd_warmup_steps": 0} if dtype == "powersgd" else {})))
    kept = 0
    for step in range(2):
        buffer = gradient(dist.get_rank(), step, 0, SHAPES, torch.float32)
        pending = reduction.start(buffer, 0, [torch.Size(shape) for shape in SHAPES])
        now = storages()
        kept = max(kept, sum(size for place, size in now.items() if place not in before) - buffer.nbytes)
        pending.wait()
    return kept, buffer.nbytes


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("dtype", WIRE_FORMATS)
def test_formats_keep_what_the_table_says(workers, dtype: str, world_size: int) -> None:
    for kept, size in workers(world_size).run(largest_kept, dtype):
        counted = WIRE_FORMATS[dtype].kept_bytes(size, world_size)
        assert kept <= counted + SCRATCH and counted <= 1.1 * kept
    assert WIRE_FORMATS[dtype].kept_bytes(size, 1) == 0
