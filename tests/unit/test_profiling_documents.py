# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The profile file: nothing is lost in it, and nothing wrong is read from it."""

from __future__ import annotations

import json
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accelerate_lshdp.documents.cluster import Cluster, Node
from accelerate_lshdp.documents.curves import MemoryCurve
from accelerate_lshdp.documents.profile import Profile, ProfileError, read_profiles, write_profiles
from accelerate_lshdp.documents.profile_sections import MeasuredRank, MessageTimes, Network, ProfiledScript
from accelerate_lshdp.planning import RankProfile, TimeCurve
from accelerate_lshdp.planning.cuts.step_time import step_times


def a_profile(**changes: Any) -> Profile:
    def rank(number: int, memory: MemoryCurve | None) -> MeasuredRank:
        return MeasuredRank(
            rank=number,
            time=TimeCurve((1, 2, 3), (0.1, 0.2, 0.25 + number)),
            spread=(0.01, 0.0, 0.02),
            max_micro_batch_size=3,
            limited_by="memory" if memory else "request",
            device="a processor",
            optimizer_seconds=0.02,
            communication_load_seconds=0.01,
            accumulation_overhead_seconds=0.005,
            memory=memory,
            memory_limit_bytes=6000 if memory else None,
            bucket_ready=(TimeCurve((1, 3), (0.05, 0.2)), TimeCurve((1, 3), (0.09, 0.24))),
        )

    values: dict[str, Any] = {
        "strategy": "ddp",
        "subject": ProfiledScript("train.py", ("--lr", "1"), 100, 400),
        "cluster": Cluster((Node(1, "10.0.0.1", "cpu"), Node(1))),
        "ranks": (rank(0, MemoryCurve((1, 2, 3), (1000, 2000, 5000))), rank(1, None)),
        "bucket_bytes": (300, 100),
        "network": Network(MessageTimes(1e-4, 1e-8, ((8, 1e-4),)), MessageTimes(2e-4, 3e-8, ((1000, 1 / 3),))),
        "measured_seconds": 12.5,
        "versions": {"torch": "2.13.0"},
    }
    return Profile(**{**values, **changes})


def test_a_profile_survives_being_written(tmp_path: Path) -> None:
    for profile in (a_profile(), a_profile(network=None, strategy="fsdp")):
        profile.save(tmp_path / "profile.json")
        assert Profile.load(tmp_path / "profile.json") == profile
        assert Profile.from_dict(profile.to_dict()) == profile
        assert json.loads((tmp_path / "profile.json").read_text()) == profile.to_dict()
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]


def test_the_layout_of_the_file() -> None:
    document = a_profile().to_dict()
    assert document["version"] == 1 and document["kind"] == "profile" and document["strategy"] == "ddp"
    assert document["subject"] == {
        "script": "train.py",
        "arguments": ["--lr", "1"],
        "parameters": 100,
        "gradient_bytes": 400,
    }
    assert document["cluster"]["nodes"][0] == {"ranks": 1, "address": "10.0.0.1", "device": "cpu"}
    assert document["ranks"][0]["memory"] == {"batch_sizes": [1, 2, 3], "bytes": [1000, 2000, 5000]}
    assert document["ranks"][1]["memory"] is None
    assert document["ranks"][0]["bucket_ready"][1] == {"batch_sizes": [1, 3], "seconds": [0.09, 0.24]}
    assert document["network"] == {
        "latency_seconds": 1e-4,
        "seconds_per_byte": 1e-8,
        "ping_pong": [[8, 1e-4]],
        "all_reduce": {"latency_seconds": 2e-4, "seconds_per_byte": 3e-8, "points": [[1000, 1 / 3]]},
    }


def test_what_the_planner_gets() -> None:
    profile = a_profile()
    ranks = profile.rank_profiles()
    assert ranks == read_profiles(profile.to_dict())
    assert ranks[0].time == TimeCurve((1, 2, 3), (0.1, 0.2, 0.25)) and ranks[0].max_micro_batch_size == 3
    assert ranks[0].fixed_seconds == 0.02 and ranks[0].communication_load_seconds == 0.01
    assert ranks[0].accumulation_overhead_seconds == 0.005
    assert ranks[0].memory == MemoryCurve((1, 2, 3), (1000, 2000, 5000)) and ranks[0].memory_limit_bytes == 6000
    # The first bucket is not delayed by sending; between it and the end the others are, the later the more.
    first, second = ranks[0].bucket_ready
    assert first == profile.ranks[0].bucket_ready[0] and second.batch_sizes == (1, 3)
    assert second.seconds == pytest.approx([0.09 + 0.01 * 0.04 / 0.05, 0.24 + 0.01 * 0.04 / 0.05])
    assert ranks[1].memory is None and ranks[1].memory_limit_bytes is None
    seconds = [2e-4 + 300 * 3e-8, 2e-4 + 100 * 3e-8]
    assert profile.bucket_seconds() == pytest.approx(seconds)
    assert profile.communication_seconds() == pytest.approx(sum(seconds))


