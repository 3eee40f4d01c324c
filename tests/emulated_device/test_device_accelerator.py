# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Invariant 1 through the accelerator on the emulated device, for every strategy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from exactness import Setting, check

from accelerate_lshdp.documents.placement import ModelPlacement, UnitPlacement, UnitStore


pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(300),  # the first test builds the device
]

#: Units that are streamed beside those of all other stores.
MIXED = ModelPlacement(
    {
        "": UnitPlacement(UnitStore.WORLD_KEPT),
        "vit.embeddings": UnitPlacement(UnitStore.REPLICATE),
        "vit.layers.0": UnitPlacement(UnitStore.HOST, checkpoint=True),
        "vit.layers.1": UnitPlacement(UnitStore.WORLD),
        "vit.layers.2": UnitPlacement(UnitStore.NODE),
        "vit.layers.3": UnitPlacement(UnitStore.HOST),
    }
)
HOST_AND_WHOLE = ModelPlacement(
    {f"transformer.h.{layer}": UnitPlacement(UnitStore.HOST) for layer in range(2)}, UnitPlacement(UnitStore.REPLICATE)
)
SETTINGS = [
    Setting("lsdp", (3, 1), (1, 1), model="gpt2", own_accumulation=2),
    Setting("osdp", (3, 1), (2,), placement=MIXED, layers=4),
    Setting("lsdp", (3, 1), (2,)),
    Setting("osdp", (3, 1), (1, 1), model="gpt2", placement=HOST_AND_WHOLE),
    Setting("lsdp", ((3, 2), (1, 2)), (2,), clip_value=0.01),
    Setting("lsdp", (3, 1), (2,), frozen=("layers.0", "embeddings")),
    Setting("lsdp", (3, 1), (2,), model="gpt2", gradient_checkpointing=True, dtype="float32", steps=20),
    Setting("ddp", (3, 1), (2,)),
    Setting("group_sharding", (3, 1), (2,)),
    Setting("fsdp", (3, 1), (2,)),
    Setting("fsdp_offload", (3, 1), (1, 1)),
    Setting("zero2", (3, 1), (2,)),
]


def cells() -> list:
    """All of them with `-m slow`, the first two by default."""
    return [
        pytest.param(setting, id=str(setting), marks=() if index < 2 else pytest.mark.slow)
        for index, setting in enumerate(SETTINGS)
    ]


@pytest.mark.parametrize("setting", cells())
def test_the_accelerator_trains_as_one_process(on_device: Callable[..., list], setting: Setting) -> None:
    found = on_device(
        "accelerator_training", "train", setting, ranks=setting.world_size, nodes=setting.nodes, timeout=100
    )
    check([each["errors"] for each in found], setting.dtype)
    assert [each["races"] for each in found] == [[]] * setting.world_size


@pytest.mark.parametrize(
    ("nodes", "accumulation"),
    [((2,), 2), *(pytest.param(nodes, 1, marks=pytest.mark.slow) for nodes in ((2,), (1, 1)))],
    ids=str,
)
def test_a_run_goes_on_with_the_same_bits(
    on_device: Callable[..., list], tmp_path: Path, nodes: tuple[int, ...], accumulation: int
) -> None:
    folders = [tmp_path / f"node{index}" for index in range(len(nodes))]
    for folder in folders:
        folder.mkdir()
    run = {"strategy": "lsdp", "sizes": (5, 3), "nodes": nodes, "folders": tuple(map(str, folders)), "dropout": True}
    # Whether gradients stay on the device between micro-batches decides in which order they are added.
    run["own_accumulation"] = accumulation

    def train(**options: Any) -> list:
        return on_device("accelerator_training", "trained_in_parts", {**run, **options}, ranks=2, nodes=nodes)

    straight, _ = train(stop=9), train(stop=5, save_at=4)
    for (expected, losses), (found, rest) in zip(straight, train(stop=9, resume=True), strict=True):
        assert rest == losses[-len(rest) :]
        assert all((found[name] == expected[name]).all() for name in expected)


def test_a_profile_measures_every_rank(on_device: Callable[..., list]) -> None:
    to_device, to_host = 4e9, 1e9
    one, other = on_device("accelerator_training", "profiled", to_device, to_host, ranks=2, timeout=100)
    assert one == other
    assert len(one["seconds"]) == 2 and min(one["seconds"]) > 0
    for host in one["hosts"]:
        # A busy machine copies later, never faster.
        assert 0 < host["to_device_bytes_per_second"] <= 1.01 * to_device
        assert 0 < host["to_host_bytes_per_second"] <= 1.01 * to_host
        assert host["optimizer_seconds_per_parameter"] > 0 < host["memory_bytes"]


def test_evaluations_and_closing_have_the_weights_of_the_last_step(on_device: Callable[..., list]) -> None:
    for found in on_device("accelerator_training", "evaluated", ranks=2):
        assert max(found["differences"]) < 1e-12
        assert found["closed"] < 1e-12
        assert found["races"] == []


@pytest.mark.parametrize(
    ("strategy", "delays"),
    [
        pytest.param("ddp", {"collective_delay": 1.0}, id="collectives", marks=pytest.mark.slow),
        pytest.param("lsdp", {"to_host": 5e4}, id="copies to the host"),
    ],
)
def test_what_a_device_waits_for_is_no_computing(
    on_device: Callable[..., list], strategy: str, delays: dict[str, float]
) -> None:
    for computed, waited in on_device(
        "accelerator_training", "statistics", strategy, delays, ranks=2, nodes=(1, 1), timeout=100
    ):
        assert computed < 0.5 < 0.9 < waited


@pytest.mark.parametrize(
    ("how", "late", "times"),
    [("hook after the step", False, 4), ("hook before the step", False, 4), ("failure", True, 1)],
)
def test_a_step_is_what_hooks_and_second_tries_expect(
    on_device: Callable[..., list], how: str, late: bool, times: int
) -> None:
    (plain,) = on_device("accelerator_training", "steps_with", "nothing")
    (found,) = on_device("accelerator_training", "steps_with", how)
    assert plain["late"] and found["late"] == late
    assert found["seen"] == [True] * times
    assert all((one == other).all() for one, other in zip(found["parameters"], plain["parameters"], strict=True))


def test_a_run_places_blocks_in_host_memory_where_the_device_is_short(on_device: Callable[..., list]) -> None:
    # Divided over both ranks, states would need half of it and the gathered blocks.
    for rank in on_device("accelerator_training", "placed_by_the_run", 0.3, ranks=2, nodes=(2,), timeout=100):
        assert "host" in rank["stores"]
        assert rank["peak"] <= rank["limit"]
        assert rank["races"] == []
