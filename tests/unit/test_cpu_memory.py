# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Freed blocks stay with the process; large ones do not where units are gathered."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest


# Blocks of one size, freed together: the pages of those below the threshold for mappings lie at the end of the heap.
FAULTS = """
import resource, sys
from accelerate_lshdp.runtime.cpu_memory import keep_freed_memory
import numpy
told = None if sys.argv[1] == "leave" else keep_freed_memory(gathers=sys.argv[1] == "gathers")
def step():
    blocks = [numpy.ones(int(sys.argv[2]) // 8) for _ in range(int(sys.argv[3]) // int(sys.argv[2]))]
step(); step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5): step()
print(told, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def run(choice: str, block_bytes: int = 2**21, together: int = 24 * 2**20, **environment: str) -> list[str]:
    command = [sys.executable, "-c", FAULTS, choice, str(block_bytes), str(together)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=True)
    return result.stdout.split()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_pages_are_not_fetched_again() -> None:
    (_, without), (told, kept) = run("leave"), run("gathers")
    assert told == "True"
    assert int(without) > 10_000 and int(kept) < int(without) / 10


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_large_blocks_are_given_back_where_units_are_gathered() -> None:
    _, fetched = run("gathers", block_bytes=2**23, together=48 * 2**20)
    assert int(fetched) > 10_000  # all pages again, in each of five steps


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_large_blocks_stay_where_nothing_is_gathered() -> None:
    told, fetched = run("whole", block_bytes=2**23, together=48 * 2**20)
    assert told == "True" and int(fetched) < 1_000


@pytest.mark.parametrize(
    "environment", [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"LD_PRELOAD": "/nowhere/libjemalloc.so.2"}], ids=str
)
def test_a_tuned_allocator_is_left_alone(environment: dict[str, str]) -> None:
    assert run("gathers", **environment)[0] == "False"
