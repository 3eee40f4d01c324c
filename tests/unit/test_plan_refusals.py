# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A bad plan is refused with a message that says where it is wrong, what was found and expected, and what to do."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plan_documents import document

from accelerate_lshdp.documents.plan import PLAN_VARIABLE, Batch, Cluster, Node, Plan, PlanError, Strategy


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
        [", ".join(f'"{strategy}"' for strategy in Strategy), 'Did you mean "lsdp"?'],
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
        ["found accumulation_steps [1, 5]", "set batch.allow_unequal_accumulation"],
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
    (
        "lossy format of a world-sharded strategy",
        lambda d: (d.update(strategy="fsdp"), d["communication"].update(dtype="int8")),
        "communication.dtype: ",
        ['found "int8" with strategy "fsdp"', '"group_sharding" or "lsdp"'],
    ),
    (
        "rank of another format",
        lambda d: d["communication"].update(dtype="int8", powersgd_rank=2),
        "communication.powersgd_rank: ",
        ["found 2 with dtype int8", 'belongs to "powersgd"'],
    ),
    (
        "powersgd of rank 0",
        lambda d: d["communication"].update(dtype="powersgd", powersgd_rank=0),
        "communication.powersgd_rank: ",
        ["found 0"],
    ),
    (
        "negative warm-up",
        lambda d: d["communication"].update(dtype="powersgd", powersgd_warmup_steps=-1),
        "communication.powersgd_warmup_steps: ",
        ["found -1"],
    ),
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


def test_error_keeps_its_place_across_processes() -> None:
    error = PlanError("found this", path="batch.total", source="plan.json")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "plan.json: batch.total: found this"
    assert isinstance(error, ValueError)
    assert str(PlanError("alone")) == "alone"
