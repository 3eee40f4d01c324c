# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Planned memory of devices is enough: emulated devices that have as much, and no more, train to the end."""

from __future__ import annotations

import pytest
import torch.multiprocessing as mp
from device_memory import random_job, train
from emulated_ranks import on_ranks


pytestmark = [pytest.mark.compiler, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("nodes", [(1, 1), (2,), (1, 2), (2, 2)])
def test_what_was_predicted_is_enough(nodes: tuple[int, ...]) -> None:
    """25 random placements, batches and precisions."""
    for seed in range(25):
        job = random_job(seed, nodes)
        for taken in on_ranks(train, sum(nodes), job):
            assert 0 < max(taken["backward"], taken["step"]) <= taken["predicted"], job


def test_half_of_it_is_not_enough() -> None:
    job = random_job(1, (1, 1))
    with pytest.raises(mp.ProcessRaisedException, match="OutOfMemoryError"):
        on_ranks(train, 2, job, 0.5)
