# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`ToldUsage`: for which parameters each rank had gradients, as far as ranks have told each other.

In a step, a rank tells of each model a byte: a `Used`, and how often ranks have told each other more. Only where it
has gradients for some of the parameters, and not for the same ones as it told last, do ranks send a bit for each
parameter, too.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch


class Used(IntEnum):
    """Which parameters of a model a rank has gradients for."""

    NONE = 0
    ALL = 1
    SOME = 2
    AS_TOLD = 3
    """Some of them: the same ones as ranks have told each other last."""

    @classmethod
    def of(cls, usage: torch.Tensor) -> Used:
        """NONE, ALL or SOME of a tensor that is not 0 where there is a gradient."""
        count = int(torch.count_nonzero(usage))
        return cls.NONE if not count else cls.ALL if count == len(usage) else cls.SOME


#: Counts of a byte, in the bits beside those of a `Used`.
_USED_BITS, _COUNTS = 2, 64


class ToldUsage:
    """What ranks have told each other last of each model, bit by bit; the same on all ranks.

    Args:
        rank: of this process.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._bits: dict[int, np.ndarray] = {}  # by the index of a model: shape (ranks, parameters)
        self._taken = 0

    def told(self, model: int, usage: torch.Tensor) -> int:
        """The byte that this rank tells of a model.

        Args:
            model: its index.
            usage: shape (parameters,), not 0 where this rank has a gradient.
        """
        used = Used.of(usage)
        bits = self._bits.get(model)
        # A model that is prepared later may stand at the same index.
        if used is Used.SOME and bits is not None and bits.shape[1] == len(usage):
            used = Used.AS_TOLD if np.array_equal(bits[self._rank], usage.numpy() > 0) else Used.SOME
        return used | self._taken % _COUNTS << _USED_BITS

    def used(self, told: np.ndarray) -> np.ndarray:
        """What each rank tells of each model, shape (ranks, models), of their bytes.

        Raises:
            RuntimeError: on all ranks, if one of them has not taken in what the others have, as after an error that a
                script has caught.
        """
        counts = told >> _USED_BITS
        if (counts != counts[:1]).any():
            apart = sorted({int(rank) for rank, _ in np.argwhere(counts != counts[:1])})
            raise RuntimeError(
                f"found that the ranks {apart} know other parameters to be used than rank 0, expected the same on all"
                " of them: one was interrupted while ranks told each other. Go on from the last checkpoint"
            )
        return told & (1 << _USED_BITS) - 1

    def take(self, model: int, bits: np.ndarray) -> torch.Tensor:
        """Takes in what all ranks have told of a model, bit by bit.

        Args:
            model: its index.
            bits: shape (ranks, parameters).

        Returns:
            How many ranks have a gradient for each parameter, in float64.
        """
        self._bits[model] = bits > 0
        self._taken += 1
        return torch.from_numpy(bits.sum(axis=0).astype(np.float64))

    def count(self, model: int, used: np.ndarray, parameters: int) -> torch.Tensor:
        """How many ranks have a gradient for each parameter, in float64, where none tells `Used.SOME`.

        Args:
            model: its index.
            used: what each rank tells, shape (ranks,).
            parameters: of the model.
        """
        count = np.full(parameters, float((used == Used.ALL).sum()))
        if (used == Used.AS_TOLD).any():
            count += self._bits[model][used == Used.AS_TOLD].sum(axis=0)
        return torch.from_numpy(count)
