# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The `placement` section of plans: what it may hold, and what is said of what it may not."""

from __future__ import annotations

import pytest

from accelerate_lshdp import Plan
from accelerate_lshdp.documents.placement import ModelPlacement, UnitPlacement, UnitStore
from accelerate_lshdp.documents.value_checks import PlanError


def test_what_is_left_out_has_the_default():
    plan = Plan.from_dict(
        {
            "version": 1,
            "strategy": "osdp",
            "placement": {"units": {"h.0": {"store": "world", "checkpoint": True}}, "default": {"store": "host"}},
        }
    )
    assert plan.placement.of("h.0") == UnitPlacement(UnitStore.WORLD, checkpoint=True)
    assert plan.placement.of("h.1") == UnitPlacement(UnitStore.HOST)
    assert ModelPlacement().of("anything") == UnitPlacement(UnitStore.NODE)


def test_a_plan_with_a_placement_survives_its_file(tmp_path):
    placement = ModelPlacement(
        {"": UnitPlacement(UnitStore.REPLICATE), "h.0": UnitPlacement(UnitStore.WORLD, slices=4)},
        memory_limit_bytes=(8 * 2**30, 16 * 2**30),
    )
    plan = Plan.from_batch_sizes([2, 1], strategy="osdp", placement=placement)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert Plan.load(tmp_path / "plan.json").digest() == plan.digest()


def test_the_placement_changes_the_digest_and_its_absence_does_not():
    plan = {"version": 1, "strategy": "osdp"}
    digests = {
        Plan.from_dict(plan).digest(),
        Plan.from_dict({**plan, "placement": {"default": {"store": "world"}}}).digest(),
        Plan.from_dict({**plan, "placement": {"units": {"h": {"store": "world"}}}}).digest(),
    }
    assert len(digests) == 3
    # Of a plan written before there were placements.
    assert (
        Plan.from_batch_sizes([11, 5]).digest() == "7d79776153a5278f1f3cf1a4fee321a57737ddd9fc760fa216b66c598d88e5af"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": "lsdp", "placement": {}}, 'placement: found a placement with strategy "lsdp", expected "osdp"'),
        ({"placement": {"units": {"h": {"store": "wrld"}}}}, 'placement.units.h.store: found "wrld"'),
        ({"placement": {"units": {"h.0": {"stor": "world"}}}}, 'placement.units["h.0"].stor: found an unknown key'),
        ({"placement": {"units": {"h": {"slices": 0}}}}, "placement.units.h.slices: found 0"),
        ({"placement": {"units": {"h": {"slices": 2}}}}, 'placement.units.h.slices: found 2 slices with store "node"'),
        (
            {"placement": {"default": {"store": "world_kept", "slices": 2}}},
            'placement.default.slices: found 2 slices with store "world_kept", expected 1',
        ),
        (
            {"placement": {"units": {"": {"store": "host", "slices": 2}, "h": {"store": "host", "slices": 2}}}},
            'placement.units.h.slices: found 2 slices with store "host", expected them for what is in no unit',
        ),
        (
            {"placement": {"default": {"store": "host", "slices": 2}}},
            'placement.default.slices: found 2 slices with store "host", expected them for what is in no unit',
        ),
        ({"placement": {"default": {"checkpoint": 1}}}, "placement.default.checkpoint: found 1"),
        ({"placement": {"units": []}}, "placement.units: found an empty list"),
        ({"placement": {"memory_limit_bytes": [1, 2, 3]}}, "placement.memory_limit_bytes: found 3 limits, expected 2"),
        ({"placement": {"memory_limit_bytes": [0]}}, "placement.memory_limit_bytes[0]: found 0"),
        (
            {"placement": {"default": {"store": "world"}}, "communication": {"dtype": "int8"}},
            'communication.dtype: found "int8" with a unit in store "world", expected "fp32" or "bf16"',
        ),
    ],
)
def test_impossible_placements_are_refused(changes, message):
    plan = Plan.from_batch_sizes([2, 1], strategy="osdp").to_dict()
    with pytest.raises(PlanError) as caught:
        Plan.from_dict({**plan, **changes})
    assert message in str(caught.value)


def test_a_printed_plan_says_where_units_are():
    placement = ModelPlacement(
        {"": UnitPlacement(UnitStore.REPLICATE), "h.0": UnitPlacement(UnitStore.WORLD, checkpoint=True)}
    )
    text = str(Plan.from_batch_sizes([2, 1], strategy="osdp", placement=placement))
    assert "placement: replicate: the rest; world recomputed: h.0; others: node" in text


def test_unknown_units_are_named_with_the_nearest_that_there_is():
    placement = ModelPlacement({"transformer.h.11": UnitPlacement()})
    with pytest.raises(PlanError, match='placement.units."transformer.h.11".*Did you mean "transformer.h.1"'):
        placement.require_units([f"transformer.h.{layer}" for layer in range(11)])
    ModelPlacement({"": UnitPlacement()}).require_units(["a", ""])
