# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Predicted steps of models whose units are kept in different ways: against uniform ones, and by hand."""

from __future__ import annotations

import pytest

from accelerate_lshdp.documents.network import LinkCost
from accelerate_lshdp.documents.placement import UnitPlacement, UnitStore
from accelerate_lshdp.planning import RankProfile, TimeCurve
from accelerate_lshdp.planning.cost.cluster_model import ClusterModel, CommunicationCost, ModelSize
from accelerate_lshdp.planning.cost.placed_step import StoreCosts, predict_placed_step
from accelerate_lshdp.planning.cost.strategy_time import predict_step


#: Two units of 10 MB, each of which travels in 0.1 s and is computed in 0.1 s forward and 0.2 s backward.
MODEL = ModelSize(20e6, 20e6, (10e6, 10e6))
WIRE = LinkCost(0.0, 1e-8)
NODE, WORLD = UnitPlacement(store=UnitStore.NODE), UnitPlacement(store=UnitStore.WORLD)
TO_NODE = UnitPlacement(store=UnitStore.WORLD_TO_NODE)


def rank(optimizer: float = 0.0) -> RankProfile:
    return RankProfile(TimeCurve([1, 8], [0.15, 1.2]), 8, fixed_seconds=optimizer)


def predict(placements, nodes=(1, 1), root=None, model=MODEL, batch=(4, 1), profiles=None, loads=None, **cluster):
    costs = StoreCosts(profiles or [rank()] * sum(nodes), ClusterModel(nodes, WIRE, **cluster), loads)
    root = root or placements[0]
    return predict_placed_step(
        placements,
        root,
        [batch] * sum(nodes),
        model,
        {placement.store: costs for placement in (*placements, root)},
        wire_bytes=model.gradient_bytes,
    )


@pytest.mark.parametrize("store", [UnitStore.WORLD, UnitStore.WORLD_KEPT])
@pytest.mark.parametrize("batch", [(4, 1), (2, 3)])
@pytest.mark.parametrize("nodes", [(1, 1), (2, 2), (1, 2)])
def test_a_model_that_is_sharded_over_the_world_takes_as_long_unit_by_unit(store, batch, nodes) -> None:
    model = ModelSize(26e6, 26e6, (10e6, 10e6))
    costs = (CommunicationCost(1e-9, 1e-3, 0.0, 1e-10, 1e-3, 2e-9),) * len(nodes)
    units = [UnitPlacement(store=store)] * 2
    mixed = predict(
        units, nodes, model=model, batch=batch, profiles=[rank(0.3)] * sum(nodes), communication_costs=costs
    )
    uniform = predict_step(
        str(store.strategy),
        [rank(0.3)] * sum(nodes),
        [batch] * sum(nodes),
        model,
        ClusterModel(nodes, WIRE, costs),
        optimizer_shares=[1.0] * sum(nodes),
    )
    assert mixed.seconds == pytest.approx(uniform.seconds)
    assert mixed.bytes_between_nodes == pytest.approx(uniform.bytes_between_nodes)


def test_what_travels_beside_the_computing_is_hidden_by_it() -> None:
    # Gathered and reduced units stop the computing: 0.05 s for each of three exchanges of a unit.
    assert predict([WORLD, WORLD]).seconds == pytest.approx(0.6 + 2 * 0.15)
    # The second unit's gradient (0.1 s) travels beside the exchanges and the backward of the first one. The gather
    # takes twice as long, as both share the link; then 0.05 s of the gradient are left, and pass beside the backward.
    assert predict([WORLD, NODE]).seconds == pytest.approx(0.6 + 0.05 + 0.1 + 0.05)
    # Its backward is the last one: nothing is left to hide it.
    assert predict([NODE, WORLD], root=WORLD).seconds == pytest.approx(0.6 + 0.15 + 0.1)
    assert predict([WORLD, NODE]).bytes_between_nodes == pytest.approx([15e6 + 10e6] * 2)


def test_recomputing_repeats_the_forward_of_its_unit() -> None:
    again = UnitPlacement(store=UnitStore.WORLD, checkpoint=True)
    assert predict([again, WORLD]).seconds == pytest.approx(predict([WORLD, WORLD]).seconds + 0.1)


def test_a_unit_that_keeps_the_shards_of_its_node_is_gathered_between_nodes_once() -> None:
    less = (
        predict([WORLD, WORLD], (2, 2)).bytes_between_nodes[0]
        - predict([WORLD, TO_NODE], (2, 2)).bytes_between_nodes[0]
    )
    assert less == pytest.approx(5e6)
    inside = (CommunicationCost(inside_seconds_per_byte=1e-8),) * 2
    free = predict([WORLD, TO_NODE], (2, 2)).seconds
    # Inside the node every rank still gathers and reduces as often: three times 10 MB of the one other rank.
    assert predict([WORLD, TO_NODE], (2, 2), communication_costs=inside).seconds == pytest.approx(free + 6 * 0.1)


def test_a_unit_copies_what_it_gathers_and_what_it_keeps() -> None:
    copying = (CommunicationCost(copy_seconds_per_byte=1e-9),) * 2
    # Twice what is gathered and once the gradient, by the two ranks of a node one after the other; then half of it.
    for store, copied in ((WORLD, 3 * 10e6), (TO_NODE, 3.5 * 10e6)):
        seconds = [predict([WORLD, store], (2, 2), communication_costs=c).seconds for c in (copying, ())]
        others = 2 * 3 * 10e6 * 1e-9  # of the first unit; there is nothing else
        assert seconds[0] - seconds[1] == pytest.approx(others + 2 * copied * 1e-9)


def test_the_optimizer_and_the_load_of_sending_are_those_of_the_units() -> None:
    costs = {
        UnitStore.NODE: StoreCosts([rank(0.4)] * 2, ClusterModel((1, 1), WIRE), (0.2, 0.2)),
        UnitStore.WORLD: StoreCosts([rank(0.2)] * 2, ClusterModel((1, 1), WIRE), (0.2, 0.2)),
    }
    predicted = predict_placed_step([WORLD, NODE], WORLD, [(4, 1)] * 2, MODEL, costs, wire_bytes=20e6)
    assert [part.optimizer_seconds for part in predicted.ranks] == pytest.approx([0.3, 0.3])
    assert predicted.seconds == pytest.approx(predict([WORLD, NODE]).seconds + 0.3 + 0.1)


def test_what_does_not_fit_together_is_an_error() -> None:
    with pytest.raises(ValueError, match="found 1 placements of 2 units"):
        predict([WORLD])
    with pytest.raises(ValueError, match="found devices with streams"):
        predict([WORLD, NODE], streams=True)
