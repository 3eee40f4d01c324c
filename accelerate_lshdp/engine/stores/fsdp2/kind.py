# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`UnitKind`: how FSDP2 keeps some units of a model, and the collectives that these need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

from accelerate_lshdp.engine.policies import ShardingPolicies
from accelerate_lshdp.engine.wire.reduction import GradientReduction


@dataclass(frozen=True, eq=False)
class UnitKind:
    """How FSDP2 keeps some units.

    Attributes:
        policies: of the store that the units are in.
        mesh: the ranks that share one copy of their parameters; one dimension.
        reduction: sums a shard's gradient over the nodes; None if no other rank holds this shard.
        all_gather: gathers a unit's parameters from the mesh.
        reduce_scatter: sums a unit's gradients and scatters them over the mesh.
        after_forward: the nodes and their ranks, where units keep the shards of a node after the forward.
        casts_inputs: whether what a unit is called with is cast to the precision that it computes in.
    """

    policies: ShardingPolicies
    mesh: DeviceMesh
    reduction: GradientReduction | None
    all_gather: AllGather
    reduce_scatter: ReduceScatter
    after_forward: HSDPMeshInfo | None = None
    casts_inputs: bool = True

    @property
    def is_replicated(self) -> bool:
        """Whether groups of ranks keep copies, whose gradients are summed by us and not by FSDP2's reduce-scatter."""
        return not self.policies.strategy.is_world_sharded

    def options(self, is_root: bool = False) -> dict[str, Any]:
        """What ``fully_shard`` is told of a unit of this kind.

        Args:
            is_root: whether it is of the module whose forward is that of the whole model, which alone converts its
                output.
        """
        precision = self.policies.precision
        if is_root and self.policies.output_dtype is not None:
            precision = type(precision)(
                param_dtype=precision.param_dtype,
                reduce_dtype=precision.reduce_dtype,
                output_dtype=self.policies.output_dtype,
                cast_forward_inputs=self.casts_inputs,
            )
        # The root's own parameters are needed first in the forward and at once in the backward: they stay gathered.
        reshards = False if is_root else self.policies.reshard_after_forward
        return {
            "mesh": self.mesh,
            "mp_policy": precision,
            "offload_policy": self.policies.offload,
            "reshard_after_forward": reshards,
        }
