# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Ways in which a run of `launch --hosts` ends in the middle of its training, and what is left on the machines."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import psutil
from emulated_machines import Machines


#: Seconds in which everything has ended, on a busy machine: what is told to end has ten seconds for it.
END_SECONDS = 30.0


def remains(machines: Machines) -> list[str]:
    """Processes that run on the machines beside their ssh servers."""
    left = []
    for node in range(len(machines.hosts)):
        for pid in machines.cluster.pids(node):
            try:
                process = psutil.Process(pid)
                command = process.cmdline()
                # An ssh server, and what it has for a connection that has just ended.
                if process.status() != psutil.STATUS_ZOMBIE and command and "sshd" not in command[0]:
                    left.append(f"node {node}: {' '.join(command)}")
            except psutil.NoSuchProcess:
                continue
    return left


def assert_nothing_is_left(machines: Machines, files: set[Path], output_folders: Collection[str] = ()) -> None:
    """Waits until no process is left on the machines, and compares their files with those that were there before."""
    deadline = time.monotonic() + END_SECONDS
    while remains(machines) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert remains(machines) == []
    assert without(files_of(machines), machines, output_folders) == without(files, machines, output_folders)
    # Each machine has a /dev/shm of its own.
    assert {machines.ssh.run(node, ["ls", "/dev/shm"]) for node in range(len(machines.hosts))} == {""}


def without(files: set[Path], machines: Machines, folders: Collection[str]) -> set[Path]:
    """The files that are not in folders of these names, which scripts make."""
    outputs = {machines.own_folder(node) / name for node in range(len(machines.hosts)) for name in folders}
    return {path for path in files if outputs.isdisjoint([path, *path.parents])}


def files_of(machines: Machines) -> set[Path]:
    """The files in the folders of the machines."""
    found = {path for node in range(len(machines.hosts)) for path in machines.own_folder(node).rglob("*")}
    return {path for path in found if "__pycache__" not in path.parts}


def _of(machines: Machines, node: int, words: str) -> psutil.Process:
    """A process of a node by words of its command."""
    for pid in machines.cluster.pids(node):
        process = psutil.Process(pid)
        if words in " ".join(process.cmdline()):
            return process
    raise AssertionError(f"found no process with {words!r} on node {node}")


def interrupt(machines: Machines, process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGINT)


def terminate(machines: Machines, process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGTERM)


def kill_launcher(machines: Machines, process: subprocess.Popen) -> None:
    process.kill()


def kill_agent(machines: Machines, process: subprocess.Popen) -> None:
    _of(machines, 1, "accelerate_lshdp.hosts.agent").kill()


def kill_rank(machines: Machines, process: subprocess.Popen) -> None:
    _of(machines, 1, "-m accelerate_lshdp.run").kill()


def kill_ssh(machines: Machines, process: subprocess.Popen) -> None:
    next(found for pid in machines.cluster.pids(0) if (found := psutil.Process(pid)).name() == "ssh").kill()


#: Each with the exit codes of the launcher.
ENDINGS: dict[Callable[[Machines, subprocess.Popen], None], set[int]] = {
    interrupt: {130},
    terminate: {143},
    kill_launcher: {-9},
    kill_agent: {137, 255},
    kill_rank: {137, 1},
    kill_ssh: {255},
}


def end_at(
    machines: Machines,
    ending: Callable[[Machines, subprocess.Popen], None],
    seconds: float,
    arguments: Sequence[str],
    output_folders: Collection[str] = (),
) -> None:
    """Starts a run, ends it some time after it was started, and looks at what is left.

    Args:
        machines: on which it runs.
        ending: what ends it.
        seconds: after which it does.
        arguments: of ``launch --hosts``.
        output_folders: names of folders that the script itself makes.
    """
    before = files_of(machines)
    process = machines.start("launch", arguments)
    time.sleep(seconds)
    try:
        ending(machines, process)
    except (AssertionError, StopIteration, psutil.NoSuchProcess):  # so early that the process is not there yet
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    else:
        output, _ = process.communicate(timeout=60)
        # So early that nothing was started, or that Python does not handle signals yet.
        early = {1, -signal.SIGINT, -signal.SIGTERM}
        assert process.returncode in ENDINGS[ending] | early, output
    assert_nothing_is_left(machines, before, output_folders)
