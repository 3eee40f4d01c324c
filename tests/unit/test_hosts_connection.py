# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Agents on machines: what they answer, and what is said of machines on which none can be started."""

from __future__ import annotations

import json
import os
import queue
import sys
import time
from pathlib import Path

import psutil
import pytest

from accelerate_lshdp import __version__
from accelerate_lshdp.documents.cluster import Node
from accelerate_lshdp.documents.hosts import Host
from accelerate_lshdp.hosts.connection import (
    HostConnection,
    HostError,
    agent_command,
    explain_end,
    is_this_machine,
)


ROOT = Path(__file__).parents[2]


def host(**keywords: str) -> Host:
    return Host(Node(1, keywords.pop("address", "127.0.0.1")), **keywords)


@pytest.fixture(autouse=True)
def package_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def fake_ssh(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Puts another program in the place of ssh."""
    program = folder / "ssh"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_an_agent_answers_and_ends_with_its_connection(tmp_path: Path) -> None:
    with HostConnection(host(folder=str(tmp_path)), local=True) as connection:
        (tmp_path / "train.py").write_text("pass")
        facts = connection.ask("facts", 60.0, files=["train.py", "plan.json"], port=None)
        assert facts["folder"] == str(tmp_path)
        assert facts["files"]["train.py"] and facts["files"]["plan.json"] is None
        assert abs(connection.ask("clock", 10.0) - time.time()) < 5
        process = psutil.Process(connection._process.pid)
    assert not process.is_running()


def test_what_a_shell_prints_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that shells read when they start often print something."""
    shown = tmp_path / "arguments"
    fake_ssh(
        tmp_path,
        monkeypatch,
        f'echo "welcome"; printf "%s\\n" "$@" > {shown}; for last; do :; done; exec sh -c "$last"',
    )
    with HostConnection(host(address="studio", folder=str(tmp_path)), local=False) as connection:
        assert connection.ask("clock", 10.0) > 0
    arguments = shown.read_text().splitlines()
    assert "BatchMode=yes" in arguments and arguments[arguments.index("--") + 1] == "studio"


def test_a_destination_is_no_option() -> None:
    command = agent_command(host(ssh="-oProxyCommand=touch /tmp/x"), local=False)
    assert command[command.index("-oProxyCommand=touch /tmp/x") - 1] == "--"


def test_names_with_spaces_stay_whole(tmp_path: Path) -> None:
    folder = tmp_path / "my runs; rm -rf $HOME"
    folder.mkdir()
    with HostConnection(host(folder=str(folder)), local=True) as connection:
        assert connection.ask("facts", 60.0, files=[], port=None)["folder"] == str(folder)


def test_an_error_of_a_request_says_which() -> None:
    with HostConnection(host(), local=True) as connection, pytest.raises(HostError, match="facts failed there"):
        connection.ask("facts", 60.0, unknown=1)


def test_an_agent_that_ends_is_an_error_at_once() -> None:
    with HostConnection(host(), local=True) as connection:
        psutil.Process(connection._process.pid).kill()
        with pytest.raises(HostError, match=r"the connection to its agent ended \(code -9\)"):
            connection.ask("clock", 60.0)


def test_a_machine_that_says_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ssh(tmp_path, monkeypatch, "exec sleep 60")
    monkeypatch.setattr("accelerate_lshdp.hosts.connection.READY_SECONDS", 0.5)
    with pytest.raises(HostError, match="it did not manage to start in time") as caught:
        HostConnection(host(address="studio"), local=False).__enter__()
    assert "ssh studio uptime" in caught.value.fix


def test_a_line_that_is_cut_ends_the_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent ends in the middle of an event; who listens hears of the loss."""
    ready = f"accelerate-lshdp-agent {json.dumps({'ready': True, 'version': __version__})}"
    fake_ssh(tmp_path, monkeypatch, f"echo '{ready}'; read line; printf 'accelerate-lshdp-agent {{\"event\": \"out'")
    heard: queue.Queue = queue.Queue()
    with HostConnection(host(address="studio"), local=False) as connection:
        connection.listen(heard.put)
        with pytest.raises(HostError, match="the connection to its agent ended"):
            connection.ask("clock", 30.0)
        assert heard.get(timeout=10)["event"] == "lost"


def test_another_release_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ssh(tmp_path, monkeypatch, """echo 'accelerate-lshdp-agent {"ready": true, "version": "0.0.1"}'; sleep 1""")
    with pytest.raises(HostError, match=f"found accelerate_lshdp 0.0.1 there, expected {__version__} as here"):
        HostConnection(host(address="studio"), local=False).__enter__()


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="found no folder") as caught:
        HostConnection(host(folder=str(tmp_path / "gone")), local=True).__enter__()
    assert "mkdir -p" in caught.value.fix


@pytest.mark.parametrize(
    ("printed", "fix"),
    [
        ("anna@studio: Permission denied (publickey).", "ssh-copy-id anna@studio"),
        ("Host key verification failed.", "ssh anna@studio true"),
        ("ssh: Could not resolve hostname studio: Name or service not known", "Correct its address"),
        ("ssh: connect to host 192.0.2.9 port 22: Connection refused", "Start an ssh server"),
        ("ssh: connect to host 192.0.2.9 port 22: Connection timed out", "let ssh through its firewall"),
        ("ssh: connect to host 192.0.2.9 port 22: No route to host", "Start it"),
        ("kex_exchange_identification: banner line too long", "Try it by hand: ssh anna@studio true"),
    ],
)
def test_what_ssh_says_gets_a_remedy(printed: str, fix: str) -> None:
    error = explain_end(host(ssh="anna@studio"), 255, [printed], local=False)
    assert printed in str(error) and fix in error.fix


def test_an_interpreter_without_the_package() -> None:
    printed = [f"{sys.executable}: Error while finding module specification for 'accelerate_lshdp.hosts.agent'"]
    printed += ["(ModuleNotFoundError: No module named 'accelerate_lshdp')"]
    assert "found no accelerate_lshdp in /env/python" in str(
        explain_end(host(python="/env/python"), 1, printed, local=False)
    )
    assert "found a package missing" in str(explain_end(host(), 1, ["No module named 'psutil'"], local=False))


def test_this_machine_is_known_by_its_addresses() -> None:
    assert is_this_machine(host(address="127.0.0.1"))
    assert is_this_machine(host(address="127.0.1.1"))  # what Debian lets a machine's own name stand for
    assert not is_this_machine(host(address="192.0.2.77"))
    assert not is_this_machine(host(address="no-such-name.invalid"))
    # Who names a way to it wants that way.
    assert not is_this_machine(host(address="127.0.0.1", ssh="studio"))
