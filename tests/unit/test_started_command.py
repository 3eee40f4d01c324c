# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Commands that agents start: what is told of their output, and their end."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import psutil
import pytest

from accelerate_lshdp.hosts import started_command
from accelerate_lshdp.hosts.started_command import StartedCommand


class Events:
    """What a command tells."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []
        self.ended = threading.Event()

    def __call__(self, event: dict[str, Any]) -> None:
        self.found.append(event)
        if event["event"] == "ended":
            self.ended.set()

    def lines(self, stream: int) -> list[str]:
        return [event["text"] for event in self.found if event.get("stream") == stream]


def run(script: str, **environment: str) -> Events:
    """The events of a Python script that has ended."""
    events = Events()
    StartedCommand([sys.executable, "-u", "-c", script], environment, events)
    assert events.ended.wait(30)
    return events


def test_lines_of_both_streams_and_then_the_end() -> None:
    events = run("import os, sys; print('a'); print(os.environ['B']); print('c', file=sys.stderr); sys.exit(3)", B="b")
    assert (events.lines(1), events.lines(2)) == (["a", "b"], ["c"])
    assert events.found[-1] == {"event": "ended", "code": 3}


def test_the_code_of_a_signal_is_a_shells() -> None:
    assert run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").found[-1]["code"] == 137


def test_text_of_any_bytes_and_without_an_end() -> None:
    events = run("import sys; sys.stdout.buffer.write('gr\\u00fc\\u00df'.encode() + b'\\xff'); sys.stdout.flush()")
    assert events.lines(1) == ["gr\u00fc\u00df\ufffd"]


def test_progress_bars_do_not_flood() -> None:
    """They write one line again and again; the last state counts."""
    script = "import time\nfor i in range(200): print(f'\\r{i} of 200', end='', flush=True); time.sleep(0.01)\nprint()"
    lines = run(script).lines(1)
    assert lines[-1] == "199 of 200"
    assert 1 <= len(lines) <= 6


def test_it_is_ended_with_what_it_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ignores SIGTERM, and so does its child."""
    monkeypatch.setattr(started_command, "STOP_SECONDS", 1.0)
    events = Events()
    script = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        " child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)']); print(child.pid);"
        " time.sleep(100)"
    )
    command = StartedCommand([sys.executable, "-u", "-c", script], {}, events)
    while not events.lines(1):
        time.sleep(0.01)
    child = psutil.Process(int(events.lines(1)[0]))
    command.stop()
    assert events.ended.wait(5) and events.found[-1]["code"] == 137
    psutil.wait_procs([child], timeout=5)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    command.stop()


def test_what_a_script_leaves_in_the_background_does_not_hold_its_end() -> None:
    began = time.monotonic()
    events = Events()
    script = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(30)'])"
    command = StartedCommand([sys.executable, "-c", script], {}, events)
    assert events.ended.wait(20) and time.monotonic() - began < 15
    command.stop()  # takes the rest with it


def test_a_program_that_is_missing() -> None:
    with pytest.raises(OSError):
        StartedCommand(["/no/such/program"], {}, Events())
