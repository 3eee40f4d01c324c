# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What a rank trains before anything is measured."""

from __future__ import annotations

from unittest.mock import MagicMock

from accelerate_lshdp.profiling.rank_session import MeasurementContext, RankSession


def test_the_first_sample_is_on_the_device_too() -> None:
    rank, samples = MagicMock(), MagicMock()
    RankSession(rank, samples, None, None, MeasurementContext(remaining=lambda: 1.0)).warm_up()
    rank.to_device.assert_called_once_with(samples.batch.return_value)
    rank.train.assert_called_once_with(rank.to_device.return_value, synchronise=True)
