# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A plan survives every way of writing it down; a bad one is refused with a message that says where and what to do."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerate_lshdp.plan import (
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


def document() -> dict[str, Any]:
    """A valid plan with every section, as JSON values."""
    return {
        "version": 1,
        "strategy": "lsdp",
        "batch": {
            "total": 16,
            "allow_unequal_accumulation": False,
            "ranks": [
                {"rank": 0, "micro_batch_size": 11, "accumulation_steps": 1},
                {"rank": 1, "micro_batch_size": 5, "accumulation_steps": 1},
            ],
        },
        "communication": {"dtype": "fp32"},
        "cluster": {
            "nodes": [
                {"ranks": 1, "address": "10.0.0.1", "device": "cuda"},
                {"ranks": 1, "address": None, "device": None},
            ],
            "link": {"bandwidth_bits_per_second": 1e9, "latency_seconds": 1e-4},
        },
        "profile": {"curves": [[1, 0.5], [2, 1.0]]},
        "predicted": {"step_seconds": 0.5, "idle_fraction": 0.02},
        "certificate": {"bound": 3},
    }


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
    assert [str(strategy) for strategy in Strategy] == [
        "ddp",
        "zero2",
        "fsdp",
        "fsdp_offload",
        "group_sharding",
        "lsdp",
    ]
    assert f"{Strategy.LSDP}" == "lsdp" and Strategy.LSDP == "lsdp"
    having = {
        name: [str(strategy) for strategy in Strategy if getattr(strategy, name)]
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


# (what is wrong, how the valid document is changed, where the message says it is, what else the message must say)
Change = Callable[[dict[str, Any]], Any]
BAD: list[tuple[str, Change, str, list[str]]] = [
    ("no version", lambda d: d.pop("version"), "version: ", ['Add "version"']),
    ("version 2", lambda d: d.update(version=2), "version: ", ["found 2, expected 1", "Write the plan again"]),
    ("version text", lambda d: d.update(version="1"), "version: ", ['found "1" (a string), expected 1']),
    ("version true", lambda d: d.update(version=True), "version: ", ["found true (a boolean), expected 1"]),
    ("version 1.0", lambda d: d.update(version=1.0), "version: ", ["found 1.0 (a float), expected 1"]),
    ("no strategy", lambda d: d.pop("strategy"), "strategy: ", ['Add "strategy"']),
    (
        "strategy misspelt",
        lambda d: d.update(strategy="lspd"),
        "strategy: ",
        ['"ddp", "zero2", "fsdp", "fsdp_offload", "group_sharding", "lsdp"', 'Did you mean "lsdp"?'],
    ),
    ("strategy in capitals", lambda d: d.update(strategy="FSDP"), "strategy: ", ['Did you mean "fsdp"?']),
    ("strategy unlike any", lambda d: d.update(strategy="qqq"), "strategy: ", ['found "qqq"', "Choose one of them"]),
    ("strategy null", lambda d: d.update(strategy=None), "strategy: ", ["found null"]),
    ("strategy list", lambda d: d.update(strategy=["lsdp"]), "strategy: ", ["found a list of 1"]),
    ("unknown key", lambda d: d.update(batches={}), "batches: ", ["an unknown key", 'Did you mean "batch"?']),
    ("odd unknown key", lambda d: d.update({"a b": 1}), '["a b"]: ', ["an unknown key", "Remove it"]),
    ("batch list", lambda d: d.update(batch=[11, 5]), "batch: ", ["found a list of 2, expected an object"]),
    ("batch unknown key", lambda d: d["batch"].update(size=3), "batch.size: ", ["an unknown key"]),
    ("no total", lambda d: d["batch"].pop("total"), "batch.total: ", ['Add "total"']),
    ("no ranks", lambda d: d["batch"].pop("ranks"), "batch.ranks: ", ['Add "ranks"']),
    ("empty ranks", lambda d: d["batch"].update(ranks=[]), "batch.ranks: ", ["found an empty list"]),
    ("ranks object", lambda d: d["batch"].update(ranks={}), "batch.ranks: ", ["found an object, expected a list"]),
    ("total wrong", lambda d: d["batch"].update(total=17), "batch.total: ", ["found 17, expected 16", "11 + 5"]),
    ("total true", lambda d: d["batch"].update(total=True), "batch.total: ", ["found true (a boolean)"]),
    ("total float", lambda d: d["batch"].update(total=16.0), "batch.total: ", ["found 16.0 (a float)"]),
    (
        "total sum huge",
        lambda d: (
            [entry.update(micro_batch_size=2**31) for entry in d["batch"]["ranks"]] + [d["batch"].update(total=4)]
        ),
        "batch.total: ",
        ["found 4294967296 samples, expected at most 2147483648"],
    ),
    (
        "unequal flag text",
        lambda d: d["batch"].update(allow_unequal_accumulation="yes"),
        "batch.allow_unequal_accumulation: ",
        ['found "yes" (a string), expected true or false'],
    ),
    (
        "unequal flag number",
        lambda d: d["batch"].update(allow_unequal_accumulation=1),
        "batch.allow_unequal_accumulation: ",
        ["found 1, expected true or false"],
    ),
    (
        "unequal counts",
        lambda d: d["batch"]["ranks"][1].update(micro_batch_size=1, accumulation_steps=5),
        "batch.ranks: ",
        ["found accumulation_steps [1, 5]", "set allow_unequal_accumulation"],
    ),
    ("rank twice", lambda d: d["batch"]["ranks"][1].update(rank=0), "batch.ranks: ", ["found rank 0 twice"]),
    ("rank missing", lambda d: d["batch"]["ranks"][1].update(rank=2), "batch.ranks: ", ["no rank 1"]),
    ("rank negative", lambda d: d["batch"]["ranks"][1].update(rank=-1), "batch.ranks[1].rank: ", ["found -1"]),
    ("rank null", lambda d: d["batch"]["ranks"][1].update(rank=None), "batch.ranks[1].rank: ", ["found null"]),
    ("rank left out", lambda d: d["batch"]["ranks"][1].pop("rank"), "batch.ranks[1].rank: ", ['Add "rank"']),
    ("rank a number", lambda d: d["batch"]["ranks"].append(5), "batch.ranks[2]: ", ["found 5, expected an object"]),
    (
        "rank unknown key",
        lambda d: d["batch"]["ranks"][0].update(micro_batch=3),
        "batch.ranks[0].micro_batch: ",
        ['Did you mean "micro_batch_size"?'],
    ),
    ("communication null", lambda d: d.update(communication=None), "communication: ", ["found null"]),
    ("dtype unknown", lambda d: d["communication"].update(dtype="fp8"), "communication.dtype: ", ['"fp32", "bf16"']),
    ("dtype near", lambda d: d["communication"].update(dtype="BF16"), "communication.dtype: ", ['mean "bf16"?']),
    ("dtype null", lambda d: d["communication"].update(dtype=None), "communication.dtype: ", ["found null"]),
    ("communication key", lambda d: d["communication"].update(bits=8), "communication.bits: ", ["an unknown key"]),
    ("cluster list", lambda d: d.update(cluster=[]), "cluster: ", ["found an empty list, expected an object"]),
    ("no nodes", lambda d: d["cluster"].pop("nodes"), "cluster.nodes: ", ['Add "nodes"']),
    ("empty nodes", lambda d: d["cluster"].update(nodes=[]), "cluster.nodes: ", ["found an empty list"]),
    ("node text", lambda d: d["cluster"].update(nodes=["a"]), "cluster.nodes[0]: ", ['found "a" (a string)']),
    ("node empty", lambda d: d["cluster"]["nodes"][1].update(ranks=0), "cluster.nodes[1].ranks: ", ["found 0"]),
    ("node key", lambda d: d["cluster"]["nodes"][0].update(gpu=1), "cluster.nodes[0].gpu: ", ["an unknown key"]),
    ("address", lambda d: d["cluster"]["nodes"][0].update(address=7), "cluster.nodes[0].address: ", ["found 7"]),
    ("device", lambda d: d["cluster"]["nodes"][0].update(device=" "), "cluster.nodes[0].device: ", ['found " "']),
    (
        "cluster against batch",
        lambda d: d["cluster"]["nodes"][0].update(ranks=2),
        "cluster.nodes: ",
        ["found 3 ranks on the nodes [2, 1], expected the 2 of batch.ranks"],
    ),
    ("link number", lambda d: d["cluster"].update(link=1e9), "cluster.link: ", ["expected an object"]),
    ("link key", lambda d: d["cluster"]["link"].update(speed=1), "cluster.link.speed: ", ["an unknown key"]),
    (
        "no bandwidth",
        lambda d: d["cluster"]["link"].pop("bandwidth_bits_per_second"),
        "cluster.link.bandwidth_bits_per_second: ",
        ['Add "bandwidth_bits_per_second"'],
    ),
    (
        "bandwidth zero",
        lambda d: d["cluster"]["link"].update(bandwidth_bits_per_second=0),
        "cluster.link.bandwidth_bits_per_second: ",
        ["found 0, expected a finite number above 0"],
    ),
    (
        "latency negative",
        lambda d: d["cluster"]["link"].update(latency_seconds=-1.5),
        "cluster.link.latency_seconds: ",
        ["found -1.5 (a float), expected a finite number of at least 0"],
    ),
    (
        "latency boolean",
        lambda d: d["cluster"]["link"].update(latency_seconds=True),
        "cluster.link.latency_seconds: ",
        ["found true (a boolean)"],
    ),
    ("profile list", lambda d: d.update(profile=[1]), "profile: ", ["found a list of 1, expected an object"]),
    ("predicted text", lambda d: d.update(predicted="fast"), "predicted: ", ['found "fast" (a string)']),
    ("certificate number", lambda d: d.update(certificate=3), "certificate: ", ["found 3, expected an object"]),
    ("NaN", lambda d: d["predicted"].update(idle_fraction=math.nan), "predicted.idle_fraction: ", ["found nan"]),
    ("Infinity", lambda d: d["profile"]["curves"][1].append(math.inf), "profile.curves[1][2]: ", ["found inf"]),
    ("NaN total", lambda d: d["batch"].update(total=math.nan), "batch.total: ", ["found nan"]),
    ("75-bit integer", lambda d: d["certificate"].update(bound=2**75), "certificate.bound: ", ["fits 64 bits"]),
]
for _key in ("micro_batch_size", "accumulation_steps"):
    for _value, _found in [
        (0, "found 0, expected an integer from 1 to 2147483648"),
        (-3, "found -3, expected"),
        (2**31 + 1, "found 2147483649, expected"),
        (True, "found true (a boolean), expected"),
        (4.0, "found 4.0 (a float), expected"),
        ("4", 'found "4" (a string), expected'),
        (None, "found null, expected"),
        ([4], "found a list of 1, expected"),
        ({}, "found an object, expected"),
    ]:
        BAD.append(
            (
                f"{_key} {_found}",
                lambda d, key=_key, value=_value: d["batch"]["ranks"][1].update({key: value}),
                f"batch.ranks[1].{_key}: ",
                [_found, "Correct this value"],
            )
        )


@pytest.mark.parametrize(("change", "where", "says"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_document_is_refused_with_file_path_finding_and_expectation(
    change: Change, where: str, says: list[str], tmp_path: Path
) -> None:
    bad = document()
    change(bad)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(bad))
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert str(caught.value).startswith(f"{path}: {where}found ")
    assert ", expected " in str(caught.value)
    for words in says:
        assert words in str(caught.value)
    with pytest.raises(PlanError) as direct:
        Plan.from_dict(bad)
    assert str(direct.value) == str(caught.value).removeprefix(f"{path}: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found nothing, expected a JSON object"),
        (" \n\t", "found nothing, expected a JSON object"),
        ("version: 1\nstrategy: lsdp\n", "not JSON (Expecting value, line 1 column 1), expected a plan"),
        ('{"version": 1,}', "found text that is not JSON"),
        ('{"version": 1', "found text that is not JSON"),
        ("[1, 2]", "found a list of 2, expected an object"),
        ("null", "found null, expected an object"),
        ('{"version": 1, "strategy": "ddp", "strategy": "lsdp"}', 'found the key "strategy" twice in one object'),
        (
            '{"version": 1, "strategy": "ddp", "batch": {"total": 1, "ranks": [{"rank": 0, "rank": 0}]}}',
            'batch.ranks[0]: found the key "rank" twice in one object',
        ),
        (
            '{"version": 1, "strategy": "ddp", "profile": {"a": {"b": 1, "b": 1}}}',
            'profile.a: found the key "b" twice',
        ),
        ('{"version": 1, "strategy": "ddp", "profile": {"a": NaN}}', "profile.a: found nan, expected a finite number"),
        ('{"version": 1, "strategy": "ddp", "profile": {"a": -Infinity}}', "profile.a: found -inf, expected a finite"),
        ('{"version": 1, "strategy": "ddp", "profile": {"a": 1e999}}', "profile.a: found inf, expected a finite"),
        ('{"version": 1, "strategy": "ddp", "profile": ' + '{"a":' * 80 + "1" + "}" * 81, "more than 64 levels"),
        ("[" * 200_000, "more than 64 levels"),
        ("9" * 5000, "thousands of digits"),
    ],
)
def test_bad_text_is_refused_from_a_file_and_from_the_environment(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    for read in (lambda: Plan.load(path), lambda: Plan.from_environment({PLAN_VARIABLE: str(path)})):
        with pytest.raises(PlanError) as caught:
            read()
        assert str(caught.value).startswith(f"{path}: ")
        assert message in str(caught.value)
    if text.startswith("{"):
        with pytest.raises(PlanError) as caught:
            Plan.from_environment({PLAN_VARIABLE: text})
        assert str(caught.value).startswith("ACCELERATE_LSHDP_PLAN: ")
        assert message in str(caught.value)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="missing.json: found no such file, expected a plan"):
        Plan.load(tmp_path / "missing.json")
    with pytest.raises(PlanError, match="found a directory, expected a plan file"):
        Plan.load(tmp_path)
    latin = tmp_path / "latin.json"
    latin.write_bytes('{"version": 1, "strategy": "é"}'.encode("latin-1"))
    with pytest.raises(PlanError, match=r"latin.json: found bytes that are not UTF-8 \(at offset 28\)"):
        Plan.load(latin)
    with pytest.raises(PlanError, match="cannot read it"):
        Plan.load("plan\0.json")
    with pytest.raises(PlanError, match="cannot read it"):
        Plan.load("p" * 5000)


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


