# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""``accelerate-lshdp bench``: every strategy side by side, on these nodes or on emulated ones.

Real nodes are compared by this package alone (`bench_nodes`), one command a node. A file that describes a cluster asks
for emulated nodes: the laboratory does that, which is part of a checkout of the project and not of its wheel.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

import accelerate_lshdp
from accelerate_lshdp.cli.bench_output import prepare_report, say, write
from accelerate_lshdp.cli.config import add_layout_arguments
from accelerate_lshdp.cli.launch_hosts import Job, add_hosts_arguments, check_hosts_arguments, run_job
from accelerate_lshdp.hosts.script_files import from_here


_EPILOG = """\
The YAML file names models and strategies; docs/commands.md says what it may hold. On several nodes run the same
command on each of them: node 0 writes the results. A file that also describes clusters and networks is measured on
nodes that are emulated on this machine, with network namespaces, tc and control groups: in a checkout of the project
(benchmarks/*.yaml are examples), as root on Linux. Without root: --in-process.

examples:
  accelerate-lshdp bench compare.yaml --nodes 2 --cpu --output-dir outputs/compare       two ranks on this machine
  accelerate-lshdp bench compare.yaml --nodes 1,2 --node-rank 0 --main-ip 10.0.0.1 --output-dir outputs/compare
  accelerate-lshdp bench compare.yaml --nodes 1,2 --node-rank 1 --main-ip 10.0.0.1 --output-dir outputs/compare
  accelerate-lshdp bench benchmarks/smoke.yaml --output-dir outputs/smoke                emulated nodes
  accelerate-lshdp report outputs/compare                                                the report again

The exit code is 1 if a limit of the file is broken, or every case has failed.
"""


def register(subparsers: argparse._SubParsersAction) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "bench",
        help="compare all strategies on these nodes, or on an emulated cluster",
        description="Train the same models with every strategy, and with plain PyTorch, in turns, so that what else"
        " the machines do hits all of them; on real nodes, or on uneven nodes behind a slow network that are emulated"
        " on this machine.",
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
        help="for results.json, tables, pictures and report.html; node 0 writes them",
    )
    ranks = parser.add_argument_group("real nodes", "as for accelerate-lshdp launch")
    ranks.add_argument(
        "--config-file",
        "--config_file",
        type=Path,
        metavar="YAML",
        help="this node's file from accelerate-lshdp config",
    )
    add_layout_arguments(ranks, with_precision=False)
    ranks.add_argument(
        "--node-rank", "--machine_rank", type=int, metavar="I", help="which of the nodes this is (needed for several)"
    )
    add_hosts_arguments(ranks)
    parser.add_argument_group("emulated nodes").add_argument(
        "--in-process",
        action="store_true",
        help="without root: ranks sleep to be slow. The network is NOT emulated, nor are limits of memory",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measures all cases, writes results and report, and prints the tables.

    Returns:
        0; 1 if a limit is broken, or every case has failed.

    Raises:
        ConfigError: the file cannot be read or is malformed.
        ValueError: clusters cannot be emulated here, or nodes did not meet.
        OSError: a file cannot be written.
    """
    from accelerate_lshdp.comparing.config import asks_for_emulation

    emulated = asks_for_emulation(arguments.config)
    if emulated:
        return _run_emulated(arguments, emulated)
    if arguments.in_process:
        raise ValueError(
            f"found --in-process, which slows emulated nodes down, but {arguments.config} describes no clusters;"
            " leave it out"
        )
    check_hosts_arguments(arguments)
    if arguments.hosts is not None:
        return run_job(arguments, _job(arguments))
    from accelerate_lshdp.cli.bench_nodes import run_on_nodes

    return run_on_nodes(arguments)


def _job(arguments: argparse.Namespace) -> Job:
    """What all machines of ``--hosts`` are to run: this command."""
    from accelerate_lshdp.comparing.config import ComparisonConfig

    ComparisonConfig.load(arguments.config)  # what is wrong with it is said once, and here
    words = [str(arguments.config), "--output-dir", str(arguments.output_dir)]
    return Job("bench", words, [], [from_here(arguments.config)], output=arguments.output_dir)


def find_laboratory() -> Path | None:
    """The folder with the package ``laboratory``, which a checkout has beside this package; None: there is none."""
    folder = Path(accelerate_lshdp.__file__).resolve().parents[1] / "benchmarks"
    return folder if (folder / "laboratory" / "__init__.py").is_file() else None


def _run_emulated(arguments: argparse.Namespace, emulated: tuple[str, ...]) -> int:
    """Runs a benchmark on emulated nodes.

    Args:
        arguments: of the command.
        emulated: the keys of the file that ask for them.
    """
    named = ("nodes", "device", "main_ip", "main_port", "config_file", "node_rank", "hosts")
    given = [f"--{name.replace('_', '-')}" for name in named if getattr(arguments, name) is not None]
    if given:
        flags = ", ".join(given).replace("--device", "--cpu or --gpu")
        raise ValueError(
            f"found {flags} for real nodes, but {arguments.config} has {', '.join(emulated)} of emulated ones; leave"
            " one of the two out"
        )
    laboratory = find_laboratory()
    if laboratory is None:
        raise ValueError(
            f"found {', '.join(emulated)} in {arguments.config}, which describe emulated nodes, but this installation"
            " has no laboratory that emulates them (benchmarks/laboratory beside the package). Expected a file"
            " without these keys, which is measured on real nodes (--nodes); or run the command in a checkout of the"
            " project, as root"
        )
    if str(laboratory) not in sys.path:
        sys.path.insert(0, str(laboratory))
    # A name that only a checkout has: everything else in this package does without it.
    from laboratory.bench import require_emulation, run_benchmark
    from laboratory.config import BenchmarkConfig

    config = BenchmarkConfig.load(arguments.config)
    if not arguments.in_process:
        require_emulation(config)
    from accelerate_lshdp.comparing.checks import check_data, check_models

    check_data(config.models)
    check_models(arguments.config, config.models)
    prepare_report(arguments.output_dir)
    if arguments.in_process:
        say("ranks sleep to be slow; the network is NOT emulated, so times say nothing about slow networks")
    words = ["accelerate-lshdp", "bench", str(arguments.config), "--output-dir", str(arguments.output_dir)]
    command = shlex.join([*words, *(["--in-process"] if arguments.in_process else [])])
    results = run_benchmark(config, in_process=arguments.in_process, command=command, say=say)
    return write(results, arguments.output_dir)
