# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Errors for users when another rank, or the network to it, has failed: what happened and what to do.

gloo tells a failed send or receive from its own point of view, as ``Read error [10.0.0.2]:2510: Connection reset by
peer``. Here this becomes one of three cases, with gloo's words at the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager


_LOST = re.compile(r"Connection (closed|reset|refused)|Broken pipe|failed to (recv|send)", re.IGNORECASE)
_UNREACHABLE = re.compile(r"No route to host|(Network|Host) is unreachable|Network is down", re.IGNORECASE)
_LATE = re.compile(r"timed? ?-?out", re.IGNORECASE)

#: torch's errors of the store in which ranks meet, which another process has.
_OF_THE_STORE = ("DistNetworkError", "DistStoreError")
_RESUME = "Then start the run again on all nodes, from the last checkpoint"
_LOST_TEXT = (
    "the connection to another rank was lost: its process has ended (an error of its own, killed, out of memory), or "
    f"its node has. The output of the rank that ended first says why. {_RESUME}"
)
_UNREACHABLE_TEXT = (
    f"another node cannot be reached. Check that it is up, and cables, switches and firewalls. {_RESUME}"
)
_LATE_TEXT = (
    "another rank did not answer in time: its node or the network stands still, or one of them is slower than the "
    "time-out allows. Check that all nodes are up and reach each other. If they are only slow, allow more time by "
    "LSHDPAccelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(minutes=...))]) from accelerate. "
    f"{_RESUME}"
)


#: The exit code of a rank that ends because another one was lost or has failed; sysexits.h calls it a failure of a
#: protocol.
FOLLOWS_ANOTHER = 76


class OtherRankError(RuntimeError):
    """This rank cannot go on because of what has happened to another one, whose own output says what."""


class CommunicationError(OtherRankError):
    """Another rank has ended, cannot be reached or did not answer within the time-out of the process group.

    This rank's part of the step is lost, and the process group cannot be used any more: end the process.
    """


@contextmanager
def failures_explained() -> Iterator[None]:
    """Turns the errors of collectives inside into `CommunicationError`; others pass as they are."""
    try:
        yield
    except RuntimeError as error:
        explanation = _explanation(error)
        if explanation is None:
            raise
        raise CommunicationError(f"{explanation}. (torch says: {error})") from error


def follows_another(error: BaseException) -> bool:
    """Whether an error of this rank comes from the loss or failure of another one, whose own error says why."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:  # a script may have made a circle
        if isinstance(link, OtherRankError) or _is_of_a_collective(link):
            return True
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return False


def _is_of_a_collective(error: BaseException) -> bool:
    """Whether an error is one of torch's own for a peer that is gone, from a collective that nobody explains."""
    if type(error).__name__ in _OF_THE_STORE and type(error).__module__.startswith("torch"):
        return True
    is_of_torch = type(error).__module__.startswith("torch.distributed") or "gloo/transport" in str(error)
    return isinstance(error, RuntimeError) and is_of_torch and _explanation(error) is not None


def _explanation(error: RuntimeError) -> str | None:
    text = str(error)
    # Errors of this project, and others that are no failed collective, explain themselves.
    if type(error) is not RuntimeError and not type(error).__module__.startswith("torch"):
        return None
    for pattern, explanation in ((_UNREACHABLE, _UNREACHABLE_TEXT), (_LOST, _LOST_TEXT), (_LATE, _LATE_TEXT)):
        if pattern.search(text):
            return explanation
    return None
