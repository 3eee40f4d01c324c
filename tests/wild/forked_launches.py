# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Starts ranks as forks of a process that has imported the libraries once, which is most of what a short script costs.

As a program it is that process: it reads one request a line and answers each when all ranks have ended. A fork takes
the environment, folder and outputs of its rank, runs what the command says as Python would, and ends as any Python
process does. The process itself has no threads and has drawn no random numbers.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launching import LaunchedProcesses, apply_environment, base_environment, free_port, rank_environment


class ForkServer:
    """The process that forks, seen from the runner."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env={**base_environment(), **environment, "PYTHONPATH": environment["PYTHONPATH"]},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def launch(
        self, command: Sequence[str], ranks: int, *, env: Mapping[str, str], cwd: Path, timeout: float
    ) -> LaunchedProcesses:
        """As `launching.launch`: runs what follows ``python`` on every rank of one node and waits for all.

        Raises:
            AssertionError: not all ranks had ended after ``timeout`` seconds. They have been killed.
        """
        port = free_port()
        environments = [
            apply_environment({**base_environment(), **rank_environment(rank, (ranks,), port)}, env)
            for rank in range(ranks)
        ]
        request = {"command": command, "environments": environments, "cwd": str(cwd), "timeout": timeout}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        codes = json.loads(self._process.stdout.readline())
        outputs = [[(cwd / f"{name}-{rank}").read_text() for name in ("stdout", "stderr")] for rank in range(ranks)]
        if None in codes:
            texts = "\n".join(f"--- rank {i}: {codes[i]}\n{out}\n{err}" for i, (out, err) in enumerate(outputs))
            raise AssertionError(f"not all of {ranks} ranks had ended after {timeout:g} s: {codes}\n{texts}")
        return LaunchedProcesses(
            [
                subprocess.CompletedProcess(command, code, out, err)
                for code, (out, err) in zip(codes, outputs, strict=True)
            ]
        )

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def serve() -> None:
    """Answers requests until there are no more. In a fork it returns too: when the script has run."""
    import accelerate  # noqa: F401
    import datasets  # noqa: F401
    import evaluate  # noqa: F401
    import transformers.trainer  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        children = {}
        for rank, environment in enumerate(request["environments"]):
            pid = os.fork()
            if pid == 0:
                become(rank, environment, Path(request["cwd"]))
                run(request["command"])
                return
            children[pid] = rank
        print(json.dumps(wait(children, request["timeout"])), flush=True)


def wait(children: dict[int, int], timeout: float) -> list[int | None]:
    """The exit code of each rank; None for one that had to be killed."""
    codes: list[int | None] = [None] * len(children)
    running = dict(children)
    deadline = time.monotonic() + timeout
    while running and time.monotonic() < deadline:
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    for number in (signal.SIGABRT, signal.SIGKILL):  # the first has faulthandler write the stacks
        for pid in running:
            os.killpg(pid, number)
        time.sleep(1.0 if running else 0.0)
    for pid in running:
        os.waitpid(pid, 0)
    return codes


def become(rank: int, environment: dict[str, str], cwd: Path) -> None:
    """Makes this fork look as if Python had been started with an environment, in a folder, with outputs of its own."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        path = "/dev/null" if name == "stdin" else f"{name}-{rank}"
        os.dup2(
            os.open(path, os.O_RDONLY if name == "stdin" else os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number
        )
    import recorder

    recorder.install()
    if "WILD_PLAIN" in environment:
        import quiet_end

        quiet_end.install()


def run(command: list[str]) -> Any:
    """What ``python COMMAND`` does: a script or, after ``-m``, a module."""
    if command[0] == "-m":
        sys.argv = command[1:]
        return runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    sys.argv = command
    sys.path[0] = str(Path(command[0]).resolve().parent)
    return runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    serve()
