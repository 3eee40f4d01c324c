# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`Watch`: tells, while a run trains and at its end, how long its steps take and where their time goes.

Rank 0 writes it to standard error, from the figures that all ranks exchange in each step anyway.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from accelerate_lshdp.accelerator.step_statistics import StepStatistics
from accelerate_lshdp.documents.plan import Plan
from accelerate_lshdp.runtime.elastic_rank import elastic_rank
from accelerate_lshdp.runtime.topology import Topology


#: Seconds between two tables; tables are written where it is set.
WATCH_VARIABLE = "LSDP_WATCH"
_INTERFACES = Path("/proc/net/dev")


@dataclass(frozen=True)
class _Moment:
    """How far a run was at some time.

    Args:
        at: seconds of a clock that only goes forward.
        steps: that this process has made.
        samples: that the run has seen.
        carried: bytes that this machine has sent and received.
    """

    at: float
    steps: int
    samples: int
    carried: tuple[int, int]


class Watch:
    """Writes a table of the last steps every so many seconds, and one of all steps at the end.

    Args:
        every: seconds between two tables.
        names: of the ranks.
        predicted: seconds of a step by the plan; None: it says nothing of them.
        statistics: medians over the last steps; None before the first one.
        write: takes the text of a table.
        clock: seconds.
    """

    def __init__(
        self,
        every: float,
        names: Sequence[str],
        predicted: float | None,
        statistics: Callable[[], StepStatistics | None],
        write: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every = every
        self._names = names
        self._predicted = "" if predicted is None else f" (predicted: {predicted:.4g} s)"
        self._statistics = statistics
        self._write = write
        self._clock = clock
        self._steps = 0
        self._first: _Moment | None = None
        self._told: _Moment | None = None
        self._last: _Moment | None = None
        self._sizes: Sequence[int] = ()
        self._decisions: list[str] = []

    def stepped(self, samples: int, sizes: Sequence[int], decision: object | None) -> None:
        """An optimizer has stepped.

        Args:
            samples: that the run has seen, up to this step.
            sizes: samples of each rank in a global batch; empty: they are not known.
            decision: of other batch sizes; None: they stay.
        """
        self._steps += 1
        self._sizes = sizes
        if decision is not None:
            self._decisions.append(f"  at step {self._steps}, {decision}")
        now = self._clock()
        if self._told is not None and now - self._told.at < self._every:
            self._last = _Moment(now, self._steps, samples, self._told.carried)
            return
        self._last = _Moment(now, self._steps, samples, carried_bytes())
        if self._told is None:  # what comes before the first step is no step
            self._first = self._told = self._last
            return
        self._tell(f"step {self._steps}", self._told, self._last)
        self._told = self._last
        self._decisions.clear()

    def end(self) -> None:
        """Writes the table of all steps; nothing if there was only one."""
        if self._steps > 1:
            last = _Moment(self._last.at, self._last.steps, self._last.samples, carried_bytes())
            self._tell(f"trained {self._steps} steps", self._first, last)

    def _tell(self, title: str, before: _Moment, now: _Moment) -> None:
        seconds, steps = now.at - before.at, now.steps - before.steps
        statistics = self._statistics()
        if statistics is None or seconds <= 0:
            return
        lines = [
            f"{title}: {(now.samples - before.samples) / seconds:.4g} samples/s, {seconds / steps:.4g} s a step"
            f"{self._predicted}, ranks are idle for {statistics.idle_fraction:.0%}"
        ]
        width = max(map(len, self._names))
        for rank, name in enumerate(self._names):
            batch = f"batch {self._sizes[rank]:>4}  " if self._sizes else ""
            lines.append(
                f"  {name:<{width}}  {batch}compute {statistics.compute_seconds[rank]:.4f} s"
                f"  wait {statistics.wait_seconds[rank]:.4f} s  optimizer {statistics.optimizer_seconds[rank]:.4f} s"
                f"  data {statistics.data_seconds[rank]:.4f} s"
            )
        sent, received = ((now.carried[way] - before.carried[way]) / steps / 1e6 for way in (0, 1))
        if sent + received:
            lines.append(f"  this machine has sent {sent:.3g} MB a step, and received {received:.3g} MB")
        self._write("\n".join([*lines, *self._decisions]))


def watch_of(topology: Topology, plan: Plan, statistics: Callable[[], StepStatistics | None]) -> Watch | None:
    """The watch of a process that is to have one: rank 0, where `WATCH_VARIABLE` says how often.

    Raises:
        ValueError: it is no number of seconds.
    """
    text = os.environ.get(WATCH_VARIABLE)
    if text is None:
        return None
    try:
        every = float(text)
        if not 0 < every < float("inf"):
            raise ValueError
    except ValueError:
        raise ValueError(f"found {text!r} in {WATCH_VARIABLE}, expected seconds between two tables, above 0") from None
    if topology.rank:
        return None
    elastic = elastic_rank()
    sizes = topology.node_sizes
    machines = [f"node {node}" for node, size in enumerate(sizes) for _ in range(size)]
    machines = machines if elastic is None else list(elastic.machines)
    predicted = (plan.predicted or {}).get("step_seconds")
    names = [f"rank {rank} on {each}" for rank, each in enumerate(machines)]
    watch = Watch(every, names, predicted, statistics, _write)
    atexit.register(watch.end)
    return watch


def _write(text: str) -> None:
    # In one piece, which `print` does not do where Python is told not to buffer: other ranks write there as well.
    sys.stderr.write("".join(f"lshdp | {line}\n" for line in text.splitlines()))
    sys.stderr.flush()


def carried_bytes() -> tuple[int, int]:
    """Bytes that the interfaces of this machine have sent and received, without the loopback."""
    if not _INTERFACES.exists():  # another system
        return 0, 0
    sent = received = 0
    for name, counts in re.findall(r"^\s*(\S+):\s*(.*)$", _INTERFACES.read_text(), re.MULTILINE):
        if name != "lo":
            sent, received = sent + int(counts.split()[8]), received + int(counts.split()[0])
    return sent, received
