# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A plan survives every way of writing it down, is compared by what changes training and checked against its run."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_documents import document

from accelerate_lshdp.documents.plan import (
    PLAN_VARIABLE,
    Batch,
    Cluster,
    Communication,
    Link,
    Node,
    Plan,
    PlanError,
    RankBatch,
    Strategy,
)


numbers = st.floats(allow_nan=False, allow_infinity=False)
leaves = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | numbers | st.text(max_size=8)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
annotations = st.none() | st.dictionaries(st.text(max_size=6), values, max_size=3)
names = st.none() | st.text(min_size=1, max_size=8).filter(str.strip)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    batch = cluster = None
    nodes = draw(st.lists(st.builds(Node, st.integers(1, 3), names, names), min_size=1, max_size=3))
    if draw(st.booleans()):
        positive = st.floats(1e-9, 1e15)
        link = draw(st.none() | st.builds(Link, positive, st.floats(0, 10) | st.just(0)))
        cluster = Cluster(tuple(nodes), link)
    if draw(st.booleans()):
        unequal = draw(st.booleans())
        shared = draw(st.integers(1, 8))
        steps = st.integers(1, 8) if unequal else st.just(shared)
        world = range(sum(node.ranks for node in nodes))
        ranks = tuple(RankBatch(rank, draw(st.integers(1, 2**20)), draw(steps)) for rank in world)
        batch = Batch(ranks, unequal)
    communication = Communication(draw(st.sampled_from(["fp32", "bf16"])))
    kinds = st.sampled_from(list(Strategy))
    return Plan(draw(kinds), batch, communication, cluster, *(draw(annotations) for _ in range(3)))


@settings(max_examples=150, deadline=None)
@given(plan=plans())
def test_round_trips(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.save(path)
    again = [
        Plan.from_dict(plan.to_dict()),
        Plan.from_json(plan.to_json()),
        Plan.load(path),
        Plan.from_environment({PLAN_VARIABLE: str(path)}),
        Plan.from_environment({PLAN_VARIABLE: plan.to_json()}),
        pickle.loads(pickle.dumps(plan)),
        copy.deepcopy(plan),
    ]
    for other in again:
        assert other == plan
        assert hash(other) == hash(plan)
        assert other.digest() == plan.digest()
        assert other.to_json() == plan.to_json()
        assert str(other) == str(plan)


def test_full_document_is_read_and_written_unchanged() -> None:
    plan = Plan.from_dict(document())
    assert plan.to_dict() == document()
    assert plan.strategy is Strategy.LSDP
    assert plan.cluster.link == Link(1e9, 1e-4)
    assert plan.cluster.node_sizes == [1, 1]


def test_hand_written_minimum_takes_the_defaults() -> None:
    ranks = [{"rank": 1, "micro_batch_size": 5}, {"rank": 0, "micro_batch_size": 11}]
    plan = Plan.from_dict({"version": 1, "strategy": "lsdp", "batch": {"total": 16, "ranks": ranks}})
    assert plan == Plan.from_batch_sizes([11, 5], strategy="lsdp")
    assert plan.communication.dtype == "fp32"
    for absent in ({}, {"batch": None}):
        assert Plan.from_dict({"version": 1, "strategy": "ddp", **absent}) == Plan.equal(strategy="ddp")


def test_batch_sizes_and_micro_batches() -> None:
    plan = Plan.from_batch_sizes([(8, 2), (5, 2)], strategy="lsdp")
    assert (plan.world_size, plan.total_batch_size) == (2, 26)
    assert (plan.batch_sizes, plan.micro_batches) == ([16, 10], [(8, 2), (5, 2)])
    assert plan.has_accumulation and not Plan.from_batch_sizes([3, (2, 1), [4, 1]]).has_accumulation
    assert Plan.from_batch_sizes([3, (2, 2)], allow_unequal_accumulation=True).batch_sizes == [3, 4]
    assert Plan.from_batch_sizes(np.array([3, 4])) == Plan.from_batch_sizes([3, 4])
    assert type(Plan.from_batch_sizes(np.array([3, 4])).batch_sizes[0]) is int


def test_equal_plan_has_no_sizes() -> None:
    plan = Plan.equal(strategy="fsdp", communication_dtype="bf16")
    assert plan.strategy is Strategy.FSDP and plan.communication.dtype == "bf16"
    assert plan.batch is plan.world_size is plan.total_batch_size is plan.batch_sizes is plan.micro_batches is None
    assert not plan.has_accumulation
    plan.check(3, [[0, 1, 2]], [1, 2])


def test_strategy_properties() -> None:
    published = ("ddp", "zero2", "fsdp", "fsdp_offload", "group_sharding", "lsdp")
    assert {str(strategy) for strategy in Strategy} >= set(published)  # plans that are stored name them
    assert Strategy.ZERO1.carried_out_as is Strategy.ZERO2 and Strategy.ZERO2.carried_out_as is Strategy.ZERO2
    assert f"{Strategy.LSDP}" == "lsdp" and Strategy.LSDP == "lsdp"
    having = {
        name: [strategy for strategy in published if getattr(Strategy(strategy), name)]
        for name in ("is_world_sharded", "is_node_sharded", "is_offloaded")
    }
    assert having == {
        "is_world_sharded": ["zero2", "fsdp", "fsdp_offload"],
        "is_node_sharded": ["group_sharding", "lsdp"],
        "is_offloaded": ["fsdp_offload", "lsdp"],
    }


def test_plan_is_immutable_and_keeps_its_own_copy() -> None:
    predicted = {"step_seconds": 1.0}
    plan = Plan.from_batch_sizes([2, 1], predicted=predicted)
    predicted["step_seconds"] = 2.0
    plan.to_dict()["predicted"]["step_seconds"] = 3.0
    assert plan.predicted == {"step_seconds": 1.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.strategy = Strategy.DDP


def test_digest_covers_what_changes_training_and_nothing_else() -> None:
    base = Plan.from_dict(document())
    same = document()
    for name in ("profile", "predicted", "certificate"):
        del same[name]
    same["batch"]["ranks"].reverse()
    del same["batch"]["allow_unequal_accumulation"]
    assert Plan.from_dict(same).digest() == base.digest()
    assert len(base.digest()) == 64 and int(base.digest(), 16)
    changes: list[Callable[[dict[str, Any]], Any]] = [
        lambda d: d.update(strategy="ddp"),
        lambda d: d.pop("batch"),
        lambda d: d["batch"].update(allow_unequal_accumulation=True),
        lambda d: d["batch"].update(ranks=[{"rank": 0, "micro_batch_size": 5}, {"rank": 1, "micro_batch_size": 11}]),
        lambda d: d["communication"].update(dtype="bf16"),
        lambda d: d["cluster"].pop("link"),
        lambda d: d.pop("cluster"),
    ]
    assert Link(1_000_000_000, 0) == Link(1e9) and repr(Link(1_000_000_000, 0)) == repr(Link(1e9))
    digests = {base.digest()}
    for change in changes:
        changed = document()
        change(changed)
        digests.add(Plan.from_dict(changed).digest())
    assert len(digests) == len(changes) + 1


def test_table() -> None:
    assert str(Plan.from_dict(document())) == "\n".join(
        [
            "Plan: strategy lsdp, communication fp32",
            " rank  node  micro-batch  accumulation  batch   share",
            "    0     0           11             1     11   68.8%",
            "    1     1            5             1      5   31.2%",
            "total                                      16  100.0%",
            "predicted: step_seconds 0.5, idle_fraction 0.02",
        ]
    )
    assert "equal batches" in str(Plan.equal()) and "lsdp" in str(Plan.equal())


def test_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document()), encoding="utf-8-sig")
    assert Plan.load(path) == Plan.from_dict(document())


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PLAN_VARIABLE, raising=False)
    assert Plan.from_environment() is None
    assert Plan.from_environment({}) is None
    monkeypatch.setenv(PLAN_VARIABLE, ' {"version": 1, "strategy": "zero2"}')
    assert Plan.from_environment() == Plan.equal(strategy="zero2")
    monkeypatch.setenv(PLAN_VARIABLE, " ")
    with pytest.raises(PlanError, match="ACCELERATE_LSHDP_PLAN: found nothing, expected a path or JSON"):
        Plan.from_environment()


