# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The tables of `osdp.py`: the gains that are claimed, for the cases that are quoted; no times of the planner."""

from __future__ import annotations

import pytest
from osdp import DEVICES, MODELS, best_uniform, predict


def case(model: str, devices: str) -> dict[str, object]:
    (found,) = (own for own in DEVICES if own.name == devices)
    return predict(MODELS[model].sizes(), found, has_host=False)


def test_gpt2_of_1600_features_in_8_gb() -> None:
    found = case("GPT-2 48 x 1600", "2 x 8 at 10 Gb/s, 8 GB")
    assert found["alone"] / found["uniform"]["fsdp"] >= 1.37
    name, rate = best_uniform(found)
    assert name == "fsdp+" and found["osdp"] / rate >= 1.075
    assert found["gap"] < 1e-4 and sum(found["blocks"].values()) == 48
    # What each rank would have to hold whole: no strategy that gathers once a step, and none that shards nothing.
    assert not {"ddp", "ddp+", "zero2", "zero2+"} & set(found["uniform"])


@pytest.mark.parametrize(
    "model, devices, gain",
    [
        ("ViT-L", "2 x 8 at 10 Gb/s, 8 GB", 1.215),
        ("GPT-2 48 x 2048", "2 x 8 at 100 Gb/s, 16 GB", 1.20),
        ("BERT-large", "8, 16 GB", 1.0),
    ],
)
def test_gains_over_the_best_uniform_strategy(model: str, devices: str, gain: float) -> None:
    found = case(model, devices)
    assert found["osdp"] / best_uniform(found)[1] >= gain


def test_host_memory_is_one_store_more() -> None:
    devices = DEVICES[0]
    model = MODELS["GPT-2 48 x 2048"].sizes()
    without, with_host = predict(model, devices, False), predict(model, devices, True)
    assert "lsdp+" in with_host["uniform"] and "lsdp+" not in without["uniform"]
    assert with_host["osdp"] > (without["osdp"] or 0.0)
