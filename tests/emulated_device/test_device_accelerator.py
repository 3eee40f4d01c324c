# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Invariant 1 through the accelerator on the emulated device, for every strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import pytest
from exactness import Setting, check


pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(300),  # the first test builds the device
]

SETTINGS = [
    Setting("lsdp", (3, 1), (2,)),
    Setting("lsdp", (3, 1), (1, 1), model="gpt2", own_accumulation=2),
    Setting("lsdp", ((3, 2), (1, 2)), (2,), clip_value=0.01),
    Setting("lsdp", (3, 1), (2,), frozen=("layers.0", "embeddings")),
    Setting("lsdp", (3, 1), (2,), model="gpt2", gradient_checkpointing=True, dtype="float32", steps=20),
    Setting("ddp", (3, 1), (2,)),
    Setting("group_sharding", (3, 1), (2,)),
    Setting("fsdp", (3, 1), (2,)),
    Setting("fsdp_offload", (3, 1), (1, 1)),
    Setting("zero2", (3, 1), (2,)),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_accelerator_trains_as_one_process(on_device: Callable[..., list], setting: Setting) -> None:
    found = on_device(
        "accelerator_training", "train", asdict(setting), ranks=setting.world_size, nodes=setting.nodes, timeout=100
    )
    check([each["errors"] for each in found], setting.dtype)
    assert [each["races"] for each in found] == [[]] * setting.world_size
