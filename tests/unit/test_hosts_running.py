# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""With which code a run on several machines ends: that of the failure from which the others follow."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from accelerate_lshdp.cli.accelerate_launch import _cause
from accelerate_lshdp.hosts.connection import HostError
from accelerate_lshdp.hosts.running import LOST_CODE, HostCommand, run_on_hosts
from accelerate_lshdp.runtime.failures import FOLLOWS_ANOTHER


class EndedMachine:
    """A connection to a machine whose command ends at once, as one event says."""

    def __init__(self, event: dict[str, Any]) -> None:
        self.event = event
        self.requests: list[str] = []

    def listen(self, hear: Callable[[dict[str, Any]], None]) -> None:
        hear(self.event)

    def ask(self, request: str, timeout: float, **arguments: Any) -> None:
        self.requests.append(request)

    def say_alive(self) -> None:
        pass


def run(*events: dict[str, Any]) -> tuple[int, list[str]]:
    """The code of a run whose machines end in this order, and what is said of it."""
    machines = [EndedMachine(event) for event in events]
    said: list[str] = []
    code = run_on_hosts(machines, [HostCommand([], {})] * len(machines), lambda *line: None, said.append)
    assert all(machine.requests == ["start", "stop"] for machine in machines)
    return code, said


def ended(code: int) -> dict[str, Any]:
    return {"event": "ended", "code": code}


LOST = {"event": "lost", "error": HostError("no route", "")}


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ([ended(0), ended(0)], 0),
        ([ended(0), ended(3)], 3),
        ([ended(4), ended(3)], 4),
        ([ended(FOLLOWS_ANOTHER), ended(7)], 7),  # who loses a rank may be seen to end before who has failed
        ([ended(FOLLOWS_ANOTHER), ended(0), ended(FOLLOWS_ANOTHER)], FOLLOWS_ANOTHER),
        ([ended(FOLLOWS_ANOTHER), LOST], LOST_CODE),
    ],
    ids=str,
)
def test_the_code_is_that_of_the_cause(events: list[dict[str, Any]], code: int) -> None:
    assert run(*events)[0] == code


def test_each_failure_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    _, said = run(ended(FOLLOWS_ANOTHER), ended(0), ended(7))
    assert said == ["node 0 lost another rank; node 1, node 2 will be ended", "node 2 ended with code 7"]


@pytest.mark.parametrize(
    ("codes", "cause"),
    [((7, 3), 7), ((FOLLOWS_ANOTHER, 7), 7), ((-15, FOLLOWS_ANOTHER, -9), -9), ((FOLLOWS_ANOTHER, -15), 76)],
)
def test_the_cause_among_the_ranks_of_a_node(codes: tuple[int, ...], cause: int) -> None:
    failures = {
        rank: SimpleNamespace(exitcode=code, timestamp=10 + rank, local_rank=rank, pid=1, error_file="", message="")
        for rank, code in enumerate(codes)
    }
    error = ChildFailedError.__new__(ChildFailedError)
    error.failures = failures
    assert _cause(error) == cause