@pytest.mark.parametrize(
    ("sizes", "keywords", "message"),
    [
        ([], {}, "batch.ranks: found an empty tuple"),
        ([0, 1], {}, "batch.ranks[0].micro_batch_size: found 0"),
        ([4, (2, 0)], {}, "batch.ranks[1].accumulation_steps: found 0"),
        ([4, True], {}, "batch.ranks[1].micro_batch_size: found true (a boolean)"),
        ([4, 2.0], {}, "batch.ranks[1].micro_batch_size: found 2.0 (a float)"),
        (["4", 2], {}, 'batch.ranks[0].micro_batch_size: found "4" (a string)'),
        ([4, (2, 1, 1)], {}, "batch.ranks[1]: found a tuple of 3, expected a size or (size, accumulation steps)"),
        ([4, (2, 2)], {}, "batch.ranks: found accumulation_steps [1, 2], expected the same number on every rank"),
        ([(2**20, 2**20)], {}, "batch.ranks[0]: found 1048576 x 1048576 samples, expected at most 2147483648"),
        ("42", {}, 'found "42" (a string) for the batch sizes, expected a list'),
        ({0: 4}, {}, "found an object for the batch sizes, expected a list"),
        (4, {}, "found 4 for the batch sizes, expected a list"),
        ([4], {"strategy": "zero3"}, "strategy: found"),
        ([4], {"communication_dtype": "fp16"}, 'communication.dtype: found "fp16" (a string)'),
        ([4], {"cluster": {"nodes": []}}, "cluster: found an object, expected a Cluster"),
        ([4], {"predicted": {"a": (1, 2)}}, "predicted.a: found a tuple of 2"),
        ([4], {"predicted": {"a": np.int64(1)}}, "predicted.a: found a Python int64"),
        ([4], {"predicted": {1: 1}}, "predicted: found the key 1, expected keys that are strings"),
    ],
)
def test_bad_arguments_are_refused(sizes: Any, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_batch_sizes(sizes, **keywords)
    assert message in str(caught.value)


def test_bad_sections_are_refused() -> None:
    with pytest.raises(PlanError, match="ranks: found a tuple of 1, expected a tuple with at least one RankBatch"):
        Batch((4,))
    with pytest.raises(PlanError, match="nodes: found null, expected a tuple with at least one Node"):
        Cluster(None)
    with pytest.raises(PlanError, match="link: found .* expected a Link"):
        Cluster((Node(1),), link=1e9)
    with pytest.raises(PlanError, match="batch: found a list of 2, expected a Batch"):
        Plan(batch=[4, 2])
    with pytest.raises(PlanError, match="communication: found null, expected a Communication"):
        Plan(communication=None)


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


def test_error_keeps_its_place_across_processes() -> None:
    error = PlanError("found this", path="batch.total", source="plan.json")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "plan.json: batch.total: found this"
    assert isinstance(error, ValueError)
    assert str(PlanError("alone")) == "alone"
