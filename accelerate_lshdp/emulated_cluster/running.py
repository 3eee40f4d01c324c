# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Runs one command on each node of a cluster and shows what they print, line by line."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import IO, TYPE_CHECKING


if TYPE_CHECKING:
    from accelerate_lshdp.emulated_cluster.cluster import EmulatedCluster

#: Seconds between SIGTERM and SIGKILL.
GRACE_SECONDS = 10.0


def run_on_nodes(
    cluster: EmulatedCluster,
    commands: Sequence[Sequence[str | PathLike]],
    environment: Mapping[str, str],
    timeout: float | None,
) -> list[int]:
    """See `EmulatedCluster.run`."""
    deadline = None if timeout is None else time.monotonic() + timeout
    one_line = threading.Lock()
    processes: list[subprocess.Popen] = []
    readers: list[threading.Thread] = []
    try:
        for node, command in enumerate(commands):
            # A session of its own: Ctrl-C is for this process, which then ends them in order.
            process = cluster.popen(
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
        _end(cluster, processes)
        for reader in readers:
            reader.join()
    return [process.returncode for process in processes]


def _end(cluster: EmulatedCluster, processes: Sequence[subprocess.Popen]) -> None:
    """Ends the nodes' programs, and then what they left running."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.02)
    for node, process in enumerate(processes):
        cluster.kill_node(node)
        process.wait()


def _show(node: int, output: IO[bytes], one_line: threading.Lock) -> None:
    with output:
        for line in output:
            text = line.decode(errors="replace").rstrip("\r\n")
            with one_line:
                print(f"node {node} | {text}", flush=True, file=sys.stdout)
