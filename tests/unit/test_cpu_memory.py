# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Small freed blocks stay with the process, large ones do not."""

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
told = keep_freed_memory() if sys.argv[1] == "keep" else None
def step():
    blocks = [numpy.ones(int(sys.argv[2]) // 8) for _ in range((48 << 20) // int(sys.argv[2]))]
step(); step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5): step()
print(told, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def run(choice: str, block_bytes: int = 2**21, **environment: str) -> list[str]:
    command = [sys.executable, "-c", FAULTS, choice, str(block_bytes)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=True)
    return result.stdout.split()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_pages_are_not_fetched_again() -> None:
    (_, without), (told, kept) = run("leave"), run("keep")
    assert told == "True"
    assert int(without) > 10_000 and int(kept) < int(without) / 10


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_large_blocks_are_given_back() -> None:
    _, fetched = run("keep", block_bytes=2**23)
    assert int(fetched) > 10_000  # all pages again, in each of five steps


@pytest.mark.parametrize(
    "environment", [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"LD_PRELOAD": "/nowhere/libjemalloc.so.2"}], ids=str
)
def test_a_tuned_allocator_is_left_alone(environment: dict[str, str]) -> None:
    assert run("keep", **environment)[0] == "False"
