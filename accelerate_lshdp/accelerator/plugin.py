# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The user's options, beside accelerate's FSDP and DeepSpeed plugins: keywords, environment, or the plan."""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, fields
from enum import Enum
from numbers import Integral, Real
from typing import Any

from accelerate_lshdp.data.weighting import LossWeighting
from accelerate_lshdp.documents.placement import ModelPlacement
from accelerate_lshdp.documents.plan import Plan, Strategy
from accelerate_lshdp.documents.plan_sections import (
    COMMUNICATION_DTYPES,
    INTRA_NODE,
    POWERSGD_RANK,
    POWERSGD_WARMUP_STEPS,
    Communication,
)
from accelerate_lshdp.engine.mixed_policies import resolve_placement
from accelerate_lshdp.engine.policies import ShardingPolicies, resolve_policies
from accelerate_lshdp.runtime.option_advice import variable_of
from accelerate_lshdp.runtime.topology import Topology


#: What leaves batch sizes, or the placement, to the run.
AUTO = "auto"


class BatchNormMode(str, Enum):
    """What to do with batch normalisation when batches are unequal."""

    ERROR = "error"
    LOCAL = "local"
    SYNC = "sync"


def parse_flag(text: str) -> bool:
    """A variable that says yes or no. Raises ValueError for anything else."""
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"found {text!r}, expected true or false")


def _number(kind: type, name: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"found {text!r}, expected {name}") from None

    return parse


_integer, _real = _number(int, "an integer"), _number(float, "a number")


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _option(parse: Callable[[str], Any], default: Any) -> Any:
    """A field that is None until it is given; ``default`` applies where keyword, plan and environment are silent."""
    return field(default=None, metadata={"parse": parse, "default": default})


