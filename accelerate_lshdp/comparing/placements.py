# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Placements of a model's units in a comparison: the memory that they need, and those that the planner makes.

Memory is counted without activations: parameters, gradients, optimizer states, and what is gathered of them. So it is
the same whatever the batch, and a limit on it is a share of what ``lsdp`` needs, whose ranks divide one copy a node.
Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accelerate_lshdp.comparing.cases import Case, uniform_placement
from accelerate_lshdp.documents.curves import RankProfile, TimeCurve
from accelerate_lshdp.documents.network import LinkCost
from accelerate_lshdp.documents.placement import ModelPlacement, UnitPlacement, UnitStore
from accelerate_lshdp.documents.strategy import Strategy
from accelerate_lshdp.planning import Choice, PlanningError, plan_placement
from accelerate_lshdp.planning.cost.cluster_model import ModelSize
from accelerate_lshdp.planning.placement.inputs import ModelSizes, PlacementCluster, UnitSize
from accelerate_lshdp.planning.placement.options import pose_placement
from accelerate_lshdp.planning.placement.problem import PlacementProblem, UnitKind
from accelerate_lshdp.planning.placement.traffic import offered_stores
from accelerate_lshdp.planning.placement.unit_costs import UnitCosts


#: Where nodes have no use for a store, the one that keeps units the same way there.
_SAME_AS = {
    UnitStore.HOST: UnitStore.NODE,
    UnitStore.NODE: UnitStore.REPLICATE,
    UnitStore.WORLD_TO_NODE: UnitStore.WORLD,
    UnitStore.WORLD_KEPT: UnitStore.REPLICATE,
    UnitStore.WORLD: UnitStore.REPLICATE,
}
_BYTES = 4  # of a parameter in fp32, in which benchmarks train


def _placement_like(strategy: Strategy) -> ModelPlacement | None:
    """The placement that shares and gathers as a strategy does, on device or host; None: no store of units does."""
    if strategy.traits.is_per_unit:
        return ModelPlacement()  # without a placement it is what its default is
    wanted = strategy.traits.shared_by, strategy.traits.gathered
    for other in (strategy, *Strategy):
        if (other.traits.shared_by, other.traits.gathered) == wanted:
            placement = uniform_placement(other, checkpoint=False)
            if placement is not None:
                return placement
    return None


