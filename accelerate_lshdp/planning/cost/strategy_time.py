# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`predict_step`: the step time of any strategy on a described cluster.

From measured (or estimated) curves of computing, a link between nodes, and what communication takes of each node's
processors, `step_writer` writes a step down as segments and transfers, and `step_simulation` finds when they end.
"""

from __future__ import annotations

from collections.abc import Sequence

from accelerate_lshdp.documents.curves import RankProfile
from accelerate_lshdp.documents.strategy import SharedBy
from accelerate_lshdp.documents.wire_format import WIRE_FORMATS
from accelerate_lshdp.planning.cost.cluster_model import ClusterModel, ModelSize
from accelerate_lshdp.planning.cost.step_prediction import StepPrediction
from accelerate_lshdp.planning.cost.step_writer import StepWriter


def predict_step(
    strategy: str,
    profiles: Sequence[RankProfile],
    micro_batches: Sequence[tuple[int, int]],
    model: ModelSize,
    cluster: ClusterModel,
    *,
    communication_dtype: str = "fp32",
    wire_bytes: float | None = None,
    optimizer_shares: Sequence[float] | None = None,
    load_seconds: Sequence[float] | None = None,
) -> StepPrediction:
    """Predicts one optimizer step.

    Args:
        strategy: one of `STRATEGIES`.
        profiles: one a rank, measured without communication; `fixed_seconds` is the optimizer step and nothing else.
        micro_batches: (size, accumulation steps) of each rank.
        model: bytes of parameters and gradients.
        cluster: nodes and network.
        communication_dtype: format of gradients on the wire.
        wire_bytes: bytes of all gradients on the wire, for formats whose size depends on the model (powersgd).
        optimizer_shares: the part of its profiled optimizer step that each rank does. None: 1/n where n ranks share
            one copy of the parameters, as if the profiled step was of all parameters.
        load_seconds: measured seconds that sending gradients adds to each rank's backward. Strategies that send during
            the backward use them instead of `cluster.communication_costs`. None: not measured.

    Raises:
        ValueError: the arguments do not match, or a batch is larger than measured.
    """
    world = sum(cluster.nodes)
    if len(profiles) != world or len(micro_batches) != world:
        raise ValueError(
            f"found {len(profiles)} profiles and {len(micro_batches)} batches for nodes with {list(cluster.nodes)}"
            " ranks, expected one of each for every rank"
        )
    if wire_bytes is None:
        share = WIRE_FORMATS[communication_dtype].wire_share if communication_dtype in WIRE_FORMATS else None
        if share is None:
            raise ValueError(f"found {communication_dtype!r} without wire_bytes, expected the bytes of all gradients")
        wire_bytes = model.gradient_bytes * share
    writer = StepWriter(strategy, model, cluster, communication_dtype, wire_bytes)
    writer.describe_ranks(profiles, micro_batches, optimizer_shares, load_seconds)
    if writer.traits.shared_by is SharedBy.WORLD:
        writer.write_world_sharded()
    else:
        writer.write_overlapped()
    return writer.simulate()
