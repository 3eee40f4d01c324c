# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Processes of ranks: started once, then told what to do, all of them at the same time.

The driver calls methods of an object in each process (`serve`), so that importing and building happens once for all
that is measured. Where a process runs (on the loopback, in a node of an emulated cluster) is the business of its
`RankPlace`. Standard library only: what a process imports counts in its memory.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from accelerate_lshdp.runtime.free_port import free_port
from accelerate_lshdp.runtime.parent_death import end_with


#: Seconds that the other ranks get to answer after the first one raised.
FAILURE_GRACE = 20.0
# What a shell may hold for other runs and would change this one.
_FOREIGN_PREFIXES = ("ACCELERATE_", "FSDP_", "GROUP_", "LSDP_", "PARALLELISM_CONFIG_", "ROLE_", "TORCHELASTIC_")
_OUTPUT_SHOWN = 4000
#: The interface of this machine's loopback.
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class RankError(RuntimeError):
    """A rank raised, ended or did not answer in time; the message says which and shows its last output.

    Attributes:
        summary: one line of it.
        ranks_usable: every rank has answered, so the processes can go on with something else.
    """

    def __init__(self, message: str, ranks_usable: bool = False, summary: str | None = None) -> None:
        super().__init__(message)
        self.summary = summary or message.partition("\n")[0]
        self.ranks_usable = ranks_usable


@dataclass(frozen=True)
class RankPlace:
    """Where one rank's process runs.

    Args:
        environment: its whole environment (see `rank_environment`).
        popen: starts it there; called as `subprocess.Popen`.
    """

    environment: dict[str, str]
    popen: Callable[..., subprocess.Popen] = subprocess.Popen


