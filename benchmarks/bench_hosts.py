# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`accelerate-lshdp bench --hosts` on machines with ssh servers, beside the laboratory on the same nodes.

    python benchmarks/bench_hosts.py --output-dir outputs/bench_hosts
    python benchmarks/bench_hosts.py --output-dir outputs/bench_hosts --strategies torch_ddp,hdp,lshdp

Both train the models and strategies of a file of the laboratory (`cluster_uneven.yaml`) on its nodes, with one of its
networks. The machines are emulated, too: what differs is that ranks were started over ssh, by the command that a user
has, and that it knows nothing of an emulation. It prints each strategy's step as a part of plain DDP's, and the batch
sizes where both have planned others; --output-dir keeps the results of both. It needs root, and takes 20 minutes for
all strategies, an hour with --rounds 10.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from laboratory.config import BenchmarkConfig
from laboratory.emulated_cluster import Cluster, EmulatedCluster
from laboratory.emulated_cluster.debian_tools import DebianTools
from laboratory.emulated_cluster.ssh_machines import SshMachines

from accelerate_lshdp.comparing.report.reading import load_results
from accelerate_lshdp.comparing.report.results import Case


ROOT = Path(__file__).parents[1]
REFERENCE = "torch_ddp"


def in_laboratory(file: Path, folder: Path) -> list[Case]:
    """The cases as the laboratory measures them."""
    output = folder / "laboratory"
    command = [sys.executable, "-m", "accelerate_lshdp.cli.main", "bench", str(file), "--output-dir", str(output)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return list(load_results(output).cases)


def over_ssh(file: Path, folder: Path) -> list[Case]:
    """The cases as the command of a user measures them, on machines with the same cores and links."""
    config = BenchmarkConfig.load(file)
    [nodes], [link] = config.clusters.values(), config.networks.values()
    described = Cluster(tuple(nodes), link)
    emulated = ("clusters", "networks", "limits")
    document = {key: value for key, value in yaml.safe_load(file.read_text()).items() if key not in emulated}
    compared = {**document, "threads": config.threads}
    # The name of a folder has a limit in the sockets of ssh.
    with tempfile.TemporaryDirectory() as name, EmulatedCluster(described) as cluster:
        place = Path(name)
        (place / "ssh").mkdir()
        with SshMachines(cluster, place / "ssh", DebianTools(place / "tools")) as ssh:
            hosts = [{"address": node.address, "cpu": 1, "python": sys.executable} for node in cluster.nodes]
            for node, host in enumerate(hosts):
                (place / f"work{node}").mkdir()
                (place / f"work{node}" / "compare.yaml").write_text(yaml.safe_dump(compared))
                program = place / f"python{node}"  # as if the package were installed
                program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n')
                program.chmod(0o755)
                host |= {"folder": str(place / f"work{node}"), "python": str(program)}
            (place / "work0" / "machines.yaml").write_text(yaml.safe_dump({"nodes": hosts}))
            command = [str(place / "python0"), "-m", "accelerate_lshdp.cli.main", "bench", "compare.yaml"]
            command += ["--hosts", "machines.yaml", "--output-dir", "results"]
            process = ssh.popen(0, command, cwd=place / "work0", env=dict(os.environ))
            if process.wait():
                raise RuntimeError(f"found exit code {process.returncode} of bench --hosts, expected 0")
            shutil.copytree(place / "work0" / "results", folder / "over_ssh", dirs_exist_ok=True)
    return list(load_results(folder / "over_ssh").cases)


def without_errors(cases: list[Case]) -> dict[str, Case]:
    """The cases that were measured, by the label of their strategy."""
    return {case.label: case for case in cases if case.error is None}


def main() -> int:
    """Runs and prints what the docstring of this module says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--file", type=Path, default=ROOT / "benchmarks" / "cluster_uneven.yaml")
    parser.add_argument("--network", default="1 Gb/s")
    parser.add_argument("--strategies", help="of the file, separated by commas; all by default")
    parser.add_argument("--rounds", type=int, help="over all cases; as many as the file says by default")
    parser.add_argument("--output-dir", type=Path, required=True)
    arguments = parser.parse_args()
    document = yaml.safe_load(arguments.file.read_text())
    if arguments.strategies:
        document["strategies"] = arguments.strategies.split(",")
    if arguments.rounds:
        document["rounds"] = arguments.rounds
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    file = arguments.output_dir / "benchmark.yaml"
    file.write_text(yaml.safe_dump({**document, "networks": [arguments.network], "limits": []}))
    laboratory = without_errors(in_laboratory(file, arguments.output_dir))
    ssh = without_errors(over_ssh(file, arguments.output_dir))
    if REFERENCE not in laboratory or REFERENCE not in ssh:
        raise SystemExit(f"found no step of {REFERENCE} to compare with: see its error above")
    apart = []
    for label in (label for label in laboratory if label in ssh and label != REFERENCE):
        expected = laboratory[label].step_seconds / laboratory[REFERENCE].step_seconds
        found = ssh[label].step_seconds / ssh[REFERENCE].step_seconds
        apart.append(found / expected - 1)
        print(f"{label}: {found:.3f} of {REFERENCE} over ssh, {expected:.3f} in the laboratory: {apart[-1]:+.1%}")
        sizes = ssh[label].batch_sizes, laboratory[label].batch_sizes
        if sizes[0] != sizes[1]:
            print(f"  batch sizes: {sizes[0]} over ssh, {sizes[1]} in the laboratory")
    apart = [abs(each) for each in apart]
    print(f"apart: {statistics.median(apart):.1%} in the median, {max(apart):.1%} at most ({len(apart)} strategies)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
