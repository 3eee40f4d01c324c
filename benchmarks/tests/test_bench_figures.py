# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Figures of a benchmark on emulated nodes: its limits, and bytes that the kernel counts."""

from __future__ import annotations

from typing import Any

import pytest
from laboratory.limits import Deviation, Limit, Ratio
from laboratory.rank import sent_bytes


def case(label: str, **figures: Any) -> dict[str, Any]:
    given = {"cluster": "c", "model": "m", "network": "n", "label": label, "step_seconds": 1.0}
    return {**given, "predicted_seconds": None, "bytes_between_nodes": None, "formula_bytes": None, **figures}


def test_limits_compare_cases_of_the_same_cluster_and_model() -> None:
    ratio = Limit("r", Ratio(("a", "b"), ("c",), "n", "step_seconds"), 0.5)
    cases = [case("a", step_seconds=3.0), case("b", step_seconds=1.0), case("c", step_seconds=4.0)]
    assert ratio.judge(cases) == {"name": "r", "value": 0.25, "limit": 0.5, "holds": True}
    slower = [{**entry, "model": "other", "step_seconds": 2.0} for entry in cases]
    assert ratio.judge(cases + slower)["value"] == 1.0
    failed = [*cases[:2], case("c", step_seconds=None)]
    assert ratio.judge(failed) == {"name": "r", "value": None, "limit": 0.5, "holds": False}
    one_of_two = [case("a", step_seconds=None), *cases[1:]]
    assert ratio.judge(one_of_two)["value"] == 0.25


def test_limits_of_errors_take_the_median_or_the_largest() -> None:
    cases = [case("a", predicted_seconds=1.02), case("b", predicted_seconds=0.9), case("c", predicted_seconds=1.03)]
    middle = Limit("m", Deviation("predicted_seconds", "step_seconds", middle=True), 0.05).judge(cases)
    assert middle["value"] == pytest.approx(0.03) and middle["holds"]
    largest = Limit("l", Deviation("predicted_seconds", "step_seconds", middle=False), 0.05).judge(cases)
    assert largest["value"] == pytest.approx(0.1) and not largest["holds"]
    bytes_of = Limit("b", Deviation("bytes_between_nodes", "formula_bytes", middle=False), 0.02)
    sent = [case("a", bytes_between_nodes=[101.0, 100.0], formula_bytes=[100.0, 100.0]), case("b")]
    assert bytes_of.judge(sent)["value"] == pytest.approx(0.01)
    assert not bytes_of.judge([case("b")])["holds"]


def test_bytes_of_an_interface_are_those_that_it_sent() -> None:
    text = "Inter-|   Receive\n face |bytes\n"
    text += "    lo: 7 1 0 0 0 0 0 0 42 1 0 0 0 0 0 0\n  eth0: 1 1 0 0 0 0 0 0 2 1 0 0 0 0 0 0\n"
    assert sent_bytes("lo", text) == 42
    with pytest.raises(ValueError, match="found no interface eth1"):
        sent_bytes("eth1", text)
