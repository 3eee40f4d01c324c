# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`run_on_hosts`: runs one command of this package on each machine until all have ended, or one has failed."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from accelerate_lshdp.hosts.connection import HostConnection, HostError
from accelerate_lshdp.hosts.started_command import SAVE_SECONDS, STOP_SECONDS
from accelerate_lshdp.runtime.failures import FOLLOWS_ANOTHER


#: Seconds that the other machines have, after one has failed, to say what they saw of it.
FAILURE_SECONDS = 15.0
#: The exit code for a machine whose connection was lost, as ssh has it.
LOST_CODE = 255
_ALIVE_SECONDS = 5.0
_START_SECONDS, _ANSWER_SECONDS = 20.0, 5.0


@dataclass(frozen=True)
class HostCommand:
    """What a machine is to run.

    Args:
        arguments: of ``accelerate-lshdp``.
        environment: added to that of the agent there.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]


def run_on_hosts(
    connections: Sequence[HostConnection],
    commands: Sequence[HostCommand],
    show: Callable[[int, int, str], None],
    say: Callable[[str], None],
) -> int:
    """Runs a command on each machine.

    When one fails, the others have `FAILURE_SECONDS` to end by themselves, and then are ended. However this function
    is left, all commands have been told to end; those of a machine that cannot be reached end by themselves.

    Args:
        connections: to the machines, in the order of their nodes.
        commands: one a machine.
        show: takes a line of output: node, 1 for standard output or 2 for errors, the line.
        say: tells whoever waits what has happened.

    Returns:
        0, or the exit code of the machine that failed first; of those that ended because they lost another one's rank,
        which may be noticed sooner, only where no other failed.

    Raises:
        HostError: a command could not be started.
    """
    # Of the kind that a signal's handler may put into.
    events: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
    for node, connection in enumerate(connections):
        connection.listen(lambda event, node=node: events.put((node, event)))
    stop_seconds = STOP_SECONDS
    try:
        with ThreadPoolExecutor(len(connections)) as pool:
            list(pool.map(_start, connections, commands))
        with _passed_on(events), _said_alive(connections):
            return _follow(connections, events, show, say)
    except SystemExit:  # of a SIGTERM, upon which trainings may save
        stop_seconds = SAVE_SECONDS
        raise
    finally:
        with ThreadPoolExecutor(len(connections)) as pool:
            list(pool.map(_stop, connections, [stop_seconds] * len(connections)))
        # What was printed last is on its way when a command has been ended.
        _show_rest(events, show)


def _start(connection: HostConnection, command: HostCommand) -> None:
    connection.ask("start", _START_SECONDS, command=list(command.arguments), environment=dict(command.environment))


def _stop(connection: HostConnection, seconds: float) -> None:
    try:
        connection.ask("stop", seconds + _ANSWER_SECONDS, seconds=seconds)
    except HostError:  # it cannot be reached: its agent ends its command itself
        connection.give_up()


def _follow(
    connections: Sequence[HostConnection],
    events: queue.SimpleQueue[tuple[int, dict[str, Any]]],
    show: Callable[[int, int, str], None],
    say: Callable[[str], None],
) -> int:
    """Shows what the machines print until all have ended, or one has failed; returns the exit code."""
    codes: dict[int, int] = {}
    deadline: float | None = None
    while len(codes) < len(connections):
        try:
            node, event = events.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        if event["event"] == "output":
            show(node, event["stream"], event["text"])
            continue
        if event["event"] == "signal":
            for connection in connections:
                with suppress(HostError):  # of one that has ended, as its own event says
                    connection.ask("signal", _START_SECONDS, name=event["name"])
            continue
        if node in codes:  # an agent whose command had ended
            continue
        codes[node] = event.get("code", LOST_CODE)
        if not codes[node]:
            continue
        if codes[node] == FOLLOWS_ANOTHER:
            what = "lost another rank"
        else:
            what = f"ended with code {codes[node]}" if "code" in event else f"was lost: {event['error']}"
        others = [f"node {each}" for each in range(len(connections)) if each not in codes]
        ending = f"; {', '.join(others)} will be ended" if others and deadline is None else ""
        say(f"node {node} {what}{ending}")
        if deadline is None:
            deadline = time.monotonic() + FAILURE_SECONDS
    failures = [code for code in codes.values() if code]  # in the order in which they came
    return next((code for code in failures if code != FOLLOWS_ANOTHER), failures[0] if failures else 0)


@contextmanager
def _said_alive(connections: Sequence[HostConnection]) -> Iterator[None]:
    """Tells the machines again and again that this process is there, also while it cannot print."""
    left = threading.Event()

    def say() -> None:
        while not left.wait(_ALIVE_SECONDS):
            for connection in connections:
                connection.say_alive()

    thread = threading.Thread(target=say, name="signs of life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()


@contextmanager
def _passed_on(events: queue.SimpleQueue[tuple[int, dict[str, Any]]]) -> Iterator[None]:
    """SIGUSR1, by which schedulers announce the end of a run's time, goes on to the machines."""

    def note(number: int, frame: FrameType | None) -> None:
        events.put((-1, {"event": "signal", "name": signal.Signals(number).name}))

    if not hasattr(signal, "SIGUSR1"):
        yield
        return
    before = signal.signal(signal.SIGUSR1, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def _show_rest(events: queue.SimpleQueue[tuple[int, dict[str, Any]]], show: Callable[[int, int, str], None]) -> None:
    with suppress(queue.Empty):
        while True:
            node, event = events.get_nowait()
            if event["event"] == "output":
                show(node, event["stream"], event["text"])
