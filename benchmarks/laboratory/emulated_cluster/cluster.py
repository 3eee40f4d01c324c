# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Builds an emulated cluster, starts programs on its nodes, disturbs them, and takes everything away again."""

from __future__ import annotations

import atexit
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from types import FrameType
from typing import Any

from accelerate_lshdp.documents.cluster import Cluster, Link, Node
from laboratory.emulated_cluster.cgroups import ControlGroup
from laboratory.emulated_cluster.network import INTERFACE, ClusterNetwork, Traffic
from laboratory.emulated_cluster.running import run_on_nodes
from laboratory.emulated_cluster.system import ClusterError


# A process joins its node's control groups, then the namespace, then becomes the program: one process id all the way.
_ENTER = 'while [ "$1" != -- ]; do echo $$ > "$1" || exit 125; shift; done; shift; exec nsenter "$@"'
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class RunningNode:
    """A node of a cluster that has been built.

    Args:
        index: its place in the description, from 0.
        address: by which the other nodes reach it.
        interface: that has the address, inside the namespace.
        namespace: name of its network namespace, for ``ip netns exec``.
        description: what was asked for.
    """

    index: int
    address: str
    interface: str
    namespace: str
    description: Node


class EmulatedCluster:
    """Nodes of different speed behind a slow network, on this machine. A context manager; needs root.

        with EmulatedCluster(load_cluster("cluster.yaml")) as cluster:
            codes = cluster.run([["python", "train.py", "--node", str(node.index)] for node in cluster.nodes])

    However the block ends (an exception, Ctrl-C, SIGTERM and SIGHUP included), the nodes' processes are ended and
    everything is removed. What a run left behind that was killed itself is removed by the next one.

    Args:
        description: of the cluster.
        period_seconds: in each such period a node runs for cpu x period and then stops. The shorter, the smoother its
            speed; cpu x period must be at least 0.001 s.

    Raises:
        ClusterError: (when entered) it cannot be built here; the message says what is missing.
        ValueError: (when entered) a share of a core too small for the period.
    """

    def __init__(self, description: Cluster, period_seconds: float = 0.02) -> None:
        self.description = description
        self.nodes: list[RunningNode] = []
        self._period_seconds = period_seconds
        self._groups: list[ControlGroup] = []
        self._network: ClusterNetwork | None = None
        self._processes: list[list[subprocess.Popen]] = []
        self._made = ExitStack()

    @classmethod
    def missing(cls, description: Cluster | None = None) -> str | None:
        """What keeps clusters from being built here, None if nothing does. It tries.

        Args:
            description: of the cluster that is wanted; by default one without memory limits and delay.
        """
        reason = _missing_basics()
        if reason is not None:
            return reason
        wanted = description or Cluster((Node(1, cores=0.5),), Link(1e9))
        tried = Cluster(wanted.nodes[:1], wanted.link)
        try:
            with cls(tried) as cluster:
                code = cluster.popen(0, ["true"]).wait(timeout=10)
        except (ClusterError, OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        return f"a program on a node ended with exit code {code}" if code else None

    def __enter__(self) -> EmulatedCluster:
        reason = _missing_basics()
        if reason is not None:
            raise ClusterError(f"the emulated cluster cannot be built: {reason}")
        self._groups, self._processes = [], [[] for _ in self.description.nodes]
        with ExitStack() as made:
            made.callback(self._let_signals_end_the_block())
            # Groups first: what an earlier run left running is ended with its groups, and only then do its network
            # namespaces go away.
            for index, node in enumerate(self.description.nodes):
                group = ControlGroup(f"node{index}", node.cores, node.memory_bytes, self._period_seconds)
                made.callback(group.remove)
                self._groups.append(group)
            network = ClusterNetwork(len(self.description.nodes), self.description.link)
            made.callback(network.remove)
            made.callback(self._end_processes)
            atexit.register(self.close)
            self._made = made.pop_all()
        for index, node in enumerate(self.description.nodes):
            address, namespace = network.addresses[index], network.namespaces[index]
            self.nodes.append(RunningNode(index, address, INTERFACE, namespace, node))
        self._network = network
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the nodes' processes and removes everything. Safe to call again."""
        with _undisturbed():
            atexit.unregister(self.close)
            self._network = None
            self._made.close()
            self._groups, self._processes, self.nodes = [], [], []

    def popen(self, node: int, argv: Sequence[str | os.PathLike], **keywords: Any) -> subprocess.Popen:
        """Starts a program on a node, inside its limits and its network from the first instruction.

        Args:
            node: index of the node.
            argv: the program and its arguments.
            keywords: as for ``subprocess.Popen``. To the environment it adds the interface for gloo and NCCL if it
                names none.

        Returns:
            The process: its id and signals are those of the program itself.
        """
        network, group = self._built(), self._groups[node]
        environment = dict(os.environ if keywords.get("env") is None else keywords["env"])
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            environment.setdefault(name, INTERFACE)
        enter = ["sh", "-c", _ENTER, "sh", *map(str, group.procs_files), "--"]
        enter += [f"--net=/run/netns/{network.namespaces[node]}", "--"]
        process = subprocess.Popen([*enter, *map(os.fspath, argv)], **{**keywords, "env": environment})
        self._processes[node].append(process)
        return process

    def run(
        self,
        commands: Sequence[Sequence[str | os.PathLike]],
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> list[int]:
        """Runs one command on each node, at the same time, and prints their output as ``node 0 | ...``.

        When one ends with an error the others are ended too: SIGTERM, and after a grace time SIGKILL.

        Args:
            commands: one a node.
            env: added to this process's environment.
            timeout: seconds for all of it; None for no limit.

        Returns:
            Exit codes, one a node; -15 for a node ended by SIGTERM, as subprocess has it.

        Raises:
            ValueError: not one command a node.
            TimeoutError: they had not ended in time; they have been ended.
        """
        if len(commands) != len(self.nodes):
            raise ValueError(f"found {len(commands)} commands, expected one for each of {len(self.nodes)} nodes")
        return run_on_nodes(self.popen, self.kill_node, commands, {**os.environ, **(env or {})}, timeout)

    def set_network(self, network: Link, node: int | None = None) -> None:
        """Changes rate and delay of all links, or of one node's, while programs run."""
        built = self._built()
        for index in range(len(self.nodes)) if node is None else [node]:
            built.shape(index, network)

    def set_cpu(self, node: int, cores: float) -> None:
        """Changes a node's speed while programs run."""
        self._built()
        self._groups[node].set_cores(cores)

    def cut_link(self, node: int) -> None:
        """Pulls the node's cable: nothing arrives or leaves, connections stay as they are and wait."""
        self._built().set_connected(node, False)

    def restore_link(self, node: int) -> None:
        """Puts the cable back."""
        self._built().set_connected(node, True)

    def kill_node(self, node: int) -> None:
        """Ends all processes of a node by SIGKILL, at once. Its network stays: new ones can be started."""
        self._built()
        self._kill(node)

    def traffic(self) -> list[Traffic]:
        """Bytes that each node's interface has sent and received since the cluster was built."""
        return self._built().traffic()

    def pids(self, node: int) -> list[int]:
        """The processes of a node."""
        self._built()
        return self._groups[node].pids()

    def memory_bytes(self, node: int) -> int:
        """Memory of all processes of a node: the sum of their proportional set sizes (PSS).

        A page that n processes share counts 1/n in each, so that shared memory counts once.
        """
        return sum(map(_proportional_set_size, self.pids(node)))

    def _built(self) -> ClusterNetwork:
        if self._network is None:
            raise ClusterError(
                "the cluster is not there: use it inside `with EmulatedCluster(description) as cluster:`"
            )
        return self._network

    def _end_processes(self) -> None:
        for group in self._groups:
            group.set_cores(float(os.cpu_count() or 1))  # a stopped process could not even end
        for node in range(len(self._groups)):
            self._kill(node)
        for process in itertools.chain(*self._processes):
            process.wait()

    def _kill(self, node: int) -> None:
        # One that has only just been started may not have joined its group yet.
        for process in self._processes[node]:
            process.kill()
        self._groups[node].kill()

    @staticmethod
    def _let_signals_end_the_block() -> Callable[[], None]:
        """SIGTERM and SIGHUP from now on raise, so that the block is left in order; returns what undoes this."""
        handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():  # elsewhere atexit and the next run remain
            for number in _ENDING_SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL:  # a handler of the program's own knows better
                    handlers[number] = signal.signal(number, _exit)

        def restore() -> None:
            for number, handler in handlers.items():
                signal.signal(number, handler)

        return restore


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Holds Ctrl-C and the like back until everything has been removed."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, *_ENDING_SIGNALS])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _missing_basics() -> str | None:
    if sys.platform != "linux":
        return f"network namespaces and control groups are Linux's, this is {sys.platform}"
    if os.geteuid() != 0:
        return "root is needed to make network namespaces and control groups: run it with sudo"
    tools = [f"{tool} ({package})" for tool, package in _TOOLS.items() if which(tool) is None]
    return f"not installed: {', '.join(tools)}" if tools else None


_TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}


def _proportional_set_size(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):  # it has ended since
        return 0
    return 0  # it is ending: its memory is gone already
