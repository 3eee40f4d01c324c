# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Holes in the C library's heap are given back before a process takes much more than it has ever used at once."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from accelerate_lshdp.runtime.heap_bound import HeapBound


pytestmark = pytest.mark.skipif(not HeapBound.is_possible(), reason="only the heap of glibc, from 2.33 on, is bounded")

PROLOGUE = """
import json, os, sys
import numpy
from accelerate_lshdp.runtime.cpu_memory import keep_freed_memory
from accelerate_lshdp.runtime.heap_bound import HeapBound
MB = 2**20
assert keep_freed_memory(gathers=len(sys.argv) < 3)
heap = HeapBound(4 * MB)
"""

# Rounds of what leaves holes: small blocks that stay, between those of a step, which the next round's do not fit.
HOLES = """
resident, used, most, most_used = heap.resident_bytes(), heap.used_bytes(), 0, 0
kept = []
for round in range(12):
    of_step = []
    for _ in range(16):
        of_step.append(numpy.ones((2 * MB + round * MB // 16) // 8))
        kept.append(numpy.ones(MB // 16 // 8))
        most = max(most, heap.resident_bytes())
        if sys.argv[1] == "bounded":
            heap.check()
        most_used = max(most_used, heap.used_bytes())
    del of_step
print(json.dumps([most - resident, most_used - used]))
"""

# What is in use for a moment between two looks comes again and again.
MOMENTS = """
returns = heap.returns
for _ in range(100):
    moment = [numpy.ones(2 * MB // 8) for _ in range(int(sys.argv[1]))]
    del moment
    heap.check()
print(json.dumps([heap.returns - returns]))
"""

# A forked process reads its own memory.
FORK = """
large = numpy.ones(64 * MB // 8)
reader, writer = os.pipe()
if not os.fork():
    del large
    os.write(writer, str(heap.resident_bytes()).encode())
    os._exit(0)
os.wait()
print(json.dumps([heap.resident_bytes() - int(os.read(reader, 100))]))
"""


def run(program: str, *arguments: str) -> list[int]:
    """What a process prints, whose C library is not told anything by this one's environment."""
    command = [sys.executable, "-c", PROLOGUE + program, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env={}, check=True)
    return json.loads(result.stdout)


def test_free_memory_is_bounded_beside_the_most_that_was_used() -> None:
    block = 3 * 2**20  # is allocated between two looks
    resident, used = run(HOLES, "bounded")
    assert resident < used + 4 * 2**20 + block
    resident, used = run(HOLES, "unbounded")
    assert resident > used + 14 * 2**20


@pytest.mark.parametrize("blocks", [4, 16, 64])
def test_memory_of_moments_between_looks_is_not_given_back_each_time(blocks: int) -> None:
    (returns,) = run(MOMENTS, str(blocks), "all freed memory stays")
    assert returns <= 1


def test_a_forked_process_reads_its_own_memory() -> None:
    (more,) = run(FORK)
    assert more > 48 * 2**20
