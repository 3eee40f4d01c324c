# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What is compared: a strategy, a format for gradients and a rule for batch sizes. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate_lshdp.documents.strategy import PLAIN, UNEQUAL, SharedBy, Strategy, strategy_traits


EQUAL, PLAN, AUTO = "equal", "plan", "auto"
FULL_PRECISION = "fp32"
#: Plain PyTorch: what the others are compared with. It uses nothing of this package.
PEERS = tuple(PLAIN)


@dataclass(frozen=True)
class Case:
    """One row of a comparison.

    Args:
        strategy: one of `documents.strategy.STRATEGIES`.
        communication_dtype: how gradients travel between nodes, ``fp32`` or a lossy format.
        batch_sizes: samples of each rank; `EQUAL`; `PLAN`, what the planner makes of measured ranks; or `AUTO`, what
            the training finds itself. None: what the strategy's name stands for.
    """

    strategy: str
    communication_dtype: str = FULL_PRECISION
    batch_sizes: str | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.batch_sizes is None:
            object.__setattr__(self, "batch_sizes", usual_sizes(self.strategy))

    @property
    def label(self) -> str:
        """How tables and limits name it; batch sizes are in it where they are not the strategy's own."""
        name = self.strategy if self.is_peer else f"{self.strategy} {self.communication_dtype}"
        if self.batch_sizes == usual_sizes(self.strategy):
            return name
        sizes = self.batch_sizes if isinstance(self.batch_sizes, str) else " ".join(map(str, self.batch_sizes))
        return f"{name} ({sizes})"

    @property
    def is_peer(self) -> bool:
        return self.strategy in PEERS

    @property
    def engine_strategy(self) -> Strategy | None:
        """What the plan says; None for peers."""
        if self.is_peer:
            return None
        return UNEQUAL[self.strategy] if self.strategy in UNEQUAL else Strategy(self.strategy)


def usual_sizes(strategy: str) -> str:
    """The rule for batch sizes that a strategy's name stands for."""
    return PLAN if strategy in UNEQUAL else EQUAL


def equal_sizes(total: int, ranks: int) -> tuple[int, ...]:
    """An equal split, the remainder one each to the first ranks."""
    return tuple(total // ranks + (rank < total % ranks) for rank in range(ranks))


def has_units(case: Case) -> bool:
    """Whether FSDP2 shards the model; on CPUs the engine does not use it inside nodes."""
    traits = strategy_traits(case.strategy)
    return traits.shared_by is SharedBy.WORLD or (traits.is_plain and traits.shared_by is SharedBy.NODE)
