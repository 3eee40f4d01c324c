# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The section of a plan by which nodes may come and go, and what a run takes over when they have."""

from __future__ import annotations

import pytest

from accelerate_lshdp.documents.curves import RankProfile, TimeCurve
from accelerate_lshdp.documents.plan import Elastic, Plan, PlanError
from accelerate_lshdp.planning.online.rebalancing import Rebalancer


AUTOMATIC = {"version": 1, "strategy": "lsdp", "automatic": {"total": 12}}


def test_the_section_is_read_and_written() -> None:
    plan = Plan.from_dict({**AUTOMATIC, "elastic": {"min_nodes": 2, "max_nodes": 4}})
    assert plan.elastic == Elastic(2, 4, "wait")
    assert Plan.from_dict(plan.to_dict()) == plan
    assert plan.digest() != Plan.from_dict(AUTOMATIC).digest()
    assert "elastic" not in Plan.from_dict(AUTOMATIC).to_dict()


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"version": 1, "strategy": "lsdp", "elastic": {}}, 'elastic: found no automatic batch sizes, .*"automatic"'),
        ({**AUTOMATIC, "elastic": {"min_nodes": 3, "max_nodes": 2}}, "found 3 to 2 nodes"),
        ({**AUTOMATIC, "elastic": {"max_nodes": 17}}, "at most 16"),
        ({**AUTOMATIC, "elastic": {"min_nodes": 0}}, "min_nodes"),
        ({**AUTOMATIC, "elastic": {"on_partition": "hope"}}, "wait.*continue"),
    ],
    ids=["fixed sizes", "bounds", "too many", "none", "partition"],
)
def test_what_cannot_be_elastic_is_said(document: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_dict(document)


def test_a_plan_for_other_ranks_keeps_its_total_alone() -> None:
    sizes = {"total": 12, "ranks": [{"rank": 0, "micro_batch_size": 8}, {"rank": 1, "micro_batch_size": 4}]}
    plan = Plan.from_dict({**AUTOMATIC, "batch": sizes, "elastic": {}})
    assert plan.for_ranks(2, as_planned=True) == plan
    three = plan.for_ranks(3, as_planned=False)
    assert (three.batch, three.total_batch_size) == (None, 12)


def test_curves_are_not_for_ranks_in_another_order() -> None:
    sizes = {"total": 12, "ranks": [{"rank": 0, "micro_batch_size": 8}, {"rank": 1, "micro_batch_size": 4}]}
    plan = Plan.from_dict({**AUTOMATIC, "batch": sizes, "elastic": {}, "profile": {"ranks": []}})
    assert plan.for_ranks(2, as_planned=True).profile == {"ranks": []}
    assert plan.for_ranks(2, as_planned=False).profile is None


def trained(sizes: list[int], seconds: list[float], steps: int = 40) -> Rebalancer:
    """What was learned of ranks that take so long for a sample."""
    learning = Rebalancer(sizes)
    for _ in range(steps):
        now = learning.batch_sizes
        compute = [0.01 + size * each for size, each in zip(now, seconds, strict=True)]
        learning.observe(now, compute, [0.001] * len(now), [None] * len(now))
    return learning


def test_ranks_go_on_with_what_was_learned_of_them() -> None:
    before = trained([4, 4, 4], [0.01, 0.02, 0.04])
    known = before.learned()
    # One has left, and one is there twice as fast as the other.
    two = Rebalancer([6, 6])
    two.go_on_with([known[0], known[1]])
    assert two.batch_sizes == trained([6, 6], [0.01, 0.02]).batch_sizes == [8, 4]
    # In another order; a stranger is taken to be as fast as the others on average.
    three = Rebalancer([4, 4, 4])
    three.go_on_with([known[2], known[0], None])
    assert three.batch_sizes[0] < three.batch_sizes[2] < three.batch_sizes[1] and sum(three.batch_sizes) == 12


def test_nobody_begins_far_beyond_what_it_has_trained() -> None:
    """A larger batch may not fit its memory, and there is no step before it that could say so."""
    before = trained([2, 22], [0.001, 0.02], steps=6)
    known = before.learned()
    largest = known[0]["curve"]["largest"]
    two = Rebalancer([12, 12])
    two.go_on_with(known)
    assert largest == 2 and two.batch_sizes == [4 * largest, 24 - 4 * largest]
    # Where that leaves no room for the global batch, somebody has to.
    one = Rebalancer([24])
    one.go_on_with(known[:1])
    assert one.batch_sizes == [24]


def test_measured_memory_bounds_what_ranks_begin_with() -> None:
    known = trained([4, 4], [0.001, 0.02]).learned()
    curve = TimeCurve(range(1, 25), [0.01 * size for size in range(1, 25)])
    two = Rebalancer([12, 12], profiles=[RankProfile(curve, 4), RankProfile(curve, 24)])
    two.go_on_with(known)  # the fast one has memory for 4
    assert two.batch_sizes == [4, 20]


def test_strangers_begin_with_equal_sizes() -> None:
    anew = Rebalancer([6, 6])
    anew.go_on_with([None, None])
    assert anew.batch_sizes == [6, 6]


@pytest.mark.parametrize("learned", [[None], [{}, None], [{"curve": {}, "fixed_seconds": []}, None]], ids=str)
def test_what_nobody_has_learned_is_refused(learned: list) -> None:
    anew = Rebalancer([6, 6])
    with pytest.raises(ValueError, match="expected"):
        anew.go_on_with(learned)
    assert anew.batch_sizes == [6, 6]
