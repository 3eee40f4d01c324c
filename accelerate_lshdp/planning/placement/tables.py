# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A placement problem as arrays, and the part of it that a branch of the search looks at.

The excess of a phase is what it sends beyond what it computes, sum_u (send - work) - W. A step is what is computed, and
`times` the positive part of each excess. Excesses and memory are linear in the counts of options: the *columns*. Rows
of memory are divided by their limits and times by `scale_time`, so that all numbers have a like size. Nothing here is
exact: what is claimed of a placement is computed by the problem, in integers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from accelerate_lshdp.planning.placement.problem import Counts, PlacementProblem


class Tables:
    """The columns of a problem; kinds with fewer options than others are padded with options that nobody may have.

    Args:
        problem: of C kinds with at most O options, P phases, K rows.

    Attributes:
        units: number of units of each kind: [C].
        valid: whether an option exists: [C, O].
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
        shape = len(kinds), max(len(kind.options) for kind in kinds)
        self.problem = problem
        self.units = np.array([len(kind.units) for kind in kinds])
        self.valid = np.zeros(shape, dtype=bool)
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
        for place, kind in enumerate(kinds):
            count = len(kind.options)
            work = np.array([option.work for option in kind.options], dtype=float).reshape(count, -1)
            send = np.array([option.send for option in kind.options], dtype=float).reshape(count, -1)
            memory = np.array([option.memory for option in kind.options], dtype=float).reshape(count, -1)
            serial = np.array([option.serial for option in kind.options], dtype=float)
            self.valid[place, :count] = True
            self.base[place, :count] = (work @ self.times + serial) / self.scale_time
            self.columns[place, :count] = np.c_[(send - work) / self.scale_time, memory / scale]
            self.peaks[place, :count] = [option.peaks for option in kind.options]
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
        return float((counts * self.base).sum()), np.einsum("co,cod->d", counts.astype(float), self.columns)

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
        floor: bytes that the largest of each peak has at least: [3].
    """

    least: np.ndarray
    most: np.ndarray
    floor: np.ndarray

    @classmethod
    def whole(cls, tables: Tables) -> Branch:
        """All choices."""
        most = np.where(tables.valid, tables.units[:, None], 0)
        return cls(np.zeros_like(most), most, np.zeros(3))

    def is_empty(self, tables: Tables) -> bool:
        """Whether some kind cannot have all of its units."""
        few, many = self.least.sum(1) > tables.units, self.most.sum(1) < tables.units
        return bool((few | many).any() or (self.least > self.most).any())

    def split_count(self, kind: int, option: int, below: int) -> tuple[Branch, Branch]:
        """The choices in which at most `below` units of a kind have an option, and those in which more have it."""
        most, least = self.most.copy(), self.least.copy()
        most[kind, option] = below
        least[kind, option] = below + 1
        return Branch(self.least, most, self.floor), Branch(least, self.most, self.floor)

    def split_peak(self, tables: Tables, peak: int, below: float) -> tuple[Branch, Branch]:
        """The choices whose largest of a peak has at most `below` bytes, and those in which it has more."""
        most = np.where(tables.peaks[..., peak] > below, 0, self.most)
        floor = self.floor.copy()
        floor[peak] = max(floor[peak], below + 1)
        return Branch(self.least, most, self.floor), Branch(self.least, self.most, floor)
