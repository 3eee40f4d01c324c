# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""From a mixture of placements to one placement that keeps all limits: rounding, repair and exchanges.

A move gives one unit of a kind another option. Moves are looked at all at once, in arrays with a row for each kind and
option that some unit has. While a placement is moved, the largest of each peak may not grow: so memory is linear in
the moves. Other peaks are other branches of the search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from accelerate_lshdp.planning.placement.tables import Tables


#: Moves of which pairs are tried: those that change the price least. The best placements lie where prices are equal.
_PAIRED = 64
_ROUNDS = 200
_SLACK = 1e-12
#: The part of hidden sends that counts as time in repairs.
_HIDDEN = 1e-2


@dataclass(slots=True)
class _Moves:
    """All moves of a placement: arrays [M, O] with a row for each kind and option that some unit has."""

    kinds: np.ndarray
    options: np.ndarray
    base: np.ndarray
    columns: np.ndarray
    allowed: np.ndarray


class Improver:
    """Makes placements feasible and better.

    Args:
        tables: the problem.
        multipliers: prices of phases and rows, by which moves are ranked.
    """

    def __init__(self, tables: Tables, multipliers: np.ndarray) -> None:
        self.tables = tables
        self.phases = tables.phase_count
        self.multipliers = multipliers
        self.prices = tables.base + tables.columns @ multipliers

    def rounded(self, mixture: np.ndarray) -> np.ndarray:
        """Whole counts near mean counts: rounded down, and the rest by largest remainder in each kind."""
        counts = np.floor(mixture + 1e-9)
        left = (self.tables.units - counts.sum(1)).astype(int)
        for kind in np.flatnonzero(left):
            rest = np.where(self.tables.valid[kind], mixture[kind] - counts[kind], -np.inf)
            counts[kind, np.argsort(-rest, kind="stable")[: left[kind]]] += 1
        return counts

    def repaired(self, counts: np.ndarray) -> np.ndarray | None:
        """A placement with the same or lower peaks that keeps all limits; None: no moves lead to one."""
        counts = counts.copy()
        peaks = self.tables.used_peaks(counts)
        room = self.tables.room(peaks) + _SLACK
        base, columns = self.tables.sums(counts)
        moves = self._moves(counts, peaks)
        # Each move lowers what is beyond the limits, so it ends; the number of units bounds the rounds that help.
        for _ in range(4 * int(self.tables.units.sum()) + 16):
            beyond = columns[self.phases :] - room
            if (beyond <= 0).all():
                return counts
            row = int(beyond.argmax())
            saved = -moves.columns[..., self.phases + row]
            # What a move really costs, and a little of what it costs where nothing overlaps: where computing hides
            # what is sent, room to hide more is worth something.
            cost = self.tables.time(base + moves.base, columns + moves.columns) - self.tables.time(base, columns)
            cost = cost + _HIDDEN * (moves.base + moves.columns[..., : self.phases] @ self.tables.times)
            able = moves.allowed & (saved > 1e-15)
            useful = np.where(able, np.minimum(saved, beyond[row]), 1.0)
            ratio = np.where(able, np.maximum(cost, 1e-9) / useful, np.inf)
            at, option = np.unravel_index(int(ratio.argmin()), ratio.shape)
            if not np.isfinite(ratio[at, option]):
                return None
            base, columns = base + moves.base[at, option], columns + moves.columns[at, option]
            moves = self._apply(counts, moves, [(int(at), int(option))], peaks)
        return None

    def improved(self, counts: np.ndarray, pairs: bool = True) -> np.ndarray:
        """A placement that no single move, and none of the pairs of moves that are tried, makes faster."""
        counts = counts.copy()
        peaks = self.tables.used_peaks(counts)
        room = self.tables.room(peaks) + _SLACK
        base, columns = self.tables.sums(counts)
        moves = self._moves(counts, peaks)
        for _ in range(_ROUNDS):
            now = float(self.tables.time(base, columns))
            fits = moves.allowed & (columns[self.phases :] + moves.columns[..., self.phases :] <= room).all(-1)
            times = np.where(fits, self.tables.time(base + moves.base, columns + moves.columns), np.inf)
            at, option = np.unravel_index(int(times.argmin()), times.shape)
            chosen = [(int(at), int(option))]
            if times[at, option] >= now - _SLACK:
                chosen = self._best_pair(counts, moves, base, columns, room, now) if pairs else []
            if not chosen:
                break
            for at, option in chosen:
                base, columns = base + moves.base[at, option], columns + moves.columns[at, option]
            moves = self._apply(counts, moves, chosen, peaks)
        return counts

    def _best_pair(
        self,
        counts: np.ndarray,
        moves: _Moves,
        base: float,
        columns: np.ndarray,
        room: np.ndarray,
        now: float,
    ) -> list[tuple[int, int]]:
        """The pair of moves that gives the fastest placement; empty: none is faster than `now`."""
        change = self.prices[moves.kinds] - self.prices[moves.kinds, moves.options][:, None]
        cost = np.where(moves.allowed, np.abs(change), np.inf).ravel()
        count = min(_PAIRED, len(cost))
        near = np.argpartition(cost, count - 1)[:count]
        near = near[np.isfinite(cost[near])]
        if len(near) < 2:
            return []
        rows, options = np.divmod(near, moves.base.shape[1])
        more_base = moves.base[rows, options]
        more = moves.columns[rows, options]
        both = columns + more[:, None] + more[None, :]
        # Two units have to be there to be moved.
        apart = (rows[:, None] != rows[None, :]) | (counts[moves.kinds[rows], moves.options[rows]] >= 2)[:, None]
        fits = apart & (both[..., self.phases :] <= room).all(-1)
        times = np.where(fits, self.tables.time(base + more_base[:, None] + more_base[None, :], both), np.inf)
        first, second = np.unravel_index(int(times.argmin()), times.shape)
        if times[first, second] >= now - _SLACK:
            return []
        return [(int(rows[place]), int(options[place])) for place in (first, second)]

    def _moves(self, counts: np.ndarray, peaks: np.ndarray) -> _Moves:
        tables = self.tables
        kinds, options = np.nonzero(counts)
        allowed = tables.valid[kinds] & (tables.peaks[kinds] <= peaks).all(-1)
        allowed[np.arange(len(kinds)), options] = False
        return _Moves(
            kinds,
            options,
            tables.base[kinds] - tables.base[kinds, options][:, None],
            tables.columns[kinds] - tables.columns[kinds, options][:, None],
            allowed,
        )

    def _apply(
        self, counts: np.ndarray, moves: _Moves, chosen: Sequence[tuple[int, int]], peaks: np.ndarray
    ) -> _Moves:
        """Makes moves, and returns those that there are then."""
        tables = self.tables
        for at, option in chosen:
            counts[moves.kinds[at], moves.options[at]] -= 1
            counts[moves.kinds[at], option] += 1
        for kind in {int(moves.kinds[at]) for at, _ in chosen}:
            first, last = np.searchsorted(moves.kinds, [kind, kind + 1])
            options = np.flatnonzero(counts[kind])
            if len(options) != last - first:
                return self._moves(counts, peaks)
            # Of all other kinds they are the same: with many kinds it is these that would take the time.
            moves.options[first:last] = options
            moves.base[first:last] = tables.base[kind] - tables.base[kind, options][:, None]
            moves.columns[first:last] = tables.columns[kind] - tables.columns[kind, options][:, None]
            moves.allowed[first:last] = tables.valid[kind] & (tables.peaks[kind] <= peaks).all(-1)
            moves.allowed[np.arange(first, last), options] = False
        return moves