@dataclass(frozen=True)
class PlacedModel:
    """A model whose units are placed on some nodes.

    Args:
        nodes: ranks of each node.
        names: of its units' modules, in the order of the forward.
        size: of the model.
    """

    nodes: tuple[int, ...]
    names: tuple[str, ...]
    size: ModelSize

    def placements(self, placement: ModelPlacement) -> tuple[list[UnitPlacement], UnitPlacement]:
        """The placements of the units, in the order of the forward, and that of what is in no unit.

        Raises:
            PlanError: the placement names a unit that the model does not have.
        """
        placement.require_units([*self.names, ""])
        return [placement.of(name) for name in self.names], placement.of("")

    def memory_share(self, case: Case, placement: ModelPlacement | None) -> float | None:
        """The memory that the rank in most need counts for a case, over that for ``lsdp``.

        None: it is not counted, as for plain PyTorch and strategies that keep parameters as no store of units does.

        Args:
            case: what is trained.
            placement: of its units, where it has one.
        """
        if case.is_peer:
            return None
        if placement is None:
            placement = _placement_like(case.engine_strategy)
        if placement is None:
            return None
        counted, of_lsdp = self._memory(placement), self._memory(self._lsdp())
        return max(own / whole for own, whole in zip(counted, of_lsdp, strict=True))

    def plan(
        self,
        share: float,
        micro_batches: Sequence[tuple[int, int]],
        profiles: Sequence[RankProfile],
        link: LinkCost,
        inside: LinkCost,
        *,
        streams: bool,
    ) -> ModelPlacement:
        """The placement with the shortest step for given micro-batches and a limit of memory.

        Args:
            share: of the memory that ``lsdp`` needs of each rank.
            micro_batches: (size, accumulation steps) of each rank.
            profiles: one a rank.
            link: between nodes.
            inside: of each rank to the others of its node.
            streams: whether devices send while they compute.

        Raises:
            PlanningError: nothing fits, there are several micro-batches in a step, or one is larger than measured.
        """
        if any(steps != 1 for _, steps in micro_batches):
            raise PlanningError(
                f"found micro-batches {list(micro_batches)} for a planned placement, expected one for each rank in a"
                " step. Take a smaller total_batch_size"
            )
        sizes = [size for size, _ in micro_batches]
        for rank, (size, profile) in enumerate(zip(sizes, profiles, strict=True)):
            if size > profile.max_micro_batch_size:
                raise PlanningError(
                    f"found a micro-batch of {size} samples on rank {rank} for a planned placement, expected at most"
                    f" the {profile.max_micro_batch_size} that were measured. Raise profile_seconds"
                )
        # Ranks that may train no more than the given sizes, and have to train as much in all, train these.
        capped = [
            RankProfile(profile.time, size, fixed_seconds=profile.fixed_seconds)
            for profile, size in zip(profiles, sizes, strict=True)
        ]
        limits = tuple(int(share * need) for need in self._memory(self._lsdp()))
        # Memory is counted as for every other case, whose share is that of devices (see `_memory`).
        cluster = PlacementCluster(self.nodes, capped, limits, link, inside, streams=streams, counts_states_alone=True)
        # Recomputing frees memory of activations, which is not counted.
        choice = Choice(checkpoint=(False,))
        return plan_placement(self._sizes(), cluster, total_batch_size=sum(sizes), choice=choice).placement

    @staticmethod
    def _lsdp() -> ModelPlacement:
        return uniform_placement(Strategy.LSDP, checkpoint=False)

    def _sizes(self) -> ModelSizes:
        def unit(name: str, size: float) -> UnitSize:
            parameters = round(size / _BYTES)
            # Blocks of a transformer compute in proportion to their parameters.
            return UnitSize(name, parameters, parameters, 0.0, 0.0, float(parameters) if name else 0.0)

        units = tuple(unit(name, size) for name, size in zip(self.names, self.size.unit_bytes, strict=True))
        return ModelSizes(units, unit("", self.size.root_bytes))

    def _memory(self, placement: ModelPlacement) -> list[int]:
        """Bytes that each rank needs with a placement."""
        world = sum(self.nodes)
        free, least = LinkCost(0.0, 0.0), RankProfile(TimeCurve((1,), (1.0,)), 1)  # memory has nothing to do with time
        cluster = PlacementCluster(
            self.nodes, (least,) * world, (1,) * world, free, free, streams=False, counts_states_alone=True
        )
        sizes = self._sizes()
        problem = pose_placement(sizes, cluster, (1,) * world, costs=UnitCosts(sizes, cluster, checkpoint=(False,)))
        offered = {is_root: offered_stores(cluster, is_root=is_root) for is_root in (True, False)}
        needs = problem.memory([self._counts(kind, placement, offered) for kind in problem.kinds])
        return self._of_ranks(problem, needs)

    @staticmethod
    def _counts(kind: UnitKind, placement: ModelPlacement, offered: dict[bool, list[UnitStore]]) -> list[int]:
        """How many units of a kind have each of its options."""
        counts = [0] * len(kind.options)
        for name in kind.units:
            wanted = placement.of(name)
            store = wanted.store
            while store not in offered[name == ""]:
                store = _SAME_AS[store]
            counts[[option.placement.store for option in kind.options].index(store)] += 1
        return counts

    @staticmethod
    def _of_ranks(problem: PlacementProblem, needs: Sequence[int]) -> list[int]:
        return [need for need, _ in problem.by_rank(needs).values()]
