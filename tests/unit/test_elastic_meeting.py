# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Where launchers of an elastic run meet, also on a machine whose network is not up yet."""

from __future__ import annotations

import errno
import socket

import pytest
from launching import free_port

from accelerate_lshdp.cli import elastic_meeting
from accelerate_lshdp.cli.elastic_meeting import bound_socket
from accelerate_lshdp.cli.waiting_nodes import Meeting


@pytest.mark.parametrize("number", [errno.ENETUNREACH, socket.EAI_AGAIN])
def test_a_network_that_comes_up_is_waited_for(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    answers, said = [OSError(number, "not yet"), OSError(number, "not yet")], []
    find = socket.gethostbyname

    def found(name: str) -> str:
        if answers:
            raise answers.pop()
        return find(name)

    monkeypatch.setattr(socket, "gethostbyname", found)
    monkeypatch.setattr(elastic_meeting, "_RETRY_SECONDS", 0.01)
    port = free_port()
    bound, address = bound_socket(Meeting(0, ("127.0.0.1", None), "127.0.0.1", port), said.append)
    with bound:
        assert address == ("127.0.0.1", port) and not answers
        assert len(said) == 1 and said[0].startswith(f"waits for a network, to meet the others at 127.0.0.1:{port}: ")


def test_node_0_waits_for_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    class Waits(Exception):
        pass

    def say(text: str) -> None:
        raise Waits(text)

    monkeypatch.setattr(elastic_meeting, "_has_network", lambda: False)
    with pytest.raises(Waits, match=r"at 192\.0\.2\.1:29500: .*Bring it up, or correct --main-ip"):
        bound_socket(Meeting(0, ("192.0.2.1", None), "192.0.2.1", 29500), say)


def test_what_does_not_pass_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_meeting, "_has_network", lambda: True)
    elsewhere = Meeting(0, ("192.0.2.1", None), "192.0.2.1", 29500)
    with pytest.raises(ValueError, match=r"node 0 cannot meet the others at 192\.0\.2\.1:29500.*Correct --main-ip"):
        bound_socket(elsewhere, pytest.fail)
    meeting = Meeting(0, ("127.0.0.1", None), "127.0.0.1", free_port())
    bound, _ = bound_socket(meeting, pytest.fail)
    with bound, pytest.raises(ValueError, match="choose another --main-port"):
        bound_socket(meeting, pytest.fail)
