# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A plugin of pytest that writes each test's outcome as one line of JSON, as soon as it is known.

So a process that is ended for its time says what it has done.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


RANK = {"passed": 0, "skipped": 1, "failed": 2}
_worst: dict[str, str] = {}


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(report.longrepr or "") if crash is None else crash.message


def _write(name: str, outcome: str, reason: str) -> None:
    with Path(os.environ["UNIT_OUTCOMES"]).open("a") as file:
        file.write(json.dumps({"test": name, "outcome": outcome, "reason": reason}) + "\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    worst = _worst.get(report.nodeid)
    if worst is None or RANK[report.outcome] > RANK[worst]:
        _worst[report.nodeid] = report.outcome
        _write(report.nodeid, report.outcome, _reason(report))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.outcome != "passed" and report.nodeid:
        _write(report.nodeid, report.outcome, _reason(report))
