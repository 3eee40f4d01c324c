# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The driver of a comparison, on pretended ranks: who trains when, what fails, and what that takes with it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from pretended_launch import MEGABYTE, PretendedLaunch

from accelerate_lshdp.comparing.config import ComparisonConfig
from accelerate_lshdp.comparing.driver import Comparison
from accelerate_lshdp.comparing.memory_meter import MemoryMeter
from accelerate_lshdp.comparing.rank_processes import RankError
from accelerate_lshdp.comparing.report import read_results


NETWORKS = {"1 Gb/s": 1e9, "100 Mb/s": 1e8}
DOCUMENT: dict[str, Any] = {
    "models": {"vit": {"kind": "vit"}},
    "total_batch_size": 8,
    "strategies": ["torch_ddp", "ddp", "lsdp"],
    "profile_seconds": 0,
    "rounds": 3,
    "steps": 2,
}


class OnNetworks(Comparison):
    """A comparison whose networks differ."""

    def _on_network(self, launch: PretendedLaunch, network: str) -> AbstractContextManager[None]:
        return launch.as_described(NETWORKS[network])


def run(
    changes: dict[str, Any] | None = None,
    seconds: Callable[[str, str], float] = lambda name, network: 1.0,
    fail: Callable[[str, dict], None] = lambda method, arguments: None,
) -> tuple[list[dict[str, Any]], PretendedLaunch]:
    launch = PretendedLaunch(seconds, fail)
    config = ComparisonConfig.from_dict({**DOCUMENT, **(changes or {})})
    comparison = OnNetworks(config, "two", [1, 1], "vit", launch.with_kinds, lambda what: None, NETWORKS)
    return [measurement.to_dict() for measurement in comparison.run()], launch


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


def test_a_case_that_finds_its_sizes_learns_before_its_first_turn() -> None:
    strategies = ["lsdp", {"strategy": "lsdp", "batch_sizes": "auto"}]
    results, launch = run({"strategies": strategies, "learning_steps": 7, "rounds": 2, "uncounted_steps": 0})
    fixed, automatic = results[:2]
    assert (fixed["label"], automatic["label"]) == ("lsdp fp32", "lsdp fp32 (auto)")
    assert (len(fixed["losses"]), len(automatic["losses"])) == (2 * 2, 7 + 2 * 2)
    assert fixed["round_seconds"] == automatic["round_seconds"] == [1.0, 1.0]
    # Bytes are those of counted steps alone, sizes those that the training has come to.
    assert fixed["bytes_between_nodes"] == automatic["bytes_between_nodes"]
    assert (fixed["batch_sizes"], automatic["batch_sizes"]) == ([4, 4], [5, 3])


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


def test_ranks_with_other_data_are_refused() -> None:
    launch = PretendedLaunch(lambda name, network: 1.0, lambda method, arguments: None)
    told = iter(["digits", "other digits"] * 9)
    comparison = OnNetworks(
        ComparisonConfig.from_dict(DOCUMENT), "two", [1, 1], "vit", launch.with_kinds, lambda what: None, NETWORKS
    )
    called = launch.call
    launch.call = lambda method, **arguments: [
        {**result, "samples": next(told)} if method == "build" else result for result in called(method, **arguments)
    ]
    errors = [measurement.error for measurement in comparison.run()]
    assert all("found other data on rank 1 than on rank 0" in error for error in errors)


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
        "limits": [],
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
