# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Placements of a comparison: the memory that cases count, and what is planned for a limit of it."""

from __future__ import annotations

from collections import Counter

import pytest

from accelerate_lshdp.comparing.cases import AUTO, Case
from accelerate_lshdp.comparing.placements import PlacedModel
from accelerate_lshdp.documents.network import LinkCost
from accelerate_lshdp.documents.placement import ModelPlacement, UnitPlacement, UnitStore
from accelerate_lshdp.planning import PlanningError, RankProfile, TimeCurve
from accelerate_lshdp.planning.cost.cluster_model import ModelSize


NAMES = tuple(f"layers.{index}" for index in range(12))
#: Twelve blocks of 7 million parameters, and 1 million in no unit.
SIZE = ModelSize(4 * 85e6, 4 * 85e6, (4 * 7e6,) * 12)
MODEL = PlacedModel((2, 2), NAMES, SIZE)
BYTES = 4e6  # of a million parameters


def share(strategy: str, placement: ModelPlacement | None = None, model: PlacedModel = MODEL) -> float:
    return model.memory_share(Case(strategy), placement)


def test_memory_is_counted_as_a_share_of_what_lsdp_counts() -> None:
    # Of 16 bytes for each parameter a rank has a half; of two blocks it gathers a copy, of one it has the whole
    # gradient; of what is in no unit both.
    lsdp = 2 * 85 * BYTES + 3 * 7 * BYTES + 2 * BYTES
    assert share("lsdp") == share("group_sharding") == share("lshdp") == 1.0
    assert share("fsdp") == share("fsdp_offload") == pytest.approx((85 + 3 * 7 + 2) * BYTES / lsdp)
    assert share("zero1") == share("zero2") == pytest.approx((85 + 84 + 7 + 2) * BYTES / lsdp)
    assert share("ddp") == pytest.approx(4 * 85 * BYTES / lsdp)
    assert share("osdp") == share("group_sharding")
    assert share("torch_fsdp") is None
    half = ModelPlacement(
        units=tuple((name, UnitPlacement(store=UnitStore.WORLD)) for name in NAMES[:6]), default=UnitPlacement()
    )
    assert share("osdp", half) == pytest.approx(1 - 6 * 7 * BYTES / lsdp)


def test_where_every_node_has_one_rank_a_node_s_copy_is_a_whole_one() -> None:
    alone = PlacedModel((1, 1), NAMES, SIZE)
    assert share("lsdp", model=alone) == share("ddp", model=alone) == 1.0
    assert share("fsdp", model=alone) < 0.7


def plan(
    limit: float, sizes: tuple[int, ...] = (4, 4, 4, 4), steps: int = 1, *, streams: bool = False
) -> ModelPlacement:
    profile = RankProfile(TimeCurve([1, 4], [1.0, 3.0]), 4, fixed_seconds=0.2)
    link, inside = LinkCost(0.0, 8e-9), LinkCost(0.0, 1e-9)
    return MODEL.plan(limit, [(size, steps) for size in sizes], [profile] * 4, link, inside, streams=streams)


@pytest.mark.parametrize("limit", [0.6, 0.75, 0.9])
def test_planned_placements_use_the_memory_that_they_are_given(limit: float) -> None:
    placement = plan(limit)
    block = 7 * BYTES / (2 * 85 * BYTES + 3 * 7 * BYTES + 2 * BYTES)  # what a node's copy of one counts more
    assert limit - block < share("osdp", placement) <= limit
    # Where devices send while they compute, too: memory is counted in one way.
    assert limit - block < share("osdp", plan(limit, streams=True)) <= limit
    stores = [placement.of(name).store for name in NAMES]
    beside = [store for store in stores if store in (UnitStore.NODE, UnitStore.REPLICATE)]
    # What travels beside the computing has its backward first.
    assert stores[len(stores) - len(beside) :] == beside
    assert Counter(stores)[UnitStore.NODE] > 0


def test_a_placement_that_cannot_be_planned_is_an_error() -> None:
    with pytest.raises(PlanningError, match="found memory limits that no placement"):
        plan(0.3)
    with pytest.raises(PlanningError, match="found a micro-batch of 5 samples on rank 0 .* Raise profile_seconds"):
        plan(0.9, (5, 4, 4, 4))
    with pytest.raises(PlanningError, match="expected one for each rank in a step"):
        plan(0.9, (2, 2, 2, 2), steps=2)


def test_labels_say_what_is_not_the_strategy_s_own() -> None:
    assert Case("osdp", placement=AUTO, memory_limit=0.9).label == "osdp fp32 (auto 0.90)"
    assert Case("fsdp", "bf16", checkpoint=True).label == "fsdp bf16 (recomputed)"
    to_node = ModelPlacement(default=UnitPlacement(store=UnitStore.WORLD_TO_NODE))
    assert Case("osdp", placement=to_node, batch_sizes=(3, 1)).label == "osdp fp32 (all units: world_to_node, 3 1)"
    recomputed = Case("zero2", checkpoint=True).known_placement
    assert recomputed.default == UnitPlacement(store=UnitStore.WORLD_KEPT, checkpoint=True)
    assert recomputed.of("") == UnitPlacement(store=UnitStore.WORLD_KEPT)
