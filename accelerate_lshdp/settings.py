"""What a run is told to do: plan, options and environment, resolved in one place and agreed on by all ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from accelerate_lshdp.plan import Plan
from accelerate_lshdp.plugin import LSDPPlugin


#: What accelerate's own launcher and plugins set for engines other than ours.
_OTHER_ENGINES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "accelerate's ParallelismConfig",
}
_OTHER_KEYWORDS = ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "parallelism_config")


def resolve_plan(
    plan: Plan | str | os.PathLike[str] | None, batch_sizes: Sequence[Any] | None, plugin: LSDPPlugin
) -> tuple[Plan, LSDPPlugin]:
    """The plan and the options of this process: keyword, then plan, then environment, then default.

    Args:
        plan: a plan, the path of one, or None: from ``ACCELERATE_LSHDP_PLAN``, or equal batches if that is not set.
        batch_sizes: one batch size, or (micro-batch size, accumulation steps), a rank; instead of ``plan``.
        plugin: the user's options.

    Returns:
        The plan, and the options with every field filled in.

    Raises:
        PlanError: a plan that cannot be read or is malformed.
        ValueError: keywords that contradict each other or the plan.
    """
    if plan is not None and not isinstance(plan, Plan):
        plan = Plan.load(plan)
    if plan is None:
        plan = Plan.from_environment()
    if batch_sizes is not None:
        given = Plan.from_batch_sizes(batch_sizes, allow_unequal_accumulation=True)
        if plan is None:
            options = plugin.resolve()
            plan = Plan.from_batch_sizes(
                batch_sizes, strategy=options.strategy, communication_dtype=options.communication_dtype
            )
        elif plan.micro_batches != given.micro_batches:
            raise ValueError(
                f"batch_sizes={list(batch_sizes)} was given as a keyword, but the plan says {plan.micro_batches} "
                "(micro-batch size, accumulation steps); give only one of them"
            )
    if plan is None:
        options = plugin.resolve()
        plan = Plan.equal(strategy=options.strategy, communication_dtype=options.communication_dtype)
    return plan, plugin.resolve(plan)


def refuse_other_engines(keywords: dict[str, Any]) -> None:
    """Raises ValueError if another engine is configured for the same model."""
    given = [name for name in _OTHER_KEYWORDS if keywords.get(name) is not None]
    if given:
        raise ValueError(
            f"{', '.join(given)} cannot be combined with LSHDPAccelerator, which places parameters itself; choose a "
            "strategy in the plan or in LSDPPlugin(strategy=...) instead"
        )
    configured = [name for name in _OTHER_ENGINES if os.environ.get(name, "false").lower() == "true"]
    if configured:
        raise ValueError(
            f"{' and '.join(_OTHER_ENGINES[name] for name in configured)} is switched on by {', '.join(configured)}; "
            "LSHDPAccelerator cannot share a model with it. Use a config file of `accelerate-lshdp config`"
        )


def switch_off_other_engines() -> None:
    """Lets accelerate start without the engines that ``refuse_other_engines`` refused, so that ranks can meet."""
    for name in _OTHER_ENGINES:
        os.environ.pop(name, None)
