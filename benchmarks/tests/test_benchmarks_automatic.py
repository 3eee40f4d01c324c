# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The benchmark of `launch --auto` runs from end to end; its unmodified scripts get the parameters of one process."""

from __future__ import annotations

import json
from pathlib import Path

import automatic_start
import pytest
from limits import Limit


SMALL = ["--layers", "1", "--batch-size", "4", "--steps", "12", "--counted", "4", "--turns", "1"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", automatic_start.KINDS)
def test_unmodified_scripts_get_the_parameters_of_one_process(tmp_path: Path, capsys, kind: str) -> None:
    options = ["--kinds", kind, "--no-quotas", "--profile-seconds", "10", "--output-dir", str(tmp_path)]
    assert automatic_start.main([*SMALL, *options]) in (0, 1)  # how long steps take is not judged here
    results = json.loads((tmp_path / "results.json").read_text())
    found = results["scripts"][kind]
    assert len(found["seconds"]["auto"]) == len(found["seconds"]["planned"]) == 4
    assert max(found["differences"]["auto"] + found["differences"]["planned"]) <= 5e-6
    assert sum(results["configuration"]["planned_batch_sizes"]) == 8
    assert f"{kind}: parameters" in capsys.readouterr().out


def test_a_limit_holds_up_to_its_value() -> None:
    assert Limit("x", 0.05, 0.05).holds and not Limit("x", 0.051, 0.05).holds
    assert not Limit("x", float("nan"), 0.05).holds
