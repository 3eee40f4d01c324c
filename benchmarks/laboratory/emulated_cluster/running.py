# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Runs one command on each node of a cluster and shows what they print, line by line."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import IO


#: Seconds between SIGTERM and SIGKILL.
GRACE_SECONDS = 10.0


def run_on_nodes(
    start: Callable[..., subprocess.Popen],
    kill_node: Callable[[int], None],
    commands: Sequence[Sequence[str | PathLike]],
    environment: Mapping[str, str],
    timeout: float | None,
) -> list[int]:
    """Runs one command on each node and prints what they print, each line with its node.

    Args:
        start: starts a command on a node, as ``EmulatedCluster.popen`` does.
        kill_node: ends all that runs on a node.
        commands: one a node.
        environment: of the commands.
        timeout: seconds; None: as long as they take.

    Returns:
        Their exit codes.

    Raises:
        TimeoutError: some had not ended in time.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    one_line = threading.Lock()
    processes: list[subprocess.Popen] = []
    readers: list[threading.Thread] = []
    try:
        for node, command in enumerate(commands):
            # A session of its own: Ctrl-C is for this process, which then ends them in order.
            process = start(
                node,
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            processes.append(process)
            readers.append(threading.Thread(target=_show, args=(node, process.stdout, one_line), daemon=True))
            readers[-1].start()
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            if deadline is not None and time.monotonic() > deadline:
                late = [node for node, code in enumerate(codes) if code is None]
                raise TimeoutError(f"nodes {late} had not ended after {timeout:g} s")
            time.sleep(0.02)
    finally:
        _end(kill_node, processes)
        for reader in readers:
            reader.join()
    return [process.returncode for process in processes]


def _end(kill_node: Callable[[int], None], processes: Sequence[subprocess.Popen]) -> None:
    """Ends the nodes' programs, and then what they left running."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.02)
    for node, process in enumerate(processes):
        kill_node(node)
        process.wait()


def _show(node: int, output: IO[bytes], one_line: threading.Lock) -> None:
    with output:
        for line in output:
            text = line.decode(errors="replace").rstrip("\r\n")
            with one_line:
                print(f"node {node} | {text}", flush=True, file=sys.stdout)
