"""Prepares a model as its strategy says: makes groups and collectives, and chooses the store of its parameters."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from accelerate_lshdp.documents.plan_sections import Communication
from accelerate_lshdp.documents.wire_format import WIRE_FORMATS
from accelerate_lshdp.engine.loading import follow_loading
from accelerate_lshdp.engine.policies import Mechanism, ShardingPolicies
from accelerate_lshdp.engine.prepared import PreparedModel, broadcast_initial_state
from accelerate_lshdp.engine.store import Store, StoreContext
from accelerate_lshdp.engine.stores.fsdp2.store import Fsdp2Store
from accelerate_lshdp.engine.stores.shared.node_sums import NodeSums
from accelerate_lshdp.engine.stores.shared.store import SharedStore
from accelerate_lshdp.engine.stores.whole import WholeStore
from accelerate_lshdp.engine.units import choose_units
from accelerate_lshdp.engine.wire.buckets import LARGEST_BYTES
from accelerate_lshdp.engine.wire.formats import make_reduction, make_second_group
from accelerate_lshdp.engine.wire.node_first import NodeFirstReduction, Place
from accelerate_lshdp.engine.wire.reduction import (
    REDUCTIONS,
    ExactReduction,
    GradientReduction,
    TimedAllGather,
    TimedReduceScatter,
)
from accelerate_lshdp.engine.wire.two_stage import Stages, TwoStageAllGather, TwoStageReduceScatter
from accelerate_lshdp.runtime.groups import ProcessGroups, world_timeout
from accelerate_lshdp.runtime.topology import Topology
from accelerate_lshdp.runtime.wait_clock import WaitClock


class Placement:
    """Prepares the models of one run, all by the same policies.

    Args:
        policies: the resolved strategy.
        topology: nodes and ranks.
        device: where the forward runs.
        clock: counts the time spent in communication.
        communication: how gradients travel between nodes.
        units: names of the units, None: chosen from the model.
        prefetch: units gathered ahead on devices with streams.
        bucket_bytes: size of the gradient buckets of whole parameters; None: chosen from the model's size.
        reduction: takes the gradients in place of what sums them between nodes; None: they are summed.
        reducing_ranks: number of ranks that sum a bucket between nodes; None: as in this run. A profile, which
            measures one rank alone, gives the number of the run that it is made for.
    """

    def __init__(
        self,
        policies: ShardingPolicies,
        topology: Topology,
        *,
        device: torch.device,
        clock: WaitClock,
        communication: Communication,
        units: tuple[str, ...] | None,
        prefetch: int,
        bucket_bytes: int | None,
        reduction: GradientReduction | None = None,
        reducing_ranks: int | None = None,
    ) -> None:
        self.policies = policies
        self.topology = topology
        self.device = device
        self.clock = clock
        self.communication = communication
        self.units = units
        self.prefetch = prefetch
        # PowerSGD sends so little that many small messages would cost more than waiting for the last large bucket.
        self.bucket_bytes = (
            LARGEST_BYTES
            if bucket_bytes is None and WIRE_FORMATS[communication.dtype].merges_buckets
            else bucket_bytes
        )
        self.reduction = reduction
        self.reducing_ranks = len(policies.replica_groups[0]) if reducing_ranks is None else reducing_ranks
        self.groups = ProcessGroups()
        self._made: list[GradientReduction] = []

    def place(self, model: nn.Module, model_index: int = 0) -> PreparedModel:
        """Prepares a model for training (collective): the same start on all ranks, then sharding or buckets.

        Args:
            model: for ``ddp`` on its device; else in host memory or on the device, changed in place.
            model_index: counts from 0 the models that are placed for the same training, in the same order on all
                ranks; each has groups of its own.
        """
        self.groups.model = model_index
        # Before anything is cut: FSDP2 never broadcasts, and replicas that start differently stay different.
        if self.topology.world_size > 1:
            broadcast_initial_state(model, self.device)
        self._made.clear()
        prepared = self.arrange(model)
        prepared.reductions = tuple(self._made)
        return prepared

    def arrange(self, model: nn.Module) -> PreparedModel:
        """Shards a model, or lays out its buckets; collective only in making process groups that do not exist yet, and
        in mapping memory that the ranks of a node share.

        Args:
            model: as for ``place``, with the same weights on all ranks that sum its gradients.
        """
        prepared = PreparedModel(model, self.clock)
        try:
            prepared.add(self._make_store(prepared.context))
        except BaseException:
            prepared.attachments.remove()  # the script may catch this and go on with its model
            raise
        if prepared.loads_together:
            follow_loading(prepared)
        return prepared

    def _make_store(self, context: StoreContext) -> Store:
        """The store of all parameters of a model, as the policies say."""
        if self.policies.mechanism is Mechanism.NODE_SHARED:
            return SharedStore(
                context,
                self.topology,
                self.groups.of_partition(self.topology.node_groups, self.topology.rank),
                self._reduction_of,
                bucket_bytes=self.bucket_bytes,
                reducing_ranks=self.reducing_ranks,
                timeout_seconds=world_timeout().total_seconds(),
            )
        if self.policies.mechanism is Mechanism.REPLICATED:
            return WholeStore(
                context,
                self._reduction_of_copies(),
                bucket_bytes=self.bucket_bytes,
                reducing_ranks=self.reducing_ranks,
            )
        # FSDP2 wants a process group, also of one process that was not launched.
        if not dist.is_initialized():
            dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        all_gather, reduce_scatter = self._unit_collectives()
        return Fsdp2Store(
            context,
            choose_units(context.module, self.units),
            self.policies,
            shard_group=self.groups.of_partition(self.policies.shard_groups, self.topology.rank),
            reduction=self._reduction_of_shards(),
            device=self.device,
            all_gather=all_gather,
            reduce_scatter=reduce_scatter,
            prefetch=self.prefetch,
        )

    def _unit_collectives(self) -> tuple[AllGather, ReduceScatter]:
        """The collectives that gather a unit's parameters from its shard group and scatter its gradients over it."""
        if not self.policies.strategy.is_world_sharded:
            return TimedAllGather(self.clock), TimedReduceScatter(self.clock)
        # A plan with a world-sharded strategy refuses formats that only all-reduce.
        dtype = REDUCTIONS[self.communication.dtype].scatter_dtype
        nodes, rank = self.topology.node_groups, self.topology.rank
        # Two stages need as many ranks on every node, and gain nothing where a node has one rank or is alone.
        if self.topology.is_uneven or len(nodes) == 1 or len(nodes[0]) == 1:
            return TimedAllGather(self.clock), TimedReduceScatter(self.clock, dtype=dtype)
        # Making a group is collective: all ranks make those of the nodes first, then those across nodes.
        places = tuple(zip(*nodes, strict=True))
        stages = Stages(self.groups.of_partition(nodes, rank), self.groups.of_partition(places, rank))
        return TwoStageAllGather(stages, self.clock), TwoStageReduceScatter(stages, self.clock, dtype=dtype)

    def _reduction_of_copies(self) -> GradientReduction | None:
        """What sums gradients of which every rank has all (collective): inside each node first, then between nodes."""
        nodes, rank = self.topology.node_groups, self.topology.rank
        world = tuple(range(self.topology.world_size))
        if self.reduction is not None or max(map(len, nodes)) == 1:
            return self._reduction((world,))
        if self.policies.shares_memory:
            timeout = world_timeout().total_seconds()
            return NodeSums(self.topology, self._reduction_of, self.clock, timeout)
        if len(nodes) == 1:
            return ExactReduction(self.groups.of_ranks(world))  # formats are for what travels between nodes
        inside = self.groups.of_partition(nodes, rank)
        mine = nodes[self.topology.node]
        places = [
            Place(mine[place % len(mine)], self._reduction_of(ranks))
            for place, ranks in enumerate(self.policies.replica_groups)
        ]
        return NodeFirstReduction(dist.group.WORLD, inside if len(mine) > 1 else None, places)

    def _reduction_of_shards(self) -> GradientReduction | None:
        """What sums the gradients of shards between nodes (collective); None if no other rank holds the same shard."""
        groups = self.policies.shard_groups
        if max(map(len, groups)) == 1 and self.topology.world_size > 1:
            return self._reduction_of_copies()  # uneven nodes: a shard is all there is
        return self._reduction(self.policies.replica_groups)

    def _reduction(self, partition: tuple[tuple[int, ...], ...]) -> GradientReduction | None:
        """What sums gradients over this rank's group of a partition (collective); None if groups have one rank."""
        # The same on all ranks: all groups of a partition have one rank, or none has.
        if len(partition[0]) == 1:
            return None
        if self.reduction is not None:
            return self.reduction
        group = self.groups.of_partition(partition, self.topology.rank)
        return self._make_reduction(group, make_second_group(self.communication, partition))

    def _make_reduction(self, group: dist.ProcessGroup, second_group: dist.ProcessGroup | None) -> GradientReduction:
        # A checkpoint saves what these keep from step to step, in the order of making.
        self._made.append(make_reduction(self.communication, group, second_group))
        return self._made[-1]

    def _reduction_of(self, ranks: tuple[int, ...]) -> GradientReduction | None:
        """What sums gradients over some ranks (collective over the world, members or not); None for one rank."""
        if len(ranks) == 1:
            return None
        group = self.groups.of_ranks(ranks)
        second_group = make_second_group(self.communication, [ranks])
        return self._make_reduction(group, second_group) if self.topology.rank in ranks else None
