# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""``--hosts``: runs a command on all machines of a file, from one of them or from another machine.

The machines are examined first, as ``accelerate-lshdp doctor`` does; what it found says which network interface each
of them is to use, and a free port. Then each machine runs the same command, as its user would have started it there.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from accelerate_lshdp.cli.config import DEFAULT_PORT
from accelerate_lshdp.cli.exit_codes import SIGNAL_BASE
from accelerate_lshdp.documents.hosts import Host, load_hosts
from accelerate_lshdp.documents.plan import PLAN_VARIABLE, Plan, PlanError


if TYPE_CHECKING:
    from accelerate_lshdp.hosts.connection import HostConnection
    from accelerate_lshdp.hosts.examination import Examination

#: Variables that are the same on all machines: options of this package and of accelerate.
_SHARED_PREFIXES = ("LSDP_", "ACCELERATE_")
_FAILURE = 1
# An agent ends after a minute without a word.
_QUICK_SECONDS, _OUTPUT_SECONDS = 10.0, 50.0


@dataclass(frozen=True)
class Job:
    """What all machines are to run.

    Args:
        name: of the subcommand.
        options: its arguments before the script, without those that say which node it is.
        script: its arguments from the script on.
        files: of code that all machines must have, as paths from the current folder.
        environment: of the command on all machines.
        output: a file or folder that node 0 writes, and that is brought here; None: nothing is.
    """

    name: str
    options: Sequence[str]
    script: Sequence[str]
    files: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    output: Path | None = None


def add_hosts_arguments(parser: Any) -> None:
    """Adds the flags that `run_job` reads to a parser, or to a group of one."""
    parser.add_argument(
        "--hosts",
        metavar="YAML",
        help="all machines, as for accelerate-lshdp doctor: the command runs on each of them",
    )
    parser.add_argument(
        "--copy", action="store_true", help="with --hosts: copy the script's Python files to machines that lack them"
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="with --hosts: a variable for all machines, with the value that it has here or another; may be repeated",
    )


def check_hosts_arguments(arguments: argparse.Namespace) -> None:
    """Raises ValueError if flags contradict ``--hosts``, or need it."""
    fixed = {
        "--config_file": arguments.config_file,
        "--nodes": arguments.nodes,
        "--node-rank": arguments.node_rank,
        "--main-ip": arguments.main_ip,
    }
    given = [flag for flag, value in fixed.items() if value is not None]
    if arguments.hosts is not None and given:
        raise ValueError(f"{', '.join(given)} cannot be combined with --hosts, whose file says it; leave one out")
    if arguments.hosts is None and (arguments.copy or arguments.env):
        raise ValueError("found --copy or --env without --hosts, expected them together")


def run_job(arguments: argparse.Namespace, job: Job, plan: Plan | None = None) -> int:
    """Runs a job on all machines.

    Args:
        arguments: parsed, with those of `add_hosts_arguments`, ``main_port`` and ``device``.
        job: what to run.
        plan: of the run, if it has one.

    Returns:
        0, the exit code of the machine that failed first, or 1 if machines are not fit for it.

    Raises:
        PlanError: the file of the hosts cannot be read, or the plan is for other nodes.
        ValueError: arguments that cannot be right.
    """
    from accelerate_lshdp.hosts.connection import HostError, connect_to_all
    from accelerate_lshdp.hosts.running import HostCommand, run_on_hosts

    hosts = [_with_device(host, arguments.device) for host in load_hosts(arguments.hosts)]
    _check_plan(plan, hosts)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # what machines print may be more than this terminal can show
            stream.reconfigure(errors="replace")

    def say(text: str) -> None:
        print(f"accelerate-lshdp {job.name}: {text}", file=sys.stderr, flush=True)

    with _ended_by_signals(), ExitStack() as stack:
        say(f"connecting to {len(hosts)} machines")
        connections, errors = connect_to_all(hosts, stack)
        try:
            examination = _prepare(arguments, job, hosts, connections, errors, say)
            if examination is None:
                return _FAILURE
            device = _device_of(hosts)
            commands = [
                HostCommand(
                    [job.name, *_place(hosts, node, examination, device), *job.options, *job.script],
                    {**_environment(arguments), **job.environment, **_interfaces(examination, node)},
                )
                for node in range(len(hosts))
            ]
            began = time.time()
            code = run_on_hosts([connections[node] for node in range(len(hosts))], commands, _show, say)
            if job.output is not None and not _is_written(job.output, began):
                _bring(connections[0], job.output, must_be_there=code == 0)
            return code
        except HostError as error:
            say(f"{error}. {error.fix}")
            return _FAILURE


def _prepare(
    arguments: argparse.Namespace,
    job: Job,
    hosts: Sequence[Host],
    connections: dict[int, HostConnection],
    errors: Mapping[int, Any],
    say: Any,
) -> Examination | None:
    """The examination of machines that are fit for the run; None if they are not."""
    from accelerate_lshdp.hosts.examination import examine
    from accelerate_lshdp.hosts.findings import find
    from accelerate_lshdp.hosts.script_files import copy_to_all

    port = arguments.main_port or DEFAULT_PORT
    if arguments.main_port is None and len(hosts) > 1 and 0 in connections:
        port = connections[0].ask("choose_port", _QUICK_SECONDS, preferred=port)
    examination = examine(hosts, connections, errors, main_port=port, files=job.files, with_rates=False, say=say)
    if arguments.copy:
        facts = {node: each.facts for node, each in enumerate(examination.machines) if each.facts is not None}
        for node, files in copy_to_all(job.files, facts, connections).items():
            say(f"copied {len(files)} file{'' if len(files) == 1 else 's'} to node {node}")
            there = facts[node]
            examination = _with_facts(examination, node, replace(there, files={**there.files, **files}))
    for node, machine in enumerate(examination.machines):
        if machine.facts is not None:  # as each machine's command will have them
            named = _interfaces(examination, node)
            examination = _with_facts(examination, node, replace(machine.facts, named_interfaces=named))
    findings = find(examination)
    for finding in findings:
        say(f"{'problem' if finding.is_problem else 'warning'}: {finding.where}: {finding.what}. {finding.fix}")
    if any(finding.is_problem for finding in findings):
        say("nothing was started")
        return None
    return examination


