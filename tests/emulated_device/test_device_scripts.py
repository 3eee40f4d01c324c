# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A recipe on the emulated device trains as it does on CPUs."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import launch

from accelerate_lshdp import Plan


pytestmark = [
    pytest.mark.slow,
    pytest.mark.compiler,
    pytest.mark.timeout(300),
]
ROOT = Path(__file__).parents[2]
RUN = ROOT / "tests" / "emulated_device" / "run_on_device.py"


def train(command: list[str | Path], *, on_device: bool) -> None:
    """Runs a script on two ranks."""
    ranks = launch([RUN, *command] if on_device else command, 2, timeout=200)
    assert ranks.returncode == 0, ranks.stderr[-6000:]
    if on_device:
        for process in ranks.processes:
            found = json.loads(process.stdout.splitlines()[-1])
            assert found["races"] == []
            assert found["to_device_bytes"] > 0


def plan_in(folder: Path) -> Path:
    folder.mkdir()
    Plan.from_batch_sizes([3, 1], strategy="lsdp").save(folder / "plan.json")
    return folder / "plan.json"


def test_a_recipe(on_device: Callable[..., list], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(Path(textwrap.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    losses = []
    for place in ("device", "host"):
        folder = tmp_path / place
        options = {
            "plan": plan_in(folder),
            "output_dir": folder,
            "train_file": text,
            "block_size": 32,
            "max_train_steps": 5,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        train([ROOT / "recipes" / "gpt2_causal_lm.py", *words], on_device=place == "device")
        losses.append(json.loads((folder / "all_results.json").read_text())["losses"])
    assert len(losses[0]) == 5
    assert losses[0] == pytest.approx(losses[1], rel=0, abs=1e-4)
