# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`examine`: asks all machines of a run about themselves, and lets each of them try the way to each other one."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Protocol

from accelerate_lshdp.documents.hosts import Host
from accelerate_lshdp.hosts.connection import HostError
from accelerate_lshdp.hosts.link_probe import CONNECT_SECONDS, MESSAGE_SECONDS, TOKEN_BYTES, LinkFigures
from accelerate_lshdp.hosts.machine_facts import MachineFacts, number_of, read_digest


# Importing torch takes long on a slow disk.
_FACTS_SECONDS, _QUICK_SECONDS = 120.0, 10.0
# The way with the shortest round trip tells the other clock best.
_CLOCK_READINGS = 5


class Agent(Protocol):
    """What answers for a machine: `MachineAgent`, over ssh or over a connection of its own."""

    def ask(self, request: str, timeout: float, **arguments: Any) -> Any:
        """The answer to a request. Raises HostError."""


@dataclass(frozen=True)
class Machine:
    """What is known of one machine.

    Args:
        host: what was asked for.
        facts: about it; None: it could not be asked.
        error: why it could not be asked.
        address: the host's address as a number, by which the others reach it; None: its name is not known.
        clock_offset: seconds by which its clock is ahead of this machine's; None: not known.
        clock_uncertainty: seconds by which the offset may be off.
    """

    host: Host
    facts: MachineFacts | None = None
    error: HostError | None = None
    address: str | None = None
    clock_offset: float | None = None
    clock_uncertainty: float = 0.0

    @property
    def on_loopback(self) -> bool:
        """Whether its address means the machine itself, on every machine."""
        return self.address is not None and ip_address(self.address.partition("%")[0]).is_loopback


@dataclass(frozen=True)
class Examination:
    """What was found on all machines and between them.

    Args:
        machines: in the order of the run's nodes.
        links: by (from, to), the way to a port that the system chose, as ranks use them.
        to_main_port: by node, the way to the port of node 0 where a run meets.
        main_port: that port.
        files: that were compared, with the SHA-256 that each has in the current folder here; None: it is not here, so
            that the machines are compared with the first one.
    """

    machines: tuple[Machine, ...]
    links: dict[tuple[int, int], LinkFigures] = field(default_factory=dict)
    to_main_port: dict[int, LinkFigures] = field(default_factory=dict)
    main_port: int = 0
    files: dict[str, str | None] = field(default_factory=dict)


