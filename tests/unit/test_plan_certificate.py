# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A plan file whose batch, profile or certificate was changed after it was made is found out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accelerate_lshdp.cli.plan_prediction import predict
from accelerate_lshdp.documents.cluster import Cluster, Node
from accelerate_lshdp.documents.plan import Plan
from accelerate_lshdp.documents.profile import Profile, write_profiles
from accelerate_lshdp.documents.profile_sections import MeasuredRank, MessageTimes, Network, ProfiledScript
from accelerate_lshdp.documents.strategy import Strategy
from accelerate_lshdp.planning import (
    CertificateError,
    MemoryCurve,
    RankProfile,
    TimeCurve,
    plan_fixed_total,
    plan_max_throughput,
)
from accelerate_lshdp.planning.proofs.plan import verify_plan


def a_profile() -> Profile:
    """Two ranks, the second twice as slow, with buckets, memory and a network."""

    def rank(number: int) -> MeasuredRank:
        slow = 1.0 + number
        return MeasuredRank(
            rank=number,
            time=TimeCurve([1, 8], [1.0 * slow, 8.0 * slow]),
            spread=(0.01, 0.01),
            max_micro_batch_size=8,
            limited_by="memory",
            device="a processor",
            optimizer_seconds=0.25,
            memory=MemoryCurve([1, 8], [100, 800]),
            memory_limit_bytes=650,
            bucket_ready=(TimeCurve([1, 8], [0.5 * slow, 4.0 * slow]),),
            communication_load_seconds=0.125,
            accumulation_overhead_seconds=0.0625,
        )

    return Profile(
        strategy=Strategy.DDP,
        subject=ProfiledScript("train.py", (), 100, 400),
        cluster=Cluster((Node(1), Node(1))),
        ranks=(rank(0), rank(1)),
        bucket_bytes=(400,),
        network=Network(MessageTimes(0.001, 0.001, ((8, 0.01),)), MessageTimes(0.25, 0.01, ((100, 1.25),))),
        measured_seconds=5.0,
        versions={"torch": "2.13.0"},
    )


def plan_of(profile: Profile, kind: str) -> Plan:
    ranks = profile.rank_profiles()
    buckets = None
    if kind == "maximum throughput":
        result = plan_max_throughput(ranks, profile.communication_seconds())
    else:
        buckets = profile.bucket_seconds()
        total, groups = (18, [[0, 1]]) if kind == "accumulation in step" else (17, None)
        result = plan_fixed_total(ranks, total, allow_accumulation=True, bucket_seconds=buckets, shard_groups=groups)
    communication = 0.0 if buckets else profile.communication_seconds()
    predicted = predict(ranks, result.micro_batches, buckets, communication)
    return Plan.from_batch_sizes(
        result.micro_batches,
        strategy=profile.strategy,
        allow_unequal_accumulation=True,
        cluster=profile.cluster,
        profile=profile.to_dict(),
        predicted={
            "step_seconds": predicted.step_seconds,
            "compute_seconds": predicted.compute_seconds,
            "idle_fraction": predicted.idle_fraction,
            "memory_bytes": predicted.memory_bytes,
        },
        certificate=result.certificate,
    )


def short_plan() -> Plan:
    """As the quickstart makes it."""
    profiles = [RankProfile(TimeCurve([1, 16], [1.0, 16.0]), 16), RankProfile(TimeCurve([1, 16], [2.0, 32.0]), 16)]
    result = plan_fixed_total(profiles, 12)
    section = {**write_profiles(profiles), "emulation": {"rank": 1}}
    return Plan.from_batch_sizes(result.batch_sizes, profile=section, certificate=result.certificate)


@pytest.mark.parametrize("kind", ["fixed total", "maximum throughput", "short"])
def test_an_honest_plan_holds_after_its_way_through_a_file(kind: str, tmp_path: Path) -> None:
    plan = short_plan() if kind == "short" else plan_of(a_profile(), kind)
    verify_plan(plan)
    plan.save(tmp_path / "plan.json")
    verify_plan(Plan.load(tmp_path / "plan.json"))


def batch(document: dict[str, Any], rank: int) -> dict[str, Any]:
    return document["batch"]["ranks"][rank]


def move_sample(document: dict[str, Any]) -> None:
    """Another cut of the same total."""
    first, second = batch(document, 0), batch(document, 1)
    first.update(micro_batch_size=first["micro_batch_size"] * first["accumulation_steps"] - 1, accumulation_steps=1)
    second.update(micro_batch_size=second["micro_batch_size"] * second["accumulation_steps"] + 1, accumulation_steps=1)


def add_sample(document: dict[str, Any]) -> None:
    batch(document, 1)["micro_batch_size"] += 1
    document["batch"]["total"] += batch(document, 1)["accumulation_steps"]


