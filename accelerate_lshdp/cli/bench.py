# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""``accelerate-lshdp bench``: every strategy side by side, on an emulated cluster on this machine."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path


RESULTS_FILE = "results.json"
_BROKEN_LIMIT = 1
_EPILOG = """\
The YAML file names clusters, networks, models and strategies; benchmarks/*.yaml are examples, docs/commands.md says
what it may hold. Nodes and network are emulated with network namespaces, tc and control groups, which needs root
on Linux. Without: --in-process.

examples:
  accelerate-lshdp bench benchmarks/smoke.yaml --output-dir outputs/smoke
  accelerate-lshdp bench benchmarks/cluster_uneven.yaml --output-dir outputs/uneven
  accelerate-lshdp report outputs/uneven                                    the report again

The exit code is 1 if a limit of the file is broken.
"""


def register(subparsers: argparse._SubParsersAction) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "bench",
        help="compare all strategies on an emulated cluster of uneven nodes",
        description="Train the same models with every strategy, and with plain PyTorch, on uneven nodes behind a slow"
        " network, all emulated on this machine; in turns, so that what else it does hits all of them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml", help="what to measure")
    parser.add_argument(
        "--output-dir",
        "--output_dir",
        type=Path,
        required=True,
        metavar="DIR",
        help="for results.json, tables, pictures and report.html",
    )
    parser.add_argument(
        "--in-process",
        action="store_true",
        help="without root: ranks sleep to be slow. The network is NOT emulated, nor are limits of memory",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measures all cases, writes results and report, and prints the tables.

    Returns:
        0; 1 if a limit is broken.

    Raises:
        ConfigError: the file cannot be read or is malformed.
        ValueError: clusters cannot be emulated here.
        OSError: a file cannot be written.
    """
    from accelerate_lshdp.benchmarking.config import BenchmarkConfig

    config = BenchmarkConfig.load(arguments.config)
    if not arguments.in_process:
        require_emulation(config)
    from accelerate_lshdp.benchmarking.models import check_model

    # Before the first measurement: a benchmark of hours must not end at its last model.
    for name, description in config.models.items():
        try:
            check_model(description)
        except ValueError as error:
            raise ValueError(f"{arguments.config}: models.{name}: {error}") from error
    arguments.output_dir.mkdir(parents=True, exist_ok=True)

    from accelerate_lshdp.benchmarking.results import run_benchmark
    from accelerate_lshdp.comparing.report import missing_library, print_results, write_report
    from accelerate_lshdp.documents.atomic_files import write_atomically

    # Said before the measurements, when it can still be installed.
    missing = missing_library()
    if missing is not None:
        say(missing)
    if arguments.in_process:
        say("ranks sleep to be slow; the network is NOT emulated, so times say nothing about slow networks")
    words = ["accelerate-lshdp", "bench", str(arguments.config), "--output-dir", str(arguments.output_dir)]
    command = shlex.join([*words, *(["--in-process"] if arguments.in_process else [])])
    results = run_benchmark(config, in_process=arguments.in_process, command=command, say=say)
    # Results first: a report can be written again from them.
    path = arguments.output_dir / RESULTS_FILE
    write_atomically(path, json.dumps(results, indent=2, allow_nan=False) + "\n")
    written = [path, *write_report(results, arguments.output_dir)]
    print_results(results)
    print(f"wrote {', '.join(map(str, written))}")
    return 0 if all(limit["holds"] for limit in results["limits"]) else _BROKEN_LIMIT


def require_emulation(config: object) -> None:
    """Checks that this machine can emulate all clusters of a configuration.

    Raises:
        ValueError: it cannot; the message says what is missing.
    """
    from accelerate_lshdp.emulated_cluster import ClusterDescription, EmulatedCluster

    for nodes in config.clusters.values():
        for network in config.networks.values():
            missing = EmulatedCluster.missing(ClusterDescription(nodes, network))
            if missing is not None:
                raise ValueError(
                    f"the cluster cannot be emulated here: {missing}. Or add --in-process: ranks then sleep to be"
                    " slow, and the network is not emulated"
                )


def say(what: str) -> None:
    """Prints a status line on stderr."""
    print(f"... {what}", file=sys.stderr, flush=True)
