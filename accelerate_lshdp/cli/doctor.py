# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""``accelerate-lshdp doctor``: examines the machines of a run and the network between them, before it is started."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate_lshdp.cli.config import DEFAULT_PORT, parse_node_sizes
from accelerate_lshdp.cli.waiting_nodes import Meeting, report_waiting
from accelerate_lshdp.documents.cluster import Node
from accelerate_lshdp.documents.hosts import Host, load_hosts


if TYPE_CHECKING:
    from accelerate_lshdp.hosts.connection import HostError
    from accelerate_lshdp.hosts.examination import Agent, Examination

_EPILOG = """\
examples:
  accelerate-lshdp doctor                                                this machine alone
  accelerate-lshdp doctor --hosts cluster.yaml                           all machines of the file, over ssh
  accelerate-lshdp doctor --hosts cluster.yaml --same train.py plan.json and whether they have the same files
  accelerate-lshdp doctor --nodes 1,2 --node-rank 0 --main-ip 192.0.2.1  without ssh: one command on each machine,
  accelerate-lshdp doctor --nodes 1,2 --node-rank 1 --main-ip 192.0.2.1  at the same time; node 0 has the report

cluster.yaml:
  nodes:
    - {address: 192.0.2.1}                                   the machine where the command runs may be among them
    - {address: 192.0.2.2, ranks: 2, device: RTX 2080 Ti, ssh: anna@studio, python: /home/anna/.venv/bin/python}

It opens ports and sends a few megabytes between the machines, and changes nothing. The exit code is 0, also with
warnings; 1 if a run on these machines would fail; 2 if arguments or files are wrong.
"""


def register(subparsers: argparse._SubParsersAction) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "doctor",
        help="examine the machines of a run and the network between them",
        description="Find what would keep a run from starting on these machines, and say how to mend it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--hosts", type=Path, metavar="YAML", help="the machines, which are reached over ssh")
    which.add_argument(
        "--nodes", type=parse_node_sizes, metavar="RANKS,...", help="ranks on each node, such as 1,2, without ssh"
    )
    parser.add_argument("--node-rank", type=int, metavar="I", help="with --nodes: which of the nodes this is")
    parser.add_argument("--main-ip", metavar="IP", help="with --nodes: address of node 0, as the other nodes see it")
    parser.add_argument(
        "--main-port", type=int, default=DEFAULT_PORT, metavar="PORT", help=f"of the run (default: {DEFAULT_PORT})"
    )
    parser.add_argument(
        "--same", nargs="+", default=[], metavar="FILE", help="files that all machines should have, such as the script"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Examines the machines and prints what was found.

    Returns:
        0; 1 if a run on these machines would fail.

    Raises:
        PlanError: the file of the hosts cannot be read.
        ValueError: arguments that cannot be right, or nodes that did not meet.
    """
    if not 1 <= arguments.main_port <= 65535:
        raise ValueError(f"found --main-port {arguments.main_port}, expected one from 1 to 65535")
    if arguments.nodes is not None and len(arguments.nodes) > 1:
        return _examine_with_commands(arguments)
    if arguments.node_rank is not None or arguments.main_ip is not None:
        raise ValueError("found --node-rank or --main-ip without several --nodes, expected them together")
    if arguments.hosts is not None:
        return _report(_examine_over_ssh(arguments))
    from accelerate_lshdp.hosts.linked_agents import OwnAgent

    host = Host(Node(1 if arguments.nodes is None else arguments.nodes[0], address="localhost"))
    return _report(_examine(arguments, [host], {0: OwnAgent()}))


def _examine_over_ssh(arguments: argparse.Namespace) -> Examination:
    """The examination of the machines of a file."""
    from accelerate_lshdp.hosts.connection import connect_to_all

    hosts = load_hosts(arguments.hosts)
    _say(f"connecting to {len(hosts)} machines")
    with ExitStack() as stack:
        agents, errors = connect_to_all(hosts, stack)
        return _examine(arguments, hosts, agents, errors)


def _examine_with_commands(arguments: argparse.Namespace) -> int:
    """This node's part of an examination for which each machine has a command of its own.

    Returns:
        The exit code, the same on all nodes.

    Raises:
        ValueError: arguments are missing, or the nodes did not meet.
    """
    from accelerate_lshdp.hosts.connection import HostError
    from accelerate_lshdp.hosts.linked_agents import LinkedAgent, OwnAgent, serve_node_0
    from accelerate_lshdp.runtime.node_links import Hello, join_node_0, wait_for_nodes

    sizes, node, address = arguments.nodes, arguments.node_rank, arguments.main_ip
    if node is None or not 0 <= node < len(sizes):
        raise ValueError(f"found --node-rank {node}, expected which of the {len(sizes)} nodes this is, counted from 0")
    if address is None:
        raise ValueError("say with --main-ip where the other nodes reach node 0")
    hello = Hello(node, sizes[node], len(sizes), "", list(sizes))
    meeting = Meeting(node, (address, *[None] * (len(sizes) - 1)), address, arguments.main_port)
    with report_waiting(meeting, lambda: False, command="doctor"):
        if node == 0:
            links, _ = wait_for_nodes(hello, address, arguments.main_port, _say)
        else:
            link, _ = join_node_0(hello, address, arguments.main_port)
    if node > 0:
        code = serve_node_0(link)
        _say("finished; node 0 has the report")
        return code
    linked = [LinkedAgent(link) for link in links]
    agents: dict[int, Agent] = {0: OwnAgent()}
    hosts, errors = [Host(Node(sizes[0], address=address))], {}
    for node, agent in enumerate(linked, start=1):
        try:
            own = agent.ask("address_towards", 10.0, address=address, port=arguments.main_port)
            agents[node] = agent
        except HostError as error:
            own, errors[node] = f"node {node}", error
        hosts.append(Host(Node(sizes[node], address=own)))
    code = _report(_examine(arguments, hosts, agents, errors))
    for agent in linked:
        with suppress(OSError):  # of a node that has gone, as the report says
            agent.finish(code)
    return code


def _examine(
    arguments: argparse.Namespace,
    hosts: Sequence[Host],
    agents: Mapping[int, Agent],
    errors: Mapping[int, HostError] | None = None,
) -> Examination:
    from accelerate_lshdp.hosts.examination import examine

    return examine(hosts, agents, errors or {}, main_port=arguments.main_port, files=arguments.same, say=_say)


def _report(examination: Examination) -> int:
    """Prints an examination; returns the exit code."""
    from accelerate_lshdp.cli.doctor_table import print_examination
    from accelerate_lshdp.hosts.findings import find

    findings = find(examination)
    print_examination(examination, findings)
    return int(any(finding.is_problem for finding in findings))


def _say(text: str) -> None:
    print(f"accelerate-lshdp doctor: {text}", file=sys.stderr, flush=True)