def _is_written(output: Path, since: float) -> bool:
    """Whether node 0 has written its output into this folder: it is this machine, or shares its files."""
    files = [output] if output.is_file() else list(output.rglob("*"))
    return any(file.is_file() and file.stat().st_mtime >= since for file in files)


def _bring(connection: HostConnection, output: Path, *, must_be_there: bool) -> None:
    """Copies the output of node 0 here. A command that has failed may have written none. Raises HostError."""
    from accelerate_lshdp.hosts.connection import HostError

    try:
        found = connection.ask("read", _OUTPUT_SECONDS, path=str(output))
    except HostError as error:
        if must_be_there:
            raise HostError(
                f"the output {output} of node 0 could not be brought here: {error}", "It lies there"
            ) from None
        return
    for name, content in found.items():
        path = Path(name)
        if not path.is_relative_to(output) or ".." in path.relative_to(output).parts:
            raise ValueError(f"found the file {name!r} in the output of node 0, expected files in {output}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(content))


def _with_facts(examination: Examination, node: int, facts: Any) -> Examination:
    machines = list(examination.machines)
    machines[node] = replace(machines[node], facts=facts)
    return replace(examination, machines=tuple(machines))


def _interfaces(examination: Examination, node: int) -> dict[str, str]:
    """The variables that name a machine's network interface; none for a single machine, or if it is not known."""
    from accelerate_lshdp.hosts.machine_facts import GLOO_VARIABLE, NCCL_VARIABLE

    machine = examination.machines[node]
    found = machine.host.interface or machine.facts.interface_of(machine.address or "")
    if found is None or len(examination.machines) == 1:
        return {}
    return {GLOO_VARIABLE: found, NCCL_VARIABLE: found}


def _check_plan(plan: Plan | None, hosts: Sequence[Host]) -> None:
    """Raises PlanError if a plan is for other nodes than a file has."""
    sizes = [host.node.ranks for host in hosts]
    if plan is None:
        return
    if plan.world_size is not None and plan.world_size != sum(sizes):
        raise PlanError(
            f"found {plan.world_size} ranks, but the machines of --hosts have {sizes}. Correct ranks: there, or make a"
            " plan for these machines.",
            path="batch.ranks",
            source=plan.source,
        )
    if plan.cluster is not None and plan.cluster.node_sizes != sizes:
        raise PlanError(
            f"found nodes of {plan.cluster.node_sizes} ranks, but the machines of --hosts have {sizes}. Put them into"
            " the plan's order, or correct ranks: there.",
            path="cluster.nodes",
            source=plan.source,
        )


def _with_device(host: Host, device: str | None) -> Host:
    """A host whose ranks train on what a flag says, in the place of what the file says."""
    if device is None or host.trains_on_cpu is (device == "cpu"):
        return host
    return replace(host, node=replace(host.node, device="cpu" if device == "cpu" else "cuda"))


def _device_of(hosts: Sequence[Host]) -> str | None:
    """What all machines compute on, as the file says; None: it does not, or they differ, as a plan has to say."""
    kinds = {host.trains_on_cpu for host in hosts}
    return {True: "cpu", False: "gpu"}.get(kinds.pop()) if len(kinds) == 1 else None


def _place(hosts: Sequence[Host], node: int, examination: Examination, device: str | None) -> list[str]:
    """The flags that tell a machine which one it is."""
    flags = ["--nodes", ",".join(str(host.node.ranks) for host in hosts)]
    if len(hosts) > 1:
        address = examination.machines[0].address
        flags += ["--node-rank", str(node), "--main-ip", str(address), "--main-port", str(examination.main_port)]
    return [*flags, f"--{device}"] if device else flags


def _environment(arguments: argparse.Namespace) -> dict[str, str]:
    """The variables that all machines get."""
    shared = {name: value for name, value in os.environ.items() if name.startswith(_SHARED_PREFIXES)}
    shared.pop(PLAN_VARIABLE, None)
    for entry in arguments.env:
        name, given, value = entry.partition("=")
        if not given and name not in os.environ:
            raise ValueError(f"found --env {name}, which has no value here, expected NAME=VALUE")
        shared[name] = value if given else os.environ[name]
    # Lines come when they are printed, and not when a buffer is full.
    return {"PYTHONUNBUFFERED": "1", **shared}


def plan_environment(plan: Plan | None) -> dict[str, str]:
    """The variable that carries a plan to all machines, so that no file has to be there."""
    return {} if plan is None else {PLAN_VARIABLE: json.dumps(plan.to_dict())}


def _show(node: int, stream: int, text: str) -> None:
    print(f"node {node} | {text}", file=sys.stdout if stream == 1 else sys.stderr, flush=True)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP leave the block in order, as Ctrl-C does: what runs on the machines has to be ended."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(SIGNAL_BASE + number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    # What is ignored stays so: with nohup, a terminal that is closed.
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
