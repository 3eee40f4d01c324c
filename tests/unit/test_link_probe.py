# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The way between two machines is tried: what works, and each thing that can go wrong with it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from accelerate_lshdp.hosts import link_probe
from accelerate_lshdp.hosts.link_probe import ProbeListener, probe_link


TOKEN = bytes(range(16))


@pytest.fixture
def listener() -> Iterator[ProbeListener]:
    made = ProbeListener(TOKEN)
    yield made
    made.close()


def serve(answer: Callable[[socket.socket], None]) -> int:
    """The port of another program, which answers in its own way."""
    server = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        connected, _ = server.accept()
        with connected:
            answer(connected)
        server.close()

    threading.Thread(target=run, daemon=True).start()
    return server.getsockname()[1]


def test_a_way_is_measured(listener: ProbeListener) -> None:
    found = probe_link("127.0.0.1", listener.port, TOKEN)
    assert found.error is None
    assert 0 < found.delay_seconds < 0.1
    assert found.bits_per_second > 1e7


def test_datagrams_are_tried(listener: ProbeListener, monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("127.0.0.1", "127.0.0.2"):  # a machine may have several
        assert not probe_link(address, listener.port, TOKEN).datagrams_lost
    monkeypatch.setattr(link_probe, "_DATAGRAM_SECONDS", 0.05)
    echo = link_probe._echo_datagrams
    monkeypatch.setattr(link_probe, "_echo_datagrams", lambda connected, token: echo(connected, b"of another one"))
    found = probe_link("127.0.0.1", listener.port, TOKEN)
    assert found.error is None and found.datagrams_lost and found.bits_per_second > 1e7


def test_a_way_is_only_tried(listener: ProbeListener) -> None:
    found = probe_link("127.0.0.1", listener.port, TOKEN, with_rate=False)
    assert (found.error, found.delay_seconds, found.bits_per_second) == (None, None, None)


def test_several_at_the_same_time(listener: ProbeListener) -> None:
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(probe_link("127.0.0.1", listener.port, TOKEN))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.error for each in found] == [None] * 4


def test_strangers_are_not_served(listener: ProbeListener) -> None:
    found = probe_link("127.0.0.1", listener.port, bytes(16))
    assert found.error is not None and "lost" in found.error


def test_nobody_listens_after_the_end() -> None:
    listener = ProbeListener(TOKEN)
    listener.close()
    listener.close()
    found = probe_link("127.0.0.1", listener.port, TOKEN)
    assert found.refused and found.error == "the connection was refused"


def test_a_port_can_be_listened_to_once(listener: ProbeListener) -> None:
    with pytest.raises(OSError, match="in use"):
        ProbeListener(TOKEN, listener.port)


def test_another_program_listens() -> None:
    port = serve(lambda connected: connected.sendall(b"220 mail.example ESMTP"))
    assert probe_link("127.0.0.1", port, TOKEN).error == "another program listens there"


def test_large_messages_that_do_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """As over a way that drops full packets: small messages are answered, and large ones are not."""
    monkeypatch.setattr(link_probe, "MESSAGE_SECONDS", 0.5)

    def echo(connected: socket.socket) -> None:
        connected.recv(len(TOKEN), socket.MSG_WAITALL)
        connected.sendall(b"w")
        while (command := connected.recv(1)) == b"e":
            connected.sendall(command)
        time.sleep(2)

    found = probe_link("127.0.0.1", serve(echo), TOKEN)
    assert found.stalled and found.error == "large messages do not arrive"
    assert found.delay_seconds is not None and found.bits_per_second is None


def test_an_answer_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_probe, "MESSAGE_SECONDS", 0.5)
    found = probe_link("127.0.0.1", serve(lambda connected: time.sleep(2)), TOKEN)
    assert found.error == "connected, but no answer within 0.5 s" and not found.stalled


def test_a_name_that_means_nothing() -> None:
    found = probe_link("no-such-name.invalid", 1, TOKEN)
    assert found.error is not None and not found.refused
