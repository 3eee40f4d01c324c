# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The `automatic` section of a plan."""

from __future__ import annotations

import json
from typing import Any

import pytest

from accelerate_lshdp.documents.plan import Automatic, Plan, PlanError


def test_a_plan_of_a_total_alone_survives_its_file(tmp_path) -> None:
    plan = Plan.auto(256, strategy="ddp", rebalance_every=5, dead_band=0.1)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert (loaded.total_batch_size, loaded.batch_sizes, loaded.world_size) == (256, None, None)
    assert loaded.automatic == Automatic(256, 5, 0.1)


def test_a_handwritten_section_needs_the_total_only() -> None:
    plan = Plan.from_json('{"version": 1, "strategy": "lsdp", "automatic": {"total": 64}}')
    assert plan.automatic == Automatic(64)
    assert "automatic batch sizes" in str(plan) and "64" in str(plan)


def test_the_total_may_be_left_to_the_script(tmp_path) -> None:
    plan = Plan.from_json('{"version": 1, "strategy": "lsdp", "automatic": {}}')
    assert plan == Plan.auto() and plan.leaves_total_open and plan.total_batch_size is None
    assert "its batch size x ranks" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    found = plan.with_total(Plan.from_batch_sizes([8, 8]).batch)
    assert not found.leaves_total_open and found.total_batch_size == found.automatic.total == 16
    assert Plan.from_dict(found.to_dict()) == found
    with pytest.raises(PlanError, match="automatic.total"):
        Plan.from_json('{"version": 1, "strategy": "lsdp", "automatic": {"total": null}}')


def test_last_known_sizes_are_a_start() -> None:
    sizes = Plan.from_batch_sizes([11, 5])
    plan = Plan.from_dict({**sizes.to_dict(), "automatic": {"total": 16}})
    assert plan.batch_sizes == [11, 5]
    moved = plan.with_batch(Plan.from_batch_sizes([10, 6]).batch)
    assert moved.batch_sizes == [10, 6] and moved.automatic == plan.automatic


def test_sizes_of_the_run_do_not_change_what_ranks_compare() -> None:
    plan = Plan.from_dict({**Plan.from_batch_sizes([11, 5]).to_dict(), "automatic": {"total": 16}})
    moved = plan.with_batch(Plan.from_batch_sizes([10, 6]).batch)
    assert moved.digest() == plan.digest() == Plan.auto(16).digest()
    assert Plan.auto(17).digest() != plan.digest()
    assert Plan.from_batch_sizes([11, 5]).digest() != plan.digest()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, "total"),
        ({"total": 0}, "automatic.total"),
        ({"total": "16"}, "automatic.total"),
        ({"total": 16, "rebalance_every": 0}, "automatic.rebalance_every"),
        ({"total": 16, "dead_band": -0.1}, "automatic.dead_band"),
        ({"total": 16, "dead_band": 1.0}, "expected less than 1"),
        ({"total": 16, "deadband": 0.1}, "deadband"),
        ({"total": 2**60}, "automatic.total"),
        ([16], "automatic"),
        ({"total": 15}, "the total of batch"),
    ],
)
def test_impossible_sections_are_refused(section: Any, message: str) -> None:
    document = {**Plan.from_batch_sizes([11, 5]).to_dict(), "automatic": section}
    with pytest.raises(PlanError, match=message):
        Plan.from_json(json.dumps(document))


def test_micro_batches_of_unequal_number_are_refused() -> None:
    document = Plan.from_batch_sizes([(4, 2), (8, 1)], allow_unequal_accumulation=True).to_dict()
    with pytest.raises(PlanError, match="same number"):
        Plan.from_dict({**document, "automatic": {"total": 16}})
