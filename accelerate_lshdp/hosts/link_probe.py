# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Tries the network between two machines: `ProbeListener` on the one, `probe_link` on the other.

What a run needs is that each machine can open connections to ports of each other one, and that small messages pass as
well as large ones: a path that cannot carry full packets lets the first by and loses the second.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from accelerate_lshdp.runtime.listening import listen_everywhere


#: Seconds for a connection to be made, and for a message to arrive.
CONNECT_SECONDS, MESSAGE_SECONDS = 3.0, 10.0
#: Bytes of the secret by which a listener knows the machines of this examination.
TOKEN_BYTES = 16
_ROUND_TRIPS = 20
# The rate is taken from the first amount that takes this long; each amount is four times the one before.
_RATE_SECONDS, _FIRST_AMOUNT, _GROWTH, _LARGEST_AMOUNT = 0.25, 16 * 1024, 4, 2**30
_CHUNK = bytes(1 << 20)
_WELCOME, _ECHO, _AMOUNT, _DATAGRAMS = b"w", b"e", b"a", b"d"
# Some may be lost on a good way.
_DATAGRAM_TRIES, _DATAGRAM_SECONDS = 5, 0.3


@dataclass(frozen=True)
class LinkFigures:
    """What the way from one machine to another carries.

    Args:
        error: why it cannot be used; None: it can.
        refused: whether the other machine answered that nobody listens; else its answer did not come.
        stalled: whether small messages passed and large ones did not.
        delay_seconds: one-way delay, half of the shortest round trip.
        bits_per_second: rate of the payload.
        datagrams_lost: whether no datagram was answered, though connections are.
    """

    error: str | None = None
    refused: bool = False
    stalled: bool = False
    delay_seconds: float | None = None
    bits_per_second: float | None = None
    datagrams_lost: bool = False


class ProbeListener:
    """Listens on a port of all interfaces and serves `probe_link` until it is closed.

    Args:
        token: connections that do not begin with it are closed.
        port: 0: any that the system chooses, as for the connections of ranks.

    Raises:
        OSError: the port cannot be listened to.
    """

    def __init__(self, token: bytes, port: int = 0) -> None:
        self._token = token
        self._socket = listen_everywhere(port)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="link probe", daemon=True).start()

    def close(self) -> None:
        """Ends it. Safe to call again."""
        # Closing alone would not end the thread that waits in `accept`, and the port would stay open with it.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connected,), daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        connected.settimeout(MESSAGE_SECONDS)
        with connected:
            try:
                if _read(connected, TOKEN_BYTES) != self._token:
                    return
                connected.sendall(_WELCOME)
                while True:
                    command = _read(connected, 1)
                    if command == _AMOUNT:
                        _discard(connected, int.from_bytes(_read(connected, 8), "big"))
                    if command == _DATAGRAMS:
                        _echo_datagrams(connected, self._token)
                    else:
                        connected.sendall(command)
            except (OSError, EOFError):  # the other side has what it wanted, or says itself what went wrong
                return


def probe_link(address: str, port: int, token: bytes, *, with_rate: bool = True) -> LinkFigures:
    """Connects to a listener on another machine, and measures the way there.

    Args:
        address: of the other machine.
        port: of its listener.
        token: that the listener has.
        with_rate: whether to measure, and not only to connect.
    """
    try:
        connected = socket.create_connection((address, port), timeout=CONNECT_SECONDS)
    except ConnectionRefusedError:
        return LinkFigures("the connection was refused", refused=True)
    except TimeoutError:
        return LinkFigures(f"no answer within {CONNECT_SECONDS:g} s")
    except OSError as error:
        return LinkFigures(error.strerror or str(error))
    delay = None
    with connected:
        connected.settimeout(MESSAGE_SECONDS)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            connected.sendall(token)
            if _read(connected, 1) != _WELCOME:
                return LinkFigures("another program listens there")
            if not with_rate:
                return LinkFigures()
            delay = min(_round_trips(connected)) / 2
            lost = not _datagrams_pass(connected, token)
            return LinkFigures(delay_seconds=delay, bits_per_second=_rate(connected, delay), datagrams_lost=lost)
        except TimeoutError:
            if delay is not None:
                return LinkFigures("large messages do not arrive", stalled=True, delay_seconds=delay)
            return LinkFigures(f"connected, but no answer within {MESSAGE_SECONDS:g} s")
        except (OSError, EOFError) as error:
            return LinkFigures(f"the connection was lost ({str(error) or 'it was closed'})")


def _round_trips(connected: socket.socket) -> Iterator[float]:
    for _ in range(_ROUND_TRIPS):
        began = time.perf_counter()
        connected.sendall(_ECHO)
        _read(connected, 1)
        yield time.perf_counter() - began


def _echo_datagrams(connected: socket.socket, token: bytes) -> None:
    """Answers datagrams that come to the address of a connection, until the other side goes on with that."""
    address = connected.getsockname()
    with socket.socket(connected.family, socket.SOCK_DGRAM) as datagrams:
        # Bound to it, as a machine with several addresses would answer from another one.
        datagrams.bind((address[0], 0, *address[2:]))
        connected.sendall(datagrams.getsockname()[1].to_bytes(2, "big"))
        while True:
            ready = select.select([datagrams, connected], [], [], MESSAGE_SECONDS)[0]
            if datagrams not in ready:
                return
            message, sender = datagrams.recvfrom(TOKEN_BYTES + 1)
            if message == token:
                datagrams.sendto(message, sender)


def _datagrams_pass(connected: socket.socket, token: bytes) -> bool:
    """Whether the listener of a connection answers datagrams, as launchers send each other."""
    connected.sendall(_DATAGRAMS)
    port = int.from_bytes(_read(connected, 2), "big")
    address = connected.getpeername()
    with socket.socket(connected.family, socket.SOCK_DGRAM) as sender:
        sender.settimeout(_DATAGRAM_SECONDS)
        sender.connect((address[0], port, *address[2:]))
        for _ in range(_DATAGRAM_TRIES):
            with suppress(OSError):  # no answer, or the answer that nobody hears there
                sender.send(token)
                if sender.recv(TOKEN_BYTES + 1) == token:
                    return True
    return False


def _rate(connected: socket.socket, delay: float) -> float:
    """Bits a second, from an amount that takes long enough to say so."""
    amount = _FIRST_AMOUNT
    while True:
        began = time.perf_counter()
        connected.sendall(_AMOUNT + amount.to_bytes(8, "big"))
        for sent in range(0, amount, len(_CHUNK)):
            connected.sendall(memoryview(_CHUNK)[: amount - sent])
        _read(connected, 1)
        # The answer needs one delay of its own.
        seconds = max(time.perf_counter() - began - 2 * delay, 1e-9)
        if seconds >= _RATE_SECONDS or amount >= _LARGEST_AMOUNT:
            return amount * 8 / seconds
        amount *= _GROWTH


def _read(connected: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = connected.recv(count)
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _discard(connected: socket.socket, count: int) -> None:
    buffer = bytearray(min(count, len(_CHUNK)) or 1)
    while count:
        received = connected.recv_into(buffer, min(count, len(buffer)))
        if not received:
            raise EOFError
        count -= received
