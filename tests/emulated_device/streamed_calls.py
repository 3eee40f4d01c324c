# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What tests of the streamed store call on their ranks, with cases as plain dictionaries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import streamed_training
from streamed_training import Case


def train(options: dict[str, Any]) -> dict[str, Any]:
    return streamed_training.train(Case(**options))


def equals_resident(options: dict[str, Any]) -> bool:
    case = Case(**options)
    return streamed_training.equals_resident(case, replace(case, strategy="group_sharding"))
