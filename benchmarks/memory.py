# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Do real processes take the memory that is predicted for them?

    python benchmarks/memory.py --nodes 2,2 --strategies ddp,lsdp,group_sharding,fsdp,zero2,fsdp_offload

Trains a transformer of 42 M parameters for three steps under each strategy, on CPU ranks of this machine, and prints
for each node the bytes that its ranks took above those that they had before the model (the kernel counts them), the
prediction, its terms, and the ratio. The exit code is 1 if a prediction is below what was taken, or more than 15 %
above it. It needs root on Linux with memory control groups (version 1).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from memory_runs.launch import NodeRun, train
from memory_runs.prediction import uniform

from accelerate_lshdp import Plan
from accelerate_lshdp.planning.cost.memory import RankMemory


STEPS = 3
MOST_ABOVE = 1.15
TERMS = ("states", "gathered", "unreduced", "activations", "communication", "heap")


@dataclass(frozen=True)
class NodeRow:
    """The bytes of a node.

    Args:
        strategy: its name.
        node: number of the node.
        base: bytes before the model.
        taken: the most bytes above them.
        terms: bytes of each of `TERMS`, as predicted.
        predicted: bytes of all ranks, as predicted.
    """

    strategy: str
    node: int
    base: int
    taken: int
    terms: dict[str, float]
    predicted: float

    @property
    def ratio(self) -> float:
        """Predicted bytes over those taken."""
        return self.predicted / self.taken


def node_rows(
    strategy: str, nodes: Sequence[int], runs: Sequence[NodeRun], memory: Sequence[RankMemory]
) -> list[NodeRow]:
    """One row for each node."""
    rows = []
    for node, size in enumerate(nodes):
        own = memory[sum(nodes[:node]) :][:size]
        rows.append(
            NodeRow(
                strategy,
                node,
                runs[node].base,
                runs[node].peak,
                {term: sum(getattr(rank, term) for rank in own) for term in TERMS},
                sum(rank.total_bytes for rank in own),
            )
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, and compares.

    Returns:
        1 if a prediction does not hold, else 0.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="2,2", help="ranks on each node (default: 2,2)")
    parser.add_argument("--strategies", default="ddp,lsdp,group_sharding,fsdp,zero2,fsdp_offload")
    parser.add_argument("--batch-size", type=int, default=4, help="samples of each rank (default: 4)")
    parser.add_argument("--width", type=int, default=512, help="of the model (default: 512)")
    parser.add_argument("--blocks", type=int, default=12, help="of the model (default: 12)")
    options = parser.parse_args(arguments)
    nodes = tuple(map(int, options.nodes.split(",")))
    model = {"blocks": options.blocks, "width": options.width, "vocabulary": 4096, "tokens": 64}
    names = options.strategies.split(",")
    plans = [Plan.from_batch_sizes([options.batch_size] * sum(nodes), strategy=name) for name in names]
    jobs = [{"plan": plan.to_dict(), "model": model, "steps": STEPS} for plan in plans]
    rows = []
    for name, plan, job in zip(names, plans, jobs, strict=True):
        # In processes of its own, as a run is: what an earlier training has freed would be taken again.
        (runs,) = train([job], nodes)
        rows += node_rows(name, nodes, runs, uniform(model, plan, nodes))
    print("MB above the base | strategy | node | base | taken | predicted | ratio | " + " | ".join(TERMS))
    for row in rows:
        figures = [row.base, row.taken, row.predicted]
        words = [row.strategy, str(row.node), *(f"{value / 1e6:.0f}" for value in figures), f"{row.ratio:.3f}"]
        print(" | ".join(["", *words, *(f"{row.terms[term] / 1e6:.0f}" for term in TERMS)]))
    return int(not all(1.0 <= row.ratio <= MOST_ABOVE for row in rows))


if __name__ == "__main__":
    sys.exit(main())
