# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Keywords of `LSDPPlugin` of the wrong type are refused when it is made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from accelerate_lshdp import LSDPPlugin


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("pin_memory", "false", "True or False"),
        ("reshard_after_forward", 0, "True or False"),
        ("prefetch", "2", "an integer, 1 or more"),
        ("prefetch", True, "an integer, 1 or more"),
        ("powersgd_rank", 2.5, "an integer, 1 or more"),
        ("powersgd_warmup_steps", -1, "an integer, 0 or more"),
        ("bucket_megabytes", "25", "positive"),
        ("bucket_megabytes", float("nan"), "positive"),
    ],
)
def test_wrong_types_are_refused(name: str, value: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r} from a keyword of LSDPPlugin should be {expected}"):
        LSDPPlugin(**{name: value})


def test_numbers_of_numpy_are_numbers() -> None:
    plugin = LSDPPlugin(prefetch=np.int64(2), bucket_megabytes=np.float32(0.5))

    assert plugin.prefetch == 2 and plugin.bucket_megabytes == 0.5
