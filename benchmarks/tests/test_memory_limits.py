# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Memory is never under-predicted: nodes that may take no more than was predicted are not ended by the kernel."""

from __future__ import annotations

from typing import Any

import pytest
from laboratory.emulated_cluster.cgroups import ControlGroup, Hierarchy
from memory_runs.launch import Killed, train
from memory_runs.random_jobs import LAYOUTS, large_job, random_job


pytestmark = [pytest.mark.root]
#: What is predicted for processes is at most so many times what they take.
MOST_ABOVE = 1.15
REFUSAL = ControlGroup.missing(memory=True)
VERSION = getattr(Hierarchy.find("memory"), "version", None)
needs_groups = pytest.mark.skipif(
    REFUSAL is not None or VERSION != 1, reason=f"no memory control groups of version 1 here: {REFUSAL}"
)


@needs_groups
def test_what_was_predicted_is_enough():
    jobs = [random_job(seed, (2,), blocks=3) for seed in (1, 6)]
    assert len(train(jobs, (2,))) == len(jobs)


@needs_groups
@pytest.mark.slow
def test_less_than_what_is_taken_is_not_enough():
    job = random_job(1, (1, 1), blocks=3)
    ((first, second),) = train([{**job, "allowed": None}], (1, 1))
    with pytest.raises(Killed, match="job 0"):
        train([{**job, "allowed": [first.peak // 2, second.peak // 2]}], (1, 1))


@needs_groups
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("nodes", LAYOUTS)
def test_limits_that_were_planned_for_are_kept(nodes):
    """25 random trainings on each of four layouts, each launched by itself, as a planned run is."""
    killed, most = outcomes([random_job(seed, nodes) for seed in range(25)], nodes)
    assert killed == [] and most <= MOST_ABOVE


@needs_groups
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_limits_of_larger_models_are_kept():
    killed, most = outcomes([large_job(seed, (1, 1)) for seed in range(16)], (1, 1))
    assert killed == [] and most <= MOST_ABOVE


def outcomes(jobs: list[dict[str, Any]], nodes: tuple[int, ...]) -> tuple[list[int], float]:
    """The places of jobs that took more than was predicted, and the largest ratio of what processes may take and took.

    The processes are whole ones, as planners count them: with what they had before the model.
    """
    killed, most = [], 0.0
    for place, job in enumerate(jobs):
        try:
            (runs,) = train([job], nodes)
        except Killed:
            killed.append(place)
            continue
        for run, allowed in zip(runs, job["allowed"], strict=True):
            most = max(most, (run.base + allowed) / (run.base + run.peak))
    return killed, most