Change = Callable[[dict[str, Any]], Any]
TAMPERED: dict[str, tuple[str, Change, str]] = {
    "a sample moved": ("fixed total", move_sample, "the plan was changed after it was made"),
    "a sample added": ("maximum throughput", add_sample, "the plan was changed after it was made"),
    "a faster rank": (
        "fixed total",
        lambda d: d["profile"]["ranks"][0].update(seconds=[0.5, 8.0]),
        "about other curves, limits or ranks",
    ),
    "a smaller maximum": (
        "fixed total",
        lambda d: d["profile"]["ranks"][0].update(max_micro_batch_size=7),
        "about other curves, limits or ranks",
    ),
    "a memory limit": (
        "fixed total",
        lambda d: d["profile"]["ranks"][0].update(memory_limit_bytes=300),
        "about other curves, limits or ranks",
    ),
    "another optimizer step": (
        "maximum throughput",
        lambda d: d["profile"]["ranks"][1].update(optimizer_seconds=0.5),
        "about other curves, limits or ranks",
    ),
    "a bucket that is ready earlier": (
        "fixed total",
        lambda d: d["profile"]["ranks"][1]["bucket_ready"][0].update(seconds=[0.1, 0.2]),
        "about other curves, limits or ranks",
    ),
    "a larger bucket": (
        "fixed total",
        lambda d: d["profile"].update(bucket_bytes=[500]),
        "found bucket_seconds [4.25] in the certificate, expected [5.25]",
    ),
    "a faster network": (
        "maximum throughput",
        lambda d: d["profile"]["network"]["all_reduce"].update(latency_seconds=0.0),
        "found communication_seconds 4.25 in the certificate, expected 4.0",
    ),
    "another strategy": ("fixed total", lambda d: d.update(strategy="lsdp"), 'expected "ddp", that of the profile'),
    "a rank less": ("fixed total", lambda d: d["profile"]["ranks"].pop(), "the plan's profile: ranks: found 1 ranks"),
    "no curves": ("fixed total", lambda d: d["profile"]["ranks"][0].pop("seconds"), "the plan's profile: "),
    "a better time": (
        "fixed total",
        lambda d: d["certificate"].update(step_seconds=d["certificate"]["step_seconds"] * 0.9),
        "the slowest rank takes",
    ),
    "a weaker bound": (
        "fixed total",
        lambda d: d["certificate"]["largest_micro_batches_below"][0].pop(),
        "the bound does not hold",
    ),
    "a certificate of another choice": (
        "maximum throughput",
        lambda d: d["certificate"]["micro_batches"].reverse() or d["certificate"]["micro_batches"][0].reverse(),
        "micro-batches",
    ),
    "shard groups that the strategy does not have": (
        "accumulation in step",
        lambda d: None,
        "found shard_groups [[0, 1]] in the certificate, expected [[0], [1]]",
    ),
    "nodes of other sizes": (
        "fixed total",
        lambda d: d.update(cluster={"nodes": [{"ranks": 2}]}),
        "found nodes of [2] ranks, expected [1, 1]",
    ),
    "a predicted step": (
        "fixed total",
        lambda d: d["predicted"].update(step_seconds=d["predicted"]["step_seconds"] * 0.9),
        "found predicted step_seconds",
    ),
    "predicted compute": (
        "fixed total",
        lambda d: d["predicted"]["compute_seconds"].reverse(),
        "found predicted compute_seconds",
    ),
    "fewer predictions": (
        "fixed total",
        lambda d: d["predicted"]["compute_seconds"].pop(),
        "found predicted compute_seconds",
    ),
    "predicted idle time": (
        "maximum throughput",
        lambda d: d["predicted"].update(idle_fraction=0.5),
        "found predicted idle_fraction 0.5",
    ),
    "predicted memory": (
        "maximum throughput",
        lambda d: d["predicted"]["memory_bytes"].__setitem__(0, 1),
        "found predicted memory_bytes",
    ),
    "a prediction that nothing predicts": (
        "short",
        lambda d: d.update(predicted={"samples_per_second": 1e9}),
        "found predicted samples_per_second",
    ),
    "no batch": ("fixed total", lambda d: d.pop("batch"), "found a plan without batch"),
    "no profile": ("fixed total", lambda d: d.pop("profile"), "found a plan without profile"),
    "no certificate": ("fixed total", lambda d: d.pop("certificate"), "found a plan without certificate"),
    "an empty profile": ("short", lambda d: d["profile"].clear(), "the plan's profile: found {}"),
    "a short profile's time": (
        "short",
        lambda d: d["profile"]["ranks"][1].update(seconds=[1.0, 32.0]),
        "about other curves, limits or ranks",
    ),
    "a short profile's rank": (
        "short",
        lambda d: d["profile"]["ranks"].pop(),
        "found profiles of 1 ranks, expected 2",
    ),
    "a short plan's batch": ("short", move_sample, "the plan was changed after it was made"),
}


@pytest.mark.parametrize("case", TAMPERED)
def test_a_changed_plan_is_rejected(case: str) -> None:
    kind, change, message = TAMPERED[case]
    plan = short_plan() if kind == "short" else plan_of(a_profile(), kind)
    if kind != "accumulation in step":  # which is wrong from the start
        verify_plan(plan)
    document = json.loads(plan.to_json())
    change(document)
    with pytest.raises(CertificateError) as caught:
        verify_plan(Plan.from_dict(document))
    assert message in str(caught.value)


def test_the_figures_of_the_planner_itself_are_predictions_too() -> None:
    """Without what the network takes: the quickstart's plan has them."""
    document = json.loads(plan_of(a_profile(), "fixed total").to_json())
    ranks = Profile.from_dict(document["profile"]).rank_profiles()
    pairs = document["certificate"]["micro_batches"]
    compute = [
        steps * rank.time(size) + (steps - 1) * rank.accumulation_overhead_seconds + rank.communication_load_seconds
        for rank, (size, steps) in zip(ranks, pairs, strict=True)
    ]
    document["predicted"] = {"compute_seconds": compute, "step_seconds": document["certificate"]["step_seconds"]}
    verify_plan(Plan.from_dict(document))


def test_what_does_not_enter_a_plan_may_change() -> None:
    document = json.loads(plan_of(a_profile(), "fixed total").to_json())
    document["profile"]["measured_seconds"] = 6.0
    document["profile"]["ranks"][0]["device"] = "another name"
    verify_plan(Plan.from_dict(document))


def test_plans_are_verified_without_torch() -> None:
    code = (
        "import json, sys, accelerate_lshdp.planning.proofs.plan;"
        "print(json.dumps([name for name in ('torch', 'accelerate', 'transformers') if name in sys.modules]))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert json.loads(output) == []
