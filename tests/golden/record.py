# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Records the golden trajectories: what one process in plain torch gives, with the versions that gave it.

    python tests/golden/record.py

They are recorded anew only where a change of torch or transformers has changed what one process computes.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
import transformers


sys.path.insert(0, str(Path(__file__).parents[1]))
from training_cases import CASES, reference_run  # noqa: E402 - the helpers lie beside this folder


FILE = Path(__file__).with_name("trajectories.json")
STEPS, TOTAL = 20, 4
OPTIONS = {"lr": 3e-3, "weight_decay": 0.05, "max_grad_norm": 1.0}
#: Relative. Another processor has other kernels, whose rounding errors of 1e-16 grow over the steps.
TOLERANCE = 1e-9


def batches() -> list[list[int]]:
    """The samples of each global batch."""
    return [list(range(TOTAL * step, TOTAL * (step + 1))) for step in range(STEPS)]


def trajectory(model: str) -> dict[str, list[float]]:
    """Losses and gradient norms (before clipping) of each step, in fp64."""
    weighting = CASES[model].weighting
    result = reference_run(model, torch.float64, batches(), weighting=weighting, steps=STEPS, **OPTIONS)
    return {"losses": result.losses, "gradient_norms": result.grad_norms}


def record() -> dict[str, Any]:
    """All trajectories, with what they were computed with."""
    return {
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "steps": STEPS,
        "global_batch": TOTAL,
        "dtype": "float64",
        "optimizer": {"name": "AdamW", **OPTIONS},
        "tolerance": TOLERANCE,
        "trajectories": {model: trajectory(model) for model in CASES},
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(record(), indent=1) + "\n", encoding="utf-8")
    print(f"wrote {FILE}")
