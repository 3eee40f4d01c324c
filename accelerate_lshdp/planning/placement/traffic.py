# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What each store sends of a unit, and when: the seconds for which links are busy.

With P bytes of a unit's parameters and G of its gradients, N nodes, L ranks on each, W in all:

    store          forward                    backward                             once a step, in the last backward
    replicate                                                                      sum and spread inside, 2(N-1)/N G
    node           (L-1)/L P inside           (L-1)/L P and (L-1)/L G inside       2(N-1)/N G between
    world          (N-1)/N P, then inside     (N-1)/N P, then inside               inside, then (N-1)/N G
    world_kept     as world, once a step                                           inside, then (N-1)/N G
    world_to_node  (N-1)/N P, then inside     (L-1)/L P inside                     inside, then (N-1)/N G
    host           P from the host            P from the host, G to it             2(N-1)/N G between

Of a `world` unit in slices, what cannot be in slices is sent as above. The other weights are gathered as often as they
are used, in more messages, and summed in every backward: whole gradients that wait for the last one would need what
slices save. If the unit's activations are recomputed, they are gathered for that, too.

Of a root in store `host`, weights in slices are copied to the device and back as often as they are used, but for the
backward of an embedding, which needs its gradient alone.

Units in store `host` are streamed: every device copies the whole unit from the node's copy, and its gradients to it,
both ways at the same time. The host steps them while the first forward of the next step computes, but for the root,
which that forward needs at its beginning.

What is said for forward and backward happens in those of every micro-batch. The root is used from the first operation
to the last, so no store gathers it a second time in the backward. On nodes with different numbers of ranks `world` is
in one stage, as in the engine; `node` is offered only where ranks compute in host memory, of which those of a node map
one copy, for devices would keep whole copies; `world_to_node` has no shards that match, and is not offered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accelerate_lshdp.documents.collectives import collectives_of
from accelerate_lshdp.documents.network import Exchange, LinkCost
from accelerate_lshdp.documents.placement import UnitPlacement, UnitStore
from accelerate_lshdp.documents.unit_sizes import SliceableWeights
from accelerate_lshdp.planning.placement.inputs import PlacementCluster


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of one kind of traffic: on the links between nodes, and inside nodes and to hosts."""

    between: float = 0.0
    inside: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.between + other.between, self.inside + other.inside)


NOTHING = Seconds()


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one unit sends in a step.

    Args:
        forward: in each forward.
        first_forward: in the first forward of a step.
        backward: in each backward.
        last_backward: in the last backward of a step.
        overlaps: whether the part between nodes goes on beside computing also where there are no streams.
    """

    forward: Seconds = NOTHING
    first_forward: Seconds = NOTHING
    backward: Seconds = NOTHING
    last_backward: Seconds = NOTHING
    overlaps: bool = True

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.forward + other.forward,
            self.first_forward + other.first_forward,
            self.backward + other.backward,
            self.last_backward + other.last_backward,
            self.overlaps and other.overlaps,
        )


def offered_stores(cluster: PlacementCluster, *, is_root: bool) -> list[UnitStore]:
    """The stores that differ on a cluster, from simple to complex."""
    world, nodes = cluster.world, len(cluster.nodes)
    stores = [UnitStore.REPLICATE]
    # Devices keep shards of equal sizes on all nodes, or whole copies; ranks in host memory map one copy a node.
    if max(cluster.nodes) > 1 and (cluster.is_even or not cluster.streams):
        stores.append(UnitStore.NODE)
    if world > 1:
        stores += [UnitStore.WORLD, UnitStore.WORLD_KEPT]
    if nodes > 1 and cluster.is_even and cluster.nodes[0] > 1 and not is_root:
        stores.append(UnitStore.WORLD_TO_NODE)
    if cluster.device_link is not None:
        stores.append(UnitStore.HOST)
    return stores


