# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""``accelerate-lshdp bench`` with a file that describes emulated nodes: all its clusters with all its models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from accelerate_lshdp.comparing.results import describe_machine, measured_results
from laboratory.config import BenchmarkConfig
from laboratory.driver import ClusterBenchmark
from laboratory.emulated_cluster import Cluster, EmulatedCluster
from laboratory.launches import make_launch


def run_benchmark(
    config: BenchmarkConfig, *, in_process: bool, command: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measures all clusters with all models.

    Args:
        config: what to measure.
        in_process: on the loopback, without root and without an emulated network.
        command: that reproduces it.
        say: tells whoever waits what is going on.

    Returns:
        The contents of ``results.json``.
    """

    def measure() -> list[dict[str, Any]]:
        cases: list[dict[str, Any]] = []
        for cluster, nodes in config.clusters.items():
            for model in config.models:
                say(f"cluster {cluster}, model {model}")
                launch = partial(make_launch, nodes, config.threads, in_process)  # takes the kinds
                benchmark = ClusterBenchmark(config, cluster, model, launch, say)
                cases += [measurement.to_dict() for measurement in benchmark.run()]
        return cases

    return measured_results(
        measure,
        lambda cases: [limit.judge(cases) for limit in config.limits],
        machine=describe_machine(),
        config={**(config.document or {}), **({"in_process": True} if in_process else {})},
        command=command,
    )


def require_emulation(config: BenchmarkConfig) -> None:
    """Checks that this machine can emulate all clusters of a configuration.

    Raises:
        ValueError: it cannot; the message says what is missing.
    """
    for nodes in config.clusters.values():
        for network in config.networks.values():
            missing = EmulatedCluster.missing(Cluster(nodes, network))
            if missing is not None:
                raise ValueError(
                    f"the cluster cannot be emulated here: {missing}. Or add --in-process: ranks then sleep to be"
                    " slow, and the network is not emulated"
                )
