# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The fixture of tests on the emulated device: ranks that have it, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from device_call import call
from workers import WorkerPools


@pytest.fixture(scope="session")
def on_device() -> Iterator[Callable[..., list[Any]]]:
    """``on_device(MODULE, FUNCTION, *arguments, ranks=1, nodes=None)``: what the function returns on each rank."""
    from device_build import missing_tools  # it imports torch, which most tests of one process do without

    reason = missing_tools()
    if reason is not None:
        pytest.skip(reason)
    # Here and not on the ranks, where it would take longer than they may take to get ready.
    built = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("device_build.py"))], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stdout[-6000:] + built.stderr[-6000:]
    pools = WorkerPools()  # not those of other tests, which must not have the device

    def run(
        module: str,
        name: str,
        *arguments: Any,
        ranks: int = 1,
        nodes: tuple[int, ...] | None = None,
        timeout: float = 60.0,
    ) -> list[Any]:
        return pools(ranks).run(call, module, name, arguments, nodes=nodes, timeout=timeout)

    yield run
    pools.close()
