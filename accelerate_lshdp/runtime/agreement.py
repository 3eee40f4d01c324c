# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Agreement about errors: what fails on one rank is raised on every rank, and none of them hangs."""

from __future__ import annotations

import logging
import time
from collections import Counter
from weakref import WeakKeyDictionary

import torch.distributed as dist

from accelerate_lshdp.runtime.failures import failures_explained
from accelerate_lshdp.runtime.participants import has_others, participants


logger = logging.getLogger(__name__)

#: Longest time in seconds between ranks that come to the same place; for so long a call waits for others in silence.
_APART_SECONDS = 30.0
#: How often a place was come to in each world: ranks that failed to meet at one still do at others.
_met: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()


def all_meet_here(place: str) -> bool:
    """Whether all ranks call this with the same ``place`` within half a minute of this one (no collective).

    A rank that is blocked in a collective cannot answer another one. So ranks count themselves in the key-value store
    of the launch, which needs no answer.

    Args:
        place: names the point in the program, the same on all ranks.
    """
    store, place = store_of_launch(), _this_time(place)
    store.add(place, 1)
    ends = time.monotonic() + _APART_SECONDS
    while store.add(place, 0) < dist.get_world_size():
        if time.monotonic() > ends:
            return False
        # Each look is a request to the launch's one store: at most 20 a second from each rank.
        time.sleep(0.05)
    return True


def tell_of_missing_ranks(call: str) -> None:
    """Waits for all ranks to make a call in which they all take part, and says so where some do not make it.

    A script that makes the call on its main process alone, as stock Accelerate allows for some of them, would wait in
    silence: this rank in the call's collectives, the others in those of their next step. After half a minute this
    returns, whether all have come or not: only the collective that comes next sees that another rank has ended.

    Args:
        call: its name, the same on all ranks.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    with failures_explained():  # the node that has the store may have ended
        _wait_and_tell(call)


def _wait_and_tell(call: str) -> None:
    store, place = store_of_launch(), _this_time(f"lshdp/{call}")
    keys = [f"{place} of rank {rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], "")
    ends, pause = time.monotonic() + _APART_SECONDS, 0.001
    while not store.check(keys):
        if time.monotonic() > ends:
            missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
            if missing:
                logger.warning(
                    f"rank {dist.get_rank()} has waited {_APART_SECONDS:g} s in {call}, which rank"
                    f" {', '.join(missing)} has not called, expected a call on all ranks: make it outside of"
                    " `if accelerator.is_main_process`. If the others are only late, nothing is wrong"
                )
            return
        time.sleep(pause)
        pause = min(2 * pause, 0.05)  # most of the time all come at once; else at most 20 requests a second


def store_of_launch() -> dist.Store:
    """The store of the launch."""
    # It is not part of torch's public interface; a store of our own would need an address of its own.
    return dist.distributed_c10d._get_default_store()


def _this_time(place: str) -> str:
    """A key of its own for each time that ranks come to a place."""
    # Counted for the process, not for an accelerator: a second one must not meet the answers of the first. A new key
    # each time: keys of the store stay as long as the launch.
    times = _met.setdefault(dist.group.WORLD, Counter())
    times[place] += 1
    return f"{place} {times[place]}"


def raise_on_all_ranks(error: BaseException | str | None, group: dist.ProcessGroup | None = None) -> None:
    """Raises the same RuntimeError on all ranks of `group` if any of them passes an error (collective, a barrier).

    Args:
        error: what went wrong on this rank, or None.
        group: the ranks that take part; None: those with which this thread exchanges (`participants`), mostly all.
            Without a process group this process is alone.

    Raises:
        RuntimeError: naming the ranks that failed and what each of them said, once per distinct message. An exception
            that this rank passed is its cause.
    """
    if isinstance(error, BaseException):
        message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    else:
        message = error
    if has_others():
        group = participants() if group is None else group
        # Texts, not exceptions: what one rank can pickle, another may not be able to read. Every rank sends one, None
        # included, so that all take part, and all raise the same or none does.
        messages: list[str | None] = [None] * dist.get_world_size(group)
        with failures_explained():
            dist.all_gather_object(messages, message, group=group)
        ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    else:
        messages, ranks = [message], [0]
    failed: dict[str, list[int]] = {}
    for rank, text in zip(ranks, messages, strict=True):
        if text is not None:
            failed.setdefault(text, []).append(rank)
    if failed:
        lines = [f"rank{'s' if len(on) > 1 else ''} {', '.join(map(str, on))}: {text}" for text, on in failed.items()]
        cause = error if isinstance(error, BaseException) else None
        raise RuntimeError("\n".join(lines)) from cause
