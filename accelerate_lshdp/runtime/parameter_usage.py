# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`ToldUsage`: for which parameters any rank had gradients, as far as ranks have told each other.

In a step, a rank tells of each model a byte: a `Used`, whether that is as it told last parameter by parameter, and how
often ranks have told each other so. That is enough where some rank has gradients for all parameters, or none has any,
or all are as they told last. Otherwise ranks unite the sets of their parameters, a bit for each.
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

    @classmethod
    def of(cls, usage: torch.Tensor) -> Used:
        """NONE, ALL or SOME of a tensor that is not 0 where there is a gradient."""
        count = int(torch.count_nonzero(usage))
        return cls.NONE if not count else cls.ALL if count == len(usage) else cls.SOME


#: The bits of a byte: a `Used`, and whether the set is as it was told last. The upper five count, modulo 32, how often
#: ranks have united the sets of any model.
_USED, _AS_TOLD = 0b011, 0b100
_COUNT_SHIFT, _COUNTS = 3, 32


class ToldUsage:
    """What ranks have told each other last of each model, parameter by parameter."""

    def __init__(self) -> None:
        # By the index of a model: what this rank has told, and which parameters any rank has; shape (parameters,).
        self._told: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._taken = 0

    def told(self, model: int, usage: torch.Tensor) -> int:
        """The byte that this rank tells of a model.

        Args:
            model: its index.
            usage: shape (parameters,), not 0 where this rank has a gradient.
        """
        own, _ = self._last(model, len(usage))
        as_told = _AS_TOLD if np.array_equal(own, usage.numpy() > 0) else 0
        return Used.of(usage) | as_told | self._taken % _COUNTS << _COUNT_SHIFT

    def hear(self, told: np.ndarray) -> np.ndarray:
        """What each rank tells of each model, shape (ranks, models), of their bytes, for `known`.

        Raises:
            RuntimeError: on all ranks, if one of them has not taken in what the others have, as after an error that a
                script has caught.
        """
        counts = told >> _COUNT_SHIFT
        if (counts != counts[:1]).any():
            apart = sorted({int(rank) for rank, _ in np.argwhere(counts != counts[:1])})
            raise RuntimeError(
                f"found that the ranks {apart} know other parameters to be used than rank 0, expected the same on all"
                " of them: one was interrupted while ranks told each other. Go on from the last checkpoint"
            )
        return told & (_USED | _AS_TOLD)

    def known(self, model: int, told: np.ndarray, parameters: int) -> np.ndarray | None:
        """Which parameters any rank has a gradient for, as far as bytes tell.

        Args:
            model: its index.
            told: what each rank tells, shape (ranks,).
            parameters: of the model.

        Returns:
            Booleans, shape (parameters,), the same on all ranks; None: ranks have to unite what they use.
        """
        used = told & _USED
        if (used == Used.ALL).any():
            return np.ones(parameters, bool)
        if (used == Used.NONE).all():
            return np.zeros(parameters, bool)
        return self._last(model, parameters)[1] if (told & _AS_TOLD).all() else None

    def take(self, model: int, usage: torch.Tensor, united: np.ndarray) -> None:
        """Takes in what ranks have told each other of a model.

        Args:
            model: its index.
            usage: of this rank, as in `told`.
            united: booleans, shape (parameters,): whether any rank has a gradient.
        """
        self._told[model] = usage.numpy() > 0, united
        self._taken += 1

    def _last(self, model: int, parameters: int) -> tuple[np.ndarray, np.ndarray]:
        """What this rank, and any rank, has told last of a model; nothing of one that ranks have told nothing of."""
        own, united = self._told.get(model, (np.empty(0), np.empty(0)))
        if len(own) == parameters:
            return own, united
        return np.zeros(parameters, bool), np.zeros(parameters, bool)  # another model stood at the index before
