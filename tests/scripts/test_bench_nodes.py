# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""``accelerate-lshdp bench`` on real nodes: one command a node, from an installed package without the laboratory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import base_environment, free_port

import accelerate_lshdp
from accelerate_lshdp.cli.main import main
from accelerate_lshdp.comparing.report import load_results


TINY = """\
models:
  vit: {kind: vit, image_size: 16, patch_size: 8, num_channels: 1, hidden_size: 32, num_hidden_layers: 2,
        num_attention_heads: 2, intermediate_size: 64, num_labels: 10}
total_batch_size: 6
strategies: [lsdp, {strategy: ddp, batch_sizes: [4, 2]}]
rounds: 2
steps: 2
profile_seconds: 0
"""
EMULATED = TINY + "clusters: {two: {nodes: [{cpu: 0.8}, {cpu: 0.4}]}}\nnetworks: [1 Gb/s]\n"


def start(config: Path, folder: Path, *options: str, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "accelerate_lshdp.cli.main", "bench", str(config), "--output-dir", str(folder)]
    return subprocess.Popen(
        [*command, "--cpu", *options],
        env={**base_environment(), **environment},
        cwd=config.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_nodes(config: Path, folder: Path, ranks: str = "1,1") -> list[subprocess.Popen]:
    """Two commands, as if they were on two machines."""
    options = ["--nodes", ranks, "--main-ip", "127.0.0.1", "--main-port", str(free_port()), "--node-rank"]
    return [start(config, folder / f"node{node}", *options, str(node)) for node in range(2)]


def finish(processes: list[subprocess.Popen], seconds: float) -> list[tuple[int, str, str]]:
    """Exit codes and outputs; ends what has not ended by itself."""
    try:
        outputs = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def losses(case: dict[str, Any]) -> list[float]:
    return [loss for _, _, loss in case["losses"]]


@pytest.mark.timeout(240)
def test_two_nodes_take_turns_and_node_0_writes_the_report(tmp_path: Path) -> None:
    config = tmp_path / "compare.yaml"
    config.write_text(TINY)
    first, second = finish(start_nodes(config, tmp_path), 220)
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert "node 1 of 2 nodes with 1 rank each, CPU" in second[2] and not (tmp_path / "node1").exists()
    results = json.loads((tmp_path / "node0" / "results.json").read_text())
    equal, uneven = results["cases"]
    assert [case["error"] for case in results["cases"]] == [None] * 2
    assert [case["nodes"] for case in results["cases"]] == [[1, 1]] * 2
    assert (equal["batch_sizes"], uneven["batch_sizes"]) == ([3, 3], [4, 2])
    # Both have trained the same global batches from the same weights.
    assert losses(uneven) == pytest.approx(losses(equal), rel=1e-4) and len(losses(equal)) == 2 * (1 + 2)
    # Steps of both nodes, on one clock; and no bytes, as the loopback's cannot be told apart.
    begins = [min(event["begin"] for event in rank) for rank in equal["timeline"]]
    assert len(begins) == 2 and 0 <= min(begins) and max(begins) < 60
    assert equal["bytes_between_nodes"] is None and equal["formula_bytes"] == [4.0 * equal["parameters"]] * 2
    assert "--nodes 1,1 --cpu --node-rank 0 --main-ip 127.0.0.1 --main-port" in results["command"]
    assert (tmp_path / "node0" / "report.html").is_file()
    assert len(load_results(tmp_path / "node0").cases) == 2


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_nodes_of_several_ranks_compare_plans_and_memory_with_plain_pytorch(tmp_path: Path) -> None:
    config = tmp_path / "compare.yaml"
    text = TINY.replace("profile_seconds: 0", "profile_seconds: 5\nmemory: true")
    config.write_text(text.replace("[lsdp, {strategy: ddp, batch_sizes: [4, 2]}]", "[torch_ddp, lsdp, lshdp]"))
    first, second = finish(start_nodes(config, tmp_path, "1,2"), 390)
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    peer, equal, planned = json.loads((tmp_path / "node0" / "results.json").read_text())["cases"]
    assert peer["batch_sizes"] == equal["batch_sizes"] == [2, 2, 2] and sum(planned["batch_sizes"]) == 6
    for case in (peer, equal, planned):
        assert case["error"] is None and case["nodes"] == [1, 2] and case["predicted_seconds"] is None
        assert losses(case) == pytest.approx(losses(peer), rel=1e-4)
        assert len(case["peak_pss_bytes"]) == 2 and min(case["peak_pss_bytes"]) > 1e7


def test_nodes_with_different_files_are_refused_on_both(tmp_path: Path) -> None:
    config = tmp_path / "compare.yaml"
    config.write_text(TINY)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "compare.yaml").write_text(TINY.replace("steps: 2", "steps: 3"))
    options = ["--nodes", "1,1", "--main-ip", "127.0.0.1", "--main-port", str(free_port()), "--node-rank"]
    files = (config, tmp_path / "other" / "compare.yaml")
    processes = [start(file, tmp_path / "out", *options, str(node)) for node, file in enumerate(files)]
    for code, _, error in finish(processes, 60):
        assert code == 2
        assert "found another configuration file on node 1 than on node 0, expected the same" in error


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_node_that_is_lost_costs_its_cases_and_no_report(tmp_path: Path) -> None:
    config = tmp_path / "compare.yaml"
    config.write_text(TINY.replace("rounds: 2", "rounds: 100000"))
    nodes = start_nodes(config, tmp_path)
    try:
        for line in nodes[0].stderr:
            if "round 3 of" in line:
                break
        nodes[1].kill()
        output, error = nodes[0].communicate(timeout=200)
    finally:
        for process in nodes:
            process.kill()
            process.communicate()
    assert nodes[0].returncode == 1, error
    cases = json.loads((tmp_path / "node0" / "results.json").read_text())["cases"]
    assert all("node 1 has gone" in case["error"] or "rank 0" in case["error"] for case in cases)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with the package alone, as a wheel installs it."""
    package = Path(accelerate_lshdp.__file__).parent
    shutil.copytree(package, tmp_path / "site" / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "site"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_an_installed_package_compares_on_one_node_and_refuses_emulated_ones(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "compare.yaml").write_text(TINY.replace(", {strategy: ddp, batch_sizes: [4, 2]}", ""))
    (tmp_path / "emulated.yaml").write_text(EMULATED)
    path = {"PYTHONPATH": str(installed)}
    real = start(tmp_path / "compare.yaml", tmp_path / "out", "--nodes", "1", **path)
    emulated = subprocess.Popen(
        [*real.args[:4], str(tmp_path / "emulated.yaml"), "--output-dir", str(tmp_path / "emulated")],
        env={**base_environment(), **path},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    (code, _, error), (refused, _, why) = finish([real, emulated], 220)
    assert code == 0, error
    (case,) = json.loads((tmp_path / "out" / "results.json").read_text())["cases"]
    assert case["error"] is None and case["nodes"] == [1] and case["cluster"] == "one node with 1 rank"
    assert refused == 2 and why.count("\n") == 1
    assert "found clusters, networks in" in why and "has no laboratory" in why and "a checkout of the project" in why
    assert not (tmp_path / "emulated").exists()


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (TINY, [], "say which ranks to compare on: --nodes"),
        (TINY, ["--in-process"], "found --in-process, which slows emulated nodes down"),
        (TINY, ["--nodes", "1,1", "--main-ip", "127.0.0.1"], "say with --node-rank which of the 2 nodes this is"),
        (TINY, ["--nodes", "1,1"], "2 nodes have to find node 0"),
        (TINY, ["--nodes", "3"], 'found [4, 2], expected 3 sizes (the ranks of "one node with 3 ranks")'),
        (TINY.replace("[lsdp,", "[torch_hsdp,"), ["--nodes", "9"], "compare.yaml: total_batch_size: found 6"),
        (
            TINY.replace("kind: vit,", "kind: vit, hidden_size: 30,"),
            ["--nodes", "2"],
            "found the key 'hidden_size' twice",
        ),
        (TINY.replace("[lsdp,", "[lshdp,"), ["--nodes", "2"], "which need a profile, but profile_seconds is 0"),
        (EMULATED, ["--nodes", "2"], "found --nodes for real nodes, but"),
        (EMULATED, ["--cpu"], "found --cpu or --gpu for real nodes, but"),
        (TINY + "limits: []\n", ["--in-process"], "clusters: found nothing under this key"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    text: str, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "compare.yaml").write_text(text)
    device = [] if {"--cpu", "--in-process"} & set(options) or text == EMULATED else ["--cpu"]
    assert main(["bench", str(tmp_path / "compare.yaml"), "--output-dir", str(tmp_path), *options, *device]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("... ")]
    assert len(said) == 1 and message in said[0]
