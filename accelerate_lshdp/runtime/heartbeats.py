# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`heartbeats`: the launchers of a run tell each other twice a second that they are there, beside gloo and NCCL.

A machine that is switched off ends no connection: ranks that wait for it wait as long as their time-out, half an hour
with gloo. Launchers have nothing else to do, so their silence means something. They find each other's addresses in
the store in which their nodes have met, and send datagrams: one that is lost is as good as the next one.
"""

from __future__ import annotations

import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from accelerate_lshdp.runtime.liveness import Change, Liveness


BEAT_SECONDS = 0.5
#: Until all nodes have told their addresses: they start their ranks at the same time.
MEETING_SECONDS = 120.0
_STORE_SECONDS = 10.0
#: After which it is said that a node was never heard of.
_UNHEARD_SECONDS = 10.0
_TOKEN_BYTES = 16
_PREFIX = "accelerate_lshdp/heartbeats"
# A datagram: the token of the run, the sender, and a counter for each node.
_HEAD = struct.Struct(f"!{_TOKEN_BYTES}sH")
_FAREWELLS = 3


def message_bytes(count: int) -> int:
    """Bytes of a datagram in a run of so many nodes."""
    return _HEAD.size + 4 * count


@dataclass(frozen=True)
class Launcher:
    """A launcher among the others of its run.

    Args:
        node: its index.
        count: number of nodes.
        address: of node 0, as the other nodes reach it.
        port: of the store on node 0.
    """

    node: int
    count: int
    address: str
    port: int


@contextmanager
def heartbeats(
    launcher: Launcher,
    has_ranks: Callable[[], bool],
    say: Callable[[str], None],
    end: Callable[[], None],
    *,
    notice_seconds: float,
    lost_seconds: float,
) -> Iterator[None]:
    """Beats while the block runs, from when the ranks have been started, and says which nodes are silent.

    Args:
        launcher: this one.
        has_ranks: returns whether its ranks run: not before all nodes have met in the store.
        say: takes a line about a node.
        end: ends this node's ranks; called when a node has been silent for `lost_seconds`.
        notice_seconds: in which the silence of a node is noticed.
        lost_seconds: of silence after which the run cannot go on; 0: however long it is.
    """
    left = threading.Event()

    def run() -> None:
        while not has_ranks():
            if left.wait(0.2):
                return
        try:
            meeting = _meet(launcher, left)
        except (OSError, RuntimeError, ValueError) as error:
            if not left.is_set():
                say(f"nodes do not tell each other that they are there ({error}); one that is lost is not noticed")
            return
        if meeting is None:
            return
        with meeting.socket:
            _beat(launcher, meeting, left, has_ranks, say, end, notice_seconds, lost_seconds)

    thread = threading.Thread(target=run, name="heartbeats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join(timeout=2 * BEAT_SECONDS)


@dataclass(frozen=True)
class _Meeting:
    """What launchers know of each other: the addresses of all, and the token of the run."""

    socket: socket.socket
    addresses: list[tuple[Any, ...]]
    token: bytes


def _meet(launcher: Launcher, left: threading.Event) -> _Meeting | None:
    """Tells this launcher's address to the others, and waits for theirs; None: the block was left before."""
    import torch.distributed as dist

    timeout = timedelta(seconds=_STORE_SECONDS)
    store = dist.TCPStore(launcher.address, launcher.port, is_master=False, wait_for_workers=False, timeout=timeout)
    store = dist.PrefixStore(_PREFIX, store)
    family, own = _own_address(launcher)
    listening = socket.socket(family, socket.SOCK_DGRAM)
    try:
        listening.bind(("", 0))
        listening.setblocking(False)
        # A run that is over must not be taken for this one: its store is gone, but not its last datagrams.
        if launcher.node == 0:
            store.set("token", secrets.token_hex(_TOKEN_BYTES))
        store.set(str(launcher.node), f"{own} {listening.getsockname()[1]}")
        keys = ["token", *map(str, range(launcher.count))]
        deadline = time.monotonic() + MEETING_SECONDS
        # Not by the store's own wait: a thread that is inside of it when Python ends may abort the process.
        while not store.check(keys):
            if left.wait(0.2):
                listening.close()
                return None
            if time.monotonic() > deadline:
                raise ValueError(f"found not all of them at {launcher.address}:{launcher.port}")
        told = [store.get(str(node)).decode().split() for node in range(launcher.count)]
        addresses: list[tuple[Any, ...]] = [(address, int(port)) for address, port in told]
        return _Meeting(listening, addresses, bytes.fromhex(store.get("token").decode()))
    except BaseException:
        listening.close()
        raise