class TrafficOf:
    """Computes the traffic of units on a cluster."""

    def __init__(self, cluster: PlacementCluster) -> None:
        self.cluster, self.nodes = cluster, cluster.nodes
        self.world = collectives_of(UnitStore.WORLD.strategy.traits, cluster.nodes)
        self._known: dict[tuple[UnitStore, float, float, float, bool], Traffic] = {}

    def whole(
        self, store: UnitStore, gathered: float, reduced: float, late_seconds: float = 0.0, *, is_root: bool
    ) -> Traffic:
        """The traffic of what of a unit is not in slices.

        Args:
            store: of the unit.
            gathered: bytes of its parameters in the precision of the forward.
            reduced: bytes of its gradients.
            late_seconds: of its optimizer step, where that is made in the next forward.
            is_root: it is the root.
        """
        # A unit that recomputes its activations sends as much as one that keeps them: each is asked for twice.
        key = store, gathered, reduced, late_seconds, is_root
        if key not in self._known:
            self._known[key] = self._whole(*key)
        return self._known[key]

    def _whole(self, store: UnitStore, gathered: float, reduced: float, late_seconds: float, is_root: bool) -> Traffic:
        if store is UnitStore.REPLICATE:
            inside = self._inside(reduced)
            spread = Seconds(0.0, self._all_reduce_seconds(reduced)) if len(self.nodes) > 1 else NOTHING
            return Traffic(last_backward=Seconds(spread.inside, 2 * inside))
        if store is UnitStore.HOST:
            to_device, to_host = self._copy(gathered), self._copy(reduced)
            return Traffic(
                forward=Seconds(0.0, to_device),
                first_forward=Seconds(0.0, late_seconds),
                backward=Seconds(0.0, to_host if is_root else max(to_device, to_host)),
                last_backward=Seconds(self._all_reduce_seconds(reduced), 0.0),
            )
        if store.strategy.is_node_sharded:
            gather, reduce = self._inside(gathered), self._inside(reduced)
            return Traffic(
                forward=Seconds(0.0, gather),
                backward=Seconds(0.0, (0.0 if is_root else gather) + reduce),
                last_backward=Seconds(self._all_reduce_seconds(reduced), 0.0),
            )
        gather = self._exchange(self.world.gather(gathered, self.nodes), 1)
        reduce = self._exchange(self.world.reduce_scatter(reduced, self.nodes), 1)
        if store is UnitStore.WORLD_KEPT:
            return Traffic(first_forward=gather, last_backward=reduce, overlaps=False)
        again = Seconds(0.0, self._inside(gathered)) if store is UnitStore.WORLD_TO_NODE else gather
        return Traffic(gather, NOTHING, NOTHING if is_root else again, reduce, overlaps=False)

    def sliced(self, placement: UnitPlacement, weights: SliceableWeights, gathered: float, reduced: float) -> Traffic:
        """The traffic of the weights of a unit in slices, whose store is `world` or `host`.

        Args:
            placement: of the unit.
            weights: in slices.
            gathered: bytes of one of their parameters in the precision of the forward.
            reduced: bytes of its gradient; 0 of frozen ones.
        """
        times = weights.uses * placement.slices
        if placement.store is UnitStore.HOST:
            to_device, again = (self._copy(count * gathered, times) for count in (weights.forward, weights.backward))
            return Traffic(
                forward=Seconds(0.0, to_device),
                backward=Seconds(0.0, max(again, self._copy(weights.forward * reduced, times))),
                last_backward=Seconds(self._all_reduce_seconds(weights.parameters * reduced), 0.0),
            )
        if not times:
            return Traffic(overlaps=False)
        forward, backward = (
            self._exchange(self.world.gather(count * gathered / times, self.nodes), times)
            for count in (weights.forward, weights.backward)
        )
        reduce = self._exchange(self.world.reduce_scatter(weights.forward * reduced / times, self.nodes), times)
        again = forward if placement.checkpoint else NOTHING
        return Traffic(forward=forward, backward=again + backward + reduce, overlaps=False)

    def _inside(self, payload: float) -> float:
        """Seconds of gathering or reducing inside the node where it takes longest."""
        return max(
            (
                self.cluster.inside.seconds((count - 1) / count * payload, count - 1)
                for count in self.nodes
                if count > 1 and payload
            ),
            default=0.0,
        )

    def _copy(self, payload: float, times: int = 1) -> float:
        """Seconds of copying between host and device, in some pieces."""
        link = self.cluster.device_link
        return link.seconds(payload, times) if link is not None and payload else 0.0

    def _all_reduce_seconds(self, payload: float) -> float:
        """Seconds of summing between nodes what each node has one copy of."""
        count = len(self.nodes)
        if count == 1 or not payload:
            return 0.0
        return self.cluster.link.seconds(2 * (count - 1) / count * payload, 2 * (count - 1))

    def _exchange(self, exchange: Exchange, times: int) -> Seconds:
        """Seconds of an exchange of all ranks that is made several times."""
        between = exchange.seconds(self.cluster.link)
        if exchange.inside_bytes:
            return Seconds(times * between, times * self._ranks_seconds(exchange.inside_bytes))
        local = [h - s for h, s in zip(exchange.handled_bytes, exchange.sent_bytes, strict=True)]
        # In one stage both links are used at the same time.
        return Seconds(times * between, times * max(0.0, self._ranks_seconds(local) - between))

    def _ranks_seconds(self, local_bytes: Sequence[float]) -> float:
        """Seconds of bytes that the ranks of each node send to each other."""
        link: LinkCost = self.cluster.inside
        return max(
            (
                link.seconds(size / count, count - 1)
                for size, count in zip(local_bytes, self.nodes, strict=True)
                if count > 1 and size > 0
            ),
            default=0.0,
        )
