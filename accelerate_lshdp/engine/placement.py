# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Prepares a model as its strategy says: makes groups and collectives, and chooses the stores of its parameters."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

from accelerate_lshdp.documents.bucket_sizes import LARGEST_BYTES
from accelerate_lshdp.documents.placement import ModelPlacement, UnitStore
from accelerate_lshdp.documents.plan_sections import Communication
from accelerate_lshdp.documents.wire_format import WIRE_FORMATS
from accelerate_lshdp.engine.attachments import Attachments
from accelerate_lshdp.engine.loading import follow_loading
from accelerate_lshdp.engine.module_state import parameters_of, with_index
from accelerate_lshdp.engine.placed_units import PlacedUnit, place_units
from accelerate_lshdp.engine.policies import Mechanism, ShardingPolicies
from accelerate_lshdp.engine.prepared import PreparedModel, broadcast_initial_state
from accelerate_lshdp.engine.recompute import recompute_activations
from accelerate_lshdp.engine.reduction_maker import ReductionMaker
from accelerate_lshdp.engine.store import Store, StoreContext
from accelerate_lshdp.engine.stores.fsdp2.kind import UnitKind
from accelerate_lshdp.engine.stores.fsdp2.store import Fsdp2Store
from accelerate_lshdp.engine.stores.shared.memory import NodeMemoryError
from accelerate_lshdp.engine.stores.shared.store import SharedStore
from accelerate_lshdp.engine.stores.sliced.choice import SlicedChoice, choose_sliced
from accelerate_lshdp.engine.stores.sliced.order import CollectiveOrder
from accelerate_lshdp.engine.stores.sliced.store import SlicedStore
from accelerate_lshdp.engine.stores.streamed.sliced_store import SlicedStreamedStore
from accelerate_lshdp.engine.stores.streamed.store import StreamedStore
from accelerate_lshdp.engine.stores.streamed.streamable import require_plain
from accelerate_lshdp.engine.stores.whole import WholeStore
from accelerate_lshdp.engine.unit_precision import UnitPrecision
from accelerate_lshdp.engine.units import choose_units
from accelerate_lshdp.engine.wire.reduction import (
    REDUCTIONS,
    GradientReduction,
    TimedAllGather,
    TimedReduceScatter,
)
from accelerate_lshdp.engine.wire.two_stage import Stages, TwoStageAllGather, TwoStageReduceScatter
from accelerate_lshdp.runtime.groups import ProcessGroups, world_timeout
from accelerate_lshdp.runtime.option_advice import option_advice
from accelerate_lshdp.runtime.topology import Topology
from accelerate_lshdp.runtime.wait_clock import WaitClock


logger = logging.getLogger(__name__)


