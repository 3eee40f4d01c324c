# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`Dissemination`: a row of each rank to all ranks of a group, with as many messages as the logarithm of their number.

In round k a rank sends the rows that it has, its own and those of the ranks after it, to the rank 2^k places before
it, and gets as many from the one 2^k places after it (Bruck, Ho, Kipnis, Upfal and Weathersby, 1997). Sending each row
to every rank takes one round, but as many messages as there are ranks, each of which wakes somebody. Of rows of bits
whose union is wanted, a rank sends one in each round: that of those that it has.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from accelerate_lshdp.runtime.failures import failures_explained


#: Tags of the rounds, in a group that carries nothing else.
_FIRST_TAG = 1
#: What a row begins with: it has come, or a rank on its way was lost.
_HERE, _LOST = 0, 1
#: Seconds for which a process that ends passes on what others wait for.
_SERVICE_SECONDS = 60.0
#: Of a row and what comes of all of them.
_Rounds = Callable[[dist.ProcessGroup, torch.Tensor, torch.Tensor], "str | None"]
#: Threads that gather, and what they get their work from.
_serving: weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue] = weakref.WeakKeyDictionary()


class Gathering:
    """The rows of all ranks, or the union of their bits, while they are on their way.

    Args:
        row: of this rank.
        result: of all, which is filled in.
        rounds: sends and receives; returns why rows of some ranks have not come.
    """

    def __init__(self, row: torch.Tensor, result: torch.Tensor, rounds: _Rounds) -> None:
        self.row = row
        self.result = result
        self.rounds = rounds
        self._has_ended = threading.Event()
        self._error: str | None = None

    def end(self, error: str | None) -> None:
        """All have come, or they will not."""
        self._error = error
        self._has_ended.set()

    def wait(self) -> None:
        """Waits for all of them.

        Raises:
            CommunicationError: another rank has ended, or did not answer in the group's time.
        """
        self._has_ended.wait()
        if self._error is not None:
            # A new one each time: the thread would keep all that the traceback of one has in sight.
            with failures_explained():
                raise RuntimeError(self._error)


class Dissemination:
    """Gathers or unites rows one after the other, in a thread of its own: what others wait for is passed on at once.

    Args:
        group: over gloo, for this alone.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._size = group.size()
        due: queue.SimpleQueue[Gathering | None] = queue.SimpleQueue()
        self._due = due
        thread = threading.Thread(target=_serve, args=(group, due), name="dissemination", daemon=True)
        _serving[thread] = due
        thread.start()
        weakref.finalize(self, due.put, None)

    def gather(self, row: torch.Tensor) -> tuple[Gathering, torch.Tensor]:
        """Begins to gather a row of each rank, as long on all; does not wait (collective).

        Args:
            row: of this rank, with one dimension, in host memory. It may be changed at once.

        Returns:
            What to wait with, and the rows once that has been done, shape (ranks, row).
        """
        return self._begin(Gathering(row.clone(), row.new_empty(self._size, len(row)), _gather))

    def unite(self, bits: torch.Tensor) -> tuple[Gathering, torch.Tensor]:
        """Begins to find the bits that any rank has set; does not wait (collective).

        Args:
            bits: of this rank, uint8, with one dimension, as many on all ranks, in host memory.

        Returns:
            What to wait with, and the bits once that has been done.
        """
        return self._begin(Gathering(bits.clone(), torch.empty_like(bits), _unite))

    def _begin(self, gathering: Gathering) -> tuple[Gathering, torch.Tensor]:
        self._due.put(gathering)
        return gathering, gathering.result


def end_dissemination() -> None:
    """Ends what passes on rows in this process, once it has passed on what was begun: others wait for it.

    To be called before the interpreter ends. A thread that stood in gloo then would end the process with SIGABRT.
    """
    deadline = time.monotonic() + _SERVICE_SECONDS
    for thread, due in list(_serving.items()):
        due.put(None)
        thread.join(max(0.0, deadline - time.monotonic()))


def _serve(group: dist.ProcessGroup, due: queue.SimpleQueue[Gathering | None]) -> None:
    error: str | None = None
    while (gathering := due.get()) is not None:
        if error is None:
            try:
                error = gathering.rounds(group, gathering.row, gathering.result)
            except BaseException as unexpected:  # who waits must not wait for ever
                error = f"{type(unexpected).__name__}: {unexpected}"
        # After a rank was lost, those that miss its rows know it, too: nobody waits for what would come next.
        gathering.end(error)


def _gather(group: dist.ProcessGroup, row: torch.Tensor, rows: torch.Tensor) -> str | None:
    """Fills in the rows of all ranks; returns why some have not come."""
    size, rank, length = group.size(), group.rank(), row.nbytes
    # This rank's first, then those of the ranks after it; each behind a byte that says whether it has come.
    held = torch.full((size, 1 + length), _LOST, dtype=torch.uint8)
    held[0, 0] = _HERE
    held[0, 1:] = row.view(torch.uint8)
    error: str | None = None
    count, tag = 1, _FIRST_TAG
    while count < size:
        more = min(count, size - count)
        got = held[count : count + more]
        not_got, not_sent = _round(group, held[:more], got, count, tag)
        if not_got is not None:  # the next rounds tell those that would wait for the same rows
            got[:, 0] = _LOST
        error = error or not_got or not_sent
        count, tag = count + more, tag + 1
    if error is None and bool((held[:, 0] == _LOST).any()):
        lost_ranks = [(rank + place) % size for place in range(size) if held[place, 0] == _LOST]
        error = f"Connection closed between ranks: found nothing of ranks {sorted(lost_ranks)}"
    rows.view(torch.uint8).copy_(held[:, 1:].roll(rank, 0))
    return error


def _unite(group: dist.ProcessGroup, bits: torch.Tensor, united: torch.Tensor) -> str | None:
    """Fills in the bits that any rank has set; returns why those of some have not come."""
    # What a rank has after round k is of the 2^k ranks from it on, or of all. It does no harm that some count twice.
    held = torch.cat([bits.new_full((1,), _HERE), bits])
    got = torch.empty_like(held)
    error: str | None = None
    count, tag = 1, _FIRST_TAG
    while count < group.size():
        not_got, not_sent = _round(group, held, got, count, tag)
        if not_got is None:
            held |= got
        else:
            held[0] = _LOST
        error = error or not_got or not_sent
        count, tag = 2 * count, tag + 1
    if error is None and int(held[0]) == _LOST:
        error = "Connection closed between ranks: found nothing of some ranks"
    united.copy_(held[1:])
    return error


def _round(
    group: dist.ProcessGroup, sent: torch.Tensor, got: torch.Tensor, places: int, tag: int
) -> tuple[str | None, str | None]:
    """Sends to the rank so many places before, and receives from the one after; why either has failed, None: not."""
    rank, size = group.rank(), group.size()
    # Each by itself: one that cannot be sent to is no reason not to take what the other one sends, and waits with.
    sending, not_sent = _attempt(lambda: group.send([sent], (rank - places) % size, tag))
    receiving, not_got = _attempt(lambda: group.recv([got], (rank + places) % size, tag))
    not_got = not_got or _attempt(receiving.wait)[1]
    not_sent = not_sent or _attempt(sending.wait)[1]
    return not_got, not_sent


def _attempt(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """What a call of gloo returns, and the words of the error that it raises."""
    try:
        return call(), None
    except RuntimeError as error:
        return None, str(error)
