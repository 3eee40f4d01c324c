# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A pool of worker processes that runs distributed test cases: started once per world size, used by many tests.

    def reduce_rank(factor):                                  # top-level function of a test module
        value = torch.tensor(float(dist.get_rank())) * factor
        dist.all_reduce(value)
        return value.item()

    def test_reduce(workers):
        assert workers(3).run(reduce_rank, 2.0, nodes=(1, 2)) == [6.0, 6.0, 6.0]

Starting Python, torch and a process group costs seconds, a case milliseconds. Every case sees the environment of a
launched rank, fresh accelerate singletons and the same seeds; after a case that raised, the ranks get a new process
group; after one that hung or died, new processes.
"""

from __future__ import annotations

import inspect
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection as mp_connection
from pathlib import Path
from typing import Any

from launching import TESTS, apply_environment, base_environment, check_nodes, rank_environment


START_TIMEOUT = 50.0
PREPARE_TIMEOUT = 30.0
RESET_TIMEOUT = 10.0
# Seconds that the other ranks get to answer after the first one raised or died, if the timeout leaves as much.
FAILURE_GRACE = 15.0


@dataclass(frozen=True)
class WorkerError:
    """An exception that ended a case on one rank; `bases` are the class names of its method resolution order."""

    type: str
    message: str
    traceback: str
    bases: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen
    connection: mp_connection.Connection
    log: Path
    stacks: Path
    log_start: int = 0

    def send(self, message: dict[str, Any]) -> None:
        try:
            self.connection.send_bytes(pickle.dumps(message))
        except OSError:  # it has died: `_collect` says so, with its output
            return

    def how_it_ended(self) -> str:
        try:
            code = self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"died: killed by {signal.Signals(-code).name}" if code < 0 else f"died: exit code {code}"

    def output(self) -> str:
        with self.log.open("rb") as file:
            file.seek(self.log_start)
            return file.read().decode(errors="replace")[-6000:].strip()


class WorkerPool:
    """The workers of one world size. Not for use from several threads."""

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, not {world_size}")
        self.world_size = world_size
        self._workers: list[_Worker] = []
        self._folder: Path | None = None
        self._port = 0
        self._generation = 0
        self._renew_world = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, by rank; empty before the first case and after a restart became due."""
        return [worker.process.pid for worker in self._workers]

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        nodes: Sequence[int] | None = None,
        env: Mapping[str, str | None] | None = None,
        timeout: float = 60.0,
        expect_failure: bool = False,
        failure_grace: float = FAILURE_GRACE,
    ) -> list[Any]:
        """Call `function(*args)` on every rank and return what the ranks returned, in rank order.

        Args:
            function: a top-level function of an importable module. It is sent by name; arguments and results are
                pickled.
            nodes: ranks of each node, e.g. (1, 2); by default one node has all.
            env: changes to the environment of every rank for this case; None as a value removes a name.
            timeout: seconds for the case, without the start of the workers and the import of the module.
            expect_failure: the case must raise on at least one rank. Returns one WorkerError, or None, a rank.
            failure_grace: once a rank has raised or died, seconds for the others to answer.

        Raises:
            AssertionError: a rank raised (all tracebacks are in the message), or none did although expect_failure is
                set; or, expected failure or not, a rank died or did not answer in time (outputs and stacks are in the
                message, the workers are killed and the next case gets new ones).
        """
        module, qualname, directory = _reference(function)
        nodes = check_nodes(nodes, self.world_size)
        title = f"{module}:{qualname} on {self.world_size} ranks, nodes {nodes}"
        pickled_args = pickle.dumps(args)
        try:
            self._prepare(module, directory, title)
            for worker in self._workers:
                worker.log_start = worker.log.stat().st_size
                environment = {**base_environment(), **rank_environment(worker.rank, nodes, self._port)}
                request = {"action": "call", "module": module, "qualname": qualname, "args": pickled_args}
                worker.send({**request, "environment": apply_environment(environment, env)})
            replies = self._collect(timeout, failure_grace, title)
        except BaseException:  # interrupted or out of time: what the workers are doing now is unknown
            self.kill()
            raise
        errors = [reply["error"] and WorkerError(**reply["error"]) for reply in replies]
        self._renew_world = any(errors) or not all(reply["intact"] for reply in replies)
        if expect_failure:
            if not any(errors):
                raise AssertionError(f"{title}: a failure was expected, but no rank raised")
            return errors
        if any(errors):
            raise AssertionError(self._report(title, [f"\n{e.traceback}" if e else "returned" for e in errors]))
        return [pickle.loads(reply["value"]) for reply in replies]

    def close(self) -> None:
        """Ask the workers to end, and kill those that do not within 5 s."""
        for worker in self._workers:
            worker.send({"action": "exit"})
        deadline = time.monotonic() + 5.0
        while any(worker.process.poll() is None for worker in self._workers) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.kill()

    def kill(self) -> None:
        """Kill the workers and what they started (each leads its own process group); the next case gets new ones."""
        for worker in self._workers:
            if worker.process.poll() is None:
                os.killpg(worker.process.pid, signal.SIGKILL)
                worker.process.wait()
            worker.connection.close()
        self._workers = []
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None

    def _prepare(self, module: str, directory: str, title: str) -> None:
        """Bring up workers that share an unused or intact process group and have imported `module`."""
        replies = None
        if self._workers:
            self._generation += self._renew_world
            try:
                timeout = RESET_TIMEOUT if self._renew_world else PREPARE_TIMEOUT
                replies = self._ask_to_prepare(module, directory, timeout, title)
            except AssertionError:
                # A worker has died since its last case, or that case left a collective without a partner: then the
                # group cannot be destroyed, but the processes can.
                self.kill()
        if replies is None:
            self._start()
            replies = self._ask_to_prepare(module, directory, PREPARE_TIMEOUT, title)
        self._renew_world = False
        errors = [reply["error"] for reply in replies]
        if any(errors):
            raise AssertionError(
                self._report(f"preparing {title}", [f"\n{e['traceback']}" if e else "is ready" for e in errors])
            )

    def _ask_to_prepare(self, module: str, directory: str, timeout: float, title: str) -> list[dict[str, Any]]:
        for worker in self._workers:
            request = {"action": "prepare", "module": module, "directory": directory}
            worker.send({**request, "generation": self._generation})
        return self._collect(timeout, FAILURE_GRACE, f"preparing {title}")

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=f"workers-{self.world_size}-"))
        self._generation = 0
        for rank in range(self.world_size):
            self._workers.append(_start_worker(rank, self.world_size, self._folder))
        title = f"starting {self.world_size} workers"
        self._port = self._collect(START_TIMEOUT, FAILURE_GRACE, title)[0]["port"]
        for worker in self._workers:
            worker.send({"port": self._port})

    def _collect(self, timeout: float, grace: float, title: str) -> list[dict[str, Any]]:
        """One reply a rank. Raises AssertionError if one died or is late; by then all have left their stacks."""
        replies: dict[int, dict[str, Any]] = {}
        dead: dict[int, str] = {}
        start = time.monotonic()
        deadline = start + timeout
        while len(replies) + len(dead) < self.world_size and time.monotonic() < deadline:
            pending = [worker for worker in self._workers if worker.rank not in replies and worker.rank not in dead]
            mp_connection.wait([worker.connection for worker in pending], timeout=0.1)
            for worker in pending:
                ended = worker.process.poll() is not None  # before the poll: its last words are read first
                try:
                    if worker.connection.poll():
                        replies[worker.rank] = pickle.loads(worker.connection.recv_bytes())
                    elif ended:
                        raise EOFError
                except (EOFError, OSError):
                    dead[worker.rank] = worker.how_it_ended()
                if worker.rank in dead or replies.get(worker.rank, {}).get("error"):
                    deadline = min(deadline, time.monotonic() + grace)
        if len(replies) == self.world_size:
            return [replies[rank] for rank in range(self.world_size)]
        seconds = f"{time.monotonic() - start:.1f} s (timeout {timeout:g} s)"
        late = [worker for worker in self._workers if worker.rank not in replies and worker.rank not in dead]
        stacks = _dump_stacks(late)
        states = []
        for worker in self._workers:
            if worker.rank in dead:
                states.append(dead[worker.rank])
            elif worker.rank in stacks:
                states.append(f"no answer after {seconds}, stacks:\n{stacks[worker.rank]}")
            else:
                error = replies[worker.rank].get("error")
                states.append(f"\n{error['traceback']}" if error else "returned")
        raise AssertionError(self._report(title, states))

    def _report(self, title: str, states: Iterable[str]) -> str:
        parts = [f"{title} failed"]
        for worker, state in zip(self._workers, states, strict=True):
            parts.append(f"--- rank {worker.rank}: {state}")
            output = worker.output()
            if output:
                parts.append(f"--- rank {worker.rank}, output:\n{output}")
        return "\n".join(parts)


