# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The environment that a launcher gives its ranks, and real processes started in it.

`launch` is for tests that need a whole script: its own process group, its own exit. Tests of functions are cheaper in
the worker pool (`workers.py`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from accelerate_lshdp.runtime.free_port import free_port


TESTS = Path(__file__).resolve().parent
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
# What an outer launcher, or the person who runs the tests, may have set and a rank must not see.
FOREIGN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
FOREIGN_PREFIXES = ("ACCELERATE_", "FSDP_", "GROUP_", "LSDP_", "PARALLELISM_CONFIG_", "ROLE_", "TORCHELASTIC_")

Command = tuple[list[str], dict[str, str]]  # arguments and environment of one process

ACCELERATE_CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
machine_rank: {machine_rank}
main_process_ip: 127.0.0.1
main_process_port: {port}
num_machines: {machines}
num_processes: {processes}
rdzv_backend: static
same_network: true
use_cpu: true
"""


def base_environment() -> dict[str, str]:
    """The environment of a rank before the launcher's part: one thread, CPU only, loopback only, no hub."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in FOREIGN_NAMES and not name.startswith(FOREIGN_PREFIXES)
    }
    environment.update(
        ACCELERATE_USE_CPU="true",
        CUDA_VISIBLE_DEVICES="",
        GLOO_SOCKET_IFNAME=LOOPBACK,
        HF_DATASETS_OFFLINE="1",
        HF_HUB_OFFLINE="1",
        MKL_NUM_THREADS="1",
        OMP_NUM_THREADS="1",
        PYTHONFAULTHANDLER="1",
        TOKENIZERS_PARALLELISM="false",
    )
    return environment