def test_profiles_of_earlier_versions_say_nothing_of_accumulation() -> None:
    document = a_profile().to_dict()
    for rank in document["ranks"]:
        del rank["accumulation_overhead_seconds"]
    assert [rank.accumulation_overhead_seconds for rank in Profile.from_dict(document).ranks] == [0.0, 0.0]


def test_a_network_that_ranks_wait_for_hides_what_sending_takes() -> None:
    """Also where it takes longer than a rank needs for its first bucket."""
    profile = a_profile()
    loaded = replace(profile, ranks=[replace(rank, communication_load_seconds=0.5) for rank in profile.ranks])
    for size in (1, 3):
        first = profile.ranks[0].bucket_ready[0](size)
        slow, fast = (step_times(loaded.rank_profiles(), seconds)[0] for seconds in ([9.0, 1.0], [0.0, 0.0]))
        assert slow.finish(size, 1) == pytest.approx(first + 10.0 + 0.02)
        assert fast.finish(size, 1) == pytest.approx(profile.ranks[0].time(size) + 0.5 + 0.02)


def test_what_travels_under_other_strategies() -> None:
    ddp = a_profile().communication_seconds()
    assert a_profile(strategy="lsdp").bucket_seconds() == a_profile().bucket_seconds()
    assert a_profile(strategy="fsdp").bucket_seconds() is None  # gathers block: nothing overlaps
    assert a_profile(strategy="fsdp").communication_seconds() == pytest.approx(1.5 * ddp)
    assert a_profile(strategy="zero2").communication_seconds() == pytest.approx(ddp)
    # For every micro-batch but the last FSDP2 gathers twice more, each time half of an all-reduce.
    overheads = {
        strategy: a_profile(strategy=strategy).rank_profiles()[0].accumulation_overhead_seconds
        for strategy in ("ddp", "lsdp", "zero2", "fsdp", "fsdp_offload")
    }
    assert overheads["ddp"] == overheads["lsdp"] == overheads["zero2"] == 0.005
    assert overheads["fsdp"] == overheads["fsdp_offload"] == pytest.approx(0.005 + ddp)
    alone = a_profile(network=None)
    assert alone.bucket_seconds() is None and alone.communication_seconds() == 0


