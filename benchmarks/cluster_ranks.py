# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Processes of an emulated cluster: started once, then told what to do, all of them at the same time.

Every rank is a node of its own as far as the engine can see; they talk over the loopback. The driver calls methods of
an object in each process (`serve`), so that importing and building happens once for all phases of a benchmark.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing import connection
from pathlib import Path
from typing import Any


# What a shell may hold for other runs and would change this one.
_FOREIGN_PREFIXES = ("ACCELERATE_", "FSDP_", "GROUP_", "LSDP_", "PARALLELISM_CONFIG_", "ROLE_", "TORCHELASTIC_")


class RankError(RuntimeError):
    """A rank raised, ended or did not answer in time; the message says which and shows its last output."""


class ClusterRanks:
    """The processes; a context manager that ends them.

    Args:
        script: Python file that calls `serve`.
        world_size: number of processes.
    """

    def __init__(self, script: Path, world_size: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lshdp-benchmark-")
        self._logs = [Path(self._folder.name, f"rank-{rank}.log") for rank in range(world_size)]
        self._processes: list[subprocess.Popen] = []
        self._connections: list[connection.Connection] = []
        port = _free_port()
        try:
            for rank in range(world_size):
                self._start(script, rank, world_size, port)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def call(self, method: str, *, timeout: float, **arguments: Any) -> list[Any]:
        """Calls a method on all ranks at once and returns what it returned, in rank order.

        Raises:
            RankError: after an error the ranks are of no more use.
        """
        for rank, link in enumerate(self._connections):
            try:
                link.send((method, arguments))
            except OSError:
                raise self._failure(rank, "has ended") from None
        replies: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(replies) < len(self._connections):
            waiting = {link: rank for rank, link in enumerate(self._connections) if rank not in replies}
            ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = min(waiting.values())
                raise self._failure(late, f"had not finished {method} after {timeout:g} s")
            for link in ready:
                rank = waiting[link]
                try:
                    fine, value = link.recv()
                except (EOFError, OSError):
                    raise self._failure(rank, f"ended during {method}") from None
                if not fine:
                    raise self._failure(rank, f"raised in {method}:\n{value}")
                replies[rank] = value
        return [replies[rank] for rank in range(len(replies))]

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

    def __enter__(self) -> ClusterRanks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self, script: Path, rank: int, world_size: int, port: int) -> None:
        ours, theirs = socket.socketpair()
        self._connections.append(connection.Connection(ours.detach()))
        with theirs, self._logs[rank].open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, str(script), str(theirs.fileno()), str(os.getpid())],
                env=_environment(rank, world_size, port),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._processes.append(process)

    def _failure(self, rank: int, what: str) -> RankError:
        output = self._logs[rank].read_text(encoding="utf-8", errors="replace")[-4000:].strip()
        return RankError(f"rank {rank} {what}\n--- output of rank {rank}:\n{output or '(none)'}")


def serve(target: object) -> None:
    """In a rank's process: does what the driver says until it is gone. Does not return.

    The process ends by ``os._exit``, because gloo's threads can abort an ordinary exit.
    """
    link, parent = connection.Connection(int(sys.argv[1])), int(sys.argv[2])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
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


def _end_with(parent: int) -> None:
    """Ends this process soon after the driver, even in the middle of a collective."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN_PREFIXES)}
    return {
        **kept,
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "GROUP_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
