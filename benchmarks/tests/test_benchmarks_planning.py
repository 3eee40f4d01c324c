# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The comparison of planning rules: its optimum is right, its rules do what they say, ours keep their limits."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import gpu_curves
import numpy as np
import planning
import planning_rules as rules
import pytest


def brute_force(curves: list[np.ndarray], total: int) -> float:
    cuts = itertools.product(*(range(1, len(curve) + 1) for curve in curves))
    return min(rules.makespan(curves, cut) for cut in cuts if sum(cut) == total)


def test_optimum_is_that_of_brute_force_on_curves_with_dips() -> None:
    rng = random.Random(3)
    dips_used = 0
    for _ in range(300):
        curves = [
            np.array([rng.randint(1, 8) / 4 for _ in range(rng.randint(1, 6))]) for _ in range(rng.randint(1, 4))
        ]
        total = rng.randint(len(curves), sum(map(len, curves)))
        best = rules.optimal_makespan(curves, total)
        assert best == brute_force(curves, total)
        dips_used += best < rules.optimal_makespan(rules.running_maximum(curves), total)
    assert dips_used > 10
    with pytest.raises(ValueError, match="found a total of 5, expected 2 to 4 samples"):
        rules.optimal_makespan([np.ones(2), np.ones(2)], 5)


def test_equal_split_gives_what_a_rank_cannot_hold_to_the_others() -> None:
    assert rules.equal_split([np.ones(8)] * 3, 8) == [3, 3, 2]
    assert rules.equal_split([np.ones(2), np.ones(16), np.ones(16)], 16) == [2, 7, 7]
    assert rules.equal_split([np.ones(2), np.ones(5), np.ones(16)], 23) == [2, 5, 16]


def test_iterative_rule_finds_a_balance_but_loses_the_total() -> None:
    linear = [np.arange(1, 17) * factor for factor in (1.0, 3.0)]
    assert rules.iterative_rule(linear, 16) == [12, 4]
    # Three equal ranks share 16 samples as 5 1/3 each: rounded one by one, a sample is lost.
    assert rules.iterative_rule([np.arange(1, 17) * 1.0] * 3, 16) == [5, 5, 5]


def test_curves_that_are_unusable_are_left_out_and_counted(tmp_path: Path) -> None:
    def curve(gpu: str, forward: list[float], model: str = "bert") -> dict:
        entry = {"model": model, "gpu": gpu, "sequence_length": 512, "dtype": "float32"}
        return {**entry, "forward_ms": forward, "backward_ms": [2.0, 4.0]}

    entries = [curve("t4", [1.0, 2.0]), curve("v100", [0.5, 1.0]), curve("l4", [1.0]), curve("p40", [0.0, 1.0])]
    path = tmp_path / "curves.json"
    path.write_text(json.dumps({"curves": [*entries, curve("t4", [1.0, 2.0], model="gpt")]}))
    (family,), skipped = gpu_curves.load_families(path)
    assert sorted(family.curves) == ["t4", "v100"] and list(skipped.values()) == [2, 1]
    np.testing.assert_allclose(family.curves["t4"], [0.003, 0.006])
    clusters = gpu_curves.draw_clusters([family], 4, 20, seed=1)
    assert clusters[0].gpus == gpu_curves.draw_clusters([family], 4, 20, seed=1)[0].gpus
    assert all(cluster.total_batch_size == 8 for cluster in clusters)


def test_absent_curves_are_a_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planning.main(["--curves", str(tmp_path / "none.json")]) == 2
    assert "name it with --curves PATH or LSHDP_GPU_CURVES" in capsys.readouterr().err


@pytest.fixture(scope="module")
def compared() -> dict:
    try:
        path = gpu_curves.curves_path(None)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return planning.compare_rules(gpu_curves.load_families(path)[0], clusters_a_size=250, seed=0)


def test_our_rules_keep_their_limits_on_measured_curves(compared: dict) -> None:
    assert [limit for limit in planning.check_rules(compared) if not limit.holds] == []


def test_rules_are_ordered_as_claimed(compared: dict) -> None:
    means = [compared[name]["all"]["mean"] for name in planning.RULES]
    assert means == sorted(means, reverse=True)
    assert compared["the paper's rule"]["all"]["wrong_total"] > 0.5
    assert compared["equal split"]["all"]["wrong_total"] == compared["linear fit + solver"]["all"]["wrong_total"] == 0


def test_a_worse_rule_breaks_the_limits(compared: dict) -> None:
    worse = {**compared, planning.PROBES: compared["linear fit + solver"]}
    broken = [limit.what for limit in planning.check_rules(worse) if not limit.holds]
    assert broken == [f"{planning.PROBES}: mean", f"{planning.PROBES}: p95"]


def test_command_prints_writes_and_fails_when_a_limit_is_broken(
    compared: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planning, "compare_rules", lambda *_: compared)
    monkeypatch.setattr(planning, "SOLVER_LIMITS", ((8, 800, 1e-9),))
    assert planning.main(["--repeats", "1", "--json", str(tmp_path / "results.json")]) == 1
    results = json.loads((tmp_path / "results.json").read_text())
    assert [limit["holds"] for limit in results["limits"]] == [True] * 4 + [False]
    printed = capsys.readouterr().out
    assert "the paper's rule" in printed and "BROKEN" in printed
