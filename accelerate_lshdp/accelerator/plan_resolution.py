# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What a run is told to do: plan, options and environment, resolved in one place and agreed on by all ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from accelerate_lshdp.accelerator.plugin import AUTO, LSDPPlugin
from accelerate_lshdp.documents.placement import ModelPlacement
from accelerate_lshdp.documents.plan import Automatic, Plan, Strategy
from accelerate_lshdp.documents.value_checks import located
from accelerate_lshdp.runtime.option_advice import variable_of


@dataclass(frozen=True, slots=True)
class BatchKeywords:
    """What the accelerator's keywords say about batch sizes; None: left to the plan.

    Args:
        batch_sizes: one batch size, or (micro-batch size, accumulation steps), a rank; or ``"auto"``.
        total_batch_size: samples in a global batch.
        rebalance_every, dead_band: of automatic batch sizes, see ``accelerate_lshdp.documents.plan.Automatic``.
    """

    batch_sizes: Sequence[Any] | str | None = None
    total_batch_size: int | None = None
    rebalance_every: int | None = None
    dead_band: float | None = None

    @property
    def is_automatic(self) -> bool:
        return self.batch_sizes == "auto" if isinstance(self.batch_sizes, str) else False


def resolve_plan(
    plan: Plan | str | os.PathLike[str] | None,
    keywords: BatchKeywords,
    plugin: LSDPPlugin,
    placement: ModelPlacement | Mapping[str, Any] | str | None = None,
) -> tuple[Plan, LSDPPlugin]:
    """The plan and the options of this process: keyword, then plan, then environment, then default.

    Args:
        plan: a plan, the path of one, or None: from ``ACCELERATE_LSHDP_PLAN``, or equal batches if that is not set.
        keywords: batch sizes given instead of, or beside, ``plan``.
        plugin: the user's options.
        placement: given instead of, or beside, that of the plan; a mapping is read as the section of a plan.
            ``"auto"``: as the option `placement` of the plugin.

    Returns:
        The plan, and the options with every field filled in. Where the option `placement` is ``"auto"``, the plan has
        no placement yet.

    Raises:
        PlanError: a plan that cannot be read or is malformed.
        ValueError: keywords that contradict each other or the plan.
    """
    if isinstance(placement, str):
        if placement != AUTO:
            raise ValueError(f"found placement={placement!r}, expected the section of a plan, or {AUTO!r}")
        plugin, placement = replace(plugin, placement=AUTO), None
    if isinstance(placement, Mapping):
        with located("placement"):
            placement = ModelPlacement.read(dict(placement))
    if plan is not None and not isinstance(plan, Plan):
        plan = Plan.load(plan)
    if plan is None:
        plan = Plan.from_environment()
    if plan is None:
        options = plugin.resolve()
        finds_placement = placement is None and options.placement == AUTO
        if finds_placement and options.strategy is not Strategy.OSDP and _strategy_was_given(plugin):
            raise ValueError(
                f'found strategy "{options.strategy}" with placement={AUTO!r} (or {variable_of("placement")}={AUTO}),'
                f' expected "{Strategy.OSDP}", the one strategy whose blocks differ; leave the strategy out'
            )
        if (finds_placement or placement is not None) and not _strategy_was_given(plugin):
            options.strategy = Strategy.OSDP  # the one strategy that has placements
        placed_by = ("strategy", "communication_dtype", "powersgd_rank", "powersgd_warmup_steps", "intra_node")
        said = {name: getattr(options, name) for name in placed_by}
        if keywords.batch_sizes is None or isinstance(keywords.batch_sizes, str):
            plan = Plan.equal(**said, placement=placement)
        else:
            plan = Plan.from_batch_sizes(keywords.batch_sizes, **said, placement=placement)
    elif placement is not None:
        plan = _with_placement(plan, placement)
    plan = _apply_batch_keywords(plan, keywords)
    return plan, plugin.resolve(plan)


def _strategy_was_given(plugin: LSDPPlugin) -> bool:
    return plugin.strategy is not None or bool(os.environ.get(variable_of("strategy"), "").strip())


def _with_placement(plan: Plan, placement: ModelPlacement) -> Plan:
    if plan.placement not in (None, placement):
        raise ValueError(
            f"placement={placement} was given as a keyword, but the plan says {plan.placement}; give only one of them"
        )
    return plan if plan.placement == placement else plan.with_placement(placement)


def _apply_batch_keywords(plan: Plan, keywords: BatchKeywords) -> Plan:
    """The plan as the keywords complete it; raises ValueError where they contradict it."""
    sizes, total = keywords.batch_sizes, keywords.total_batch_size
    if isinstance(sizes, str) and not keywords.is_automatic:
        raise ValueError(f"found batch_sizes={sizes!r}, expected one entry a rank, or 'auto'")
    if total is not None and plan.total_batch_size not in (None, total):
        raise ValueError(
            f"total_batch_size={total} was given as a keyword, but the plan says {plan.total_batch_size}; give only "
            "one of them"
        )
    if keywords.is_automatic or plan.automatic is not None:
        if sizes is not None and not keywords.is_automatic:
            raise ValueError(
                f"batch_sizes={list(sizes)} was given as a keyword, but the plan says that the run finds its sizes "
                "itself; leave the keyword out, or remove the plan's section automatic"
            )
        return _with_automatic(plan, keywords)
    if sizes is not None and plan.micro_batches != _micro_batches(sizes):
        raise ValueError(
            f"batch_sizes={list(sizes)} was given as a keyword, but the plan says {plan.micro_batches} "
            "(micro-batch size, accumulation steps); give only one of them"
        )
    given = {"rebalance_every": keywords.rebalance_every, "dead_band": keywords.dead_band}
    if total is not None and plan.batch is None:
        given["total_batch_size"] = total
    useless = [f"{name}={value}" for name, value in given.items() if value is not None]
    if useless:
        raise ValueError(f"{', '.join(useless)} has a meaning with batch_sizes='auto' only; add that, or leave it out")
    return plan


def _with_automatic(plan: Plan, keywords: BatchKeywords) -> Plan:
    total = plan.total_batch_size if keywords.total_batch_size is None else keywords.total_batch_size
    if total is None and plan.automatic is None:
        raise ValueError(
            "found batch_sizes='auto' without total_batch_size, expected the samples of a global batch: the run finds "
            "how to divide them, not how many there are. Give total_batch_size=..."
        )
    planned = Automatic(total) if plan.automatic is None else replace(plan.automatic, total=total)
    options = {"rebalance_every": keywords.rebalance_every, "dead_band": keywords.dead_band}
    for name, value in options.items():
        if plan.automatic is not None and value not in (None, getattr(planned, name)):
            raise ValueError(
                f"{name}={value} was given as a keyword, but the plan says {getattr(planned, name)}; give only one"
            )
    return plan.with_automatic(replace(planned, **{k: v for k, v in options.items() if v is not None}))


def _micro_batches(batch_sizes: Sequence[Any]) -> list[tuple[int, int]]:
    return Plan.from_batch_sizes(batch_sizes, allow_unequal_accumulation=True).micro_batches
