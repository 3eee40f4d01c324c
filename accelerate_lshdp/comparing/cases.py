# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What is compared: a strategy, a format for gradients, a rule for batch sizes and placements of single units.

Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from accelerate_lshdp.documents.placement import ModelPlacement, UnitPlacement, UnitStore
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
        placement: of single units, for ``osdp``; or `AUTO`, what the planner makes of measured ranks and network.
            None: all units are kept as the strategy says.
        memory_limit: of a planned placement: memory that a rank may use, as a share of what ``lsdp`` needs of it.
        checkpoint: whether all blocks recompute their activations.
    """

    strategy: str
    communication_dtype: str = FULL_PRECISION
    batch_sizes: str | tuple[int, ...] | None = None
    placement: ModelPlacement | str | None = None
    memory_limit: float | None = None
    checkpoint: bool = False

    def __post_init__(self) -> None:
        if self.batch_sizes is None:
            object.__setattr__(self, "batch_sizes", usual_sizes(self.strategy))

    @property
    def label(self) -> str:
        """How tables and limits name it; what is not the strategy's own is in it."""
        name = self.strategy if self.is_peer else f"{self.strategy} {self.communication_dtype}"
        details = []
        if self.placement is not None:
            details.append(f"{self.placement} {self.memory_limit:.2f}" if self.is_planned else str(self.placement))
        if self.checkpoint:
            details.append("recomputed")
        if self.batch_sizes != usual_sizes(self.strategy):
            details.append(
                self.batch_sizes if isinstance(self.batch_sizes, str) else " ".join(map(str, self.batch_sizes))
            )
        return f"{name} ({', '.join(details)})" if details else name

    @property
    def is_peer(self) -> bool:
        return self.strategy in PEERS

    @property
    def is_planned(self) -> bool:
        """Whether its units are placed by the planner."""
        return self.placement == AUTO

    @property
    def engine_strategy(self) -> Strategy | None:
        """The strategy that its training has without a placement; None for peers."""
        if self.is_peer:
            return None
        return UNEQUAL[self.strategy] if self.strategy in UNEQUAL else Strategy(self.strategy)

    @property
    def known_placement(self) -> ModelPlacement | None:
        """The placement that it trains with, where that is known before anything is measured."""
        if isinstance(self.placement, ModelPlacement):
            return self.placement
        return uniform_placement(self.engine_strategy, checkpoint=True) if self.checkpoint else None


def uniform_placement(strategy: Strategy, *, checkpoint: bool) -> ModelPlacement | None:
    """The placement that keeps all units as a strategy does; None: no store of single units does.

    Args:
        strategy: of the engine.
        checkpoint: whether units recompute their activations; what is in no unit never does.
    """
    store = UnitStore.of(strategy)
    if store is None:
        return None
    return ModelPlacement(
        units=(("", UnitPlacement(store=store)),), default=UnitPlacement(store=store, checkpoint=checkpoint)
    )


def usual_sizes(strategy: str) -> str:
    """The rule for batch sizes that a strategy's name stands for."""
    return PLAN if strategy in UNEQUAL else EQUAL


def equal_sizes(total: int, ranks: int) -> tuple[int, ...]:
    """An equal split, the remainder one each to the first ranks."""
    return tuple(total // ranks + (rank < total % ranks) for rank in range(ranks))


def has_units(strategy: str) -> bool:
    """Whether FSDP2 shards a model under a strategy; on CPUs the engine does not use it inside nodes."""
    traits = strategy_traits(strategy)
    return traits.shared_by is SharedBy.WORLD or (traits.is_plain and traits.shared_by is SharedBy.NODE)
