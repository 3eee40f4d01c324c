# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A placement problem as arrays, and the part of it that a branch of the search looks at.

The excess of a phase is what it sends beyond what it computes, sum_u (send - work) - W. A step is what is computed
and `times` the positive part of each excess. Excesses and memory are linear in the counts of options: the *columns*.
Rows of memory are divided by their limits and times by `scale_time`, so that all numbers have a like size. Nothing
here is exact: what is claimed of a placement is computed by the problem, in integers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from accelerate_lshdp.planning.placement.problem import Counts, PlacementProblem


class Tables:
    """The columns of a problem; kinds with fewer options than others are padded with options that nobody may have.

    Args:
        problem: of C kinds with at most O options, P phases, K rows.

    Attributes:
        units: number of units of each kind: [C].
        valid: whether an option exists: [C, O].
        recomputes: whether it recomputes activations: [C, O].
        scale_time: nanoseconds of the unit in which times are.
        scale_memory: bytes of the unit of each row: [K].
        base: time that an option adds to what is computed, and its serial part: float64 [C, O].
        columns: excess of each phase, memory in each row as a share of its limit: [C, O, P + K].
        right: what the columns may sum to: computing of each phase; limits without what is fixed: [P + K].
        times: of each phase: [P].
        constant: time that no option changes.
        peaks: bytes of each peak of an option: [C, O, 3].
        peak_weights: what a byte of a peak takes of each row: [K, 3].
    """

    def __init__(self, problem: PlacementProblem) -> None:
        kinds, phases, rows = problem.kinds, problem.phases, problem.rows
        lengths = np.array([len(kind.options) for kind in kinds])
        shape = len(kinds), int(lengths.max())
        self.problem = problem
        self.units = np.array([len(kind.units) for kind in kinds])
        self.valid = np.arange(shape[1]) < lengths[:, None]
        self.recomputes = np.zeros(shape, dtype=bool)
        self.base = np.zeros(shape)
        self.columns = np.zeros((*shape, len(phases) + len(rows)))
        self.peaks = np.zeros((*shape, 3))
        self.times = np.array([phase.times for phase in phases], dtype=float)
        self.scale_memory = scale = np.array([max(1, row.limit) for row in rows], dtype=float)
        computing = np.array([phase.nanoseconds for phase in phases], dtype=float)
        constant = float(problem.serial + self.times @ computing)
        # Where nothing is computed, what the first options send has the size of a step, too.
        self.scale_time = constant or float(sum(sum(kind.options[0].send) for kind in kinds)) or 1.0
        self.right = np.r_[
            computing / self.scale_time, np.array([row.limit - row.fixed for row in rows], dtype=float) / scale
        ]
        self.constant = constant / self.scale_time
        self.peak_weights = np.array([row.peak_weights for row in rows], dtype=float).reshape(-1, 3) / scale[:, None]
        # In the order in which `valid` picks them: those of the first kind, then of the next.
        options = [option for kind in kinds for option in kind.options]
        work = np.array([option.work for option in options], dtype=float).reshape(len(options), -1)
        send = np.array([option.send for option in options], dtype=float).reshape(len(options), -1)
        memory = np.array([option.memory for option in options], dtype=float).reshape(len(options), -1)
        serial = np.array([option.serial for option in options], dtype=float)
        self.recomputes[self.valid] = [option.placement.checkpoint for option in options]
        self.base[self.valid] = (work @ self.times + serial) / self.scale_time
        self.columns[self.valid] = np.hstack(((send - work) / self.scale_time, memory / scale))
        self.peaks[self.valid] = [option.peaks for option in options]
        #: The sizes that each peak may have, increasing.
        self.peak_sizes = [np.unique(self.peaks[..., peak][self.valid]) for peak in range(3)]

    @property
    def phase_count(self) -> int:
        """Number of phases; in columns they come before the rows of memory."""
        return len(self.times)

    @property
    def longest(self) -> float:
        """A time that no placement exceeds."""
        sends = np.maximum(0.0, self.columns[..., : self.phase_count]) @ self.times
        return self.constant + float(self.units @ np.where(self.valid, self.base + sends, 0.0).max(1))

    def leave_out_time(self) -> None:
        """Makes all placements equally fast, so that only memory matters."""
        self.base[:], self.columns[..., : self.phase_count], self.right[: self.phase_count] = 0.0, 0.0, 0.0
        self.constant = 0.0

    def time(self, base: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Times of steps from sums of `base` and `columns`; any leading shape."""
        excess = columns[..., : self.phase_count] - self.right[: self.phase_count]
        return self.constant + base + np.maximum(0.0, excess) @ self.times

    def sums(self, counts: np.ndarray) -> tuple[float, np.ndarray]:
        """Sums of `base` and of `columns` over the units: a number, and an array [P + K]."""
        flat = counts.ravel()
        used = flat.nonzero()[0]
        taken = flat[used].astype(float)
        columns = self.columns.reshape(len(flat), -1)
        return float(taken @ self.base.ravel()[used]), taken @ columns.take(used, axis=0)

    def room(self, peaks: np.ndarray) -> np.ndarray:
        """What the memory columns may sum to where the largest of each peak are `peaks` bytes: [K]."""
        return self.right[self.phase_count :] - self.peak_weights @ peaks

    def used_peaks(self, counts: np.ndarray) -> np.ndarray:
        """The largest bytes of each peak among the options that units have: [3]."""
        return self.peaks[counts > 0].max(axis=0)

    def counts_of(self, counts: np.ndarray) -> Counts:
        """The counts without what was padded."""
        return [row[own].tolist() for row, own in zip(counts, self.valid, strict=True)]

    def array_of(self, counts: Counts) -> np.ndarray:
        """The counts of a problem as an array [C, O]."""
        array = np.zeros(self.valid.shape, dtype=np.int64)
        for place, own in enumerate(counts):
            array[place, : len(own)] = own
        return array


@dataclass(frozen=True, slots=True)
class Branch:
    """The choices that a branch of the search looks at.

    Args:
        least: the fewest units of a kind that have an option: [C, O].
        most: the most of them: [C, O].
        recomputing: the fewest and the most units of a kind that recompute: [C, 2].
        floor: bytes that the largest of each peak has at least: [3].
    """

    least: np.ndarray
    most: np.ndarray
    recomputing: np.ndarray
    floor: np.ndarray

    @classmethod
    def whole(cls, tables: Tables) -> Branch:
        """All choices."""
        most = np.where(tables.valid, tables.units[:, None], 0)
        return cls(np.zeros_like(most), most, np.c_[0 * tables.units, tables.units], np.zeros(3))

    def is_empty(self, tables: Tables) -> bool:
        """Whether some kind cannot have options for all of its units."""
        if (self.least > self.most).any():
            return True
        low, high = np.zeros(len(tables.units)), np.zeros(len(tables.units))
        for recomputes, bounds in ((tables.recomputes, self.recomputing), (~tables.recomputes, self._keeping(tables))):
            least = np.maximum(bounds[:, 0], np.where(recomputes, self.least, 0).sum(1))
            most = np.minimum(bounds[:, 1], np.where(recomputes, self.most, 0).sum(1))
            if (least > most).any():
                return True
            low, high = low + least, high + most
        return bool((low > tables.units).any() or (high < tables.units).any())

    def contains(self, tables: Tables, counts: np.ndarray) -> bool:
        """Whether a placement is one of these choices, but for its peaks."""
        recomputing = np.where(tables.recomputes, counts, 0).sum(1)
        within = (recomputing >= self.recomputing[:, 0]) & (recomputing <= self.recomputing[:, 1])
        return bool((counts >= self.least).all() and (counts <= self.most).all() and within.all())

    def split_count(self, kind: int, option: int, below: int) -> tuple[Branch, Branch]:
        """The choices in which at most `below` units of a kind have an option, and those in which more have it."""
        most, least = self.most.copy(), self.least.copy()
        most[kind, option] = below
        least[kind, option] = below + 1
        return replace(self, most=most), replace(self, least=least)

    def split_recomputing(self, kind: int, below: int) -> tuple[Branch, Branch]:
        """The choices in which at most `below` units of a kind recompute, and those in which more do."""
        fewer, more = self.recomputing.copy(), self.recomputing.copy()
        fewer[kind, 1] = below
        more[kind, 0] = below + 1
        return replace(self, recomputing=fewer), replace(self, recomputing=more)

    def split_peak(self, tables: Tables, peak: int, below: float) -> tuple[Branch, Branch]:
        """The choices whose largest of a peak has at most `below` bytes, and those in which it has more."""
        most = np.where(tables.peaks[..., peak] > below, 0, self.most)
        floor = self.floor.copy()
        floor[peak] = max(floor[peak], below + 1)
        return replace(self, most=most), replace(self, floor=floor)

    def _keeping(self, tables: Tables) -> np.ndarray:
        """The fewest and the most units of each kind that keep their activations: [C, 2]."""
        return tables.units[:, None] - self.recomputing[:, ::-1]