def examine(
    hosts: Sequence[Host],
    agents: Mapping[int, Agent],
    errors: Mapping[int, HostError],
    *,
    main_port: int,
    files: Sequence[str] = (),
    with_rates: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> Examination:
    """Examines the machines of a run.

    Args:
        hosts: all of them, in the order of the run's nodes.
        agents: by node, of those that can be asked.
        errors: by node, why the others cannot.
        main_port: the port of node 0 where a run meets.
        files: to compare between the machines.
        with_rates: whether to measure the ways, and not only to try them.
        say: tells whoever waits what is going on.
    """
    say(f"asking {_count(len(agents), 'machine')}")
    machines = [
        Machine(host, error=errors.get(node), address=number_of(host.address)) for node, host in enumerate(hosts)
    ]

    def ask_about(node: int) -> Machine:
        several = len(hosts) > 1
        try:
            port = main_port if node == 0 and several else None
            found = agents[node].ask("facts", _FACTS_SECONDS, files=list(files), port=port)
            offset, uncertainty = _clock(agents[node])
        except HostError as error:
            return replace(machines[node], error=error)
        facts = MachineFacts.read(found)
        return replace(machines[node], facts=facts, clock_offset=offset, clock_uncertainty=uncertainty)

    for node, machine in _at_once(ask_about, agents).items():
        machines[node] = machine
    for node, machine in enumerate(machines):
        if machine.address is None:  # names that only the machines know are as good
            machines[node] = replace(machine, address=_ask_for_number(machine.host, agents, without=node))
    asked = [node for node in reachable_nodes(machines) if machines[node].facts is not None]
    examination = Examination(
        tuple(machines), main_port=main_port, files={file: read_digest(Path(file)) for file in files}
    )
    if len(asked) < 2:
        return examination
    say(f"trying the network between {_count(len(asked), 'machine')}")
    links, to_main_port = _try_network(machines, agents, asked, main_port, with_rates)
    return replace(examination, links=links, to_main_port=to_main_port)


def _ask_for_number(host: Host, agents: Mapping[int, Agent], *, without: int) -> str | None:
    for node, agent in agents.items():
        with suppress(HostError):
            if node != without and (found := agent.ask("resolve", _QUICK_SECONDS, name=host.address)) is not None:
                return found
    return None


def reachable_nodes(machines: Sequence[Machine]) -> list[int]:
    """The nodes whose addresses mean the same machine everywhere: not the loopback, unless all are on one machine."""
    known = [node for node, machine in enumerate(machines) if machine.address is not None]
    elsewhere = [node for node in known if not machines[node].on_loopback]
    return elsewhere or known


def _clock(agent: Agent) -> tuple[float, float]:
    """The offset of a machine's clock to this one's, and its uncertainty, in seconds."""
    readings = []
    for _ in range(_CLOCK_READINGS):
        before = time.time()
        there = agent.ask("clock", _QUICK_SECONDS)
        after = time.time()
        readings.append(((after - before) / 2, there - (before + after) / 2))
    uncertainty, offset = min(readings)
    return offset, uncertainty


def _try_network(
    machines: Sequence[Machine],
    agents: Mapping[int, Agent],
    asked: Sequence[int],
    main_port: int,
    with_rates: bool,
) -> tuple[dict[tuple[int, int], LinkFigures], dict[int, LinkFigures]]:
    """The ways between all machines that were asked; see `Examination`."""
    token = secrets.token_hex(TOKEN_BYTES)

    def listen(node: int, port: int = 0) -> int | None:
        try:
            return agents[node].ask("listen", _QUICK_SECONDS, token=token, port=port).get("port")
        except HostError:  # what is asked of it next says so
            return None

    def stop_listening(node: int) -> None:
        with suppress(HostError):  # of one that has gone, whose ports are closed with it
            agents[node].ask("close_listeners", _QUICK_SECONDS)

    def probe(source: int, target: int, port: int | None, with_rate: bool) -> LinkFigures:
        if port is None:
            return LinkFigures(f"node {target} could not listen")
        limit = CONNECT_SECONDS + 4 * MESSAGE_SECONDS + _QUICK_SECONDS
        address = machines[target].address
        try:
            found = agents[source].ask("probe", limit, address=address, port=port, token=token, with_rate=with_rate)
        except HostError as error:
            return LinkFigures(str(error))
        return LinkFigures(**found)

    ports = _at_once(listen, asked)
    to_main_port: dict[int, LinkFigures] = {}
    if 0 in asked and listen(0, main_port) is not None:
        others = [node for node in asked if node != 0]
        to_main_port = _at_once(lambda node: probe(node, 0, main_port, False), others)
    links: dict[tuple[int, int], LinkFigures] = {}
    for pairs in _rounds(asked):
        # One direction at a time, and every machine in one pair alone: the rates are those of links that are free.
        for directed in (pairs, [(target, source) for source, target in pairs]):
            links |= _at_once(lambda pair: probe(*pair, ports[pair[1]], with_rates), directed)
    _at_once(stop_listening, asked)
    return links, to_main_port


def _rounds(nodes: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """All pairs in rounds, in each of which a node is in one pair at most (the circle method of tournaments)."""
    ring: list[int | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        yield [(one, other) for one, other in pairs if one is not None and other is not None]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def _at_once(function: Callable[[Any], Any], over: Sequence[Any] | Mapping[Any, Any]) -> dict[Any, Any]:
    """What a function returns for each of some values, called for all of them at the same time."""
    values = list(over)
    with ThreadPoolExecutor(max(1, len(values))) as pool:
        return dict(zip(values, pool.map(function, values), strict=True))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
