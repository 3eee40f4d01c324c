# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Nodes that train on processors beside nodes with devices: their gradients meet on the hosts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from exactness import Setting, check


pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(300),  # the first test builds the device
]

SLOW = (("copy_delay", 0.004), ("to_device", 1e8), ("to_host", 1e8))
CLUSTERS = [
    ((1, 1), ("cpu", "emulated")),
    pytest.param((1, 2), ("emulated", "cpu"), marks=pytest.mark.slow),
    ((2, 1), ("emulated", "cpu")),
    pytest.param((1, 1, 1), ("emulated", "cpu", "emulated"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("nodes", "devices"), CLUSTERS, ids=str)
@pytest.mark.parametrize("model", ["Tied", pytest.param("Unused", marks=pytest.mark.slow)])
def test_the_engine_trains_as_one_process(
    on_device: Callable[..., list], model: str, nodes: tuple[int, ...], devices: tuple[str, ...]
) -> None:
    options = {"model": model, "nodes": nodes, "devices": devices, "accumulation": 2, "delays": SLOW}
    for found in on_device("streamed_calls", "train", options, ranks=sum(nodes), timeout=100):
        assert found["races"] == []
        assert found["error"] < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("wire_format", ["bf16", "int8", "powersgd"])
def test_all_nodes_get_the_same_bits_in_every_format(on_device: Callable[..., list], wire_format: str) -> None:
    options = {"nodes": (2, 1), "devices": ("emulated", "cpu"), "wire_format": wire_format}
    errors = {found["error"] for found in on_device("streamed_calls", "train", options, ranks=3, timeout=100)}
    assert len(errors) == 1 and errors.pop() < 0.1


@pytest.mark.parametrize(
    "setting",
    [
        Setting("lsdp", (3, 1), (1, 1), model="gpt2", own_accumulation=2),
        pytest.param(Setting("lsdp", ((3, 2), (1, 2)), (1, 1), clip_value=0.01), marks=pytest.mark.slow),
        pytest.param(Setting("lsdp", (2, 1, 1), (2, 1), frozen=("layers.0", "embeddings")), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_accelerator_trains_as_one_process(on_device: Callable[..., list], setting: Setting) -> None:
    devices = ("emulated", "cpu")
    found = on_device(
        "accelerator_training", "train", setting, devices, ranks=setting.world_size, nodes=setting.nodes, timeout=100
    )
    check([each["errors"] for each in found], setting.dtype)
    assert [each["races"] for each in found] == [[]] * setting.world_size


def test_the_run_finds_batch_sizes(on_device: Callable[..., list]) -> None:
    setting, devices = Setting("lsdp", (4, 4), (1, 1)), ("emulated", "cpu")
    found = on_device("accelerator_training", "train", setting, devices, 8, ranks=2, nodes=(1, 1), timeout=100)
    check([each["errors"] for each in found], setting.dtype)


def test_nodes_that_compute_in_bf16_keep_the_same_parameters(on_device: Callable[..., list]) -> None:
    setting, devices = Setting("lsdp", (3, 1), (1, 1), dtype="float32"), ("emulated", "cpu")
    one, other = on_device(
        "accelerator_training", "train", setting, devices, None, "bf16", ranks=2, nodes=(1, 1), timeout=100
    )
    assert one["errors"] == other["errors"]
    assert 0 < max(one["errors"]) < 0.05


def test_a_run_goes_on_with_the_same_bits(on_device: Callable[..., list], tmp_path: Path) -> None:
    folders = [tmp_path / f"node{index}" for index in range(2)]
    for folder in folders:
        folder.mkdir()
    run = {"strategy": "lsdp", "sizes": (5, 3), "nodes": (1, 1), "folders": tuple(map(str, folders)), "dropout": True}

    def train(**options: Any) -> list:
        devices = ("cpu", "emulated")
        return on_device(
            "accelerator_training", "trained_in_parts", {**run, **options}, devices, ranks=2, nodes=(1, 1)
        )

    straight, _ = train(stop=9), train(stop=5, save_at=4)
    for (expected, losses), (found, rest) in zip(straight, train(stop=9, resume=True), strict=True):
        assert rest == losses[-len(rest) :]
        assert all((found[name] == expected[name]).all() for name in expected)


def test_collectives_of_the_script_meet_on_the_hosts(on_device: Callable[..., list]) -> None:
    devices = ("emulated", "cpu")
    for rank, found in enumerate(on_device("accelerator_training", "met", devices, ranks=2, nodes=(1, 1))):
        own = devices[rank]
        assert found == {
            "device": own,
            "gather": (own, [0.0, 1.0, 1.0]),
            "reduce": (own, [3.0]),
            "pad_across_processes": (own, [1.0, float(rank)]),
        }


@pytest.mark.parametrize("strategy", ["ddp", "group_sharding", "fsdp", "fsdp_offload"])
def test_strategies_whose_gradients_are_on_devices_are_refused(on_device: Callable[..., list], strategy: str) -> None:
    devices = ("emulated", "cpu")
    for error in on_device("accelerator_training", "refused", devices, "strategy", strategy, ranks=2, nodes=(1, 1)):
        assert f"devices of types emulated, cpu and strategy {strategy}" in error
        assert "expected strategy lsdp" in error


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("units", "no module of the model is called, or is of class, no such unit"),
        ("parameter", "found a parameter of class _Parameter.* Use nodes with devices of one type"),
        ("plan of one rank", "rank 1: .*nowhere.json"),
        ("profile", "found nodes with devices of types emulated, cpu, expected one: profiles do not know yet"),
    ],
)
def test_all_ranks_are_told_what_one_of_them_finds(on_device: Callable[..., list], what: str, expected: str) -> None:
    for error in on_device("accelerator_training", "refused", ("emulated", "cpu"), what, ranks=2, nodes=(1, 1)):
        assert re.search(expected, error), error


def test_the_ranks_of_a_node_have_one_type(on_device: Callable[..., list]) -> None:
    # One launcher a machine: what it started is one node, whatever it computes on.
    for error in on_device("accelerator_training", "refused_in_one_node", ranks=2, nodes=(2,)):
        assert "the ranks of node 0 train on devices of types ['cpu', 'emulated']" in error
