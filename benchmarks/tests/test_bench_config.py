# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A benchmark's YAML file: what it may say, and what is said about mistakes in it."""

from __future__ import annotations

import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from laboratory.config import BenchmarkConfig
from laboratory.limits import Ratio

from accelerate_lshdp.comparing.cases import AUTO, PLAN, Case
from accelerate_lshdp.comparing.config import ConfigError


BENCHMARKS = Path(__file__).resolve().parents[1]
DOCUMENT: dict[str, Any] = {
    "clusters": {"uneven": {"nodes": [{"cpu": 0.8}, {"cpu": 0.4}]}},
    "networks": ["1 Gb/s", {"rate": "250 Mb/s", "delay": "2 ms"}],
    "models": {"vit": {"kind": "vit", "hidden_size": 96}},
    "total_batch_size": 8,
    "strategies": ["torch_ddp", "ddp", "lshdp:bf16", {"strategy": "lsdp", "batch_sizes": [6, 2]}],
    "limits": [{"name": "fast", "ratio": ["lshdp bf16", ["torch_ddp", "ddp fp32"], "1 Gb/s"], "at_most": 0.6}],
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """The document with another value at a path such as "limits.0.name"."""
    document = deepcopy(DOCUMENT)
    *parents, last = [int(part) if part.isdecimal() else part for part in path.split(".")]
    place: Any = document
    for parent in parents:
        place = place[parent]
    place[last] = value
    return document


def test_a_file_says_what_is_compared_where() -> None:
    config = BenchmarkConfig.from_dict(DOCUMENT)
    assert [case.label for case in config.cases] == ["torch_ddp", "ddp fp32", "lshdp bf16", "lsdp fp32 (6 2)"]
    assert config.cases[2] == Case("lshdp", "bf16", PLAN)
    assert list(config.networks) == ["1 Gb/s", "250 Mb/s, 2 ms"]
    assert config.networks["250 Mb/s, 2 ms"].latency_seconds == 0.002
    assert [node.cores for node in config.clusters["uneven"]] == [0.8, 0.4]
    assert config.limits[0].of == Ratio(("lshdp bf16",), ("torch_ddp", "ddp fp32"), "1 Gb/s", "step_seconds")


def test_a_case_may_say_where_its_units_are() -> None:
    planned = {"strategy": "osdp", "placement": "auto", "memory_limit": 0.75}
    config = BenchmarkConfig.from_dict(changed("strategies.3", planned))
    assert config.cases[3] == Case("osdp", placement=AUTO, memory_limit=0.75)
    with pytest.raises(
        ConfigError, match=r'strategies\[1\]: "osdp fp32 \(auto 0.75\)" trains with a planned placement'
    ):
        document = changed("strategies.3", planned)
        BenchmarkConfig.from_dict({**document, "strategies": document["strategies"][1::2], "profile_seconds": 0})
    written = {"default": {"store": "world"}, "units": {"layers.0": {"checkpoint": True}}}
    case = BenchmarkConfig.from_dict(changed("strategies.3", {"strategy": "osdp", "placement": written})).cases[3]
    assert str(case.known_placement) == "node recomputed: layers.0; others: world"


def test_a_ratio_may_leave_out_what_needs_more_memory() -> None:
    ratio = Ratio(("osdp",), ("lsdp", "fsdp", "torch_fsdp"), "slow", "step_seconds", within_memory=0.75)
    cases = [
        {"cluster": "c", "model": "m", "network": "slow", "label": label, "step_seconds": step, "memory_share": share}
        for label, step, share in (
            ("osdp", 3.0, 0.74),
            ("lsdp", 2.0, 1.0),
            ("fsdp", 4.0, 0.6),
            ("torch_fsdp", 1.0, None),
        )
    ]
    assert ratio.value(cases) == 0.75
    assert math.isnan(ratio.value([case for case in cases if case["label"] != "fsdp"]))


def test_nodes_may_have_other_cores_later() -> None:
    config = BenchmarkConfig.from_dict(changed("clusters.uneven.later", [0.4, 0.4]))
    assert [node.cores for node in config.later["uneven"]] == [0.4, 0.4]
    assert [node.ranks for node in config.later["uneven"]] == [node.ranks for node in config.clusters["uneven"]]


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_files_of_this_repository_are_right(path: Path) -> None:
    assert BenchmarkConfig.load(path).cases


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("round", 3, 'round: found an unknown key, .* Did you mean "rounds"?'),
        ("rounds", 0, "rounds: found 0, expected an integer from 1"),
        ("interleaved", 1, "interleaved: found 1, expected true or false"),
        ("learning_rate", "1e-4", r'learning_rate: found "1e-4" \(a string\), expected a finite number above 0'),
        ("strategies", [], "strategies: found an empty list"),
        ("strategies.0", "torch_dpp", r'strategies\[0\]: found "torch_dpp" .* Did you mean "torch_ddp"?'),
        ("strategies.2", "lshdp:int4", r'strategies\[2\]: found "int4" .*expected one of "fp32", "bf16"'),
        ("strategies.0", "torch_ddp:bf16", r'strategies\[0\]: found "torch_ddp:bf16", expected "torch_ddp"'),
        ("strategies.1", "torch_ddp", r'strategies\[1\]: found "torch_ddp" twice'),
        (
            "strategies.3.batch_sizes",
            [6, 3],
            r"strategies\[3\].batch_sizes: found \[6, 3\], expected 2 sizes .* sum 8",
        ),
        ("strategies.3.batch_sizes", [8, 0], r"batch_sizes\[1\]: found 0, expected an integer from 1"),
        ("strategies.3.batch_sizes", "even", r'batch_sizes: found "even" .* expected one of "equal", "plan"'),
        ("strategies.3.strategy", "torch_fsdp", r"strategies\[3\]: plain PyTorch \(torch_fsdp\) trains with equal"),
        ("total_batch_size", 9, "total_batch_size: found 9 samples for the 2 ranks .* expected a multiple"),
        ("total_batch_size", 1, "total_batch_size: found 1, expected at least 2"),
        ("profile_seconds", 0, r'strategies\[2\]: "lshdp bf16" trains with planned batch sizes, which need a profile'),
        (
            "clusters.uneven.later",
            [0.4],
            r"clusters.uneven.later: found cores of 1 nodes, expected them for each of 2",
        ),
        ("clusters.uneven.later", [0.4, 0], r"clusters.uneven.later\[1\]: found 0"),
        ("clusters.uneven.nodes.0", {"cpu": 0}, r"clusters.uneven.nodes\[0\].cpu: found 0"),
        ("clusters", {}, "clusters: found an object, expected an object with one entry"),
        ("networks.0", "1 GB/s", r'networks\[0\].rate: found "1 GB/s"'),
        ("networks.1", "1 Gb/s", r'networks\[1\]: found "1 Gb/s" twice'),
        ("models.vit.kind", "bert", r'models.vit.kind: found "bert" .*expected one of "vit", "gpt2"'),
        ("limits.0.ratio", ["lshdp bf16", "torch_ddp"], r"limits\[0\].ratio: found a list of 2, expected \[label"),
        ("limits.0.ratio", ["lshdp", "torch_ddp", "1 Gb/s"], r'limits\[0\].ratio: found "lshdp" .*"lshdp bf16"'),
        ("limits.0.ratio", ["torch_ddp", "ddp fp32", "2 Gb/s"], r'limits\[0\].ratio: found "2 Gb/s"'),
        ("limits.0.at_most", None, r"limits\[0\].at_most: found null, expected a finite number"),
        ("limits.0.within_memory", 0, r"limits\[0\].within_memory: found 0, expected a finite number above 0"),
        ("strategies.3", {"strategy": "lsdp", "placement": "auto"}, r"strategies\[3\].placement: found a placement"),
        ("strategies.3", {"strategy": "osdp", "placement": "auto"}, r"strategies\[3\]: expected placement auto and m"),
        ("strategies.3", {"strategy": "osdp", "memory_limit": 0.9}, r"strategies\[3\]: expected placement auto and m"),
        (
            "strategies.3",
            {"strategy": "osdp", "placement": {"default": {"store": "disk"}}},
            r'strategies\[3\].placement.default.store: found "disk"',
        ),
        (
            "strategies.3",
            {"strategy": "torch_fsdp", "checkpoint": True},
            r'strategies\[3\].checkpoint: found checkpoint with strategy "torch_fsdp"',
        ),
        (
            "strategies.3",
            {"strategy": "lsdp", "checkpoint": True, "batch_sizes": "auto"},
            r"strategies\[3\]: found batch_sizes auto with a placement or checkpoint",
        ),
        ("limits.0.error", "bytes largest", r"limits\[0\]: found \['ratio', 'error'\] of .*, expected one of them"),
    ],
)
def test_mistakes_are_named(path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BenchmarkConfig.from_dict(changed(path, value))


def test_what_is_no_yaml_or_no_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there.yaml: cannot be read"):
        BenchmarkConfig.load(tmp_path / "there.yaml")
    (tmp_path / "broken.yaml").write_text("clusters: [")
    with pytest.raises(ConfigError, match="broken.yaml: found text that is not YAML"):
        BenchmarkConfig.load(tmp_path / "broken.yaml")
    (tmp_path / "twice.yaml").write_text("rounds: 3\nrounds: 4\n")
    with pytest.raises(ConfigError, match="found the key 'rounds' twice"):
        BenchmarkConfig.load(tmp_path / "twice.yaml")
