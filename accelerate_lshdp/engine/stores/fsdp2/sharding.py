# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Shards the units of a model by ``fully_shard``, each as its kind says."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from accelerate_lshdp.engine.stores.fsdp2.kind import UnitKind
from accelerate_lshdp.engine.stores.fsdp2.versions import keep_shards_of_node


def shard_units(
    module: nn.Module,
    units: Sequence[tuple[tuple[nn.Module, ...], UnitKind]],
    root: UnitKind,
    prefetch: int,
    ignored: set[nn.Parameter],
) -> None:
    """Shards a model in place.

    Args:
        module: the model, identical on all ranks.
        units: groups of modules that are gathered together, in the order of the forward, and how each is kept.
        root: how what is in no unit is kept.
        prefetch: number of units gathered ahead on devices with streams.
        ignored: parameters that FSDP2 has nothing to do with.
    """
    # Units before the root: `fully_shard` of a module takes what no unit inside it has taken.
    for unit, kind in units:
        fully_shard(list(unit) if len(unit) > 1 else unit[0], ignored_params=ignored, **kind.options())
        if kind.after_forward is not None:
            keep_shards_of_node(unit[0], kind.after_forward)
    # FSDP2 wants one root for all units, also where the root's own parameters are in another store.
    fully_shard(module, ignored_params=ignored, **root.options(is_root=True))
    module.register_forward_hook(_drop_after_evaluation)
    # FSDP2 itself fetches one unit ahead. Told of more, it has that many gathered units in memory at a time.
    heads = [unit[0] for unit, _ in units]
    if prefetch > 1:
        for index, head in enumerate(heads):
            head.set_modules_to_forward_prefetch(heads[index + 1 : index + 1 + prefetch])
            head.set_modules_to_backward_prefetch(heads[max(0, index - prefetch) : index][::-1])


def _drop_after_evaluation(module: nn.Module, args: object, output: object) -> None:
    """Drops the gathered parameters that a forward without gradients has left: no backward will need them.

    FSDP2 would go on with them in the next forward, whatever became of the shards meanwhile: optimizers that have
    other weights for evaluation, and averages of weights that are swapped in and out, change these in place.
    """
    if not torch.is_grad_enabled():
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
