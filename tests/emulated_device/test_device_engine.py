# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The engine on the emulated device: the parameters of one process, and no race, however slow the device is."""

from __future__ import annotations

from collections.abc import Callable

import pytest


pytestmark = [
    pytest.mark.compiler,
    pytest.mark.slow,
    pytest.mark.timeout(300),  # the first test builds the device
]

DELAYS = {
    "fast": {},
    "slow copies": {"copy_delay": 0.005},
    "slow collectives": {"collective_delay": 0.01},
    "slow operators": {"compute_delay": 0.0005},
}


STRATEGIES = ["ddp", "group_sharding", "lsdp", "zero2", "fsdp", "fsdp_offload", "osdp"]


@pytest.mark.parametrize("delays", DELAYS)
@pytest.mark.parametrize("nodes", [(1, 1), (2,)], ids=["apart", "together"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_are_those_of_one_process(
    on_device: Callable[..., list], strategy: str, nodes: tuple[int, ...], delays: str
) -> None:
    for found in on_device("device_training", "train", strategy, nodes, DELAYS[delays], ranks=2, timeout=100):
        assert found["error"] < 1e-5
        assert found["races"] == []
