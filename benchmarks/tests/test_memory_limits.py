# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Memory is never under-predicted: nodes that may take no more than was predicted are not ended by the kernel."""

from __future__ import annotations

import pytest
from laboratory.emulated_cluster.cgroups import ControlGroup, Hierarchy
from memory_runs.launch import Killed, train
from memory_runs.random_jobs import LAYOUTS, random_job


pytestmark = [pytest.mark.root]
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
    killed = []
    for seed in range(25):
        try:
            assert len(train([random_job(seed, nodes)], nodes)) == 1
        except Killed:
            killed.append(seed)
    assert killed == []
