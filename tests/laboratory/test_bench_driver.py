# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The driver of a benchmark, on ranks that are pretended: who trains when, what fails, and what that takes with it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from accelerate_lshdp.benchmarking.config import BenchmarkConfig
from accelerate_lshdp.benchmarking.driver import ClusterBenchmark
from accelerate_lshdp.benchmarking.launches import ENGINE, PLAIN_DDP, PLAIN_FSDP2
from accelerate_lshdp.benchmarking.limits import Limit, WallSeconds
from accelerate_lshdp.benchmarking.memory_meter import MemoryMeter
from accelerate_lshdp.benchmarking.rank_processes import RankError
from accelerate_lshdp.benchmarking.speed_check import CheckedRank, Speed
from accelerate_lshdp.comparing.report import read_results
from accelerate_lshdp.emulated_cluster import NetworkDescription


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
MEGABYTE = 1_000_000


class PretendedLaunch:
    """Two ranks whose steps take as many seconds as `seconds` says and send a megabyte."""

    sleeps = False
    node_sizes = [1, 1]

    def __init__(self, seconds: Callable[[str, str], float], fail: Callable[[str, dict], None]) -> None:
        self.calls: list[tuple[str, str]] = []
        self.crews_called: list[tuple[str, str]] = []
        self.seconds = seconds
        self.fail = fail
        self.network = "full speed"
        self.sent = 0
        self.open: list[str] = []

    def with_crews(self, crews: Sequence[str]) -> PretendedLaunch:
        self.crews = crews
        return self

    def __enter__(self) -> PretendedLaunch:
        self.open.clear()
        return self

    def __exit__(self, *error: object) -> None:
        self.calls.append(("exit", ""))

    @contextmanager
    def as_described(self, network: NetworkDescription) -> Iterator[None]:
        self.network = f"{network.bits_per_second / 1e6:g}"
        try:
            yield
        finally:
            self.network = "full speed"

    def call(self, method: str, *, crew: str = ENGINE, timeout: float = 60, **arguments: Any) -> list[Any]:
        assert crew in self.crews
        case = arguments.get("name", "").partition(",")[0]
        expected = PLAIN_DDP if case == "torch_ddp" else PLAIN_FSDP2 if case.startswith("torch_") else ENGINE
        assert crew == expected or not case
        self.crews_called.append((method, crew))
        self.calls.append((method, arguments.get("name", "")))
        self.fail(method, arguments)
        return [getattr(self, f"_{method}")(**arguments)] * 2

    def sent_between_nodes(self) -> list[int]:
        return [self.sent, self.sent]

    def sent_inside_nodes(self) -> list[int]:
        return [0, 0]

    def memory_bytes(self) -> list[int]:
        return [5, 7]

    def _build(self, **arguments: Any) -> dict[str, Any]:
        return {"parameters": 1000, "unit_bytes": [1000, 1000]}

    def _measure_formats(self, names: list[str]) -> dict[str, Any]:
        points = [(1000, 1.0), (2000, 2.0)]
        return {name: {"points": points, "wire_share": 1.0, "wire_bytes": 4000} for name in names}

    def _begin(self, name: str, **arguments: Any) -> None:
        self.open.append(name)

    def _train(self, name: str, steps: int) -> list[tuple[float, float]]:
        assert name in self.open
        self.sent += steps * MEGABYTE
        return [(self.seconds(name, self.network), 1.5)] * steps

    def _statistics(self, name: str) -> dict[str, Any]:
        return {
            "compute_seconds": [1.0, 2.0],
            "wait_seconds": [1.0, 0.0],
            "optimizer_seconds": [0.1, 0.2],
            "idle_fraction": 0.25,
        }

    def _timeline(self, name: str) -> list[dict[str, Any]]:
        return [{"name": "forward", "begin": 1.0, "end": 2.0}]

    def _end(self, name: str) -> None:
        self.open.remove(name)

    def _forget_groups(self) -> None:
        pass

    def _peak_bytes(self) -> int:
        return 11


def run(
    changes: dict[str, Any] | None = None,
    seconds: Callable[[str, str], float] = lambda name, network: 1.0,
    fail: Callable[[str, dict], None] = lambda method, arguments: None,
) -> tuple[list[dict[str, Any]], PretendedLaunch]:
    launch = PretendedLaunch(seconds, fail)
    config = BenchmarkConfig.from_dict({**DOCUMENT, **(changes or {})})
    benchmark = ClusterBenchmark(config, "two", "vit", launch.with_crews, say=lambda what: None)
    return [measurement.to_dict() for measurement in benchmark.run()], launch