def _start_worker(rank: int, world_size: int, folder: Path) -> _Worker:
    log, stacks = folder / f"output-{rank}", folder / f"stacks-{rank}"
    ours, theirs = socket.socketpair()
    arguments = [theirs.fileno(), rank, world_size, os.getpid(), stacks]
    with theirs, log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-u", str(TESTS / "worker_main.py"), *map(str, arguments)],
            env=base_environment(),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return _Worker(rank, process, mp_connection.Connection(ours.detach()), log, stacks)


def _dump_stacks(workers: list[_Worker]) -> dict[int, str]:
    """The stacks of all threads of the workers, by rank, as faulthandler writes them on SIGUSR1."""
    for worker in workers:
        worker.process.send_signal(signal.SIGUSR1)
    time.sleep(0.5)
    return {worker.rank: worker.stacks.read_text() if worker.stacks.exists() else "none" for worker in workers}


def _reference(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Module, qualified name and import directory by which a worker finds `function`."""
    module, qualname = function.__module__, function.__qualname__
    found: Any = sys.modules[module]
    for name in qualname.split("."):
        found = getattr(found, name, None)
    if found is not function:
        raise TypeError(f"{module}:{qualname} is not a top-level function of its module: workers could not import it")
    depth = module.count(".")
    return module, qualname, str(Path(inspect.getfile(function)).resolve().parents[depth])


class WorkerPools:
    """The pools of a test session, one a world size, each started by its first case."""

    def __init__(self) -> None:
        self._pools: dict[int, WorkerPool] = {}

    def __call__(self, world_size: int) -> WorkerPool:
        if world_size not in self._pools:
            self._pools[world_size] = WorkerPool(world_size)
        return self._pools[world_size]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
