# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`PlacementProblem`: one option for each unit of a model, so that a step is short and each rank's memory suffices.

An option is a placement (a store, whether activations are recomputed, slices) with what it costs. A step has phases:
the forward and the backward of a micro-batch, apart for those that also send what travels once a step. In a phase the
ranks compute while units are sent, so it ends when both have:

    step  =  sum over phases p of  times_p * max(W_p + sum_u work_up,  sum_u send_up)  +  S + sum_u serial_u

where W_p is the computing of one micro-batch, work_up what the option of unit u adds to it (recomputing, exchanges
that block), send_up the time for which it keeps the links busy, and serial_u what nothing overlaps (the optimizer
step). Sends of a phase are added up as if all links were one: an upper bound, which is met where one link is slow.

Ranks with the same share, limit and micro-batch have a row k of memory, or one for each of some moments of a step
(`moments`):

    fixed_k  +  sum_u memory_uk  +  2 max_u gathered_u  +  m max_u unreduced_u  +  samples_k max_u recomputed_u
             <=  limit_k

One unit is computed while the next one is gathered, so two are gathered at a time, of which neither is larger than
the largest: the row never says less than is needed. Then come the gradient of one unit before it is reduced (m = 1;
where ranks compute in host memory m = 2, with the message of the unit before it), and what one unit recomputes for its
backward. What is needed throughout, or all the time up to that moment, is in memory_uk, what no option changes in
fixed_k.

Times are whole nanoseconds and sizes whole bytes, both rounded up: sums of them are exact, also in float64 (2^53 ns
are 104 days), and certificates are checked in integers.

