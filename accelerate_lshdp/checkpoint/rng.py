"""The random number generators of a rank: python, numpy, torch on the CPU and torch on the device."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy
import torch


def capture(device: torch.device) -> dict[str, Any]:
    """The state of all generators; nothing is drawn from them."""
    version, words, gauss = random.getstate()
    algorithm, key, position, has_gauss, cached = numpy.random.get_state()
    return {
        "python": [version, numpy.array(words, dtype=numpy.uint32), gauss],
        "numpy": [algorithm, key, int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "device_type": device.type,
        "device": None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device).cpu(),
    }


def fits(state: dict[str, Any], device: torch.device) -> bool:
    """Whether `state` can be restored here: it comes from the same kind of device."""
    return state["device_type"] == device.type


def check(state: dict[str, Any]) -> None:
    """Raises whatever is wrong with a state; no generator of this process changes."""
    version, words, gauss = state["python"]
    random.Random().setstate((version, tuple(words.tolist()), gauss))
    numpy.random.RandomState().set_state(tuple(state["numpy"]))
    torch.Generator().set_state(state["torch"].clone())
    if not isinstance(state["device_type"], str):
        raise ValueError(f"found {state['device_type']!r:.60}, expected a kind of device")
    if (state["device_type"] == "cpu") != (state["device"] is None):
        raise ValueError(f"found a state of {state['device_type']} without or with too many generators")


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Sets all generators to what `capture` saw."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    numpy.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["torch"].clone())
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state["device"].clone(), device)


def derive(seed: int, rank: int, samples_seen: int) -> None:
    """Seeds all generators from (seed, rank, samples seen): the same for every run that continues from here, different
    on every rank, and not a stream that the training has used before."""
    digest = hashlib.sha256(f"{seed}/{rank}/{samples_seen}".encode()).digest()
    number = int.from_bytes(digest[:8], "little")
    random.seed(number)
    numpy.random.seed(number % 2**32)
    torch.manual_seed(number % 2**63)  # of the devices, too