class RankProcesses:
    """The processes; a context manager that ends them.

    Args:
        command: a Python program that calls `serve`, without the arguments that `serve` reads.
        places: one a rank.
        first_rank: number of the first of these ranks, for messages.
    """

    def __init__(self, command: Sequence[str], places: Sequence[RankPlace], first_rank: int = 0) -> None:
        self._first_rank = first_rank
        self._folder = tempfile.TemporaryDirectory(prefix="lshdp-ranks-")
        self._logs = [Path(self._folder.name, f"rank-{rank}.log") for rank in range(len(places))]
        self._processes: list[subprocess.Popen] = []
        self._connections: list[connection.Connection] = []
        try:
            for rank, place in enumerate(places):
                self._start(command, rank, place)
        except BaseException:
            self.close()
            raise

    @classmethod
    def on_loopback(cls, script: Path, world_size: int) -> RankProcesses:
        """A script's processes, each a node of its own as far as the engine can see."""
        port = free_port()
        sizes = [1] * world_size
        places = [RankPlace(rank_environment(rank, sizes, port=port)) for rank in range(world_size)]
        return cls([sys.executable, str(script)], places)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def call(
        self,
        method: str,
        *,
        timeout: float,
        elsewhere: Mapping[connection.Connection, Callable[[], bool]] | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """Calls a method on all ranks at once and returns what it returned, in rank order.

        Args:
            method: its name.
            timeout: seconds.
            elsewhere: connections to other nodes, each with what is called once when something arrives there; it
                returns whether the call has failed on that node, so that these ranks may wait for it in vain.
            arguments: of the method.

        Raises:
            RankError: a rank raised, ended or is late. Only if its `ranks_usable` says so may others calls follow.
        """
        for rank, link in enumerate(self._connections):
            try:
                link.send((method, arguments))
            except OSError:
                raise self._failure(rank, "has ended") from None
        replies: dict[int, Any] = {}
        raised: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        others = dict(elsewhere or {})
        while len(replies) + len(raised) < len(self._connections):
            waiting = {
                link: rank for rank, link in enumerate(self._connections) if rank not in replies and rank not in raised
            }
            ready = connection.wait([*waiting, *others], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                if raised:
                    break
                raise self._failure(min(waiting.values()), f"had not finished {method} after {timeout:g} s")
            for link in ready:
                if link in others:
                    if others.pop(link)():
                        deadline = min(deadline, time.monotonic() + FAILURE_GRACE)
                    continue
                rank = waiting[link]
                try:
                    fine, value = link.recv()
                except (EOFError, OSError):
                    raise self._failure(rank, f"ended during {method}") from None
                if fine:
                    replies[rank] = value
                else:
                    raised[rank] = value
                    deadline = min(deadline, time.monotonic() + FAILURE_GRACE)
        if raised:
            rank, what = next(iter(raised.items()))  # the first: what followed may be its consequence
            everyone = len(replies) + len(raised) == len(self._connections)
            summary = f"rank {self._first_rank + rank} raised in {method}: {what.strip().splitlines()[-1]}"
            raise self._failure(rank, f"raised in {method}:\n{what}", everyone, summary)
        return [replies[rank] for rank in range(len(replies))]

    @contextmanager
    def awake(self) -> Iterator[None]:
        """In the block the processes run; after it they are stopped (`pause`)."""
        self.wake()
        try:
            yield
        finally:
            self.pause()

    def wake(self) -> None:
        """Lets the processes go on that `pause` has stopped."""
        self._signal("SIGCONT")

    def pause(self) -> None:
        """Stops the processes, which take no time of a processor until `wake`.

        Those of gloo's threads that run wake up a hundred times a second, while others are measured on the same
        cores. Call it only when no rank of any node needs these any more: rank 0 serves the store of all. Linux only:
        elsewhere they go on, for nobody would end them if the driver were killed.
        """
        self._signal("SIGSTOP")

    def _signal(self, name: str) -> None:
        if sys.platform == "linux":
            for process in self._processes:
                process.send_signal(signal.Signals[name])

    def close(self) -> None:
        """Ends the processes; they are not asked."""
        for link in self._connections:
            link.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._processes, self._connections = [], []
        self._folder.cleanup()

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self, command: Sequence[str], rank: int, place: RankPlace) -> None:
        ours, theirs = socket.socketpair()
        self._connections.append(connection.Connection(ours.detach()))
        with theirs, self._logs[rank].open("wb") as log:
            process = place.popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                env=place.environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._processes.append(process)

    def _failure(self, rank: int, what: str, ranks_usable: bool = False, summary: str | None = None) -> RankError:
        name = f"rank {self._first_rank + rank}"
        output = self._logs[rank].read_text(encoding="utf-8", errors="replace")[-_OUTPUT_SHOWN:].strip()
        message = f"{name} {what}\n--- output of {name}:\n{output or '(none)'}"
        return RankError(message, ranks_usable, summary)


def serve(target: object) -> None:
    """In a rank's process: does what the driver says until it is gone. Does not return.

    The process ends by ``os._exit``, because gloo's threads can abort an ordinary exit.
    """
    link, parent = connection.Connection(int(sys.argv[1])), int(sys.argv[2])
    end_with(parent)
    while True:
        try:
            method, arguments = link.recv()
        except EOFError:
            os._exit(0)
        try:
            reply = True, getattr(target, method)(**arguments)
        except Exception:
            reply = False, traceback.format_exc()
        try:
            link.send(reply)
        except OSError:
            os._exit(1)


def rank_environment(
    rank: int,
    node_sizes: Sequence[int],
    *,
    port: int,
    address: str = "127.0.0.1",
    interface: str | None = None,
    threads: int = 1,
    on_gpu: bool = False,
) -> dict[str, str]:
    """What a launcher would tell a rank, and what keeps ranks on one machine from disturbing each other.

    Args:
        rank: its number; ranks are numbered node by node.
        node_sizes: ranks on each node.
        port: where rank 0 listens at `address`.
        interface: for gloo; None: the loopback.
        threads: of the rank's computation.
        on_gpu: whether the rank computes on the GPU of its local rank.
    """
    first = node = 0
    while rank >= first + node_sizes[node]:
        first += node_sizes[node]
        node += 1
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN_PREFIXES)}
    return {
        **kept,
        "RANK": str(rank),
        "WORLD_SIZE": str(sum(node_sizes)),
        "LOCAL_RANK": str(rank - first),
        "LOCAL_WORLD_SIZE": str(node_sizes[node]),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(len(node_sizes)),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": interface or LOOPBACK,
        **({} if on_gpu else {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