class Placement:
    """Prepares the models of one run, all by the same policies.

    Args:
        policies: the resolved strategy.
        topology: nodes and ranks.
        device: where the forward runs.
        clock: counts the time spent in communication.
        communication: how gradients travel between nodes.
        units: names of the units, None: chosen from the model.
        placement: of each unit, where the plan has one; the policies are those of `mixed_policies` then.
        prefetch: units gathered ahead on devices with streams.
        bucket_bytes: size of the gradient buckets of whole parameters; None: chosen from the model's size.
        reduction: takes the gradients in place of what sums them between nodes; None: they are summed.
        reducing_ranks: number of ranks that sum a bucket between nodes; None: as in this run. A profile, which
            measures one rank alone, gives the number of the run that it is made for.
        keeps_gradients: whether those of streamed units stay on the device until the last micro-batch, if they fit.
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
        placement: ModelPlacement | None = None,
        reduction: GradientReduction | None = None,
        reducing_ranks: int | None = None,
        keeps_gradients: bool = True,
    ) -> None:
        self.placement = placement
        self.policies = policies
        self.topology = topology
        self.device = with_index(device)
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
        self.keeps_gradients = keeps_gradients
        self.reducing_ranks = len(policies.replica_groups[0]) if reducing_ranks is None else reducing_ranks
        self.groups = ProcessGroups()
        self._reductions = ReductionMaker(
            topology,
            self.groups,
            communication,
            clock,
            shares_memory=policies.shares_memory,
            substitute=reduction,
        )

    def require_placeable(self, model: nn.Module) -> None:
        """Checks what ranks with other devices find out otherwise while this one waits for them.

        Raises:
            ValueError: a rank of another node cannot stream the model.
        """
        if self.topology.mixes_devices:
            choose_units(model, self.units)
            require_plain(parameters_of(model), mixes_devices=True)

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
            # Devices of different types meet on their hosts.
            broadcast_initial_state(model, torch.device("cpu") if self.topology.mixes_devices else self.device)
        self._reductions.made.clear()
        prepared = self.arrange(model)
        prepared.reductions = tuple(self._reductions.made)
        return prepared

    def arrange(self, model: nn.Module) -> PreparedModel:
        """Shards a model, or lays out its buckets; collective only in making process groups that do not exist yet, and
        in mapping memory that the ranks of a node share.

        Args:
            model: as for ``place``, with the same weights on all ranks that sum its gradients.
        """
        prepared = PreparedModel(model, self.clock)
        try:
            for make in self._stores_of(model, prepared.attachments):
                prepared.add(make(prepared.context))
        except BaseException:
            prepared.attachments.remove()  # the script may catch this and go on with its model
            raise
        if prepared.loads_together:
            follow_loading(prepared)
        return prepared

    def _stores_of(self, model: nn.Module, attachments: Attachments) -> list[Callable[[StoreContext], Store]]:
        """What makes the stores of a model, one after the other."""
        if self.placement is None:
            return [lambda context: self._make_store(context, self.policies)]
        units, rest = place_units(model, self.units, self.placement)
        if rest.placement.checkpoint:
            raise ValueError(
                'found checkpoint: true for what is in no unit (""), expected false: its forward is that of the whole '
                "model, which would be computed twice. Name the units whose activations are to be recomputed"
            )
        recomputed = [module for unit in units if unit.placement.checkpoint for module in unit.modules]
        recompute_activations(model, recomputed, attachments)
        # All stores of the plan, and not those of this model: models of one loss need gradients of one scale.
        policies = [*self.policies.of_stores.values(), *map(self._policies_of, (*units, rest))]
        # A CPU gathers and streams nothing for itself, so it has nothing to slice; but the gradients of all nodes are
        # cut alike.
        may_stream = self.topology.mixes_devices or self._policies_of(rest).mechanism is Mechanism.STREAMED
        streamed = choose_sliced(model, [rest], 1) if rest.placement.store is UnitStore.HOST and may_stream else []
        if rest.placement.store is UnitStore.HOST and rest.placement.slices > 1:
            self._require_streaming(self._policies_of(rest))
        sharded = [unit for unit in (*units, rest) if self._policies_of(unit).mechanism is Mechanism.FSDP2]
        sliced = choose_sliced(model, sharded, self.topology.world_size)
        if not sliced and not streamed and all(_keep_alike(each, policies[0]) for each in policies):
            return [lambda context: self._make_store(context, policies[0])]
        return self._mixed_stores(units, rest, sliced, streamed, attachments)

    @staticmethod
    def _require_streaming(policies: ShardingPolicies) -> None:
        """Raises ValueError if what is to be streamed in slices would be sharded."""
        if policies.mechanism is Mechanism.FSDP2:
            raise ValueError(
                f'found slices of what is in no unit ("") in store "{UnitStore.HOST}" on ranks that do not map the '
                f"memory of their node, expected them to. Use {option_advice('intra_node', 'auto')} on Linux, or "
                "leave slices out"
            )

    def _policies_of(self, unit: PlacedUnit) -> ShardingPolicies:
        return self.policies.of_stores[unit.placement.store]

    def _mixed_stores(
        self,
        units: Sequence[PlacedUnit],
        rest: PlacedUnit,
        sliced: Sequence[SlicedChoice],
        streamed_in_slices: Sequence[SlicedChoice],
        attachments: Attachments,
    ) -> list[Callable[[StoreContext], Store]]:
        """What makes the stores of a model whose units are kept in different ways, one store a mechanism."""
        by_mechanism: dict[Mechanism, list[nn.Parameter]] = {mechanism: [] for mechanism in Mechanism}
        for unit in (*units, rest):
            by_mechanism[self._policies_of(unit).mechanism] += unit.parameters
        # Without units that cast themselves the whole model computes under autocast, as accelerate lets it.
        if self.policies.casts_itself and self.policies.precision.param_dtype is not None:
            self._set_precision(units, rest, attachments)
        # In the order of the model, as buckets are filled; parameters of one unit may be registered apart.
        places = {id(parameter): index for index, parameter in enumerate(parameters_of(rest.modules[0]))}
        for parameters in by_mechanism.values():
            parameters.sort(key=lambda parameter: places[id(parameter)])
        whole, shared = by_mechanism[Mechanism.REPLICATED], by_mechanism[Mechanism.NODE_SHARED]
        streamed, gathered = by_mechanism[Mechanism.STREAMED], by_mechanism[Mechanism.FSDP2]
        # The model was left where it is: units that are kept on the host may not fit the device.
        for parameter in whole:
            parameter.data = parameter.data.to(self.device)
        makers: list[Callable[[StoreContext], Store]] = []
        waits = not gathered  # which have collectives in the backward
        if shared:
            makers.append(
                lambda context: self._make_shared(
                    context, shared, "shared", waits_in_backward=waits, in_slices=streamed_in_slices
                )
            )
        if streamed:
            blocks = [unit.modules for unit in units if self._policies_of(unit).mechanism is Mechanism.STREAMED]
            with_rest = self._policies_of(rest).mechanism is Mechanism.STREAMED
            makers.append(
                lambda context: self._make_streamed(context, streamed, blocks, with_rest, waits, streamed_in_slices)
            )
        if whole:
            makers.append(lambda context: self._make_whole(context, whole, user="whole"))
        # Last, as it cannot be undone: what fails before it leaves the model to the script.
        if gathered:
            # Made by the first maker that asks: making groups is collective, and may fail.
            kinds = functools.cache(lambda: self._kinds_of(units, rest))
            elsewhere = [*whole, *shared, *streamed, *(each.parameter for each in sliced)]
            if not sliced:
                makers.append(lambda context: self._make_sharded_units(context, units, rest, elsewhere, kinds()))
                return makers
            order = functools.cache(lambda: self._order_of(kinds()[UnitStore.WORLD]))
            announced = functools.cache(lambda: {store: order().announced(kind) for store, kind in kinds().items()})
            makers.append(lambda context: self._make_sharded_units(context, units, rest, elsewhere, announced()))
            makers.append(lambda context: self._make_sliced(context, units, sliced, kinds()[UnitStore.WORLD], order()))
        return makers

    def _set_precision(self, units: Sequence[PlacedUnit], rest: PlacedUnit, attachments: Attachments) -> None:
        """Lets whole units compute in lower precision; those of FSDP2, and streamed ones, do so themselves."""
        precision = UnitPrecision(self.device.type, self.policies.precision.param_dtype, attachments)
        modules: dict[bool, list[nn.Module]] = {True: [], False: []}  # by whether they are cast already
        for unit in units:
            modules[self._policies_of(unit).casts_itself] += unit.modules
        if self._policies_of(rest).casts_itself:
            precision.cast_whole(modules[False])
        else:
            precision.cast_rest(rest.modules[0], modules[True])

    def _make_store(self, context: StoreContext, policies: ShardingPolicies) -> Store:
        """The store of all parameters of a model, which are kept alike."""
        if policies.mechanism is Mechanism.NODE_SHARED:
            return self._make_shared(context)
        if policies.mechanism is Mechanism.REPLICATED:
            return self._make_whole(context)
        if policies.mechanism is Mechanism.STREAMED:
            return self._make_streamed(context, None, choose_units(context.module, self.units))
        kind = self._kind(policies, self._reductions.of_shards(policies))
        units = [(unit, kind) for unit in choose_units(context.module, self.units)]
        return Fsdp2Store(context, units, kind, device=self.device, prefetch=self.prefetch)

    def _make_shared(
        self,
        context: StoreContext,
        parameters: Sequence[nn.Parameter] | None = None,
        user: str = "",
        *,
        waits_in_backward: bool = True,
        in_slices: Sequence[SlicedChoice] = (),
    ) -> SharedStore:
        if self.topology.mixes_devices:
            # The groups of those that stream: all ranks make the same ones, in the same order.
            node_group, reduction_of = self._node_group_on_host(), self._streamed_reductions()
        else:
            node_group = self.groups.of_partition(self.topology.node_groups, self.topology.rank)
            reduction_of = functools.partial(self._reductions.of_ranks, user=user)
        return SharedStore(
            context,
            self.topology,
            node_group,
            reduction_of,
            parameters=parameters,
            bucket_bytes=self.bucket_bytes,
            reducing_ranks=self.reducing_ranks,
            timeout_seconds=world_timeout().total_seconds(),
            waits_in_backward=waits_in_backward,
            in_slices=in_slices,
        )

    def _make_streamed(
        self,
        context: StoreContext,
        parameters: Sequence[nn.Parameter] | None,
        units: Sequence[tuple[nn.Module, ...]],
        has_rest: bool = True,
        waits_in_backward: bool = True,
        in_slices: Sequence[SlicedChoice] = (),
    ) -> StreamedStore:
        make = functools.partial(SlicedStreamedStore, in_slices=in_slices) if in_slices else StreamedStore
        return make(
            context,
            self.topology,
            self._node_group_on_host(),
            self._streamed_reductions(),
            parameters=parameters,
            bucket_bytes=self.bucket_bytes,
            reducing_ranks=self.reducing_ranks,
            timeout_seconds=world_timeout().total_seconds(),
            waits_in_backward=waits_in_backward,
            device=self.device,
            units=units,
            has_rest=has_rest,
            ahead=self.prefetch,
            compute_dtype=self.policies.precision.param_dtype,
            output_dtype=self.policies.output_dtype,
            keeps_gradients=self.keeps_gradients,
        )

    def _streamed_reductions(self) -> Callable[[tuple[int, ...]], GradientReduction | None]:
        """What makes the reductions of gradients in host memory."""
        # Groups of its own, also of all ranks: the node's thread reduces whenever gradients are there, and nothing
        # orders that with the collectives of the world that the training loop calls meanwhile.
        return functools.partial(self._reductions.on_host, user="streamed")

    def _node_group_on_host(self) -> dist.ProcessGroup:
        """The ranks of this node (collective: all ranks make the groups of all nodes)."""
        _require_world()
        if self.topology.world_size == 1:  # a rank that trains for itself asks nobody, as in a profile
            return dist.group.WORLD
        groups = [self.groups.on_host(ranks) for ranks in self.topology.node_groups]
        return groups[self.topology.node]

    def _make_whole(
        self, context: StoreContext, parameters: Sequence[nn.Parameter] | None = None, user: str = ""
    ) -> WholeStore:
        make = functools.partial(
            WholeStore,
            context,
            parameters=parameters,
            bucket_bytes=self.bucket_bytes,
            reducing_ranks=self.reducing_ranks,
        )
        try:
            return make(self._reductions.of_copies(user))
        except NodeMemoryError as error:
            # On all ranks, and before anything was made of it: each has its parameters, and only sums are shared.
            if self.communication.intra_node == "shared_memory":
                raise
            logger.warning(f"gradients are summed inside the nodes by collectives, without shared memory: {error}")
        return make(self._reductions.of_copies(user, in_memory=False))

    def _kinds_of(self, units: Sequence[PlacedUnit], rest: PlacedUnit) -> dict[UnitStore, UnitKind]:
        """How FSDP2 keeps the units of each store (collective)."""
        # In the order of the model, the same on all ranks: making groups is collective.
        stores = dict.fromkeys(unit.placement.store for unit in (*units, rest))
        sharding = {store: self.policies.of_stores[store] for store in stores}
        sharding = {store: each for store, each in sharding.items() if each.mechanism is Mechanism.FSDP2}
        # Stores of which nodes hold copies differ in where their shards live, not in which ranks sum them.
        copied = next((each for each in sharding.values() if not each.strategy.is_world_sharded), None)
        reduction = None if copied is None else self._reductions.of_shards(copied, user="units")
        return {
            store: self._kind(policies, None if policies.strategy.is_world_sharded else reduction)
            for store, policies in sharding.items()
        }

    def _order_of(self, kind: UnitKind) -> CollectiveOrder:
        return CollectiveOrder(kind.mesh.get_group(), self.device, self.clock)

    def _make_sharded_units(
        self,
        context: StoreContext,
        units: Sequence[PlacedUnit],
        rest: PlacedUnit,
        elsewhere: Sequence[nn.Parameter],
        kinds: Mapping[UnitStore, UnitKind],
    ) -> Fsdp2Store:
        """The store of those units that FSDP2 shards."""
        sharded = [(unit.modules, kinds[unit.placement.store]) for unit in units if unit.placement.store in kinds]
        # Of a rest that is whole FSDP2 has nothing to cast: neither images nor labels that are not to be rounded.
        root = kinds.get(rest.placement.store) or replace(next(iter(kinds.values())), casts_inputs=False)
        return Fsdp2Store(context, sharded, root, elsewhere=elsewhere, device=self.device, prefetch=self.prefetch)

    def _make_sliced(
        self,
        context: StoreContext,
        units: Sequence[PlacedUnit],
        sliced: Sequence[SlicedChoice],
        kind: UnitKind,
        order: CollectiveOrder,
    ) -> SlicedStore:
        """The store of those weights that their operators gather in slices."""
        modules = [module for unit in units for module in unit.modules]
        return SlicedStore(context, sliced, modules, kind, device=self.device, order=order)

    def _kind(self, policies: ShardingPolicies, reduction: GradientReduction | None) -> UnitKind:
        """How FSDP2 keeps units with these policies, and what sums their shards between nodes (collective)."""
        _require_world()
        group = self.groups.of_partition(policies.shard_groups, self.topology.rank)
        all_gather, reduce_scatter, stages = self._unit_collectives(policies)
        return UnitKind(
            policies,
            DeviceMesh.from_group(group, self.device.type, mesh_dim_names=("shard",)),
            reduction,
            all_gather,
            reduce_scatter,
            self._nodes_of(stages) if policies.reshards_to_node else None,
        )

    def _nodes_of(self, stages: Stages) -> HSDPMeshInfo:
        """The nodes and their ranks, as many on each, as FSDP2 describes a mesh of two dimensions."""
        ranks = torch.tensor(self.topology.node_groups)
        mesh = DeviceMesh.from_group(
            [stages.across, stages.inside], self.device.type, mesh=ranks, mesh_dim_names=("replicate", "shard")
        )
        return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)

    def _unit_collectives(self, policies: ShardingPolicies) -> tuple[AllGather, ReduceScatter, Stages | None]:
        """The collectives that gather a unit's parameters from its shard group and scatter its gradients over it, and
        the groups of their two stages.
        """
        if not policies.strategy.is_world_sharded:
            return TimedAllGather(self.clock), TimedReduceScatter(self.clock), None
        # A plan with a world-sharded strategy refuses formats that only all-reduce.
        reduction = REDUCTIONS[self.communication.dtype]
        wire = {"dtype": reduction.scatter_dtype, "convert": reduction.to_scatter_dtype}
        nodes, rank = self.topology.node_groups, self.topology.rank
        # Two stages need as many ranks on every node, and gain nothing where a node has one rank or is alone.
        if self.topology.is_uneven or len(nodes) == 1 or len(nodes[0]) == 1:
            return TimedAllGather(self.clock), TimedReduceScatter(self.clock, **wire), None
        # Making a group is collective: all ranks make those of the nodes first, then those across nodes.
        places = tuple(zip(*nodes, strict=True))
        stages = Stages(self.groups.of_partition(nodes, rank), self.groups.of_partition(places, rank))
        gather = TwoStageAllGather(stages, self.clock)
        return gather, TwoStageReduceScatter(stages, self.clock, **wire), stages


def _require_world() -> None:
    """Makes a process group of one process that was not launched, as FSDP2 and memory of a node want one."""
    if not dist.is_initialized():
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)


def _keep_alike(first: ShardingPolicies, second: ShardingPolicies) -> bool:
    """Whether units with these policies are kept in the same way, whatever their strategies are called."""
    if first.mechanism is not second.mechanism:
        return False
    return first.mechanism is not Mechanism.FSDP2 or first == second
