# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Freed memory stays with the process."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest


# Blocks below the threshold for mappings, freed together: their pages lie at the end of the heap.
FAULTS = """
import resource, sys
from accelerate_lshdp.runtime.cpu_memory import keep_freed_memory
import numpy
told = keep_freed_memory() if sys.argv[1] == "keep" else None
def step():
    blocks = [numpy.ones(1 << 18) for _ in range(64)]
step(); step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5): step()
print(told, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def run(choice: str, **environment: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", FAULTS, choice], capture_output=True, text=True, timeout=60, env=environment, check=True
    )
    return result.stdout.split()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_pages_are_not_fetched_again() -> None:
    (_, without), (told, kept) = run("leave"), run("keep")
    assert told == "True"
    assert int(without) > 10_000 and int(kept) < int(without) / 10


@pytest.mark.parametrize(
    "environment", [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"LD_PRELOAD": "/nowhere/libjemalloc.so.2"}], ids=str
)
def test_a_tuned_allocator_is_left_alone(environment: dict[str, str]) -> None:
    assert run("keep", **environment)[0] == "False"
