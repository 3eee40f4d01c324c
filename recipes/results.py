# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`all_results.json`: what a recipe measured, written once at the end by the main process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accelerate_lshdp import LSHDPAccelerator


def write_results(accelerator: LSHDPAccelerator, output_dir: str, results: dict[str, Any]) -> None:
    """Write `results` and the measured speed to `<output_dir>/all_results.json` on the main process, and print it.

    The speed is that of the last optimizer steps (medians): `step_seconds`, `samples_per_second`, `idle_fraction`
    (1 - mean / max of the ranks' compute seconds) and, one entry a rank, `compute_seconds` and `wait_seconds`. All
    are null if this run made no step.
    """
    if not accelerator.is_main_process:
        return
    statistics = accelerator.step_statistics
    speed = {
        "step_seconds": statistics and statistics.seconds,
        "samples_per_second": statistics and statistics.samples_per_second,
        "idle_fraction": statistics and statistics.idle_fraction,
        "compute_seconds": statistics and list(statistics.compute_seconds),
        "wait_seconds": statistics and list(statistics.wait_seconds),
    }
    path = Path(output_dir) / "all_results.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**results, **speed}, indent=2) + "\n", encoding="utf-8")
    if statistics is not None:
        accelerator.print(
            f"{path}: {statistics.seconds:.3g} s a step, {statistics.samples_per_second:.4g} samples/s, "
            f"{statistics.idle_fraction:.1%} idle, batch sizes {results['batch_sizes']}"
        )