DELETED = object()


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (["version"], 2, "version: found 2, expected 1"),
        (["kind"], DELETED, 'kind: found null, expected "profile"'),
        (["speed"], 1, "speed: found an unknown key"),
        (["network"], DELETED, "network: found nothing under this key"),
        (["strategy"], "lsd", 'strategy: found "lsd".*Did you mean "lsdp"'),
        (["subject", "parameters"], -1, "subject.parameters: found -1"),
        (["subject", "arguments"], [1], r"subject.arguments\[0\]: found 1"),
        (["cluster", "nodes"], [{"ranks": 3}], "ranks: found 2 ranks, expected 3"),
        (["ranks"], {}, "ranks: found an object, expected a list"),
        (["ranks", 1, "rank"], 0, r"ranks\[1\].rank: found rank 0, expected 1"),
        (["ranks", 1, "color"], "red", r"ranks\[1\].color: found an unknown key"),
        (["ranks", 0, "seconds"], [0.1, 0.2], r"ranks\[0\].seconds: found 3 batch sizes and 2 times"),
        (["ranks", 0, "seconds", 1], "fast", r"ranks\[0\].seconds\[1\]: found \"fast\" \(a string\)"),
        (["ranks", 0, "seconds", 1], -0.5, r"ranks\[0\].seconds\[1\]: found -0.5"),
        (["ranks", 0, "batch_sizes", 1], 2.0, r"ranks\[0\].batch_sizes\[1\]: found 2.0 \(a float\)"),
        (["ranks", 0, "batch_sizes", 1], True, r"ranks\[0\].batch_sizes\[1\]: found true"),
        (["ranks", 0, "spread"], [0.1], r"ranks\[0\].spread: found 1 values for 3 batch sizes"),
        (["ranks", 0, "max_micro_batch_size"], 4, r"ranks\[0\].max_micro_batch_size: found 4, .* from 1 to 3"),
        (["ranks", 0, "limited_by"], "luck", r"ranks\[0\].limited_by: found \"luck\""),
        (["ranks", 0, "optimizer_seconds"], float("nan"), r"ranks\[0\].optimizer_seconds: found nan"),
        (["ranks", 0, "memory", "bytes"], [1, 2], r"ranks\[0\].memory.bytes: found 3"),
        (["ranks", 0, "memory"], None, r"ranks\[0\]: found memory_limit_bytes 6000 without a memory curve"),
        (["ranks", 0, "memory_limit_bytes"], 0, r"ranks\[0\].memory_limit_bytes: found 0"),
        (["ranks", 0, "bucket_ready"], [], r"ranks\[0\].bucket_ready: found 0 curves for 2 buckets"),
        (["ranks", 0, "bucket_ready", 1, "seconds", 0], 0, r"ranks\[0\].bucket_ready\[1\].seconds\[0\]: found 0"),
        (["bucket_bytes", 1], 1.5, r"bucket_bytes\[1\]: found 1.5"),
        (["network", "latency_seconds"], -1e-3, "network.latency_seconds: found -0.001"),
        (["network", "all_reduce", "points", 0], [1], r"network.all_reduce.points\[0\]: found a list of 1"),
        (["measured_seconds"], "a minute", 'measured_seconds: found "a minute"'),
        (["versions", "torch"], 2.13, "versions.torch: found 2.13"),
    ],
)
def test_bad_profiles_are_refused(tmp_path: Path, where: list[Any], value: Any, message: str) -> None:
    document = deepcopy(a_profile().to_dict())
    inner: Any = document
    for key in where[:-1]:
        inner = inner[key]
    if value is DELETED:
        del inner[where[-1]]
    else:
        inner[where[-1]] = value
    with pytest.raises(ProfileError, match=f"^{message}"):
        Profile.from_dict(document)
    (tmp_path / "profile.json").write_text(json.dumps(document))
    with pytest.raises(ProfileError, match=f"profile.json: {message}"):
        Profile.load(tmp_path / "profile.json")


def test_what_is_no_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="expected a profile that `accelerate-lshdp profile` wrote"):
        Profile.load(tmp_path / "nowhere.json")
    (tmp_path / "text").write_text("batch sizes: 1, 2, 3")
    with pytest.raises(ProfileError, match="text: found no JSON document"):
        Profile.load(tmp_path / "text")
    (tmp_path / "plan.json").write_text('{"version": 1, "strategy": "ddp"}')
    with pytest.raises(ProfileError, match="plan.json: kind: found null"):
        Profile.load(tmp_path / "plan.json")
    for document in (None, [], "profile"):
        with pytest.raises(ProfileError, match="expected an object"):
            Profile.from_dict(document)


def test_a_profile_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot write the profile"):
        a_profile().save(tmp_path / "no" / "profile.json")
    assert list(tmp_path.iterdir()) == []


def test_profiles_are_read_without_torch() -> None:
    code = "import accelerate_lshdp.documents.profile, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


# ---- the short form in a plan


def test_the_short_form_survives_being_written() -> None:
    profiles = [
        RankProfile(TimeCurve((1, 2, 7), (0.1, 0.15, 0.5)), 7),
        RankProfile(TimeCurve((1, 4), (1 / 3, 2 / 3)), 3),
    ]
    assert read_profiles({**write_profiles(profiles), "emulation": {"rank": 1}}) == profiles


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 1}, "expected rank 0"),
        ({"seconds": [0.1]}, "the profile of rank 0: found 2 batch sizes and 1 times"),
        ({"seconds": None}, "the profile of rank 0"),
        ({"max_micro_batch_size": 9}, "the profile of rank 0: found max_micro_batch_size 9"),
        ({"speed": 3}, "found .* at place 0"),
    ],
)
def test_bad_short_forms_are_refused(change: dict[str, Any], message: str) -> None:
    document = write_profiles([RankProfile(TimeCurve((1, 2), (0.1, 0.2)), 2)])
    document["ranks"][0].update(change)
    with pytest.raises(ValueError, match=message):
        read_profiles(document)


def test_a_short_form_without_ranks_is_refused() -> None:
    for document in ({}, {"ranks": []}, {"ranks": 3}, None):
        with pytest.raises(ValueError, match="measure the ranks again"):
            read_profiles(document)