Sources: OSDP (Jiang et al., IJCAI 2023) chooses between sharding and replicating each operator, and splits large ones;
the states of a rank are those of ZeRO (Rajbhandari et al., 2020), and keeping the node's shards after the forward is
hpZ of ZeRO++ (Wang et al., 2023). Unlike OSDP, the two phases overlap with what is sent in each, nodes and
micro-batches may differ, and what is chosen is proven (`planning.proofs.placement`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from accelerate_lshdp.documents.placement import UnitPlacement
from accelerate_lshdp.planning.cuts.step_time import PlanningError


#: Multipliers of certificates are integers: these parts of 1, and of a nanosecond for a byte.
MULTIPLIER_PARTS = 2**40
#: Counts of the units of each kind (outer) that have each option (inner).
Counts = Sequence[Sequence[int]]


class Peak(IntEnum):
    """What only the largest unit counts for: the index in `Option.peaks` and `MemoryRow.peak_weights`."""

    GATHERED = 0
    UNREDUCED = 1
    RECOMPUTED = 2


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the step in which computing and sending overlap.

    Args:
        name: for messages.
        nanoseconds: computing of one micro-batch, on the slowest rank.
        times: how often a step has it.
    """

    name: str
    nanoseconds: int
    times: int = 1


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """The memory of ranks that need the same.

    Args:
        name: for messages.
        limit: bytes.
        fixed: bytes that are needed whatever is chosen.
        peak_weights: how often the largest of each `Peak` is needed; of `Peak.RECOMPUTED` the samples.
        ranks: the ranks whose memory it is; empty: it is that of a host.
    """

    name: str
    limit: int
    fixed: int
    peak_weights: tuple[int, int, int]
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Option:
    """One placement of a unit, and its costs.

    Args:
        placement: store, checkpointing and slices.
        send: nanoseconds of each phase for which it keeps links busy.
        work: nanoseconds that it adds to the computing of each phase.
        serial: nanoseconds that nothing overlaps.
        memory: bytes in each row, at its moment.
        peaks: bytes of each `Peak`; recomputed ones for each sample.
    """

    placement: UnitPlacement
    send: tuple[int, ...]
    work: tuple[int, ...]
    serial: int
    memory: tuple[int, ...]
    peaks: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class UnitKind:
    """Units that are alike: only how many of them have an option matters.

    Args:
        units: their names.
        options: what each of them may have.
    """

    units: tuple[str, ...]
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class PlacementProblem:
    """Phases, rows of memory, and units with their options; see the module.

    Args:
        phases: the parts of a step.
        rows: the memory of ranks and hosts.
        kinds: all units.
        serial: nanoseconds of a step that nothing overlaps and no option changes.

    Raises:
        PlanningError: there is nothing to choose, or an option has other phases or rows than the problem.
    """

    phases: tuple[Phase, ...]
    rows: tuple[MemoryRow, ...]
    kinds: tuple[UnitKind, ...]
    serial: int = 0

    def __post_init__(self) -> None:
        if not self.kinds or not all(kind.units and kind.options for kind in self.kinds):
            raise PlanningError("found a unit kind without units or options, expected at least one of both")
        for kind in self.kinds:
            for option in kind.options:
                sizes = (len(option.send), len(option.work), len(option.memory))
                expected = (len(self.phases), len(self.phases), len(self.rows))
                if sizes != expected:
                    raise PlanningError(
                        f'found an option of unit "{kind.units[0]}" with {sizes} sends, works and rows, expected'
                        f" {expected}, those of the problem"
                    )

    @property
    def unit_count(self) -> int:
        """Number of units."""
        return sum(len(kind.units) for kind in self.kinds)

    @property
    def computing(self) -> int:
        """Nanoseconds of a step in which nothing is sent or recomputed: no step is shorter."""
        return self.serial + sum(phase.times * phase.nanoseconds for phase in self.phases)

    def nanoseconds(self, counts: Counts) -> int:
        """Nanoseconds of a step: exact."""
        used = self._used(counts)
        total = self.serial + sum(count * option.serial for option, count in used)
        for place, phase in enumerate(self.phases):
            work = phase.nanoseconds + sum(count * option.work[place] for option, count in used)
            total += phase.times * max(work, sum(count * option.send[place] for option, count in used))
        return total

    def memory(self, counts: Counts) -> list[int]:
        """Bytes of each row: exact."""
        used = self._used(counts)
        peaks = [max(own) for own in zip(*(option.peaks for option, _ in used), strict=True)]
        return [
            row.fixed
            + sum(count * option.memory[place] for option, count in used)
            + sum(weight * peak for weight, peak in zip(row.peak_weights, peaks, strict=True))
            for place, row in enumerate(self.rows)
        ]

    def by_rank(self, needs: Sequence[int]) -> dict[int, tuple[int, int]]:
        """The most bytes that each rank needs at a time, and its limit.

        Args:
            needs: bytes of each row.
        """
        found: dict[int, tuple[int, int]] = {}
        for row, need in zip(self.rows, needs, strict=True):
            for rank in row.ranks:
                found[rank] = max(found.get(rank, (0, row.limit)), (need, row.limit))
        return dict(sorted(found.items()))

    def fits(self, counts: Counts) -> bool:
        """Whether all rows keep their limits."""
        return all(need <= row.limit for need, row in zip(self.memory(counts), self.rows, strict=True))

    def sha256(self) -> str:
        """The fingerprint by which a certificate names the problem that it is about: SHA-256 in hex."""
        text = json.dumps(self._document(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode("utf-8")).hexdigest()

    def _document(self) -> dict[str, Any]:
        return {
            "phases": [[phase.nanoseconds, phase.times] for phase in self.phases],
            "rows": [[row.limit, row.fixed, row.peak_weights] for row in self.rows],
            "serial": self.serial,
            "kinds": [
                [
                    kind.units,
                    [[o.placement.to_dict(), o.send, o.work, o.serial, o.memory, o.peaks] for o in kind.options],
                ]
                for kind in self.kinds
            ],
        }

    def _used(self, counts: Counts) -> list[tuple[Option, int]]:
        """The options that units have, and how many units of a kind have them."""
        return [
            (option, count)
            for kind, own in zip(self.kinds, counts, strict=True)
            for option, count in zip(kind.options, own, strict=True)
            if count
        ]
