# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The driver of a benchmark on emulated nodes, on ranks that are pretended: when their speed is checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from laboratory.config import BenchmarkConfig
from laboratory.driver import ClusterBenchmark
from laboratory.emulated_cluster import Link
from laboratory.planned import Overheads
from laboratory.speed_check import CheckedRank, Speed
from pretended_launch import PretendedLaunch as RanksOfALaunch

from accelerate_lshdp.comparing.launch import ENGINE, PLAIN_DDP, PLAIN_FSDP2
from accelerate_lshdp.comparing.rank_processes import RankError


DOCUMENT: dict[str, Any] = {
    "clusters": {"two": {"nodes": [{"cpu": 0.8}, {"cpu": 0.4}]}},
    "networks": ["1 Gb/s", "100 Mb/s"],
    "models": {"vit": {"kind": "vit"}},
    "total_batch_size": 8,
    "strategies": ["torch_ddp", "ddp", "lsdp"],
    "profile_seconds": 0,
    "rounds": 3,
    "steps": 2,
}


class PretendedLaunch(RanksOfALaunch):
    """As of any launch, with networks that are described."""

    @contextmanager
    def as_described(self, network: Link) -> Iterator[None]:
        with super().as_described(network.bandwidth_bits_per_second):
            yield


class KnowsTheSpeed:
    """In place of `ClusterMeasurements`: a step takes a second at the speed that was profiled."""

    planned: bool | None = None

    def check_micro_batches(self, total: int, *, planned: bool) -> tuple[list[int], list[float]]:
        self.planned = planned
        return [total // 2] * 2, [0.4, 0.4]

    def predicted_seconds(self, case: Any, micro_batches: Any, network: str, speed: Speed, placements: Any) -> float:
        return speed.slowdown


def test_speeds_are_checked_around_every_turn_and_predictions_follow_them() -> None:
    launch = PretendedLaunch(lambda name, network: 1.0, lambda method, arguments: None)
    # In its second network the machine is half as fast.
    launch._check_speed = lambda sizes, is_peer: CheckedRank(
        sizes[0] * 0.1 if launch.network == "1000" else 0.8, 0.1, 0.1
    )
    results = [measurement.to_dict() for measurement in checked_benchmark(launch).run()]
    turns = [method for method, _ in launch.calls if method in ("check_speed", "train")]
    # Three cases have turns, in each a step that does not count before the others. Rounds begin with another case.
    check, turn = ["check_speed"], ["train", "train"]
    peer, of_engine = check + turn + check, check + turn + check + turn + check
    rounds = peer + of_engine, of_engine + peer, (check + turn + check) + peer + (check + turn + check)
    assert turns == sum(rounds, []) * 2  # networks
    assert [result["error"] for result in results] == [None] * 6
    assert [result["slowdown"] for result in results] == pytest.approx([1.0] * 3 + [2.0] * 3)
    assert [result["predicted_seconds"] for result in results] == pytest.approx([1.0] * 3 + [2.0] * 3)


@pytest.mark.parametrize(("strategies", "planned"), [(["ddp", "lsdp"], False), (["lsdp", "lshdp"], True)])
def test_checks_follow_the_plan_if_a_case_does(strategies: list[str], planned: bool) -> None:
    launch = PretendedLaunch(lambda name, network: 1.0, lambda method, arguments: None)
    benchmark = checked_benchmark(launch, strategies=strategies, profile_seconds=5)
    benchmark._measured = KnowsTheSpeed()
    assert benchmark._check_micro_batches() == ([benchmark.config.total_batch_size // 2] * 2, [0.4, 0.4])
    assert benchmark._measured.planned is planned


def checked_benchmark(launch: PretendedLaunch, **changes: Any) -> ClusterBenchmark:
    """One that knows the ranks already."""
    config = BenchmarkConfig.from_dict({**DOCUMENT, **changes})
    benchmark = ClusterBenchmark(config, "two", "vit", launch.with_kinds, say=lambda what: None)

    def learn(launch: PretendedLaunch) -> None:
        benchmark._measure_formats(launch)
        benchmark._measured = KnowsTheSpeed()

    benchmark._learn = learn
    return benchmark


@pytest.mark.parametrize(
    ("interleaved", "order"), [(False, ["overheads", "formats", "profile"]), (True, ["formats", "profile"])]
)
def test_overheads_are_measured_where_memory_is_as_cases_find_it(interleaved: bool, order: list[str]) -> None:
    """Before all else if cases have fresh processes: freed memory that a process keeps is not new when it is used."""
    config = BenchmarkConfig.from_dict({**DOCUMENT, "profile_seconds": 5, "interleaved": interleaved})
    launch = PretendedLaunch(lambda name, network: 1.0, lambda method, arguments: None)
    benchmark, done = ClusterBenchmark(config, "two", "vit", launch.with_kinds, say=lambda what: None), []

    def profile(launch: PretendedLaunch, network: str) -> dict[str, Any]:
        done.append("profile")
        raise RankError("this is enough")

    benchmark._measure_overheads = lambda launch: done.append("overheads") or {ENGINE: Overheads()}
    benchmark._measure_formats = lambda launch: done.append("formats")
    benchmark._profile_on = profile
    with pytest.raises(RankError):
        benchmark._learn(launch)
    assert done == order


def test_a_turn_is_predicted_for_the_speed_before_and_after_it_in_processes_of_its_kind() -> None:
    launch = PretendedLaunch(lambda name, network: 1.0, lambda method, arguments: None)
    told = iter([0.4, 0.8, 1.2, 1.6, 2.0] * 6)
    launch._check_speed = lambda sizes, is_peer: CheckedRank(next(told), 0.1 if is_peer else None, 0.1)
    benchmark = checked_benchmark(launch)
    first, second, third = [m for m in benchmark.measurements if m.network == benchmark.measurements[0].network]
    benchmark._measured = KnowsTheSpeed()
    benchmark._take_turn = lambda launch, measurement: None
    benchmark._take_turns(launch.with_kinds((ENGINE, PLAIN_DDP)), [first, second, third])
    seconds = {name: [check[0][:2] for check in checks] for name, checks in benchmark._checks.items()}
    assert first.case.is_peer and not second.case.is_peer
    assert seconds == {
        first.name: [(0.4, 0.1), (0.8, 0.1)],
        second.name: [(1.2, None), (1.6, None)],
        third.name: [(1.6, None), (2.0, None)],
    }
    second.micro_batches = [(4, 1), (4, 1)]
    benchmark._predict(second)
    assert second.slowdown == pytest.approx(1.4 / 0.4)


@pytest.mark.parametrize("interleaved", [True, False])
def test_what_is_usual_of_ranks_is_told_by_checks_in_the_same_processes_on_the_same_network(interleaved: bool) -> None:
    launch = PretendedLaunch(lambda name, network: 1.0, lambda method, arguments: None)
    benchmark = checked_benchmark(launch, interleaved=interleaved)
    before, between, after = ([CheckedRank(seconds, None, 0.1)] * 2 for seconds in (0.4, 0.5, 0.6))
    peer, second, third, *others = sorted(benchmark.measurements, key=lambda m: m.bits_per_second)
    benchmark._checks |= {
        peer.name: [[CheckedRank(1.0, 0.1, 0.1)] * 2],
        second.name: [before, between],
        third.name: [between, after],
    }
    benchmark._checks |= {other.name: [[CheckedRank(2.0, None, 0.1)] * 2] for other in others}
    assert benchmark._checks_among(second) == ([before, between, after] if interleaved else [before, between])


def test_a_case_that_has_failed_has_no_more_checks() -> None:
    def fail(method: str, arguments: dict) -> None:
        if method == "train" and "lsdp fp32" in arguments["name"]:
            raise RankError("rank 1 raised in train: MemoryError", ranks_usable=True)

    launch = PretendedLaunch(lambda name, network: 1.0, fail)
    launch._check_speed = lambda sizes, is_peer: CheckedRank(0.4, None, 0.1)
    benchmark = checked_benchmark(launch)
    counts = {m.case.label: len(benchmark._checks[m.name]) for m in benchmark.run()}
    # The failed one had one check, before its first turn; that of the engine goes on with the one that follows it.
    assert counts["lsdp fp32"] == 1 and counts["ddp fp32"] == 3 + 2 + 2


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_case_whose_step_fails_has_that_error_and_no_other_has_one(interleaved: bool) -> None:
    def fail(method: str, arguments: dict) -> None:
        if method == "train" and "ddp fp32" in arguments["name"] and "torch" not in arguments["name"]:
            raise RankError("rank 1 raised in train: MemoryError", ranks_usable=True)

    launch = PretendedLaunch(lambda name, network: 1.0, fail)
    launch._check_speed = lambda sizes, is_peer: CheckedRank(0.4, None, 0.1)
    results = {r["label"]: r for r in (m.to_dict() for m in checked_benchmark(launch, interleaved=interleaved).run())}
    assert "MemoryError" in results["ddp fp32"]["error"] and "lost" not in results["ddp fp32"]["error"]
    assert results["lsdp fp32"]["error"] is None and results["lsdp fp32"]["slowdown"] == 1.0


def test_no_speed_is_checked_where_memory_is_measured_meanwhile() -> None:
    launch = PretendedLaunch(lambda name, network: 1.0, lambda method, arguments: None)
    results = [m.to_dict() for m in checked_benchmark(launch, interleaved=False, memory=True).run()]
    assert [result["error"] for result in results] == [None] * 6
    assert "check_speed" not in [method for method, _ in launch.calls]
    for result in results:
        assert result["predicted_seconds"] == (None if result["is_peer"] else 1.0)
        assert result["slowdown"] is None
        assert result["peak_pss_bytes"] == [5, 7]


@pytest.mark.parametrize("peers", [["torch_ddp"], ["torch_ddp", "torch_fsdp", "torch_hsdp"]])
def test_without_turns_there_are_processes_to_learn_from_and_no_others(peers: list[str]) -> None:
    launch = PretendedLaunch(lambda name, network: 1.0, lambda method, arguments: None)
    changes = {"interleaved": False, "profile_seconds": 5, "strategies": [*peers, "lsdp"]}
    config = BenchmarkConfig.from_dict({**DOCUMENT, **changes})
    benchmark = ClusterBenchmark(config, "two", "vit", launch.with_kinds, say=lambda what: None)
    learned_of: list[Sequence[str]] = []

    def learn(launch: PretendedLaunch) -> None:
        learned_of.append(tuple(launch.kinds))
        benchmark._measure_formats(launch)

    benchmark._learn = learn
    benchmark.run()
    assert learned_of == [(ENGINE, PLAIN_FSDP2) if "torch_fsdp" in peers else (ENGINE,)]


def test_speed_is_checked_in_the_processes_that_train_before_and_after() -> None:
    launch = PretendedLaunch(lambda name, network: 1.0, lambda method, arguments: None)
    launch._check_speed = lambda sizes, is_peer: CheckedRank(0.4, 0.1 if is_peer else None, 0.1)
    strategies = ["torch_ddp", "torch_fsdp", "torch_hsdp", "lsdp"]
    benchmark = checked_benchmark(launch, strategies=strategies, rounds=1, networks=DOCUMENT["networks"][:1])
    assert [measurement.error for measurement in benchmark.run()] == [None] * 4
    done = [call for call in launch.kinds_called if call[0] in ("check_speed", "train")]
    turn = [("train", kind) for kind in (PLAIN_DDP, PLAIN_FSDP2, ENGINE) for _ in range(2)]
    check = [("check_speed", kind) for kind in (PLAIN_DDP, PLAIN_FSDP2, ENGINE)]
    ddp, fsdp2, engine = turn[:2], turn[2:4], turn[4:]
    expected = [check[0], *ddp, check[0], check[1], *fsdp2, check[1], *fsdp2, check[1], check[2], *engine, check[2]]
    assert done == expected


def test_after_a_failed_turn_the_others_do_not_use_its_groups() -> None:
    forgotten: list[str] = []

    def fail(method: str, arguments: dict) -> None:
        if method == "train" and "lsdp fp32" in arguments["name"]:
            raise RankError("rank 1 raised in train: MemoryError", ranks_usable=True)

    launch = PretendedLaunch(lambda name, network: 1.0, fail)
    launch._check_speed = lambda sizes, is_peer: CheckedRank(0.4, None, 0.1)
    launch._forget_groups = lambda: forgotten.append(launch.calls[-2][0])
    results = [measurement.to_dict() for measurement in checked_benchmark(launch, profile_seconds=0).run()]
    assert [result["error"] is None for result in results] == [True, True, False] * 2
    assert forgotten == ["train"] * 2 and ("forget_groups", ENGINE) in launch.kinds_called
