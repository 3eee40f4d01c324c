# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Where the time of the last steps went, as ordinary logs: they show in TensorBoard, W&B, a Trainer's progress bar."""

from __future__ import annotations

from accelerate_lshdp.accelerator.step_statistics import StepStatistics
from accelerate_lshdp.data.place import MicroBatchPlace


def step_logs(statistics: StepStatistics | None, place: MicroBatchPlace | None) -> dict[str, float]:
    """Medians over the last steps, the same on all ranks but for ``step_seconds``; empty before the first step.

    Seconds of each rank's computing and waiting (``compute_seconds/rank_0``, ...), ``idle_fraction``,
    ``samples_per_second``, and the samples of each rank in a global batch (``batch_size/rank_0``, ...).

    Args:
        statistics: of the last steps; None: there was none.
        place: of the last batch; None: its sizes are not known.
    """
    if statistics is None:
        return {}
    logs: dict[str, float] = {
        "step_seconds": statistics.seconds,
        "samples_per_second": statistics.samples_per_second,
        "idle_fraction": statistics.idle_fraction,
    }
    of_ranks = {
        "compute_seconds": statistics.compute_seconds,
        "wait_seconds": statistics.wait_seconds,
        "batch_size": () if place is None else place.cut.sizes,
    }
    for name, values in of_ranks.items():
        logs.update({f"{name}/rank_{rank}": value for rank, value in enumerate(values)})
    return {name: float(f"{value:.4g}") for name, value in logs.items()}
