# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Speed and memory of devices for estimates: nominal rates, and the fraction of them that training reaches."""

from __future__ import annotations

import re
from dataclasses import dataclass


#: Fraction of a device's peak rate in training. Assumed; models and batches differ much: give `tflops` or a profile.
ATTAINED = 0.4
#: Operations per second of a CPU core in fp32: derived from step times of a ViT under CPU quotas on one machine, so
#: only a rough guide.
CORE_FLOPS = 7.5e10
#: CPU seconds of an AdamW step for each parameter on one core (one run on a busy machine).
CORE_OPTIMIZER_SECONDS = 1.5e-9
# Memory traffic of AdamW in fp32 for each parameter: reads parameter, gradient and two moments, writes all but the
# gradient.
_OPTIMIZER_BYTES = 28


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator device.

    Args:
        name: name of the product.
        flops: floating-point operations per second that training reaches in fp32.
        half_flops: the same in bf16 or fp16.
        memory_bytes: memory of the device; None: not known.
        bytes_per_second: bandwidth of its memory.
    """

    name: str
    flops: float
    half_flops: float
    memory_bytes: int | None
    bytes_per_second: float

    def flops_in(self, mixed_precision: str) -> float:
        """Floating-point operations per second under accelerate's `mixed_precision`."""
        return self.flops if mixed_precision == "no" else self.half_flops

    def optimizer_seconds(self, parameters: float) -> float:
        """Seconds of an AdamW step on `parameters` parameters, which the bandwidth of the memory bounds."""
        return parameters * _OPTIMIZER_BYTES / self.bytes_per_second


def _device(name: str, teraflops: float, half: float, gigabytes: float, bandwidth: float) -> Device:
    return Device(name, ATTAINED * teraflops * 1e12, ATTAINED * half * 1e12, int(gigabytes * 2**30), bandwidth * 1e9)


#: Nominal, not checked against the makers' sheets: TFLOP/s in fp32 and half precision, GiB, GB/s of memory.
DEVICES = {
    device.name: device
    for device in (
        _device("GTX 1080 Ti", 11.3, 11.3, 11, 484),
        _device("RTX 2080", 10.1, 40, 8, 448),
        _device("RTX 2080 Ti", 13.4, 54, 11, 616),
        _device("RTX 3090", 35.6, 71, 24, 936),
        _device("RTX 4090", 82.6, 165, 24, 1008),
        _device("T4", 8.1, 65, 16, 320),
        _device("P100", 9.5, 19, 16, 732),
        _device("V100", 15.7, 125, 16, 900),
        _device("A10", 31.2, 125, 24, 600),
        _device("L4", 30.3, 121, 24, 300),
        _device("A100", 19.5, 312, 40, 1555),
        _device("A100 80GB", 19.5, 312, 80, 2039),
        _device("H100", 67, 989, 80, 3350),
        _device("H200", 67, 989, 141, 4800),
    )
}
_UNKNOWN_BANDWIDTH = 500e9


def find_device(name: str, teraflops: float | None = None, memory_bytes: int | None = None) -> Device:
    """The device with a name, with the figures that the user gives instead of the table's.

    Args:
        name: name of the product; "NVIDIA", "GeForce", "Tesla" and the like are ignored.
        teraflops: 1e12 operations per second that it reaches in training, in the precision that is used.
        memory_bytes: memory of each device.

    Raises:
        ValueError: the name is unknown, and nothing says how fast it is.
    """
    known = {_plain(device): device for device in DEVICES}.get(_plain(name))
    if known is None and teraflops is None:
        raise ValueError(
            f"found the unknown device {name!r} without tflops, expected one of {', '.join(DEVICES)}, or tflops, the"
            " 1e12 operations a second that it reaches in training"
        )
    found = DEVICES[known] if known is not None else Device(name, 0.0, 0.0, None, _UNKNOWN_BANDWIDTH)
    # The user's figure is for the precision in use, whichever that is, so it stands for both.
    flops, half = (found.flops, found.half_flops) if teraflops is None else (teraflops * 1e12,) * 2
    return Device(found.name, flops, half, memory_bytes or found.memory_bytes, found.bytes_per_second)


def _plain(name: str) -> str:
    words = re.sub(r"[^a-z0-9]+", " ", name.lower()).split()
    return "".join(word for word in words if word not in ("nvidia", "geforce", "tesla", "pcie", "sxm", "sxm4", "sxm5"))
