# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Invariant 1 on a GPU: one rank with NCCL, and two nodes of one rank that share a GPU, with gloo between them."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from exactness import Setting, check
from launching import TESTS, launch


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="found no CUDA device"),
]
PATHS = os.pathsep.join(filter(None, [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH")]))
ON_A_GPU = {"ACCELERATE_USE_CPU": None, "CUDA_VISIBLE_DEVICES": "0", "PYTHONPATH": PATHS}


def on_gpu(task: str, setting: Setting) -> list[list[str]]:
    """What the ranks print about a task of `cuda_worker`, in words."""
    arguments = [TESTS / "gpu" / "cuda_worker.py", task, json.dumps(asdict(setting))]
    ended = launch(arguments, setting.world_size, nodes=setting.nodes, env=ON_A_GPU)
    assert ended.returncode == 0, ended.stderr
    lines = [line.split() for process in ended.processes for line in process.stdout.splitlines()]
    return [words[1:] for words in lines if words and words[0] == task]


def errors_on_gpu(setting: Setting) -> list[tuple[float, float]]:
    return [(float(gradient), float(parameters)) for gradient, parameters in on_gpu("errors", setting)]


@pytest.mark.parametrize(
    "setting",
    [
        Setting(strategy, (4,), (1,), model=model)
        for strategy in ("ddp", "lsdp", "fsdp", "fsdp_offload", "zero2", "group_sharding")
        for model in ("vit", "gpt2")
    ]
    + [Setting(strategy, ((2, 3),), (1,)) for strategy in ("ddp", "lsdp", "fsdp_offload", "zero2")]
    + [Setting(strategy, (3, 1), (1, 1)) for strategy in ("ddp", "lsdp", "group_sharding")]
    + [
        Setting("lsdp", ((2, 2), (1, 2)), (1, 1), model="gpt2"),
        Setting("lsdp", (3, 1), (2,), model="gpt2", own_accumulation=2),
        Setting("lsdp", (3, 1, 2), (1, 2), frozen=("layers.0",)),
        Setting("lsdp", (2, 2), (2,), gradient_checkpointing=True, dtype="float32", steps=20),
        Setting("lsdp", (3, 1), (1, 1), model="gpt2", intra_node="collectives"),
    ],
    ids=str,
)
def test_training_on_a_gpu_equals_one_process_on_the_cpu(setting: Setting) -> None:
    errors = errors_on_gpu(setting)
    assert len(errors) == setting.world_size
    check(errors, setting.dtype)


@pytest.mark.parametrize("sizes", [(4,), (2, 1)], ids=str)
def test_streamed_bf16_has_the_bits_of_the_offload_of_fsdp2(sizes: tuple[int, ...]) -> None:
    nodes = (1,) * len(sizes)
    found = on_gpu("same_bits", Setting("lsdp", sizes, nodes, model="gpt2", dtype="float32", layers=4))
    assert found == [["True"]] * len(sizes)


@pytest.mark.parametrize("strategy", ["lsdp", "ddp"])
def test_a_gpu_is_profiled_planned_for_and_trained_on(tmp_path: Path, strategy: str) -> None:
    recipe = [TESTS.parent / "recipes" / "vit_image_classification.py", "--output_dir", tmp_path / "vit"]

    def run(*arguments: object) -> None:
        command = ["-m", "accelerate_lshdp.cli.main", *map(str, arguments)]
        ended = launch(command, 0, env=ON_A_GPU, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr + ended.stdout

    options = ["--strategy", strategy, "--mixed-precision", "bf16"]
    run("profile", "--nodes", 1, "--gpu", "--seconds", 8, "--total-batch-size", 64, *options, *recipe)
    (rank,) = json.loads((tmp_path / "lshdp_profile.json").read_text())["ranks"]
    assert rank["device"] == torch.cuda.get_device_name()
    assert 0 < rank["memory"]["bytes"][0] < rank["memory_limit_bytes"] <= torch.cuda.mem_get_info()[1]
    run("plan", "lshdp_profile.json", "--total", 64)
    run("launch", "--plan", "lshdp_plan.json", "--mixed-precision", "bf16", *recipe, "--max_train_steps", 4)
