# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Checks of a comparison on this machine, before any process is started: they would end one of hours at its end."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def check_models(config: Path, models: Mapping[str, Mapping[str, Any]]) -> None:
    """Checks the models of a configuration file. Raises ValueError: transformers refuses one."""
    # It takes seconds to import, and is needed on one node only.
    from accelerate_lshdp.comparing.models import check_model

    for name, description in models.items():
        try:
            check_model(description)
        except ValueError as error:
            raise ValueError(f"{config}: models.{name}: {error}") from error


def check_data(models: Mapping[str, Mapping[str, Any]]) -> None:
    """Checks that the data of all models can be loaded. Raises ValueError: a library is not installed."""
    if find_spec("sklearn") is None and any(model["kind"] == "vit" for model in models.values()):
        raise ValueError(
            "found no scikit-learn on this machine, expected it for its images of handwritten digits. Install it: pip"
            " install scikit-learn"
        )
