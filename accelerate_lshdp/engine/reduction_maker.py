# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`ReductionMaker`: chooses and makes what sums the gradients of a model between ranks."""

from __future__ import annotations

import functools

import torch.distributed as dist

from accelerate_lshdp.documents.plan_sections import Communication
from accelerate_lshdp.engine.policies import ShardingPolicies, replica_groups
from accelerate_lshdp.engine.stores.shared.node_sums import NodeSums
from accelerate_lshdp.engine.wire.formats import make_reduction, make_second_group
from accelerate_lshdp.engine.wire.node_first import NodeFirstReduction, Place
from accelerate_lshdp.engine.wire.reduction import ExactReduction, GradientReduction
from accelerate_lshdp.runtime.groups import ProcessGroups, host_backend, world_timeout
from accelerate_lshdp.runtime.topology import Topology
from accelerate_lshdp.runtime.wait_clock import WaitClock


class ReductionMaker:
    """Makes the reductions of the models of one run. All its methods are collective.

    The argument ``user`` of its methods is that of `ProcessGroups.of_partition`: stores of one model, which start
    reductions independently of each other, need groups of their own.

    Args:
        topology: nodes and ranks.
        groups: of the run.
        communication: how gradients travel between nodes.
        clock: counts the time spent waiting.
        shares_memory: whether ranks of a node can sum gradients in memory that all of them map.
        substitute: takes the gradients in place of what sums them; None: they are summed.

    Attributes:
        made: the reductions that keep something from step to step, in the order of making, for checkpoints.
    """

    def __init__(
        self,
        topology: Topology,
        groups: ProcessGroups,
        communication: Communication,
        clock: WaitClock,
        *,
        shares_memory: bool,
        substitute: GradientReduction | None,
    ) -> None:
        self._topology = topology
        self._groups = groups
        self._communication = communication
        self._clock = clock
        self._shares_memory = shares_memory
        self._substitute = substitute
        self.made: list[GradientReduction] = []

    def of_copies(self, user: str = "", *, in_memory: bool = True) -> GradientReduction | None:
        """What sums gradients of which every rank has all: inside each node first, then between nodes.

        Args:
            user: as above.
            in_memory: whether ranks of a node sum in memory that they share, where they can.
        """
        nodes, rank = self._topology.node_groups, self._topology.rank
        world = tuple(range(self._topology.world_size))
        if self._substitute is not None or max(map(len, nodes)) == 1:
            return self.of_partition((world,), user)
        if self._shares_memory and in_memory:
            timeout = world_timeout().total_seconds()
            return NodeSums(self._topology, functools.partial(self.of_ranks, user=user), self._clock, timeout)
        if len(nodes) == 1:
            return ExactReduction(self._groups.of_ranks(world, user))  # formats are for what travels between nodes
        inside = self._groups.of_partition(nodes, rank, user)
        mine = nodes[self._topology.node]
        places = [
            Place(mine[place % len(mine)], self.of_ranks(ranks, user))
            for place, ranks in enumerate(replica_groups(nodes))
        ]
        return NodeFirstReduction(dist.group.WORLD, inside if len(mine) > 1 else None, places)

    def of_shards(self, policies: ShardingPolicies, user: str = "") -> GradientReduction | None:
        """What sums the gradients of shards between nodes; None if no other rank holds the same shard.

        Args:
            policies: of the shards.
            user: as above.
        """
        if max(map(len, policies.shard_groups)) == 1 and self._topology.world_size > 1:
            return self.of_copies(user)  # uneven nodes: a shard is all there is
        return self.of_partition(policies.replica_groups, user)

    def of_partition(self, partition: tuple[tuple[int, ...], ...], user: str = "") -> GradientReduction | None:
        """What sums gradients over this rank's group of a partition; None if groups have one rank."""
        # The same on all ranks: all groups of a partition have one rank, or none has.
        if len(partition[0]) == 1:
            return None
        if self._substitute is not None:
            return self._substitute
        group = self._groups.of_partition(partition, self._topology.rank, user)
        return self._make(group, make_second_group(self._communication, partition))

    def of_ranks(self, ranks: tuple[int, ...], user: str = "") -> GradientReduction | None:
        """What sums gradients over some ranks, of which this one may be none; None for one rank, and elsewhere."""
        if len(ranks) == 1:
            return None
        group = self._groups.of_ranks(ranks, user)
        second_group = make_second_group(self._communication, [ranks])
        return self._make(group, second_group) if self._topology.rank in ranks else None

    def on_host(self, ranks: tuple[int, ...], user: str = "") -> GradientReduction | None:
        """As `of_ranks`, for gradients in host memory, whatever device the ranks train on."""
        if self._substitute is not None:
            return self._substitute
        if len(ranks) == 1:
            return None
        group = self._groups.on_host(ranks, user)
        second_group = make_second_group(self._communication, [ranks], host_backend())
        return self._make(group, second_group) if self._topology.rank in ranks else None

    def _make(self, group: dist.ProcessGroup, second_group: dist.ProcessGroup | None) -> GradientReduction:
        self.made.append(make_reduction(self._communication, group, second_group))
        return self.made[-1]
