# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A worker process of a loader is forked only when torch's threads rest (python/cpython#112275)."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from accelerate_lshdp import LSHDPAccelerator, Plan
from accelerate_lshdp.runtime import forking, torch_threads
from accelerate_lshdp.runtime.forking import install_safe_forks


_PR_SET_NAME = 15
_HANG_SECONDS = 5.0
LONGEST_SECONDS = forking._LONGEST_SECONDS

needed = pytest.mark.skipif(sys.version_info >= (3, 12), reason="this Python's children do not wait for the lock")


def fork_beside(name: bytes, times: int) -> list[bool]:
    """Whether the child of each fork was made after a thread of that name, at work before, had done its work."""
    LSHDPAccelerator(plan=Plan.equal())
    forking._LONGEST_SECONDS = 10.0  # whatever else the machine does
    try:
        return [_forked_after_work(name) for _ in range(times)]
    finally:
        forking._LONGEST_SECONDS = LONGEST_SECONDS


def _forked_after_work(name: bytes) -> bool:
    begun, done = threading.Event(), threading.Event()

    def work() -> None:
        _name_this_thread(name)
        begun.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 30_000)  # about 10 ms, without holding the interpreter
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if done.is_set() else 1)
    thread.join()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@needed
def test_a_fork_waits_for_the_threads_of_gloo(workers):
    assert workers(1).run(fork_beside, b"pt_gloo_runloop", 5) == [[True] * 5]


def test_a_fork_does_not_wait_for_threads_of_others(workers):
    """The counterpart: the work above is long enough to be seen."""
    (waited,) = workers(1).run(fork_beside, b"other", 5)
    assert not all(waited)


@contextmanager
def thread_named(name: bytes) -> Iterator[None]:
    named, end = threading.Event(), threading.Event()

    def rest() -> None:
        _name_this_thread(name)
        named.set()
        end.wait()

    thread = threading.Thread(target=rest, daemon=True)
    thread.start()
    named.wait()
    try:
        yield
    finally:
        end.set()
        thread.join()


def test_a_thread_does_not_wait_for_itself():
    """A loader's worker process is named ``pt_data_worker``, and may fork."""
    found = []

    def look() -> None:
        _name_this_thread(b"pt_own")
        found.extend([torch_threads._states("pt_own"), torch_threads._states("pt_other")])

    with thread_named(b"pt_other"):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert len(found) == 2 and found[0] == [] and len(found[1]) == 1


def test_a_name_that_ends_within_a_character_is_read():
    """The kernel cuts names at 15 bytes."""
    with thread_named("pt_entraîner".encode()[:9]):
        assert len(torch_threads._states("pt_entra")) == 1


@pytest.mark.parametrize(
    ("seen", "polls"),
    [([["S"], ["R"], ["S", "S"], ["S", "R"], ["S"], ["S"]], 6), ([["R"], []], 2), ([["S"], ["S"]], 2)],
)
def test_threads_are_idle_when_two_looks_in_a_row_find_them_so(monkeypatch, seen, polls):
    looks = iter(seen)
    monkeypatch.setattr(torch_threads, "_states", lambda prefix: next(looks))
    slept = []
    monkeypatch.setattr(torch_threads.time, "sleep", slept.append)
    torch_threads.wait_until_idle("pt_", poll_seconds=0.001, polls=2, longest_seconds=60.0, blind_seconds=9.0)
    assert slept == [0.001] * polls


def test_threads_that_do_not_rest_are_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr(torch_threads, "_states", lambda prefix: ["R"])
    torch_threads.wait_until_idle("pt_", poll_seconds=0.001, polls=2, longest_seconds=0.05, blind_seconds=9.0)


def _name_this_thread(name: bytes) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name)


def fork_amid_collectives(seconds: float) -> tuple[int, int]:
    """Forks while gloo's threads finish and drop collectives. Returns how many children there were and how many hung.

    There is no accelerator: it binds ranks to processors, and a thread that shares the forking one's is rarely caught.
    """
    install_safe_forks()
    forks = hung = 0
    end = time.monotonic() + seconds
    over = torch.zeros(1)
    while not over:
        works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(16)]
        works[forks % 16].wait()
        del works
        forks += 1
        hung += not _child_ends()
        over = torch.tensor(float(time.monotonic() > end))
        dist.all_reduce(over)
    return forks, hung


def _child_ends() -> bool:
    child = os.fork()
    if child == 0:
        os._exit(0)
    deadline = time.monotonic() + _HANG_SECONDS
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(0.0003)
    return True


@needed
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_child_hangs(workers):
    """Without the rest some children in a thousand hang (Python 3.11.7, two cores)."""
    for forks, hung in workers(2).run(fork_amid_collectives, 60.0, timeout=200):
        assert forks > 500 and hung == 0, f"{hung} of {forks} children hung"
