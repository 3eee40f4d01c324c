# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""``accelerate-lshdp bench`` as users run it: on an emulated cluster where root is available, and without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from laboratory.bench import require_emulation
from laboratory.config import BenchmarkConfig
from laboratory.emulated_cluster import EmulatedCluster


SMOKE = Path(__file__).resolve().parents[1] / "smoke.yaml"
TINY = """\
clusters: {uneven: {nodes: [{cpu: 0.8}, {cpu: 0.4}]}}
networks: [200 Mb/s]
models:
  vit: {kind: vit, image_size: 16, patch_size: 8, num_channels: 1, hidden_size: 128, num_hidden_layers: 2,
        num_attention_heads: 4, intermediate_size: 512, num_labels: 10}
total_batch_size: 6
strategies: [torch_ddp, torch_fsdp, {strategy: lshdp, batch_sizes: [4, 2]}]
rounds: 2
steps: 2
profile_seconds: 0
limits:
  - {name: bytes, error: bytes largest, at_most: 0.05}
"""
MISSING = EmulatedCluster.missing()
needs_cluster = pytest.mark.skipif(MISSING is not None, reason=f"no emulated cluster here: {MISSING}")


def bench(config: Path, folder: Path, *options: str, timeout: float) -> tuple[subprocess.CompletedProcess, Any]:
    command = [
        sys.executable,
        "-m",
        "accelerate_lshdp.cli.main",
        "bench",
        str(config),
        "--output-dir",
        str(folder),
    ]
    finished = subprocess.run([*command, *options], capture_output=True, text=True, timeout=timeout)
    results = folder / "results.json"
    return finished, json.loads(results.read_text()) if results.exists() else None


def check_losses(cases: list[dict[str, Any]]) -> None:
    """All train on the same global batches, from the same weights: losses are those of plain PyTorch."""
    expected = [loss for _, _, loss in cases[0]["losses"]]
    for case in cases:
        tolerance = 1e-4 if case["communication_dtype"] == "fp32" else 1e-2
        assert [loss for _, _, loss in case["losses"]] == pytest.approx(expected, rel=tolerance), case["label"]


@pytest.mark.slow
@pytest.mark.root
@needs_cluster
@pytest.mark.timeout(120)
def test_a_tiny_benchmark_on_an_emulated_cluster(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    finished, results = bench(tmp_path / "tiny.yaml", tmp_path, timeout=110)
    assert finished.returncode == 0, finished.stderr
    cases = results["cases"]
    assert [case["error"] for case in cases] == [None] * 3
    assert [case["batch_sizes"] for case in cases] == [[3, 3], [3, 3], [4, 2]]
    check_losses(cases)
    # Every strategy sends what its formula says, and the network really limits it.
    assert results["limits"][0]["holds"], results["limits"]
    for case in cases:
        assert case["step_seconds"] > max(case["bytes_between_nodes"]) * 8 / case["bits_per_second"]
        assert {event["name"] for event in case["timeline"][1]} >= {"data", "forward", "backward", "optimizer"}
    assert len(cases[2]["compute_seconds"]) == 2 and cases[0]["compute_seconds"] is None
    assert (tmp_path / "report.html").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("by_quota", [pytest.param(True, marks=[pytest.mark.root, needs_cluster]), False])
def test_automatic_sizes_beside_planned_ones_go_on_where_nodes_change(tmp_path: Path, by_quota: bool) -> None:
    text = TINY.partition("limits:")[0].replace("profile_seconds: 0", "profile_seconds: 5\nlearning_steps: 6")
    text = text.replace("{nodes: [{cpu: 0.8}, {cpu: 0.4}]}", "{nodes: [{cpu: 0.8}, {cpu: 0.4}], later: [0.4, 0.8]}")
    text = text.replace(
        "torch_fsdp, {strategy: lshdp, batch_sizes: [4, 2]}", "lshdp, {strategy: lsdp, batch_sizes: auto}"
    )
    (tmp_path / "tiny.yaml").write_text(text)
    finished, results = bench(tmp_path / "tiny.yaml", tmp_path, *([] if by_quota else ["--in-process"]), timeout=290)
    assert finished.returncode == 0, finished.stderr
    cases = results["cases"]
    labels = ["torch_ddp", "lshdp fp32", "lsdp fp32 (auto)"]
    assert [(case["cluster"], case["label"]) for case in cases] == [
        (cluster, label) for cluster in ("uneven", "uneven_later") for label in labels
    ]
    assert [case["error"] for case in cases] == [None] * 6
    assert all(sum(case["batch_sizes"]) == 6 for case in cases)
    # The automatic training may come to sizes that were not measured.
    assert all(case["predicted_seconds"] > 0 for case in cases if case["label"] == "lshdp fp32")
    check_losses(cases[:2])
    learned, turns = 6, 2 * (1 + 2)
    for automatic in (cases[2], cases[5]):
        assert len(automatic["losses"]) == learned + turns
    # The automatic training has gone on, the planned one has begun anew.
    assert cases[5]["losses"][0][2] < cases[2]["losses"][0][2]
    assert cases[4]["losses"][0][2] == pytest.approx(cases[1]["losses"][0][2], rel=1e-4)
    # Both train the same global batches, whatever the sizes.
    together = zip(cases[1]["losses"], cases[2]["losses"], strict=False)
    assert all(one == pytest.approx(other, rel=1e-4) for (_, _, one), (_, _, other) in together)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_tiny_benchmark_without_root(tmp_path: Path) -> None:
    text = TINY.partition("limits:")[0].replace("torch_fsdp, ", "") + "memory: true\n"
    (tmp_path / "tiny.yaml").write_text(text)
    finished, results = bench(tmp_path / "tiny.yaml", tmp_path, "--in-process", timeout=290)
    assert finished.returncode == 0, finished.stderr
    assert "the network is NOT emulated" in finished.stderr and results["config"]["in_process"]
    cases = results["cases"]
    assert [case["error"] for case in cases] == [None] * 2
    assert all(case["bytes_between_nodes"] is None and min(case["peak_pss_bytes"]) > 1e7 for case in cases)
    check_losses(cases)


@pytest.mark.slow
@pytest.mark.root
@needs_cluster
@pytest.mark.timeout(300)
def test_every_strategy_in_two_minutes(tmp_path: Path) -> None:
    finished, results = bench(SMOKE, tmp_path, timeout=290)
    assert finished.returncode in (0, 1), finished.stderr  # 1: a busy machine took longer than two minutes
    assert [case["error"] for case in results["cases"]] == [None] * len(BenchmarkConfig.load(SMOKE).strategies)
    assert all(case["predicted_seconds"] > 0 for case in results["cases"])
    check_losses(results["cases"])


def test_what_is_missing_for_a_cluster_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(EmulatedCluster, "missing", classmethod(lambda cls, description=None: "root is needed"))
    with pytest.raises(ValueError, match="cannot be emulated here: root is needed. Or add --in-process"):
        require_emulation(BenchmarkConfig.load(SMOKE))