def test_cases_take_turns_in_another_order_each_round() -> None:
    results, launch = run()
    trained = [name for method, name in launch.calls if method == "train"]
    order = [name.partition(",")[0] for name in dict.fromkeys(trained[:6])]
    assert order == ["torch_ddp", "ddp fp32", "lsdp fp32"]
    turns = [trained[turn : turn + 6 : 2] for turn in range(0, 18, 6)]
    assert [turn[0].partition(",")[0] for turn in turns] == ["torch_ddp", "ddp fp32", "lsdp fp32"]
    assert all(set(turn) == set(turns[0]) for turn in turns)
    assert launch.calls.count(("build", "")) == 2 and launch.open == []
    assert [(result["label"], result["network"]) for result in results[:4]] == [
        ("torch_ddp", "1 Gb/s"),
        ("ddp fp32", "1 Gb/s"),
        ("lsdp fp32", "1 Gb/s"),
        ("torch_ddp", "100 Mb/s"),
    ]


def test_steps_are_taken_on_the_network_and_counted_without_the_first() -> None:
    results, _ = run(seconds=lambda name, network: {"1000": 1.0, "100": 3.0}[network])
    assert [result["step_seconds"] for result in results] == [1.0] * 3 + [3.0] * 3
    first = results[0]
    assert first["round_seconds"] == [1.0, 1.0, 1.0] and first["samples_per_second"] == 8.0
    assert len(first["losses"]) == 3 * (1 + 2) and first["losses"][-1] == [9.0, 9, 1.5]
    assert first["bytes_between_nodes"] == [MEGABYTE, MEGABYTE] and first["formula_bytes"] == [4000.0, 4000.0]
    assert first["compute_seconds"] == [1.0, 2.0] and first["idle_fraction"] == 0.25
    assert first["peak_pss_bytes"] is None and first["predicted_seconds"] is None


