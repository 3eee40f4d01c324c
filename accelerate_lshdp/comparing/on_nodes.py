# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Compares all cases on real nodes; called on node 0 once all nodes have met."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from accelerate_lshdp.comparing.config import ComparisonConfig
from accelerate_lshdp.comparing.driver import Comparison
from accelerate_lshdp.comparing.node_agent import NodeAgent
from accelerate_lshdp.comparing.node_launch import NodeLaunch
from accelerate_lshdp.comparing.results import all_machines, measured_results
from accelerate_lshdp.runtime.node_links import NodeLink


def compare_on_nodes(
    config: ComparisonConfig,
    agent: NodeAgent,
    links: Sequence[NodeLink],
    *,
    command: str,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measures all cases with all models.

    Args:
        config: what to measure.
        agent: of this node.
        links: to the other nodes.
        command: that reproduces it.
        say: tells whoever waits what is going on.

    Returns:
        The contents of ``results.json``.
    """
    nodes = agent.place.node_sizes
    launch = partial(NodeLaunch, agent, links, nodes, config.threads)  # takes the kinds

    def measure() -> list[dict[str, Any]]:
        cases: list[dict[str, Any]] = []
        for model in config.models:
            say(f"model {model}")
            # Of real nodes neither the rate of the links is known, nor that all have the same.
            networks = {"between the nodes" if links else "inside the node": None}
            comparison = Comparison(config, name_nodes(nodes), nodes, model, launch, say, networks)
            cases += [measurement.to_dict() for measurement in comparison.run()]
        return cases

    return measured_results(
        measure,
        lambda cases: [],
        machine=all_machines(launch(()).ask("machine")),
        config=config.document or {},
        command=command,
    )


def name_nodes(nodes: Sequence[int]) -> str:
    """The name of real nodes in results, from the ranks of each."""
    if len(set(nodes)) > 1:
        return f"nodes with {' + '.join(map(str, nodes))} ranks"
    ranks = f"{nodes[0]} rank{'' if nodes[0] == 1 else 's'}"
    return f"one node with {ranks}" if len(nodes) == 1 else f"{len(nodes)} nodes with {ranks} each"
