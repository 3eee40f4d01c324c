# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The table of strategies: where parameters live, when they are gathered, and what overlaps. Needs no torch.

Plans, the engine, the planner, estimates, benchmarks and the command line read it. A strategy that combines these
properties in a new way is one more member of `Strategy`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class SharedBy(str, Enum):
    """The ranks that share one copy of the parameters."""

    NOBODY = "nobody"
    NODE = "node"
    WORLD = "world"


class Gathered(str, Enum):
    """How often the ranks that share a copy of the parameters gather a unit of it."""

    EACH_PASS = "each_pass"  # in each forward and each backward: dropped in between
    EACH_MICRO_BATCH = "each_micro_batch"  # in each forward: kept until its backward
    EACH_STEP = "each_step"  # in the first forward of an optimizer step: kept until its last backward


@dataclass(frozen=True, slots=True)
class StrategyTraits:
    """The properties of one strategy.

    Args:
        shared_by: the ranks that share one copy of parameters, gradients and optimizer states.
        gathered: how often they gather it; without meaning where nobody shares.
        is_offloaded: the copy is in host memory.
        is_plain: plain PyTorch (DDP, FSDP2, HSDP) with its own collectives on gloo, for comparison.
        is_unequal: every rank gets a batch size that suits its speed.
        is_per_unit: a plan's `placement` may give units other stores; the other traits are those of its default.
        done_by: name of the strategy that is carried out instead, as it sends as much and needs less memory; the other
            traits are those of what is done. None: the strategy is carried out itself.
    """

    shared_by: SharedBy
    gathered: Gathered = Gathered.EACH_PASS
    is_offloaded: bool = False
    is_plain: bool = False
    is_unequal: bool = False
    is_per_unit: bool = False
    done_by: str | None = None

    @property
    def overlaps(self) -> bool:
        """Whether gradients travel between nodes while the backward goes on, also on devices without streams."""
        # FSDP2's own collectives block where there are no streams: all of a world-sharded strategy, and those of
        # plain HSDP, whose all-reduce ours replaces.
        return self.shared_by is not SharedBy.WORLD and not (self.is_plain and self.shared_by is SharedBy.NODE)

    @property
    def complexity(self) -> tuple[bool, int, bool, int]:
        """Sorts strategies from simple to complex: of several that are as fast, the simplest is advised."""
        # A node's copy belongs in host memory, which every node has most of; a copy of all ranks does not.
        unusual = self.is_offloaded is not (self.shared_by is SharedBy.NODE)
        gathers = -list(Gathered).index(self.gathered)
        unusual = unusual and self.shared_by is not SharedBy.NOBODY
        return self.is_per_unit, list(SharedBy).index(self.shared_by), unusual, gathers


class Strategy(str, Enum):
    """The placement of parameters, gradients and optimizer state: whole, sharded, or on the host.

    Attributes:
        traits: its properties.
    """

    traits: StrategyTraits

    DDP = "ddp", StrategyTraits(SharedBy.NOBODY)
    ZERO2 = "zero2", StrategyTraits(SharedBy.WORLD, Gathered.EACH_STEP)
    # ZeRO-1 divides the optimizer states alone. It sends what ZeRO-2 does, and keeps whole gradients and parameters.
    ZERO1 = "zero1", StrategyTraits(SharedBy.WORLD, Gathered.EACH_STEP, done_by="zero2")
    FSDP = "fsdp", StrategyTraits(SharedBy.WORLD)
    FSDP_OFFLOAD = "fsdp_offload", StrategyTraits(SharedBy.WORLD, is_offloaded=True)
    GROUP_SHARDING = "group_sharding", StrategyTraits(SharedBy.NODE)
    LSDP = "lsdp", StrategyTraits(SharedBy.NODE, is_offloaded=True)
    OSDP = "osdp", StrategyTraits(SharedBy.NODE, is_per_unit=True)

    def __new__(cls, name: str, traits: StrategyTraits) -> Strategy:
        member = str.__new__(cls, name)
        member._value_ = name
        member.traits = traits
        return member

    def __str__(self) -> str:
        return self.value

    @property
    def carried_out_as(self) -> Strategy:
        """The strategy that is carried out under this name."""
        return self if self.traits.done_by is None else Strategy(self.traits.done_by)

    @property
    def is_world_sharded(self) -> bool:
        """Whether each rank keeps 1/world of the parameters, so that all ranks form one shard group."""
        return self.traits.shared_by is SharedBy.WORLD

    @property
    def is_node_sharded(self) -> bool:
        """Whether each node keeps a full copy of the parameters, sharded over its ranks."""
        return self.traits.shared_by is SharedBy.NODE

    @property
    def is_offloaded(self) -> bool:
        """Whether parameters and optimizer state live in host memory."""
        return self.traits.is_offloaded

    @property
    def on_one_rank(self) -> Strategy:
        """The strategy that keeps and moves parameters alike where no other rank takes part."""
        if not self.is_world_sharded:
            return self
        return next(s for s in Strategy if s.is_node_sharded and s.is_offloaded == self.is_offloaded)


#: Names that comparisons use for a strategy with unequal batch sizes. They do not change what travels.
UNEQUAL: dict[str, Strategy] = {"hdp": Strategy.DDP, "lshdp": Strategy.LSDP}

#: Plain PyTorch, which comparisons measure the strategies against.
PLAIN: dict[str, StrategyTraits] = {
    "torch_ddp": StrategyTraits(SharedBy.NOBODY, is_plain=True),
    "torch_fsdp": StrategyTraits(SharedBy.WORLD, is_plain=True),
    "torch_hsdp": StrategyTraits(SharedBy.NODE, is_plain=True),
}


def _with_unequal(strategy: Strategy) -> dict[str, StrategyTraits]:
    """A strategy and its name with unequal batch sizes, if it has one."""
    unequal = {name: replace(strategy.traits, is_unequal=True) for name, of in UNEQUAL.items() if of is strategy}
    return {strategy.value: strategy.traits, **unequal}


#: Everything that can be compared and predicted, by name, in the order of tables.
STRATEGIES: dict[str, StrategyTraits] = {
    **PLAIN,
    **{name: traits for strategy in Strategy for name, traits in _with_unequal(strategy).items()},
}


def strategy_traits(strategy: str) -> StrategyTraits:
    """The traits of a strategy by its name.

    Raises:
        ValueError: there is no such strategy.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"found strategy {strategy!r}, expected one of {', '.join(STRATEGIES)}")
    return STRATEGIES[strategy]
