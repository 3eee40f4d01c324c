# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Fixtures of all tests: the worker pools, and a process in which no test sees what another one left behind."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from typing import Any


# Read when huggingface_hub, tokenizers and torch are imported, so set before any test module is.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis  # noqa: E402
import pytest  # noqa: E402
from workers import WorkerPools  # noqa: E402


# No test says how fast a machine has to be; by default an example that takes longer than 200 ms fails.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")


# Collecting makes some hundred thousand objects that stay. Python's collector would walk through them again and again
# while they are made, and with every full collection of the tests after it: a tenth of the processor time of a run.
gc.disable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keeps all tests that use the emulated cluster in one process, where `-n` starts several."""
    from xdist.scheduler import LoadScopeScheduling

    # Not by marks and `--dist loadgroup`: xdist 3.8 writes them where pytest 9.2 does not read them.
    class TestScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            # Others one by one: with whole files, one process ends minutes before the other.
            return "benchmarks" if nodeid.startswith("benchmarks/") else nodeid

    return TestScheduling(config, log)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPools]:
    """`workers(world_size).run(function, *args, ...)`: see workers.py."""
    pools = WorkerPools()
    yield pools
    pools.close()


@pytest.fixture(autouse=True)
def clean_process() -> Iterator[None]:
    """Restore the environment and forget accelerate's singletons after each test that runs in this process."""
    environment = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environment)
    state = sys.modules.get("accelerate.state")  # planning tests need not import torch for this
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
