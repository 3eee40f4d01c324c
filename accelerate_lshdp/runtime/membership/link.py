# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`MembershipLink`: a `Membership` on a socket, in a thread of its own, and what the main thread sees of it."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from accelerate_lshdp.runtime.membership.generation import Generation, Member
from accelerate_lshdp.runtime.membership.hearing import BEAT_SECONDS
from accelerate_lshdp.runtime.membership.membership import Membership
from accelerate_lshdp.runtime.membership.message import MESSAGE_BYTES, Message, Status


#: How often the membership is looked at while no message comes.
_LOOK_SECONDS = 0.1
#: How often a launcher that leaves says so: one of the messages will arrive.
_FAREWELLS = 5


@dataclass(frozen=True)
class View:
    """What is known at a moment.

    Args:
        me: this launcher.
        generation: the newest.
        node: that this launcher is in it; None: none.
        silent: seconds for which members have not been heard of.
        deaf: members that are heard, and do not hear this launcher.
        left_silent: members of generations before that were out of the next one, of which nothing had come for long,
            and for how many seconds.
        left_deaf: such members that were heard, and did not hear this launcher.
        last: what other launchers of the run have said last, by identity, members or not.
        there: identities of those of them that were heard lately.
        foreign: machines whose launchers are of another run.
        has_quorum: whether the members that are there may decide.
        failure: a launcher on which the script has failed, and its exit code.
        has_ended: whether the training has ended on some member.
        ended_before: whether it had before this generation, whose ranks have nothing to do then.
    """

    me: Member
    generation: Generation
    node: int | None
    silent: dict[Member, float]
    deaf: list[Member]
    left_silent: dict[Member, float]
    left_deaf: list[Member]
    last: Mapping[tuple[str, str], Message]
    there: frozenset[tuple[str, str]]
    foreign: list[str]
    has_quorum: bool
    failure: tuple[Member, int] | None
    has_ended: bool
    ended_before: bool

    @property
    def leaving(self) -> frozenset[tuple[str, str]]:
        """Identities of launchers that were told to end."""
        return self._that_say(Status.LEAVES, Status.LEFT)

    @property
    def left(self) -> frozenset[tuple[str, str]]:
        """Identities of those of them whose ranks have ended."""
        return self._that_say(Status.LEFT)

    def _that_say(self, *statuses: Status) -> frozenset[tuple[str, str]]:
        return frozenset(key for key, message in self.last.items() if message.status in statuses)

    @classmethod
    def of(cls, known: Membership, now: float) -> View:
        """What a membership knows."""
        # Not later than it looks: if this process was frozen, what it has not heard meanwhile is not missing.
        now = min(now, known.looked_at + 2 * BEAT_SECONDS)
        heard = known.hearing.heard
        return cls(
            known.me,
            known.generation,
            known.node,
            known.hearing.silent(now),
            known.hearing.deaf(now),
            known.hearing.left_silent,
            known.hearing.left_deaf,
            {key: its.message for key, its in heard.items()},
            frozenset(key for key, its in heard.items() if known.hearing.is_fresh(its, now)),
            known.hearing.foreign(now),
            known.has_quorum(now),
            known.failure(),
            known.has_ended,
            known.ended_before,
        )


class MembershipLink:
    """Sends and receives what a membership says and hears.

    Args:
        membership: of this launcher.
        bound: a UDP socket, bound to the address that the others know; closed at the end.
    """

    def __init__(self, membership: Membership, bound: socket.socket) -> None:
        self._membership = membership
        self._socket = bound
        self._lock = threading.Lock()
        self._left = threading.Event()
        self._has_changed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)

    def __enter__(self) -> MembershipLink:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._thread.join()
        # It decides on nothing more, and its ranks have ended.
        if self._membership.status is Status.LEAVES:
            self._membership.say(Status.LEFT)
        for _ in range(_FAREWELLS):
            with self._lock:
                messages = self._membership.farewell(time.monotonic())
            self._send(messages)
            time.sleep(_LOOK_SECONDS)
        self._socket.close()

    @contextmanager
    def changing(self) -> Iterator[Membership]:
        """The membership, for as long as the block runs."""
        with self._lock:
            yield self._membership

    def view(self) -> View:
        """What is known now."""
        with self._lock:
            return View.of(self._membership, time.monotonic())

    def wait(self, seconds: float) -> None:
        """Waits until the generation changes, so many seconds at most."""
        self._has_changed.wait(seconds)
        self._has_changed.clear()

    def _run(self) -> None:
        generation = self._membership.generation
        while not self._left.is_set():
            with self._lock:
                messages = self._membership.tick(time.monotonic())
            if self._membership.generation is not generation:
                generation = self._membership.generation
                self._has_changed.set()
            self._send(messages)
            self._receive(time.monotonic() + _LOOK_SECONDS)

    def _send(self, messages: list[tuple[tuple[str, int], Message]]) -> None:
        data: dict[int, bytes] = {}
        for address, message in messages:
            if id(message) not in data:
                data[id(message)] = message.to_bytes()
            with suppress(OSError):  # of a way that is down: the other one hears nothing, which is the point
                self._socket.sendto(data[id(message)], address)

    def _receive(self, until: float) -> None:
        while (seconds := until - time.monotonic()) > 0:
            if not select.select([self._socket], [], [], seconds)[0]:
                return
            with suppress(OSError):  # an error that an earlier datagram met
                message = Message.from_bytes(self._socket.recvfrom(MESSAGE_BYTES)[0])
                if message is not None:
                    with self._lock:
                        now = time.monotonic()
                        self._membership.hear(message, now)
                        if self._membership.has_to_say(now):
                            return  # others wait for the answer
