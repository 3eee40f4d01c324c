# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`Machines`: emulated machines with ssh servers, host names and mounts of their own, and the file that lists them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from laboratory.emulated_cluster import Cluster, EmulatedCluster, Link, Node
from laboratory.emulated_cluster.debian_tools import DebianTools
from laboratory.emulated_cluster.ssh_machines import SshMachines

import accelerate_lshdp


ROOT = Path(accelerate_lshdp.__file__).parents[1]


@dataclass
class Machines:
    """Machines, their file, and what a test changes of them before a command runs on the first one."""

    cluster: EmulatedCluster
    ssh: SshMachines
    folder: Path
    hosts: list[dict[str, Any]]
    environment: dict[str, str] = field(default_factory=dict)

    def own_folder(self, node: int) -> Path:
        """The folder of a machine in which commands run."""
        return self.folder / f"work{node}"

    def python_with(self, node: int, name: str, content: str) -> None:
        """Gives a machine an interpreter that finds one more file first."""
        extra = self.folder / f"extra{node}"
        path = extra / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        program = self.folder / f"python{node}"
        program.write_text(f'#!/bin/sh\nPYTHONPATH={extra}:{ROOT} exec {sys.executable} "$@"\n')
        program.chmod(0o755)
        self.hosts[node]["python"] = str(program)

    def start(self, subcommand: str, arguments: Sequence[str], **keywords: Any) -> subprocess.Popen:
        """Starts ``accelerate-lshdp SUBCOMMAND --hosts FILE ARGUMENTS`` on the first machine."""
        file = self.folder / "cluster.yaml"
        file.write_text(yaml.safe_dump({"nodes": self.hosts}))
        command = [sys.executable, "-m", "accelerate_lshdp.cli.main", subcommand, "--hosts", str(file), *arguments]
        keywords = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **keywords}
        environment = {**os.environ, **self.environment}
        # As in a terminal: what runs in the background of a script ignores Ctrl-C, and hands that on.
        keywords["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
        return self.ssh.popen(0, command, env=environment, cwd=self.own_folder(0), **keywords)


@contextmanager
def emulated_machines(count: int, folder: Path, tools: DebianTools, cores: float = 2.0) -> Iterator[Machines]:
    """Machines of one CPU rank each, with a folder each, and links of 1 Gb/s."""
    (folder / "ssh").mkdir()
    description = Cluster((Node(1, cores=cores),) * count, Link(1e9))
    with EmulatedCluster(description) as cluster, SshMachines(cluster, folder / "ssh", tools) as ssh:
        made = Machines(cluster, ssh, folder, [{"address": node.address, "cpu": 1} for node in cluster.nodes])
        for node, host in enumerate(made.hosts):
            made.own_folder(node).mkdir()
            host["folder"] = str(made.own_folder(node))
            made.python_with(node, "nothing.py", "")  # as if the package were installed
        yield made
