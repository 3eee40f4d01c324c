# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Ranks of unequal speed: all phases of the benchmark run, and options that cannot work are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import uneven_cluster
from laboratory.emulated_cluster.cgroups import ControlGroup
from limits import Limit


BENCHMARKS = Path(__file__).resolve().parents[1]


def test_a_limit_holds_up_to_its_value() -> None:
    assert Limit("x", 0.05, 0.05).holds and not Limit("x", 0.051, 0.05).holds
    assert not Limit("x", float("nan"), 0.05).holds


def test_options_that_cannot_work_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, message in (
        (["--phases", "profile,planes"], "found phases ['planes']"),
        (["--halved-rank", "4"], "expected one of 4 ranks"),
        (["--phases", "plans"], "run the phase profile first"),
    ):
        with pytest.raises(SystemExit):
            uneven_cluster.parse(["--output-dir", str(tmp_path), *options])
        assert message in capsys.readouterr().err


SMOKE = "--small --shares 0.8,0.4 --totals 8,64 --total 8 --profile-seconds 5 --plan-blocks 2 --steps 6 --blocks 1"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("by_quota", [True, False])
def test_all_phases_run_on_a_tiny_model(by_quota: bool, tmp_path: Path) -> None:
    refusal = ControlGroup.missing() if by_quota else None
    if refusal is not None:
        pytest.skip(f"no CPU quotas here: {refusal}")
    command = [sys.executable, str(BENCHMARKS / "uneven_cluster.py"), *SMOKE.split(), "--output-dir", str(tmp_path)]
    command += [] if by_quota else ["--no-quotas"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=250, env=dict(os.environ))
    # So short a run on a busy machine breaks limits of time (1), but every phase has to come to its end (not 2).
    assert finished.returncode in (0, 1), finished.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["failure"] is None and len(results["limits"]) == 6
    assert ("CPU quotas (cgroups)" if by_quota else "EMULATED by sleeping") in finished.stdout
    assert [sum(size * count for size, count in row["micro_batches"]) for row in results["plans"]] == [8, 64]
    automatic = results["automatic"]
    assert [situation["shares"] for situation in automatic["situations"]] == [[0.8, 0.4], [0.4, 0.4]]
    assert automatic["steps"] == 2 * (6 + 1 + 4)
    assert automatic["situations"][0]["learning"][0]["batch_sizes"] == [4, 4]
    assert automatic["parameter_difference"] <= 5e-6
    assert (automatic["parameter_difference"] == 0) == (automatic["decisions"] == [])