def _own_address(launcher: Launcher) -> tuple[socket.AddressFamily, str]:
    """This machine's address on the way to node 0; on node 0 that by which the others reach it."""
    family, kind, _, _, place = socket.getaddrinfo(launcher.address, launcher.port, type=socket.SOCK_DGRAM)[0]
    if launcher.node == 0:
        return family, str(place[0])
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # of a datagram socket: chooses the interface, and sends nothing
        return family, str(probe.getsockname()[0])


def _beat(
    launcher: Launcher,
    meeting: _Meeting,
    left: threading.Event,
    has_ranks: Callable[[], bool],
    say: Callable[[str], None],
    end: Callable[[], None],
    notice_seconds: float,
    lost_seconds: float,
) -> None:
    """Beats until the block is left. When the ranks of this node have ended, it is not missed any more."""
    state = Liveness(
        launcher.node,
        launcher.count,
        beat_seconds=BEAT_SECONDS,
        notice_seconds=notice_seconds,
        now=time.monotonic(),
    )
    counters = struct.Struct(f"!{launcher.count}I")

    def send(values: Sequence[int]) -> None:
        message = _HEAD.pack(meeting.token, launcher.node) + counters.pack(*values)
        for node in state.receivers():
            with suppress(OSError):  # of a way that is down: the other node hears nothing, which is the point
                meeting.socket.sendto(message, meeting.addresses[node])

    def listen(until: float) -> None:
        while (seconds := until - time.monotonic()) > 0:
            if not select.select([meeting.socket], [], [], seconds)[0]:
                return
            with suppress(OSError):  # an error that an earlier datagram met
                message, place = meeting.socket.recvfrom(message_bytes(launcher.count) + 1)
                if len(message) == message_bytes(launcher.count) and message[:_TOKEN_BYTES] == meeting.token:
                    sender = _HEAD.unpack_from(message)[1]
                    if sender < launcher.count:
                        # Its own name may mean the loopback on its machine; what it sends comes from its address.
                        meeting.addresses[sender] = place
                        state.hear(counters.unpack_from(message, _HEAD.size), time.monotonic())

    is_over, unheard_at = False, time.monotonic() + _UNHEARD_SECONDS
    while not left.is_set() and has_ranks():
        send(state.beat())
        listen(time.monotonic() + BEAT_SECONDS)
        now = time.monotonic()
        for change in state.look(now):
            say(_describe(change, meeting))
        if unheard_at is not None and now > unheard_at:
            unheard_at = None
            if state.unheard():
                names = ", ".join(f"node {node} ({meeting.addresses[node][0]})" for node in state.unheard())
                say(f"nothing is heard of {names} by UDP, so its loss is not noticed. Let UDP through the firewalls")
        longest = state.longest_silence(now)
        if longest is not None and 0 < lost_seconds < longest[1] and not is_over:
            is_over = True
            say(
                f"node {longest[0]} has been silent for {longest[1]:.0f} s, so the run ends here. Start it again from"
                " the last checkpoint, when the node is back or without it (--lost-after waits longer)"
            )
            end()
    # The launcher waits for those of other nodes now, and has nothing to say of them. Its machine may be taken away.
    for _ in range(_FAREWELLS):
        send(state.end())
    while not left.wait(BEAT_SECONDS):
        send(state.end())


def _describe(change: Change, meeting: _Meeting) -> str:
    name = f"node {change.node} ({meeting.addresses[change.node][0]})"
    if not change.is_silent:
        return f"{name} is back, after {change.seconds:.1f} s"
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - change.seconds))
    return (
        f"{name} has not been heard of since {since} ({change.seconds:.1f} s): it is off, frozen, or its network is"
        " down. The other ranks wait for it"
    )
