# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The random number generators of a rank: python, numpy, torch on the CPU and torch on the device."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy
import torch


def capture(device: torch.device) -> dict[str, Any]:
    """Captures the state of all generators of this process as values and tensors; nothing is drawn from them."""
    # Words of the generators as arrays: they go to the file of tensors, where lists would be 1,249 numbers of JSON a
    # rank.
    version, words, gauss = random.getstate()
    algorithm, key, position, has_gauss, cached = numpy.random.get_state()
    return {
        "python": [version, numpy.array(words, dtype=numpy.uint32), gauss],
        "numpy": [algorithm, key, int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "device_type": device.type,
        "device": None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device).cpu(),
    }


def unused() -> dict[str, Any]:
    """A state in the form of `capture` that is of no process, for checkpoints from which numbers are derived anew."""
    version, words, gauss = random.Random(0).getstate()
    algorithm, key, position, has_gauss, cached = numpy.random.RandomState(0).get_state()
    return {
        "python": [version, numpy.array(words, dtype=numpy.uint32), gauss],
        "numpy": [algorithm, key, int(position), int(has_gauss), float(cached)],
        "torch": torch.Generator().manual_seed(0).get_state(),
        "device_type": "cpu",
        "device": None,
    }


def fits(state: dict[str, Any], device: torch.device) -> bool:
    """Whether `state` can be restored here: it comes from the same kind of device."""
    return state["device_type"] == device.type


def check(state: dict[str, Any]) -> None:
    """Raises an error if a state cannot be restored; no generator of this process changes."""
    # By generators made for it: each library checks its own format.
    version, words, gauss = state["python"]
    random.Random().setstate((version, tuple(words.tolist()), gauss))
    numpy.random.RandomState().set_state(tuple(state["numpy"]))
    torch.Generator().set_state(state["torch"].clone())
    if not isinstance(state["device_type"], str):
        raise ValueError(f"found {state['device_type']!r:.60}, expected a kind of device")
    if (state["device_type"] == "cpu") != (state["device"] is None):
        raise ValueError(f"found a state of {state['device_type']} without or with too many generators")


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Sets all generators of this process to a state from `capture`."""

    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    numpy.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["torch"].clone())
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state["device"].clone(), device)


def derive(seed: int, rank: int, samples_seen: int) -> None:
    """Seeds all generators from (seed, rank, samples seen).

    The streams are the same in every run that continues from there, differ between ranks, and are none that the
    training has used before.
    """
    # A hash, not a sum: seed 1 on rank 2 must not be the stream of seed 2 on rank 1.
    digest = hashlib.sha256(f"{seed}/{rank}/{samples_seen}".encode()).digest()
    number = int.from_bytes(digest[:8], "little")
    random.seed(number)
    numpy.random.seed(number % 2**32)
    torch.manual_seed(number % 2**63)  # of the devices, too