def test_turns_of_slow_cases_are_short() -> None:
    seconds = {"torch_ddp": 1.0, "ddp fp32": 4.0, "lsdp fp32": 20.0}
    results, _ = run({"turn_seconds": 10, "steps": 4}, seconds=lambda name, network: seconds[name.split(",")[0]])
    counted = {result["label"]: len(result["losses"]) // 3 - 1 for result in results}
    assert counted == {"torch_ddp": 4, "ddp fp32": 2, "lsdp fp32": 1}


def test_a_case_that_fails_has_its_error_and_the_others_go_on() -> None:
    def fail(method: str, arguments: dict) -> None:
        if method == "begin" and arguments["name"] == "ddp fp32, 1 Gb/s":
            raise RankError("rank 1 raised in begin:\nTraceback\nValueError: too large", True, "rank 1: too large")

    results, _ = run(fail=fail)
    assert [result["error"] for result in results] == [None, "rank 1: too large", None, None, None, None]
    assert results[1]["step_seconds"] is None and results[2]["step_seconds"] == 1.0


def test_lost_processes_end_what_had_not_finished_and_nothing_else() -> None:
    def fail(method: str, arguments: dict) -> None:
        if method == "train" and arguments["name"] == "ddp fp32, 100 Mb/s":
            raise RankError("rank 0 had not finished train after 9 s")

    results, launch = run(fail=fail)
    assert [result["error"] is None for result in results] == [True, True, True, False, False, False]
    assert results[4]["error"] == "rank 0 had not finished train after 9 s"
    assert "lost before it had finished: rank 0 had not finished" in results[5]["error"]
    assert launch.calls[-1] == ("exit", "")


@pytest.mark.parametrize("interleaved", [True, False])
def test_memory_is_measured_in_fresh_processes_for_each_case(interleaved: bool) -> None:
    results, launch = run({"memory": True, "interleaved": interleaved})
    assert all(result["peak_pss_bytes"] == [5, 7] and result["peak_rank_bytes"] == [11, 11] for result in results)
    # Plain PyTorch takes turns in processes of its own; what knows the cluster are the engine's.
    assert launch.calls.count(("build", "")) == (2 if interleaved else 1) + 3
    assert all(result["step_seconds"] == 1.0 for result in results)


def test_one_case_that_loses_its_own_processes_leaves_the_others() -> None:
    def fail(method: str, arguments: dict) -> None:
        if method == "begin" and arguments["name"].startswith("ddp"):
            raise RankError("rank 0 ended during begin")

    results, _ = run({"interleaved": False}, fail=fail)
    assert [result["error"] is None for result in results] == [True, False, True] * 2


def test_the_report_can_read_the_results() -> None:
    cases, _ = run({"memory": True}, fail=lambda method, arguments: None)
    results = {
        "version": 1,
        "kind": "benchmark",
        "created": "2026-01-02T03:04:05+00:00",
        "command": "accelerate-lshdp bench x.yaml",
        "machine": {"cpu": "x", "cores": 2, "memory_bytes": 1, "kernel": "6"},
        "versions": {"python": "3.11"},
        "config": DOCUMENT,
        "wall_seconds": 9.0,
        "cases": cases,
        "limits": [Limit("w", WallSeconds(), 10).judge(cases, 9.0)],
    }
    assert len(read_results(json.loads(json.dumps(results, allow_nan=False))).cases) == 6


def test_the_meter_keeps_the_peak_of_each_node_and_says_what_it_could_not_read() -> None:
    readings = [[1, 9], [5, 2], [3, 3]]
    all_read = threading.Event()

    def read() -> list[int]:
        if len(readings) == 1:
            all_read.set()
            return readings[0]
        return readings.pop(0)

    with MemoryMeter(read, interval_seconds=0.001) as meter:
        assert all_read.wait(10)
    assert meter.peak_bytes == [5, 9]

    def broken() -> list[int]:
        raise OSError("no such process")

    with pytest.raises(RankError, match="memory could not be read: no such process"):
        with MemoryMeter(broken):
            pass


class KnowsTheSpeed:
    """In place of `Knowledge`: a step takes a second at the speed that was profiled."""

    planned: bool | None = None

    def check_micro_batches(self, total: int, *, planned: bool) -> tuple[list[int], list[float]]:
        self.planned = planned
        return [total // 2] * 2, [0.4, 0.4]

    def predicted_seconds(self, case: Any, micro_batches: Any, network: str, speed: Speed) -> float:
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
    benchmark._knowledge = KnowsTheSpeed()
    assert benchmark._check_micro_batches() == ([benchmark.config.total_batch_size // 2] * 2, [0.4, 0.4])
    assert benchmark._knowledge.planned is planned


def checked_benchmark(launch: PretendedLaunch, **changes: Any) -> ClusterBenchmark:
    """One that knows the ranks already."""
    config = BenchmarkConfig.from_dict({**DOCUMENT, **changes})
    benchmark = ClusterBenchmark(config, "two", "vit", launch.with_crews, say=lambda what: None)

    def learn(launch: PretendedLaunch) -> None:
        benchmark._measure_formats(launch)
        benchmark._knowledge = KnowsTheSpeed()

    benchmark._learn = learn
    return benchmark


def test_a_turn_is_predicted_for_the_speed_before_and_after_it_in_processes_of_its_kind() -> None:
    launch = PretendedLaunch(lambda name, network: 1.0, lambda method, arguments: None)
    told = iter([0.4, 0.8, 1.2, 1.6, 2.0] * 6)
    launch._check_speed = lambda sizes, is_peer: CheckedRank(next(told), 0.1 if is_peer else None, 0.1)
    benchmark = checked_benchmark(launch)
    first, second, third = [m for m in benchmark.measurements if m.network == benchmark.measurements[0].network]
    benchmark._knowledge = KnowsTheSpeed()
    benchmark._take_turn = lambda launch, measurement: None
    benchmark._take_turns(launch.with_crews((ENGINE, PLAIN_DDP)), [first, second, third])
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
    benchmark = ClusterBenchmark(config, "two", "vit", launch.with_crews, say=lambda what: None)
    learned_of: list[Sequence[str]] = []

    def learn(launch: PretendedLaunch) -> None:
        learned_of.append(tuple(launch.crews))
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
    done = [call for call in launch.crews_called if call[0] in ("check_speed", "train")]
    turn = [("train", crew) for crew in (PLAIN_DDP, PLAIN_FSDP2, ENGINE) for _ in range(2)]
    check = [("check_speed", crew) for crew in (PLAIN_DDP, PLAIN_FSDP2, ENGINE)]
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
    assert forgotten == ["train"] * 2 and ("forget_groups", ENGINE) in launch.crews_called
