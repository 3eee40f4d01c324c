# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What a rank sees of a loss, in bytes: a row that it tells in every step, and the values that it has compared.

Every rank tells every other one, so what is told of a loss that is known has few bytes. Values, which are told while
it is found out what a loss is, are fetched by the ranks that look at them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from accelerate_lshdp.accelerator.losses.observations import SeenLoss
from accelerate_lshdp.accelerator.losses.values import CrossEntropies


#: Bits of a number, from the lowest one on.
_FLAGS = ("asks", "has_auxiliary", "low_precision", "looked", "compiled", "counted", "even")
#: Further bits: whether there is a loss that looks somehow, and whether there are values.
_LOOKS, _VALUES = 1 << len(_FLAGS), 2 << len(_FLAGS)
_TOLD = np.dtype(
    [
        ("position", np.int64),
        ("looks", np.uint32),
        ("flags", np.uint16),
        ("known", np.int8),
        ("kind_of_class", np.int8),
        ("dimensions", np.uint8),
        ("samples", np.uint32),
        ("labels", np.uint32),
        ("shifted", np.uint32),
        ("ignored", np.uint32),
    ]
)
_NUMBERS = [name for name in _TOLD.names if name not in ("looks", "flags")]
#: Of a rank that has compared nothing.
_NO_VALUES = {"loss": math.nan, "own": math.nan, "multiple": math.nan, "factor": 1.0, "items": math.nan}


def told(seen: SeenLoss) -> tuple[torch.Tensor, bytes | None]:
    """What a rank tells all others of a loss, in uint8, as many bytes on all ranks; and the values it has compared."""
    numbers = np.array([*(getattr(seen, name) for name in _NO_VALUES), *seen.values], np.float64)
    none = np.array([*_NO_VALUES.values(), *CrossEntropies()], np.float64)
    values = None if np.array_equal(numbers, none, equal_nan=True) else numbers.tobytes()
    flags = sum(1 << index for index, name in enumerate(_FLAGS) if getattr(seen, name))
    flags |= (0 if math.isnan(seen.looks) else _LOOKS) | (0 if values is None else _VALUES)
    row = np.zeros(1, _TOLD)
    for name in _NUMBERS:
        row[name] = getattr(seen, name)
    row["looks"], row["flags"] = seen.looks if flags & _LOOKS else 0, flags
    return torch.from_numpy(row.view(np.uint8)), values


def ranks_with_values(rows: torch.Tensor) -> list[int]:
    """The ranks that have compared values, as their rows say, which have the shape (ranks, bytes)."""
    flags = np.frombuffer(rows.numpy().tobytes(), _TOLD)["flags"]
    return np.flatnonzero(flags & _VALUES).tolist()


def seen_losses(rows: torch.Tensor, values: Mapping[int, bytes]) -> list[SeenLoss]:
    """What ranks see of a loss, of what they have told.

    Args:
        rows: of each rank, shape (ranks, bytes).
        values: that ranks have compared, as far as they are wanted.
    """
    found = []
    for rank, row in enumerate(np.frombuffer(rows.numpy().tobytes(), _TOLD)):
        flags = int(row["flags"])
        numbers = [*_NO_VALUES.values(), *CrossEntropies()]
        if rank in values:
            numbers = np.frombuffer(values[rank], np.float64).tolist()
        found.append(
            SeenLoss(
                looks=float(row["looks"]) if flags & _LOOKS else math.nan,
                **{name: float(row[name]) for name in _NUMBERS},
                **{name: float(flags >> index & 1) for index, name in enumerate(_FLAGS)},
                **dict(zip(_NO_VALUES, numbers, strict=False)),
                values=CrossEntropies(*numbers[len(_NO_VALUES) :]),
            )
        )
    return found