@dataclass
class LSDPPlugin:
    """Options of locally sharded heterogeneous data parallelism.

    An option left at None is looked up in the plan, then in the environment (``LSDP_`` and its name in capitals,
    for example ``LSDP_STRATEGY=fsdp``), then takes its default.

    Args:
        strategy: where parameters live, by a name of `documents.strategy.Strategy`; default ``lsdp``. With ``osdp``
            the plan's placement says it for each unit.
        mixed_precision: ``no``, ``bf16`` (gradients are still reduced in fp32) or ``fp16`` (CUDA). Default: the
            accelerator's.
        placement: ``auto``: when the model is prepared, the run measures it and the machines, and places each unit
            where it is best, with strategy ``osdp``. Default: the placement that the plan has.
        units: class names or module names of the modules that are gathered and reduced together. Default: the model's
            ``_no_split_modules``, else the entries of its ``ModuleList`` and ``Sequential``.
        reshard_after_forward: whether a unit drops its gathered parameters after the forward. Default: all strategies
            but ``zero1`` and ``zero2`` do.
        prefetch: number of units gathered ahead of the computation, on devices with streams. Default 1.
        pin_memory: whether host memory of offloaded parameters is pinned. Default: on devices other than the CPU.
        communication_dtype: how gradients travel between nodes, by a name of `documents.wire_format.WIRE_FORMATS`:
            ``fp32`` (exact; default), or one that sends fewer bytes.
        powersgd_rank: of the matrices that stand for gradients under ``powersgd``. Default 8.
        powersgd_warmup_steps: exact steps at the start of a run with ``powersgd``. Default 10.
        intra_node: how the ranks of a node share parameters and gradients under ``lsdp`` and ``group_sharding``, and
            sum gradients under ``ddp``: ``shared_memory`` (CPU: in memory that all of them map), ``collectives``, or
            ``auto`` (default): shared memory on CPUs.
        bucket_megabytes: size of the gradient buckets of whole parameters (``ddp``; on CPUs also ``lsdp`` and
            ``group_sharding``). Default: N/48 of the model for N nodes (a ring sends N-ths), from 1 to 25.
        loss_weighting: what losses are means over: ``auto`` (default: found out on the first batches), ``sample``,
            ``tokens`` or ``none`` (nothing: the script weights them).
        token_counter: counts the loss tokens of a batch, for ``tokens``, which it stands for where ``loss_weighting``
            is not given. Default: labels other than -100, after the model's shift.
        batch_norm: ``error`` (default), ``local`` (each rank normalises over its own batch) or ``sync`` (CUDA, without
            accumulation): what to do with batch normalisation under unequal batches.

    Raises:
        ValueError: an impossible value, naming the option and where it came from.
    """

    strategy: Strategy | str | None = _option(str, Strategy.LSDP)
    mixed_precision: str | None = _option(str, None)
    placement: str | None = _option(str, None)
    units: tuple[str, ...] | None = _option(_names, None)
    reshard_after_forward: bool | None = _option(parse_flag, None)
    prefetch: int | None = _option(_integer, 1)
    pin_memory: bool | None = _option(parse_flag, None)
    communication_dtype: str | None = _option(str, "fp32")
    powersgd_rank: int | None = _option(_integer, POWERSGD_RANK)
    powersgd_warmup_steps: int | None = _option(_integer, POWERSGD_WARMUP_STEPS)
    intra_node: str | None = _option(str, "auto")
    bucket_megabytes: float | None = _option(_real, None)
    loss_weighting: LossWeighting | str | None = _option(str, LossWeighting.AUTO)
    token_counter: Callable[[Any], int] | None = None
    batch_norm: BatchNormMode | str | None = _option(str, BatchNormMode.ERROR)

    def __post_init__(self) -> None:
        self._check(lambda name: "a keyword of LSDPPlugin")

    def resolve(self, plan: Plan | None = None) -> LSDPPlugin:
        """A copy with every option filled in: keyword, then plan, then environment, then default.

        Raises:
            ValueError: a keyword contradicts the plan, or the environment holds an impossible value.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        if plan is not None:
            if self.placement is not None and not plan.leaves_placement_open:
                found = (
                    f"the placement {plan.placement}" if plan.placement is not None else f'strategy "{plan.strategy}"'
                )
                raise ValueError(
                    f"placement={self.placement!r} was given as a keyword, but the plan says {found}; leave the"
                    f' keyword out, or give a plan of strategy "{Strategy.OSDP}" without a placement'
                )
            communication = plan.communication
            planned = {"strategy": plan.strategy, "communication_dtype": communication.dtype}
            planned["powersgd_rank"] = communication.powersgd_rank
            planned["powersgd_warmup_steps"] = communication.powersgd_warmup_steps
            planned["intra_node"] = communication.intra_node
            for name, value in planned.items():
                if values[name] is not None and str(values[name]) != str(value):
                    raise ValueError(
                        f"{name}={str(values[name])!r} was given as a keyword, but the plan says {str(value)!r}; give "
                        "only one of them, or make them agree"
                    )
                values[name] = value
        decided = () if plan is None or plan.leaves_placement_open else ("placement",)
        for option in fields(self):
            if values[option.name] is None and option.metadata and option.name not in decided:
                values[option.name] = self._from_environment(option)
        resolved = copy(self)  # not made anew: its check would take what the environment says for keywords
        for name, value in values.items():
            setattr(resolved, name, value)
        resolved._check(lambda name: f"the environment ({variable_of(name)})")
        if resolved.loss_weighting is LossWeighting.AUTO and resolved.token_counter is not None:
            resolved.loss_weighting = LossWeighting.TOKENS
        return resolved

    @property
    def communication(self) -> Communication:
        """How gradients travel, of resolved options."""
        return Communication(self.communication_dtype, self.powersgd_rank, self.powersgd_warmup_steps, self.intra_node)

    @staticmethod
    def _from_environment(option: Any) -> Any:
        variable = variable_of(option.name)
        text = os.environ.get(variable)
        if text is None or not text.strip():
            return option.metadata["default"]
        try:
            return option.metadata["parse"](text)
        except ValueError as error:
            raise ValueError(f"{variable}: {error}") from None

    def _check(self, origin: Callable[[str], str]) -> None:
        """Raises ValueError for an impossible value; ``origin`` says where that of an option came from."""
        choices = {
            "strategy": Strategy,
            "loss_weighting": LossWeighting,
            "batch_norm": BatchNormMode,
            "mixed_precision": ("no", "bf16", "fp16"),
            "communication_dtype": COMMUNICATION_DTYPES,
            "intra_node": INTRA_NODE,
            "placement": (AUTO,),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            known = [member.value for member in allowed] if isinstance(allowed, type) else list(allowed)
            if value is None:
                continue
            text = value.value if isinstance(value, Enum) else value
            if text not in known:
                raise ValueError(f"{name}={value!r} from {origin(name)} is not known; use one of {', '.join(known)}")
            setattr(self, name, allowed(text) if isinstance(allowed, type) else text)
        if isinstance(self.units, str):
            self.units = _names(self.units)
        for name in ("reshard_after_forward", "pin_memory"):
            flag = getattr(self, name)
            if flag is not None and not isinstance(flag, bool):  # "false" would count as true
                raise ValueError(f"{name}={flag!r} from {origin(name)} should be True or False")
        for name, least in (("prefetch", 1), ("powersgd_rank", 1), ("powersgd_warmup_steps", 0)):
            number = getattr(self, name)
            if number is not None and not (_is_number(number, Integral) and number >= least):
                raise ValueError(f"{name}={number!r} from {origin(name)} should be an integer, {least} or more")
        megabytes = self.bucket_megabytes
        if megabytes is not None and not (_is_number(megabytes, Real) and megabytes > 0):
            raise ValueError(f"bucket_megabytes={megabytes!r} from {origin('bucket_megabytes')} should be positive")

    def policies(
        self,
        topology: Topology,
        *,
        device_type: str,
        mixed_precision: str = "no",
        placement: ModelPlacement | None = None,
    ) -> ShardingPolicies:
        """What FSDP2 will be told on a topology and a kind of device; needs neither.

        Args:
            topology: nodes and ranks, for example ``Topology(rank=0, node_sizes=(2, 2))``.
            device_type: ``"cpu"`` or ``"cuda"``.
            mixed_precision: the accelerator's, used where the plugin has none.
            placement: of the plan, if it has one.
        """
        resolved = self.resolve()
        options = {
            "device_type": device_type,
            "mixed_precision": resolved.mixed_precision or mixed_precision,
            "reshard_after_forward": resolved.reshard_after_forward,
            "pin_memory": resolved.pin_memory,
            "intra_node": resolved.intra_node,
        }
        if placement is not None:
            return resolve_placement(placement, topology, **options)
        return resolve_policies(Strategy(resolved.strategy), topology, **options)
