"""Fixtures of all tests: the worker pools, and a process in which no test sees what another one left behind."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator


# Read when huggingface_hub, tokenizers and torch are imported, so set before any test module is.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
from workers import WorkerPools  # noqa: E402


# Collecting makes some hundred thousand objects that stay. Python's collector would walk through them again and again
# while they are made, and with every full collection of the tests after it: a tenth of the processor time of a run.
gc.disable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the tests of a file in one process, and all that use the emulated cluster, where `-n` starts several."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            folder = item.path.parent
            together = folder if folder.parent.name == "benchmarks" else item.path
            item.add_marker(pytest.mark.xdist_group(str(together.relative_to(config.rootpath))))


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