def rank_environment(rank: int, nodes: Sequence[int], port: int) -> dict[str, str]:
    """The variables that torchrun sets for `rank` when node i has `nodes[i]` ranks, in rank order."""
    first = 0
    for node, ranks in enumerate(nodes):
        if rank < first + ranks:
            return {
                "RANK": str(rank),
                "WORLD_SIZE": str(sum(nodes)),
                "LOCAL_RANK": str(rank - first),
                "LOCAL_WORLD_SIZE": str(ranks),
                "GROUP_RANK": str(node),
                "GROUP_WORLD_SIZE": str(len(nodes)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        first += ranks
    raise ValueError(f"rank {rank} is not on nodes {tuple(nodes)}, which have {sum(nodes)} ranks")


def check_nodes(nodes: Sequence[int] | None, world_size: int) -> tuple[int, ...]:
    """`nodes`, or one node with every rank; raises ValueError if they do not make up `world_size` ranks."""
    nodes = (world_size,) if nodes is None else tuple(nodes)
    if sum(nodes) != world_size or any(ranks < 1 for ranks in nodes):
        raise ValueError(f"nodes {nodes} must be positive and sum to the {world_size} ranks of this world")
    return nodes


def apply_environment(environment: dict[str, str], changes: Mapping[str, str | None] | None) -> dict[str, str]:
    """`environment` with `changes`; a value of None removes the name."""
    result = dict(environment)
    for name, value in (changes or {}).items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = value
    return result


class LaunchedProcesses(subprocess.CompletedProcess):
    """All processes of a launch as one: the first non-zero return code and the joined outputs.

    `processes` holds one CompletedProcess per rank, or per node where `accelerate launch` was used.
    """

    def __init__(self, processes: list[subprocess.CompletedProcess]) -> None:
        self.processes = processes
        super().__init__(
            args=[process.args for process in processes],
            returncode=next((process.returncode for process in processes if process.returncode), 0),
            stdout="".join(process.stdout for process in processes),
            stderr="".join(process.stderr for process in processes),
        )


def launch(
    script_args: Sequence[str | os.PathLike],
    nproc: int,
    *,
    nodes: Sequence[int] | None = None,
    env: Mapping[str, str | None] | None = None,
    timeout: float = 100.0,
    cwd: str | os.PathLike | None = None,
    launcher: str = "environment",
) -> LaunchedProcesses:
    """Run a script on `nproc` ranks and wait for all of them.

    Args:
        script_args: what follows `python`: `["script.py", "--flag"]` or `["-m", "module"]` (`["-c", code]` only with
            launcher="environment").
        nproc: number of ranks over all nodes; 0 starts one process without any launcher variable.
        nodes: ranks of each node; one node by default.
        env: changes to the environment; None as a value removes a name.
        timeout: seconds for everything, start included.
        launcher: "environment" starts every rank itself with torchrun's variables, so that nothing but the ranks ends
            the ranks; "accelerate" runs one `accelerate launch` per node.

    Raises:
        AssertionError: not all processes had ended after `timeout` seconds. They have been killed; the message holds
            their stacks and outputs.
    """
    with tempfile.TemporaryDirectory(prefix="launch-") as folder:
        if launcher not in ("environment", "accelerate"):
            raise ValueError(f'launcher must be "environment" or "accelerate", not {launcher!r}')
        if nproc == 0:
            commands = [([sys.executable, *map(str, script_args)], apply_environment(base_environment(), env))]
        elif launcher == "environment":
            commands = _rank_commands(script_args, check_nodes(nodes, nproc), env)
        else:
            commands = _accelerate_commands(script_args, check_nodes(nodes, nproc), env, Path(folder))
        return _run_together(commands, timeout, cwd, Path(folder))


def _rank_commands(
    script_args: Sequence[str | os.PathLike], nodes: tuple[int, ...], env: Mapping[str, str | None] | None
) -> list[Command]:
    port = free_port()
    return [
        (
            [sys.executable, *map(str, script_args)],
            apply_environment({**base_environment(), **rank_environment(rank, nodes, port)}, env),
        )
        for rank in range(sum(nodes))
    ]


def _accelerate_commands(
    script_args: Sequence[str | os.PathLike],
    nodes: tuple[int, ...],
    env: Mapping[str, str | None] | None,
    folder: Path,
) -> list[Command]:
    commands = []
    port = free_port()
    for node, ranks in enumerate(nodes):
        config = folder / f"accelerate-{node}.yaml"
        # accelerate starts num_processes // num_machines ranks on this machine, whatever the others were told.
        config.write_text(
            ACCELERATE_CONFIG.format(machine_rank=node, port=port, machines=len(nodes), processes=ranks * len(nodes))
        )
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
        commands.append(([*command, *map(str, script_args)], apply_environment(base_environment(), env)))
    return commands


def _run_together(
    commands: list[Command], timeout: float, cwd: str | os.PathLike | None, folder: Path
) -> LaunchedProcesses:
    running: list[tuple[subprocess.Popen, IO[str], IO[str]]] = []
    deadline = time.monotonic() + timeout
    try:
        for index, (command, environment) in enumerate(commands):
            # Files, not pipes: a full pipe would stop the process, and a dead parent's pipe would kill it.
            out, err = ((folder / f"{name}-{index}").open("w+") for name in ("stdout", "stderr"))
            process = subprocess.Popen(
                command,
                env=environment,
                cwd=cwd,
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            running.append((process, out, err))
        while any(process.poll() is None for process, _, _ in running) and time.monotonic() < deadline:
            time.sleep(0.02)
        late = [index for index, (process, _, _) in enumerate(running) if process.poll() is None]
        # SIGABRT makes faulthandler write every thread's stack to stderr before the process ends.
        _end([process for process, _, _ in running], signal.SIGABRT)
    finally:
        _end([process for process, _, _ in running], signal.SIGKILL)
        finished = []
        for process, out, err in running:
            process.wait()
            finished.append(subprocess.CompletedProcess(process.args, process.returncode, _read(out), _read(err)))
    if late:
        outputs = "\n".join(
            f"--- process {index} ({'still running' if index in late else f'exit code {process.returncode}'}) ---\n"
            f"{process.stdout[-8000:]}\n{process.stderr[-12000:]}"
            for index, process in enumerate(finished)
        )
        raise AssertionError(
            f"processes {late} of {len(finished)} had not ended after {timeout:g} s and were killed\n{outputs}"
        )
    return LaunchedProcesses(finished)


def _end(processes: list[subprocess.Popen], with_signal: signal.Signals) -> None:
    """Send a signal to the processes and all that they started, and give these up to 2 s to end."""
    running = [process for process in processes if process.poll() is None]
    started: list[psutil.Process] = []
    for process in running:
        try:
            started += psutil.Process(process.pid).children(recursive=True)
        except psutil.NoSuchProcess:  # ended since the poll, which is all we want
            continue
    # Children first, or a launcher could end them before they have shown their stacks.
    for process in [*started, *running]:
        try:
            process.send_signal(with_signal)
        except psutil.NoSuchProcess:
            continue
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        if all(process.poll() is not None for process in running) and all(has_ended(child.pid) for child in started):
            return
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    """Whether the process is gone, or only waits to be reaped by a parent that is not ours."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _read(stream: IO[str]) -> str:
    with stream:
        stream.seek(0)
        return stream.read()
