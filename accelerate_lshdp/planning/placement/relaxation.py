# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The lower bound of a branch from multipliers, and the best multipliers.

With a multiplier a_p in [0, times_p] for each phase and l_k >= 0 for each row of memory,

    times_p * max(W, C) >= (times_p - a_p) * W + a_p * C        for what is computed, W, and sent, C
    0 >= l_k * (memory of row k - limit_k)                      where the limit is kept

Added up, the right-hand sides are a sum over units. Every unit takes the option that is cheapest at these prices:
one pass over the options and no search give a bound for all placements, whatever the multipliers are. It is concave in
them, and piecewise linear: each placement gives one piece.

The best multipliers come from Dantzig and Wolfe's decomposition (1960): a linear program mixes placements so that the
mixture keeps all limits, its prices are new multipliers, and the placement that is cheapest at them joins, until none
is cheaper than the mixture. The program has a row for each multiplier and one for the mixture, no more than a dozen,
so its simplex works on matrices of that size. The mixture is what rounding begins with.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from accelerate_lshdp.planning.placement.tables import Branch, Tables


#: The greatest price of a row of memory, in units of time for as much memory as the limit. Prices of rows that no
#: mixture keeps grow up to it, and the bound with them beyond any step: so a branch without room is recognised.
_GREATEST_PRICE = 1e3
_PIVOTS = 400
_ONE = np.ones(1)
_TOLERANCE = 1e-10


@dataclass(frozen=True, slots=True)
class Relaxation:
    """The bound of a branch.

    Args:
        bound: time, in the tables' unit, that no placement of the branch undercuts.
        multipliers: with which it holds: of phases, then of rows for as much memory as the limit.
        mixture: mean counts of the mixture: [C, O].
        parts: the placements that are mixed, those with the largest parts first: each [C, O].
    """

    bound: float
    multipliers: np.ndarray
    mixture: np.ndarray
    parts: list[np.ndarray]


class _Cheapest:
    """Finds the placement of a branch that is cheapest at given multipliers."""

    def __init__(self, tables: Tables, branch: Branch) -> None:
        self.tables = tables
        units = tables.units[:, None]
        self._flat = tables.columns.reshape(-1, tables.columns.shape[-1])
        self._missing = np.where(branch.most > 0, 0.0, np.inf)
        self._kinds = np.arange(len(units))
        self.right = np.concatenate((tables.right[: tables.phase_count], tables.room(branch.floor)))
        # Units of other kinds may all have one and the same option, whichever is cheapest.
        bounded = ((branch.least > 0) | ((branch.most > 0) & (branch.most < units))).any(1)
        bounded |= (branch.recomputing[:, 0] > 0) | (branch.recomputing[:, 1] < tables.units)
        self._bounded = [_BoundedKind(tables, branch, int(kind)) for kind in np.flatnonzero(bounded)]

    def __call__(self, multipliers: np.ndarray) -> tuple[float, np.ndarray]:
        """The bound at some multipliers, and the counts of the placement that it comes from: [C, O]."""
        tables = self.tables
        prices = tables.base + (self._flat @ multipliers).reshape(tables.base.shape) + self._missing
        counts = np.zeros(prices.shape)
        counts[self._kinds, prices.argmin(1)] = tables.units
        for bounded in self._bounded:
            counts[bounded.kind] = bounded.cheapest(prices[bounded.kind].tolist())
        used = counts > 0
        total = float(counts[used] @ prices[used])
        return tables.constant + total - float(multipliers @ self.right), counts


class _BoundedKind:
    """A kind of which a branch bounds the counts; plain lists, as there are few options and few such kinds."""

    def __init__(self, tables: Tables, branch: Branch, kind: int) -> None:
        self.kind = kind
        self.units = int(tables.units[kind])
        self.least, self.most = branch.least[kind].tolist(), branch.most[kind].tolist()
        self.recomputes = tables.recomputes[kind].astype(int).tolist()
        fewest, most = branch.recomputing[kind].tolist()
        # First of units that keep their activations, then of those that recompute.
        self.fewest, self.room = [self.units - most, fewest], [self.units - fewest, most]

    def cheapest(self, prices: list[float]) -> list[int]:
        """The cheapest counts: what every option and each of the two groups need, then the cheapest that have room.

        Groups do not overlap, so taking the cheapest at each turn is optimal.
        """
        counts, grouped = list(self.least), [0, 0]
        for recomputes, count in zip(self.recomputes, counts, strict=True):
            grouped[recomputes] += count
        order = sorted(range(len(prices)), key=prices.__getitem__)
        for group in (0, 1):
            for option in order:
                needed = self.fewest[group] - grouped[group]
                if needed > 0 and self.recomputes[option] == group:
                    taken = min(needed, self.most[option] - counts[option])
                    counts[option] += taken
                    grouped[group] += taken
        left = self.units - sum(counts)
        for option in order:
            if left <= 0:
                break
            group = self.recomputes[option]
            taken = min(left, self.most[option] - counts[option], self.room[group] - grouped[group])
            counts[option] += taken
            grouped[group] += taken
            left -= taken
        return counts