def test_save_is_atomic_and_leaves_nothing_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    first, second = Plan.from_batch_sizes([1, 2]), Plan.from_batch_sizes([2, 1])
    first.save(path)
    seen = []

    def interrupted(source: Path, target: Path) -> None:
        seen.append(Plan.load(source))
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(PlanError, match=r"plan.json: cannot write the plan \(Input/output error\)"):
            second.save(path)
    assert seen == [second]  # it was complete before it could get its final name
    assert Plan.load(path) == first
    second.save(path)
    assert Plan.load(path) == second
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]
    with pytest.raises(PlanError, match="cannot write the plan"):
        first.save(tmp_path / "nowhere" / "plan.json")
    with pytest.raises(PlanError, match="cannot write the plan"):
        first.save(tmp_path)


def test_plan_fits_its_run() -> None:
    Plan.from_dict(document()).check(2, [[0], [1]], [1, 1])
    unequal = Plan.from_batch_sizes([(4, 1), (2, 2), (2, 2)], allow_unequal_accumulation=True)
    unequal.check(3, [[0], [1, 2]], [1, 2])


@pytest.mark.parametrize(
    ("plan", "run", "message"),
    [
        (
            Plan.from_batch_sizes([4, 2]),
            (3, [[0], [1], [2]], [1, 1, 1]),
            "batch.ranks: found batch sizes for 2 ranks, expected 3, the processes of this run. Launch 2 processes",
        ),
        (
            Plan.from_batch_sizes([4, 2, 2], cluster=Cluster((Node(1), Node(2)))),
            (3, [[0, 1], [2]], [2, 1]),
            "cluster.nodes: found nodes of [1, 2] ranks, expected [2, 1], the nodes of this run",
        ),
        (
            Plan(cluster=Cluster((Node(1), Node(2)))),
            (3, [[0, 1], [2]], [2, 1]),
            "cluster.nodes: found nodes of [1, 2] ranks, expected [2, 1]",
        ),
        (
            Plan.from_batch_sizes([(4, 1), (2, 2), (2, 2)], allow_unequal_accumulation=True),
            (3, [[0, 1], [2]], [2, 1]),
            "batch.ranks: found accumulation_steps [1, 2] on ranks [0, 1], which share one copy of the parameters",
        ),
        (
            Plan.from_batch_sizes([(4, 1), (2, 2)], allow_unequal_accumulation=True, strategy="fsdp"),
            (2, [[0, 1]], [1, 1]),
            'under "fsdp", expected equal numbers inside the group',
        ),
    ],
)
def test_plan_that_does_not_fit_its_run_is_refused(plan: Plan, run: tuple, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan.check(*run)
    assert message in str(caught.value)


def test_refusal_of_a_loaded_plan_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    Plan.from_batch_sizes([4, 2]).save(path)
    with pytest.raises(PlanError) as caught:
        Plan.load(path).check(1, [[0]], [1])
    assert str(caught.value).startswith(f"{path}: batch.ranks: found batch sizes for 2 ranks")
