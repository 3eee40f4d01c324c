# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Who says that a run places the units of its model itself: keyword, option, environment, and plans that leave it."""

from __future__ import annotations

from typing import Any

import pytest

from accelerate_lshdp import LSDPPlugin, Plan
from accelerate_lshdp.accelerator.plan_resolution import BatchKeywords, resolve_plan


UNITS = {"units": {"": {"store": "node"}}}
PLACED = Plan.from_dict({**Plan.equal(strategy="osdp").to_dict(), "placement": UNITS})
OPEN = Plan.equal(strategy="osdp")


def resolve(plan: Plan | None = None, keyword: Any = None, **options: Any) -> tuple[str, bool, bool]:
    """Strategy, whether the plan has a placement, and whether the run is to find it."""
    plan, resolved = resolve_plan(plan, BatchKeywords(), LSDPPlugin(**options), keyword)
    assert str(plan.strategy) == str(resolved.strategy)
    return str(plan.strategy), plan.placement is not None, resolved.placement == "auto"


@pytest.mark.parametrize("plan", [None, OPEN])
@pytest.mark.parametrize("way", ["keyword", "option", "environment"])
def test_each_way_leaves_the_placement_to_the_run(
    plan: Plan | None, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "environment":
        monkeypatch.setenv("LSDP_PLACEMENT", "auto")
    placement = "auto" if way == "keyword" else None
    options = {"placement": "auto"} if way == "option" else {}
    assert resolve(plan, placement, **options) == ("osdp", False, True)


def test_nothing_asks_for_it() -> None:
    assert resolve() == ("lsdp", False, False)
    assert resolve(PLACED) == ("osdp", True, False)


def test_plans_and_keywords_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LSDP_PLACEMENT", "auto")
    assert resolve(Plan.equal(strategy="fsdp")) == ("fsdp", False, False)
    assert resolve(PLACED) == ("osdp", True, False)
    assert resolve(None, UNITS) == ("osdp", True, False)
    assert resolve(OPEN, UNITS) == ("osdp", True, False)
    assert resolve(strategy="osdp") == ("osdp", False, True)


@pytest.mark.parametrize("plan", [Plan.equal(strategy="lsdp"), PLACED])
@pytest.mark.parametrize("way", ["keyword", "option"])
def test_a_plan_that_says_it_contradicts(plan: Plan, way: str) -> None:
    options = {"placement": "auto"} if way == "option" else {}
    with pytest.raises(ValueError, match="placement='auto' was given as a keyword, but the plan says"):
        resolve(plan, "auto" if way == "keyword" else None, **options)


def test_another_strategy_has_no_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="found strategy \"lsdp\" with placement='auto'"):
        resolve(keyword="auto", strategy="lsdp")
    monkeypatch.setenv("LSDP_PLACEMENT", "auto")
    monkeypatch.setenv("LSDP_STRATEGY", "ddp")
    with pytest.raises(ValueError, match="LSDP_PLACEMENT=auto"):
        resolve()


def test_other_words_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match="placement='best' from a keyword of LSDPPlugin is not known; use one of auto"
    ):
        LSDPPlugin(placement="best")
    with pytest.raises(ValueError, match="found placement='best'"):
        resolve(keyword="best")
    monkeypatch.setenv("LSDP_PLACEMENT", "best")
    with pytest.raises(ValueError, match="LSDP_PLACEMENT"):
        resolve()
