# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Do real processes take the memory that is predicted for them?

    python benchmarks/memory.py --nodes 2,2 --strategies ddp,lsdp,group_sharding,fsdp,zero2,fsdp_offload
    python benchmarks/memory.py --nodes 1,2 --limits 0.6,0.75,0.9,1.1

Trains a transformer of 42 M parameters for three steps under each strategy, on CPU ranks of this machine, and under
placements of single blocks that are planned for some limits: shares of what `lsdp` is predicted to take. It prints for
each node the bytes that its ranks took above those that they had before the model (the kernel counts them), the
prediction, the ratio, and the terms of the prediction, which those of a placement are not split into. The exit code is
1 if a prediction is below what was taken, or more than 15 % above it. It needs root on Linux with memory control
groups (version 1).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from memory_runs.launch import NodeRun, train
from memory_runs.prediction import placed, planned, uniform

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
        terms: bytes of each of `TERMS`, as predicted; empty where they are not known.
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
    name: str, nodes: Sequence[int], runs: Sequence[NodeRun], ranks: Sequence[RankMemory | int]
) -> list[NodeRow]:
    """One row for each node.

    Args:
        name: of the strategy.
        nodes: ranks on each node.
        runs: what each node took.
        ranks: what is predicted for each rank, by terms or in all.
    """
    rows = []
    for node, size in enumerate(nodes):
        own = ranks[sum(nodes[:node]) :][:size]
        terms = {}
        if isinstance(own[0], RankMemory):
            terms = {term: sum(getattr(rank, term) for rank in own) for term in TERMS}
            own = [rank.total_bytes for rank in own]
        rows.append(NodeRow(name, node, runs[node].base, runs[node].peak, terms, sum(own)))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, and compares.

    Returns:
        1 if a prediction does not hold, else 0.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="2,2", help="ranks on each node (default: 2,2)")
    parser.add_argument("--strategies", default="ddp,lsdp,group_sharding,fsdp,zero2,fsdp_offload")
    parser.add_argument("--limits", default="", help="of placements that are planned, as shares of what lsdp takes")
    parser.add_argument("--batch-size", type=int, default=4, help="samples of each rank (default: 4)")
    parser.add_argument("--width", type=int, default=512, help="of the model (default: 512)")
    parser.add_argument("--blocks", type=int, default=12, help="of the model (default: 12)")
    options = parser.parse_args(arguments)
    nodes = tuple(map(int, options.nodes.split(",")))
    model = {"blocks": options.blocks, "width": options.width, "vocabulary": 4096, "tokens": 64}
    sizes = [options.batch_size] * sum(nodes)
    cases: list[tuple[str, Plan, Sequence[RankMemory | int]]] = []
    for name in filter(None, options.strategies.split(",")):
        plan = Plan.from_batch_sizes(sizes, strategy=name)
        cases.append((name, plan, uniform(model, plan, nodes)))
    most = max(rank.total_bytes for rank in uniform(model, Plan.from_batch_sizes(sizes, strategy="lsdp"), nodes))
    for share in map(float, filter(None, options.limits.split(","))):
        plan = planned(model, options.batch_size, nodes, int(share * most))
        cases.append((f"osdp in {share}", plan, placed(model, plan, nodes)))
    rows = []
    for name, plan, memory in cases:
        # In processes of its own, as a run is: what an earlier training has freed would be taken again.
        (runs,) = train([{"plan": plan.to_dict(), "model": model, "steps": STEPS}], nodes)
        rows += node_rows(name, nodes, runs, memory)
    print("MB above the base | strategy | node | base | taken | predicted | ratio | " + " | ".join(TERMS))
    for row in rows:
        figures = [row.base, row.taken, row.predicted]
        words = [row.strategy, str(row.node), *(f"{value / 1e6:.0f}" for value in figures), f"{row.ratio:.3f}"]
        print(" | ".join(["", *words, *(f"{row.terms[term] / 1e6:.0f}" if row.terms else "" for term in TERMS)]))
    return int(not all(1.0 <= row.ratio <= MOST_ABOVE for row in rows))


if __name__ == "__main__":
    sys.exit(main())
