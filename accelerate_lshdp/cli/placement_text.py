# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A planned placement in words: which block goes where, and why."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from accelerate_lshdp.cli.byte_sizes import format_bytes
from accelerate_lshdp.documents.placement import UnitPlacement, UnitStore
from accelerate_lshdp.planning.placement.problem import Option
from accelerate_lshdp.planning.placement.result import PlacementResult


#: What each store costs and saves.
_STORES = {
    UnitStore.REPLICATE: "whole on every rank, so nothing is gathered",
    UnitStore.NODE: "one copy a node, so only gradients travel between nodes",
    UnitStore.WORLD: "one copy in all, gathered for each forward and backward: the least memory",
    UnitStore.WORLD_KEPT: "one copy in all, gathered once a step",
    UnitStore.WORLD_TO_NODE: "one copy in all, gathered between nodes for the forward, inside them for the backward",
    UnitStore.HOST: "one copy a node, in host memory",
}
#: Ranges of numbered blocks that are named in one line.
_MOST_RANGES = 6
#: A rank whose memory is used up to this part is limited by it.
_FULL = 0.97


def describe_placement(result: PlacementResult) -> list[str]:
    """Lines that say which block goes where and why: one for each group of units that have the same placement."""
    problem = result.problem
    count = sum(len(kind.units) for kind in problem.kinds if kind.units != ("",))
    groups: dict[UnitPlacement, list[str]] = {}
    for name, placement in result.placement.units:
        groups.setdefault(placement, []).append(name)
    order = [name for kind in problem.kinds for name in kind.units]
    lines = []
    for placement, names in sorted(groups.items(), key=lambda group: -len(group[1])):
        blocks = sorted((name for name in names if name), key=order.index)
        parts = [f"{len(blocks)} of {count} blocks ({name_blocks(blocks)})"] if blocks else []
        parts += ["the rest of the model"] if "" in names else []
        saved = _saved_by_recomputing(result, blocks) if placement.checkpoint else ""
        where = ", ".join(str(placement).split(" ", 1))
        lines.append(f"{' and '.join(parts)}: {where}: {_STORES[placement.store]}{saved}")
    return [*lines, _memory_line(result), _pace_line(result)]


def name_blocks(names: Sequence[str]) -> str:
    """Names of blocks in short: ``h.0-3, 7`` for ``h.0`` to ``h.3`` and ``h.7``."""
    series: dict[str, list[int]] = {}
    for name in names:
        before, number = re.fullmatch(r"(.*?)(\d*)", name).groups()
        series.setdefault(before if number else name, []).extend([int(number)] if number else [])
    return "; ".join(before + _ranges(sorted(numbers)) for before, numbers in series.items())


def _ranges(numbers: Sequence[int]) -> str:
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return ", ".join(texts[:_MOST_RANGES]) + (", ..." if len(texts) > _MOST_RANGES else "")


def _options(result: PlacementResult, names: Iterable[str]) -> Iterable[tuple[Option, tuple[Option, ...]]]:
    """The option that each of some units has, with all of its kind."""
    chosen, wanted = dict(result.placement.units), set(names)
    for kind in result.problem.kinds:
        for name in kind.units:
            if name in wanted:
                yield next(o for o in kind.options if o.placement == chosen[name]), kind.options


def _saved_by_recomputing(result: PlacementResult, names: Sequence[str]) -> str:
    """What recomputing saves on the rank that has most activations, and what it takes."""
    steps = result.micro_batches[0][1]
    rows = [place for place, row in enumerate(result.problem.rows) if row.ranks]
    bytes_saved, nanoseconds = dict.fromkeys(rows, 0), 0
    for option, others in _options(result, names):
        same = (option.placement.store, False, option.placement.slices)
        keeps = next(
            (o for o in others if (o.placement.store, o.placement.checkpoint, o.placement.slices) == same), None
        )
        if keeps is None:
            return ""
        for row in rows:
            bytes_saved[row] += keeps.memory[row] - option.memory[row]
        more = [own - other for own, other in zip(option.work, keeps.work, strict=True)]
        nanoseconds += sum(phase.times * extra for phase, extra in zip(result.problem.phases, more, strict=True))
    saved = format_bytes(max(bytes_saved.values()))
    each = " a step" if steps > 1 else ""
    return f"; recomputing frees {saved} of activations and takes {nanoseconds / 1e9:.2g} s{each}"


def _memory_line(result: PlacementResult) -> str:
    predicted = result.predicted
    shares = [used / limit for used, limit in zip(predicted.memory_bytes, predicted.memory_limit_bytes, strict=True)]
    fullest = max(range(len(shares)), key=shares.__getitem__)
    used, limit = predicted.memory_bytes[fullest], predicted.memory_limit_bytes[fullest]
    text = f"memory: {format_bytes(used)} of {format_bytes(limit)} on rank {fullest}, which has least to spare"
    return f"{text}: its limit decides" if shares[fullest] >= _FULL else f"{text}: no limit is reached"


def _pace_line(result: PlacementResult) -> str:
    """What each phase of the step waits for: the longer of the two."""
    parts = []
    for phase, computed, sent in phase_seconds(result):
        computes, sends = f"{computed:.2g} s of computing", f"{sent:.2g} s of sending"
        longer, shorter = (computes, sends) if computed >= sent else (sends, computes)
        parts.append(f"{phase}: {longer}" + (f", which hide {shorter}" if min(computed, sent) > 0 else ""))
    return "; ".join(parts)


def phase_seconds(result: PlacementResult) -> list[tuple[str, float, float]]:
    """(name, seconds of computing, seconds of sending) of each phase; those that a step has several times once."""
    problem = result.problem
    work = [phase.nanoseconds for phase in problem.phases]
    send = [0] * len(work)
    names = [name for kind in problem.kinds for name in kind.units]
    for option, _ in _options(result, names):
        work = [before + own for before, own in zip(work, option.work, strict=True)]
        send = [before + own for before, own in zip(send, option.send, strict=True)]
    return [
        (phase.name, computed / 1e9, sent / 1e9)
        for phase, computed, sent in zip(problem.phases, work, send, strict=True)
    ]
