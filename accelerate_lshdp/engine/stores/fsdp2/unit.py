# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The units of a sharded model: FSDP2's parameter groups, as the reduction between nodes sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from accelerate_lshdp.engine.stores.fsdp2.kind import UnitKind
from accelerate_lshdp.engine.stores.fsdp2.versions import param_groups


@dataclass
class Unit:
    """One FSDP2 parameter group that has trainable parameters."""

    module: FSDPModule
    kind: UnitKind | None = None
    fsdp_params: list[FSDPParam] = field(default_factory=list)  # those that were trainable in ``prepare``
    parameters: list[nn.Parameter] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    local: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # (offset, this node's earlier gradients)

    def layout(self) -> list[tuple[nn.Parameter, int]]:
        """The parameters in the gradient buffer (those not frozen now), each with the elements of its padded shard."""
        # Padded: FSDP2 cuts every tensor into equal chunks of its first dimension, and the buffer that the hook gets
        # has the chunk's size also on ranks whose own part is shorter.
        pairs = zip(self.parameters, self.fsdp_params, strict=True)
        return [(p, fsdp_param.padded_sharded_param_size.numel()) for p, fsdp_param in pairs if p.requires_grad]

    def shapes(self) -> list[torch.Size]:
        """The shapes of the padded shards in the gradient buffer."""
        pairs = zip(self.parameters, self.fsdp_params, strict=True)
        return [fsdp_param.padded_sharded_param_size for p, fsdp_param in pairs if p.requires_grad]


def collect_units(module: nn.Module, kinds: Mapping[int, UnitKind]) -> list[Unit]:
    """Units with trainable parameters, in the order in which a backward usually reaches them; the root is last.

    Args:
        module: the model.
        kinds: of each unit, by the id of each of its modules.
    """
    # The order of reductions between nodes, so it has to be the same on all ranks: that of registration, backwards.
    heads, seen = [], set()
    for candidate in module.modules():
        if isinstance(candidate, FSDPModule) and id(candidate._get_fsdp_state()) not in seen:
            seen.add(id(candidate._get_fsdp_state()))
            heads.append(candidate)
    root, *blocks = heads
    units, index = [], 0
    for head in [*reversed(blocks), root]:
        unit = Unit(head, kinds[id(head)])
        for group in param_groups(head):
            for fsdp_param in group.fsdp_params:
                if fsdp_param.sharded_param.requires_grad:
                    unit.fsdp_params.append(fsdp_param)
                    unit.parameters.append(fsdp_param.sharded_param)
                    unit.indices.append(index)
                    index += 1
        if unit.parameters:
            units.append(unit)
    return units


def sharded_like(parameter: nn.Parameter, local: torch.Tensor) -> DTensor:
    """A new DTensor with the parameter's layout and device (the host if it is offloaded), and this rank's piece."""
    whole = torch.empty_like(parameter, requires_grad=False)  # `from_local` moves to the device of the mesh
    whole.to_local().copy_(local)
    return whole


def root_first(root: FSDPModule):  # noqa: ANN202 - a closure for torch
    """A hook of a unit's forward that lets FSDP2 begin with the whole model.

    FSDP2 takes for the root what has the first forward. A script may call a part of the model before that, as a
    ``generate`` does which calls the blocks itself.
    """
    state = root._get_fsdp_state()

    def before_forward(*_: object) -> None:
        state._lazy_init()  # which does nothing after the first time

    return before_forward