class _Master:
    """The linear program of mixtures, by the revised simplex method.

    Columns are placements, and for each row a slack and an excess: what a phase sends beyond what it computes costs
    its `times`, memory beyond the limit costs `_GREATEST_PRICE`. Starts with one placement, whose slacks and excesses
    are a feasible basis.
    """

    def __init__(self, tables: Tables, right: np.ndarray) -> None:
        self.rows = len(right)
        self.right = np.concatenate((right, _ONE))
        prices = np.full(self.rows - tables.phase_count, _GREATEST_PRICE)
        self.excess_costs = np.concatenate((tables.times, prices))
        self.tables = tables
        self.counts: list[np.ndarray] = []
        self.columns: list[np.ndarray] = []
        self.costs: list[float] = []

    def add(self, counts: np.ndarray) -> int:
        """Adds a placement; returns its number."""
        base, columns = self.tables.sums(counts)
        self.counts.append(counts)
        self.columns.append(np.concatenate((columns, _ONE)))
        self.costs.append(base)
        if len(self.counts) == 1:
            self._start()
        return len(self.counts) - 1

    def _start(self) -> None:
        # Entries of the basis: (cost, column, number of the placement or -1).
        self.basis = []
        for row in range(self.rows):
            beyond = self.columns[0][row] > self.right[row]
            self.basis.append(self._unit(row, beyond))
        self.basis.append((self.costs[0], self.columns[0], 0))
        self._solve()

    def _unit(self, row: int, is_excess: bool) -> tuple[float, np.ndarray, int]:
        column = np.zeros(self.rows + 1)
        column[row] = -1.0 if is_excess else 1.0
        return (self.excess_costs[row] if is_excess else 0.0), column, -1

    def _solve(self) -> None:
        matrix = np.array([entry[1] for entry in self.basis]).T
        self.inverse = np.linalg.inv(matrix)
        self.values = np.maximum(0.0, self.inverse @ self.right)
        self.prices = np.array([entry[0] for entry in self.basis]) @ self.inverse

    @property
    def multipliers(self) -> np.ndarray:
        """The prices of the rows, made to be valid multipliers."""
        return np.clip(-self.prices[:-1], 0.0, self.excess_costs)

    @property
    def cost(self) -> float:
        """The cost of the mixture."""
        return float(self.prices @ self.right)

    def reduced_cost(self, number: int) -> float:
        """By how much a placement would lower the cost, for each part of it in the mixture; below 0: it would."""
        return self.costs[number] - float(self.prices @ self.columns[number])

    def enter_slack(self) -> bool:
        """Lets the best slack or excess enter, if one lowers the cost."""
        # Reduced costs: of a slack -price, of an excess its cost + price.
        slack, excess = -self.prices[:-1], self.excess_costs + self.prices[:-1]
        both = np.concatenate((slack, excess))
        row = int(both.argmin())
        if both[row] >= -_TOLERANCE:
            return False
        return self._enter(self._unit(row % self.rows, row >= self.rows))

    def enter(self, number: int) -> bool:
        """Lets a placement enter the basis."""
        return self._enter((self.costs[number], self.columns[number], number))

    def _enter(self, entry: tuple[float, np.ndarray, int]) -> bool:
        direction = self.inverse @ entry[1]
        able = direction > 1e-11
        if not able.any():
            return False
        ratios = np.where(able, self.values / np.where(able, direction, 1.0), np.inf)
        # Among equal ratios the largest pivot: small ones make the inverse inexact.
        near = ratios <= ratios.min() + 1e-12
        leaving = int(np.where(near, direction, -np.inf).argmax())
        before = self.basis[leaving]
        self.basis[leaving] = entry
        try:
            self._solve()
        except np.linalg.LinAlgError:
            self.basis[leaving] = before
            self._solve()
            return False
        return True

    def mixture(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """Mean counts, and the mixed placements, largest parts first."""
        parts = [
            (value, self.counts[number])
            for value, (_, _, number) in zip(self.values.tolist(), self.basis, strict=True)
            if number >= 0 and value > 1e-9
        ]
        parts.sort(key=lambda part: -part[0])
        total = sum(value for value, _ in parts) or 1.0
        mean = sum((value / total) * counts for value, counts in parts)
        return np.asarray(mean), [counts for _, counts in parts]


def relax(tables: Tables, branch: Branch, *, start: np.ndarray, known: list[np.ndarray], enough: float) -> Relaxation:
    """The best bound of a branch.

    Args:
        tables: the problem.
        branch: the choices to bound; not empty.
        start: multipliers to begin with.
        known: placements that may be mixed, of other branches; those outside this one are left out.
        enough: a bound of at least this time is good enough to stop.
    """
    cheapest = _Cheapest(tables, branch)
    best, counts = cheapest(start)
    multipliers = start
    master = _Master(tables, cheapest.right)
    master.add(counts)
    for other in known:
        if branch.contains(tables, other):
            master.add(other)
    for _ in range(_PIVOTS):
        if best >= enough:
            break
        if master.enter_slack():
            continue
        pool = [master.reduced_cost(number) for number in range(len(master.counts))]
        number = int(np.argmin(pool))
        if pool[number] >= -_TOLERANCE:
            prices = master.multipliers
            bound, counts = cheapest(prices)
            if bound > best:
                best, multipliers = bound, prices
            if best >= tables.constant + master.cost - _TOLERANCE:
                break
            number = master.add(counts)
            if master.reduced_cost(number) >= -_TOLERANCE:
                break
        if not master.enter(number):
            break
    mixture, parts = master.mixture()
    return Relaxation(best, multipliers, mixture, parts)
