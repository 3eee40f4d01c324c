# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The memory in which an optimizer steps on a device: the engine bounds it, planned placements count it. No torch."""

from __future__ import annotations


#: Bytes of the parameters for which torch's ``foreach`` optimizers compute at a time on a device. They keep a kernel
#: busy for much longer than its launch takes.
STEPPED_TOGETHER = 16 * 2**20


def stepping_bytes(parameter_bytes: float, largest: float) -> float:
    """Bytes that AdamW needs beside parameters, gradients and moments while it steps: one for each of a part.

    Args:
        parameter_bytes: of all parameters that are trained.
        largest: of the largest of them, which is in one part.
    """
    return min(parameter_bytes, max(STEPPED_TOGETHER, largest))
