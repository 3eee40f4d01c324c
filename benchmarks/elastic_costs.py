# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What it costs that a run is elastic, on an emulated cluster of four nodes.

    python benchmarks/elastic_costs.py
    python benchmarks/elastic_costs.py --runs 5 --returns 8

First, undisturbed runs, in turns with and without ``--elastic``: their steps. Then one run that nodes leave and return
to: for how long a node that comes interrupts the others, and how long the tenth step after that takes, beside steps of
the same nodes that have trained together for longer. It needs root.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from elastic_cluster import COUNT, ElasticCluster, best_step_seconds
from laboratory.emulated_cluster import Cluster, EmulatedCluster, Link, Node


STEPS, LEFT_OUT = 500, 100
#: Seconds that a node is away, and that it then trains with the others.
AWAY_SECONDS, BACK_SECONDS = 6.0, 12.0
#: Steps after a return that are judged: their batch sizes are those of the first ten.
JUDGED = slice(10, 20)


def cluster() -> Cluster:
    return Cluster((Node(1, cores=2.0),) * COUNT, Link(1e9))


def undisturbed_step_seconds(elastic: bool) -> float:
    """The median step of a run, without its first ones."""
    with tempfile.TemporaryDirectory() as folder, EmulatedCluster(cluster()) as built:
        run = ElasticCluster(built, Path(folder), STEPS, elastic=elastic)
        codes = run.end(180)
        if any(codes):
            raise RuntimeError(f"found exit codes {codes}, expected 0: {run.output(0)[-2000:]}")
        times = [at for _, at in run.steps(0)[LEFT_OUT:]]
        return (times[-1] - times[0]) / (len(times) - 1)


def returns(count: int) -> tuple[list[float], list[float], list[float]]:
    """A run that nodes leave and return to.

    Returns:
        Seconds for which others were interrupted by a node that came; the same by one that left; and the steps after a
        return, as parts of those of the same nodes later.
    """
    with tempfile.TemporaryDirectory() as folder, EmulatedCluster(cluster()) as built:
        run = ElasticCluster(built, Path(folder), 10**6)
        run.wait(lambda: len(run.steps(0)) > LEFT_OUT, 120)
        for number in range(count):
            node = 1 + number % (COUNT - 1)
            run.launchers[node].send_signal(signal.SIGTERM)
            run.launchers[node].wait(60)
            time.sleep(AWAY_SECONDS)
            run.start(node)
            run.wait(lambda node=node: node in run.newest()[1], 60)
            time.sleep(BACK_SECONDS)
        changes = run.changes(0)[1:]
        came = [change for change in changes if len(change.names) == COUNT]
        left = [change.pause for change in changes if len(change.names) < COUNT and change.pause is not None]
        settled = [_seconds(change.steps[len(change.steps) // 2 :]) for change in came]
        late = [_seconds(change.steps[JUDGED]) for change in came]
        parts = [after / later for after, later in zip(late, settled, strict=True)]
        return [change.pause for change in came if change.pause is not None], left, parts


def _seconds(times: tuple[float, ...]) -> float:
    """The median step between these moments."""
    return statistics.median(after - before for before, after in zip(times, times[1:], strict=False))


def main() -> int:
    """Runs and prints what the docstring of this module says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="undisturbed ones, of each kind")
    parser.add_argument("--returns", type=int, default=6, help="of nodes")
    arguments = parser.parse_args()
    print(f"a step whose batch sizes are best takes {best_step_seconds(range(COUNT)):.4f} s of the devices")
    ratios = []
    for number in range(arguments.runs):
        # The other one first in every second turn: a machine is not always as fast.
        seconds = {elastic: undisturbed_step_seconds(elastic) for elastic in (number % 2 == 0, number % 2 == 1)}
        ratios.append(seconds[True] / seconds[False])
        print(f"step {seconds[True]:.4f} s elastic, {seconds[False]:.4f} s fixed: {ratios[-1]:.3f}", flush=True)
    if ratios:
        print(f"elastic / fixed: {statistics.median(ratios):.3f} in the median")
    if arguments.returns:
        came, left, parts = returns(arguments.returns)
        for what, values in (("a node that came", came), ("a node that left", left)):
            print(f"{what} interrupted the others for " + ", ".join(f"{each:.2f}" for each in values) + " s")
        print("steps 11 to 20 after a return, of later ones: " + ", ".join(f"{each:.3f}" for each in parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
