# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Waits of the engine are needed: without any single one of them a training shows that it is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from mutated_run import sites


pytestmark = [
    pytest.mark.slow,
    pytest.mark.compiler,
    pytest.mark.timeout(300),
]
RUN = Path(__file__).with_name("mutated_run.py")
PACKAGE = Path(__file__).parents[2] / "accelerate_lshdp"
#: Ranks of trainings in which something of these files happens; of others, 2.
RANKS = {"engine/wire/node_first.py": 3, "engine/stores/fsdp2/streams.py": 4}
#: Not run here: what torch does itself in the versions that have `reset_iter_state`, and what only CUDA has.
ELSEWHERE = ("engine/stores/fsdp2/versions.py", "engine/stores/streamed/pinning.py")
SITES = [
    pytest.param(path, number, id=f"{path.removeprefix('engine/')}:{site.lineno}")
    for path in sorted(file.relative_to(PACKAGE).as_posix() for file in (PACKAGE / "engine").rglob("*.py"))
    if path not in ELSEWHERE
    for number, site in enumerate(sites(PACKAGE / path))
]


def run_ranks(store: Path, path: str, number: int) -> list[str | None]:
    """What each rank has found; one that was ended for another's sake has found something, too."""
    ranks = RANKS.get(path, 2)
    started = [
        subprocess.Popen(
            [sys.executable, str(RUN), str(rank), str(ranks), str(store), path, str(number)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    found = []
    for process in started:
        try:
            output, errors = process.communicate(timeout=200)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
        lines = [line for line in output.splitlines() if line.startswith(("null", '"'))]
        found.append(json.loads(lines[-1]) if lines else f"ended with {process.returncode}: {errors[-2000:]}")
    return found


@pytest.mark.parametrize("path", sorted({site.values[0] for site in SITES}))
def test_nothing_is_found_where_nothing_is_missing(on_device: Callable[..., list], tmp_path: Path, path: str) -> None:
    assert set(run_ranks(tmp_path / "store", path, -1)) == {None}


@pytest.mark.parametrize(("path", "number"), SITES)
def test_a_wait_that_is_left_out_is_found(
    on_device: Callable[..., list], tmp_path: Path, path: str, number: int
) -> None:
    assert any(run_ranks(tmp_path / "store", path, number))
