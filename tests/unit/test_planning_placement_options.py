# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What each placement of a unit costs: written out here for two small clusters, and against the cost model's bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from placement_problems import cluster_for

from accelerate_lshdp.documents.host_memory import free_in_heap
from accelerate_lshdp.documents.placement import ModelPlacement, UnitPlacement, UnitStore
from accelerate_lshdp.documents.step_memory import STEPPED_TOGETHER
from accelerate_lshdp.documents.unit_sizes import SliceableWeights
from accelerate_lshdp.planning import PlanningError
from accelerate_lshdp.planning.cost.memory import STATE_BYTES, ModelCounts, rank_memory, waiting_bytes
from accelerate_lshdp.planning.placement.inputs import ModelSizes, PlacementCluster, UnitSize
from accelerate_lshdp.planning.placement.options import pose_placement, uniform_counts
from accelerate_lshdp.planning.placement.problem import Option, PlacementProblem
from accelerate_lshdp.planning.placement.sent_bytes import bytes_between_nodes
from accelerate_lshdp.planning.placement.traffic import offered_stores
from accelerate_lshdp.planning.placement.unit_costs import UnitCosts


P = 6_000_000  # parameters of a unit
SLICEABLE = SliceableWeights(parameters=P, forward=P, backward=P, uses=1)
MODEL = ModelSizes(
    units=tuple(UnitSize(f"h.{place}", P, P, 3_000_000, 200_000, 9e9, SLICEABLE) for place in range(4)),
    root=UnitSize("", P // 2, P // 2, 1_000_000, 0, 1e9),
    working_bytes=500_000,
)
EVEN, UNEVEN = (2, 2), (1, 3)
AMPLE = 10**12
BETWEEN, INSIDE, COPY = 1e9, 6e9, 1e10  # bytes a second, see `cluster_for`
HOP, STEP, COPIED = 30e-6, 4e-6, 20e-6  # seconds of each message


def posed(
    nodes: tuple[int, ...], samples: int = 2, steps: int = 1, model: ModelSizes = MODEL, **options
) -> PlacementProblem:
    cluster = {name: options.pop(name) for name in ("has_host", "streams", "host_limits") if name in options}
    placed_on = cluster_for(model, nodes, (AMPLE,) * sum(nodes), **cluster)
    costs = UnitCosts(model, placed_on, **options)
    return pose_placement(model, placed_on, (samples,) * sum(nodes), steps, costs=costs)


def option(problem: PlacementProblem, store: UnitStore, *, root: bool = False, **placement) -> Option:
    wanted = {"store": store, "checkpoint": False, "slices": 1, **placement}
    kind = next(kind for kind in problem.kinds if (kind.units == ("",)) is root)
    (found,) = (
        own for own in kind.options if all(getattr(own.placement, name) == value for name, value in wanted.items())
    )
    return found


def nanoseconds(seconds: float) -> object:
    return pytest.approx(seconds * 1e9, abs=1)


def test_units_that_are_alike_are_one_kind() -> None:
    problem = posed(EVEN)
    assert [kind.units for kind in problem.kinds] == [("h.0", "h.1", "h.2", "h.3"), ("",)]


# Seconds of one unit on two nodes of two ranks: gathering half of it inside the node, a world's part between nodes.
GATHER = STEP + 2 * P / INSIDE
BETWEEN_HALF = HOP + 2 * P / BETWEEN
ALL_REDUCE = 2 * HOP + 4 * P / BETWEEN
WHOLE_COPY = COPIED + 4 * P / COPY
LATE_STEP = 2e-10 * P


@pytest.mark.parametrize(
    "store, forward, backward",
    [
        (UnitStore.REPLICATE, 0, 2 * GATHER + ALL_REDUCE),
        (UnitStore.NODE, GATHER, 2 * GATHER + ALL_REDUCE),
        (UnitStore.WORLD, BETWEEN_HALF + GATHER, 2 * (BETWEEN_HALF + GATHER)),
        (UnitStore.WORLD_KEPT, BETWEEN_HALF + GATHER, BETWEEN_HALF + GATHER),
        (UnitStore.WORLD_TO_NODE, BETWEEN_HALF + GATHER, 2 * GATHER + BETWEEN_HALF),
        # In the forward the host steps the units, in the backward gradients are copied while parameters are.
        (UnitStore.HOST, WHOLE_COPY + LATE_STEP, WHOLE_COPY + ALL_REDUCE),
    ],
)
def test_sends_on_even_nodes(store: UnitStore, forward: float, backward: float) -> None:
    own = option(posed(EVEN, has_host=True), store)
    assert own.send == (nanoseconds(forward), nanoseconds(backward))
    assert own.work == (0, 0)


@pytest.mark.parametrize(
    "store, forward, backward",
    [
        # Three ranks hold thirds; one rank holds everything, and sums each third with its owner.
        (UnitStore.REPLICATE, 0, 2 * (2 * STEP + 4 * P * 2 / 3 / INSIDE) + ALL_REDUCE),
        # A ring over four ranks, and an all-to-all from both nodes, of which each sends 3/4 of a unit.
        (UnitStore.WORLD, 3 * HOP + 3 * P / BETWEEN, 4 * HOP + 6 * P / BETWEEN),
        (UnitStore.WORLD_KEPT, 3 * HOP + 3 * P / BETWEEN, HOP + 3 * P / BETWEEN),
    ],
)
def test_sends_on_uneven_nodes(store: UnitStore, forward: float, backward: float) -> None:
    own = option(posed(UNEVEN), store)
    assert own.send == (nanoseconds(forward), nanoseconds(backward))


def test_shards_of_uneven_nodes_stop_computing_inside_the_node() -> None:
    inside = 2 * STEP + 4 * P * 2 / 3 / INSIDE
    own = option(posed(UNEVEN, streams=False), UnitStore.NODE)
    assert own.send == (0, nanoseconds(ALL_REDUCE))
    assert own.work == (nanoseconds(inside), nanoseconds(2 * inside))


def test_uneven_nodes_have_no_shards_to_come_back_to() -> None:
    offered = {
        nodes: offered_stores(cluster_for(MODEL, nodes, (AMPLE,) * sum(nodes)), is_root=False)
        for nodes in (EVEN, UNEVEN)
    }
    assert UnitStore.WORLD_TO_NODE in offered[EVEN]
    assert UnitStore.WORLD_TO_NODE not in offered[UNEVEN]
    with pytest.raises(PlanningError, match="expected some of .*'world_kept'"):
        posed(UNEVEN, stores=(UnitStore.WORLD_TO_NODE,))


def test_devices_of_uneven_nodes_are_not_offered_shards_of_the_node() -> None:
    """The engine keeps whole copies there (`engine.policies.shard_groups_of`)."""
    for is_root in (True, False):
        on_devices, on_hosts = (
            offered_stores(cluster_for(MODEL, UNEVEN, (AMPLE,) * sum(UNEVEN), streams=streams), is_root=is_root)
            for streams in (True, False)
        )
        assert UnitStore.NODE not in on_devices and UnitStore.NODE in on_hosts


def test_what_does_not_differ_is_not_offered() -> None:
    alone = offered_stores(cluster_for(MODEL, (1,), (AMPLE,)), is_root=False)
    single = offered_stores(cluster_for(MODEL, (1, 1), (AMPLE,) * 2), is_root=False)
    assert alone == [UnitStore.REPLICATE]
    assert single == [UnitStore.REPLICATE, UnitStore.WORLD, UnitStore.WORLD_KEPT]
    assert UnitStore.HOST in offered_stores(cluster_for(MODEL, (1,), (AMPLE,), has_host=True), is_root=True)


def test_the_root_is_gathered_once_a_micro_batch() -> None:
    half = HOP + P / BETWEEN + STEP + P / INSIDE
    own = option(posed(EVEN), UnitStore.WORLD, root=True)
    assert own.send == (nanoseconds(half), nanoseconds(half))
    # Gathered, and its gradient not reduced, all the time: nothing of it comes and goes.
    assert own.memory[0] == 16 * P // 2 // 4 + 8 * P // 2 + 2 * 1_000_000 and own.peaks == (0, 0, 0)


STATES = 16 * P


@pytest.mark.parametrize(
    "store, kept, peaks",
    [
        (UnitStore.REPLICATE, STATES, (0, 0)),
        (UnitStore.NODE, STATES // 2, (4 * P, 4 * P)),
        (UnitStore.WORLD, STATES // 4, (4 * P, 4 * P)),
        (UnitStore.WORLD_KEPT, STATES // 4 + 4 * P, (0, 4 * P)),
        (UnitStore.WORLD_TO_NODE, STATES // 4 + 2 * P, (4 * P, 4 * P)),
        # Its gradients, and those of buckets that are on their way to the host.
        (UnitStore.HOST, 0, (4 * P, 4 * P + int(waiting_bytes(4 * MODEL.trainable, 2)))),
    ],
)
def test_memory_of_stores(store: UnitStore, kept: int, peaks: tuple[int, int]) -> None:
    problem = posed(EVEN, samples=3, has_host=True, host_limits=(AMPLE, AMPLE))
    own = option(problem, store)
    on_host = STATES if store is UnitStore.HOST else 0
    assert own.memory == (kept + 3 * 3_000_000, on_host, on_host)
    assert own.peaks == (*peaks, 0)
    again = option(problem, store, checkpoint=True)
    assert again.memory[0] == kept + 3 * 200_000
    assert again.peaks == (*peaks, 3_000_000)
    assert problem.rows[0].peak_weights == (2, 1, 3)


@pytest.mark.parametrize("samples", [1, 3, 30])
def test_memory_of_the_optimizers_step(samples: int) -> None:
    """When it steps, activations are gone: it needs no more unless there are few of them, all units recomputed."""
    working, few = 500_000, 4 * 200_000 + 1_000_000
    fixed = posed(EVEN, samples=samples).rows[0].fixed
    stepping = STEPPED_TOGETHER  # no parameter is larger
    assert fixed == samples * working + max(0, stepping - samples * (working / 2 + few))
    # On hosts it is counted in what the C library keeps free.
    assert posed(EVEN, samples=samples, streams=False).rows[0].fixed == samples * working * 9 / 8 + free_in_heap(4 * P)


def test_a_node_of_one_rank_keeps_everything() -> None:
    """On uneven nodes the rows of memory differ."""
    problem = posed(UNEVEN, streams=False)
    assert [row.ranks for row in problem.rows] == [(0,), (1, 2, 3)]
    activations = 6_000_000 * 9 // 8  # with holes between them
    assert option(problem, UnitStore.NODE).memory == (STATES + activations, STATES // 3 + activations)
    # Gradients of FSDP2 come as activations go.
    assert option(problem, UnitStore.WORLD).memory == (STATES // 4 + activations - min(P, activations // 2),) * 2


def test_recomputing_takes_a_forward_in_the_backward() -> None:
    problem = posed(EVEN)
    forward, backward = (phase.nanoseconds for phase in problem.phases)
    assert backward == pytest.approx(2 * forward, abs=2)
    again = option(problem, UnitStore.NODE, checkpoint=True).work
    assert again == (0, pytest.approx(forward * 9 / 37, rel=1e-6))


def test_several_micro_batches_send_gradients_once() -> None:
    once, often = posed(EVEN), posed(EVEN, steps=3)
    assert [(phase.name, phase.times) for phase in often.phases] == [
        ("first forward", 1),
        ("other forwards", 2),
        ("last backward", 1),
        ("other backwards", 2),
    ]
    for store in (UnitStore.REPLICATE, UnitStore.NODE, UnitStore.WORLD, UnitStore.WORLD_KEPT):
        first, others, last, others_back = option(often, store).send
        assert (first, last) == option(once, store).send
    assert option(often, UnitStore.REPLICATE).send[1::2] == (0, 0)
    assert option(often, UnitStore.WORLD_KEPT).send[1::2] == (0, 0)
    assert option(often, UnitStore.NODE).send[1::2] == (nanoseconds(GATHER), nanoseconds(2 * GATHER))
    assert option(often, UnitStore.WORLD).send[1::2] == (nanoseconds(BETWEEN_HALF + GATHER),) * 2
    # The sum of the micro-batches' gradients is whole on every rank until the last one.
    more = option(often, UnitStore.WORLD).memory[0] - option(once, UnitStore.WORLD).memory[0]
    assert more == 4 * P
    assert option(often, UnitStore.NODE).memory == option(once, UnitStore.NODE).memory


def test_without_streams_exchanges_stop_the_computing() -> None:
    problem = posed(EVEN, streams=False)
    world, node = option(problem, UnitStore.WORLD), option(problem, UnitStore.NODE)
    assert world.send == (0, 0)
    assert world.work == (nanoseconds(BETWEEN_HALF + GATHER), nanoseconds(2 * (BETWEEN_HALF + GATHER)))
    assert node.send == (0, nanoseconds(ALL_REDUCE))
    assert node.work == (nanoseconds(GATHER), nanoseconds(2 * GATHER))


def test_slices_shrink_what_is_gathered_at_a_time() -> None:
    problem = posed(EVEN, slices=(1, 4))
    whole, sliced = option(problem, UnitStore.WORLD), option(problem, UnitStore.WORLD, slices=4)
    assert sliced.peaks == (P, P, 0) and whole.peaks == (4 * P, 4 * P, 0)
    assert sliced.memory == whole.memory
    # As many bytes in four times as many messages.
    assert sliced.send[0] == nanoseconds(4 * (HOP + STEP) + 2 * P / BETWEEN + 2 * P / INSIDE)
    assert {own.placement.slices for own in problem.kinds[1].options} == {1}
    assert {own.placement.store for own in problem.kinds[0].options if own.placement.slices > 1} == {UnitStore.WORLD}


def test_slices_sum_gradients_in_every_micro_batch_and_keep_none() -> None:
    once, often = (posed(EVEN, steps=steps, slices=(1, 2)) for steps in (1, 3))
    assert option(often, UnitStore.WORLD, slices=2).memory == option(once, UnitStore.WORLD, slices=2).memory
    between, inside = 2 * HOP + 2 * P / BETWEEN, 2 * STEP + 2 * P / INSIDE
    forward, backward = between + inside, 2 * (between + inside)
    # First and later forwards, then backwards before the last one and the last one.
    assert option(often, UnitStore.WORLD, slices=2).send == tuple(
        map(nanoseconds, (forward, forward, backward, backward))
    )
    recomputed = option(once, UnitStore.WORLD, slices=2, checkpoint=True)
    assert recomputed.send == (nanoseconds(forward), nanoseconds(forward + backward))


def test_what_cannot_be_in_slices_is_gathered_whole() -> None:
    # Half of the unit, in two weights, of which one is used twice, once as an embedding.
    weights = SliceableWeights(parameters=P // 2, forward=3 * P // 4, backward=P // 2, uses=3)
    unit = replace(MODEL.units[0], sliceable=weights)
    problem = posed(EVEN, steps=3, model=replace(MODEL, units=(unit,)), slices=(1, 2))
    whole, sliced = option(problem, UnitStore.WORLD), option(problem, UnitStore.WORLD, slices=2)
    assert sliced.peaks == (3 * P, 3 * P, 0)  # the other half, and a half of this one
    # Between micro-batches the gradients of the other half wait.
    assert [own - less for own, less in zip(whole.memory, sliced.memory, strict=True)] == [2 * P] * len(whole.memory)
    messages = 6 * (HOP + STEP)
    rest = HOP + STEP + P / BETWEEN + P / INSIDE
    forward = rest + messages + 1.5 * P / BETWEEN + 1.5 * P / INSIDE
    backward = rest + messages + P / BETWEEN + P / INSIDE + messages + 1.5 * P / BETWEEN + 1.5 * P / INSIDE
    first, others, last, earlier = sliced.send
    assert first == others == nanoseconds(forward)
    assert earlier == nanoseconds(backward)
    assert last - earlier == nanoseconds(rest)


def test_a_root_in_slices_keeps_nothing_gathered() -> None:
    root = replace(MODEL.root, sliceable=SliceableWeights(P // 2, P, P // 2, 2))  # a tied embedding and head
    problem = posed(EVEN, model=replace(MODEL, root=root), slices=(1, 2))
    whole, sliced = (option(problem, UnitStore.WORLD, root=True, slices=slices) for slices in (1, 2))
    assert [own - less for own, less in zip(whole.memory, sliced.memory, strict=True)] == [4 * P] * len(whole.memory)
    assert sliced.peaks == (P, P, 0) and whole.peaks == (0, 0, 0)


def test_a_head_in_slices_keeps_no_logits_and_computes_them_twice() -> None:
    weights = SliceableWeights(P // 2, P, P // 2, 2, logits_bytes=400_000, loss_bytes=700_000)
    roots = [
        replace(MODEL.root, sliceable=each) for each in (replace(weights, logits_bytes=None, loss_bytes=None), weights)
    ]
    whole_logits, sliced_logits = (
        option(
            posed(EVEN, samples=2, model=replace(MODEL, root=root), slices=(1, 2)),
            UnitStore.WORLD,
            root=True,
            slices=2,
        )
        for root in roots
    )
    saved = [own - less for own, less in zip(whole_logits.memory, sliced_logits.memory, strict=True)]
    assert saved == [2 * (700_000 - 3 * 400_000 // 2)] * len(saved)
    # The root's forward again, in the backward.
    forward, backward = (two - one for one, two in zip(whole_logits.work, sliced_logits.work, strict=True))
    assert forward == 0 and backward > 0


def test_a_root_on_the_host_is_streamed_in_slices() -> None:
    root = replace(MODEL.root, sliceable=SliceableWeights(P // 2, P, P // 2, 2))  # a tied embedding and head
    problem = posed(EVEN, model=replace(MODEL, root=root), slices=(1, 4), has_host=True)
    whole, sliced = (option(problem, UnitStore.HOST, root=True, slices=slices) for slices in (1, 4))
    # What is on the device: neither the weights nor their gradients.
    ranks = len(problem.rows)
    assert [own - less for own, less in zip(whole.memory, sliced.memory, strict=True)] == [4 * P] * ranks
    waiting = waiting_bytes(4 * MODEL.trainable, 2)
    assert whole.peaks == (0, waiting, 0)
    # Three slices of a gradient may wait beside the one that is handed in, and the one that is computed.
    assert sliced.peaks == (P // 2, max(waiting, 4 * P // 2) + P // 2, 0)
    # Copied twice in the forward and once in the backward, beside its gradient's two parts; a message each slice.
    assert sliced.send == (
        nanoseconds(8 * COPIED + 4 * P / COPY),
        nanoseconds(8 * COPIED + 4 * P / COPY + 2 * HOP + 2 * P / BETWEEN),
    )
    # Blocks are streamed whole.
    assert {own.placement.slices for own in problem.kinds[0].options if own.placement.store is UnitStore.HOST} == {1}


def test_slices_need_a_row_of_each_rank() -> None:
    many = posed((64, 64), slices=(1, 2, 4))
    assert {own.placement.slices for own in many.kinds[0].options} == {1, 2}


def test_slices_are_sent_in_every_micro_batch() -> None:
    """Bytes of one node of two that have a rank each, of which each sends half of what is exchanged."""
    for slices, checkpoint, times in ((1, False, 2 * 3 + 1), (2, False, 3 * 3), (2, True, 4 * 3)):
        unit = UnitPlacement(UnitStore.WORLD, checkpoint=checkpoint, slices=slices)
        placement = ModelPlacement({"": UnitPlacement(UnitStore.REPLICATE)}, unit)
        root = 4 * MODEL.root.trainable
        sent = bytes_between_nodes(MODEL, placement, (1, 1), 3)
        assert sent == pytest.approx([root + len(MODEL.units) * times * 4 * P / 2] * 2)


def test_slices_on_the_host_send_a_gradient_once_a_step() -> None:
    root = replace(MODEL.root, sliceable=SliceableWeights(P // 2, P, P // 2, 2))
    model = replace(MODEL, root=root)
    sent = [
        bytes_between_nodes(
            model, ModelPlacement({"": UnitPlacement(UnitStore.HOST, slices=slices)}, UnitPlacement()), (1, 1), 3
        )
        for slices in (1, 4)
    ]
    assert sent[0] == sent[1] == (4 * model.trainable,) * 2


def test_optimizer_steps_go_by_what_a_rank_keeps() -> None:
    problem = posed(EVEN, has_host=True)
    whole = 1e-11 * P
    expected = {
        UnitStore.REPLICATE: whole,
        UnitStore.NODE: whole / 2,
        UnitStore.WORLD: whole / 4,
        UnitStore.HOST: 0,
    }
    for store, seconds in expected.items():
        assert option(problem, store).serial == nanoseconds(seconds)
    # What is in no unit is needed at the beginning of the forward.
    assert option(problem, UnitStore.HOST, root=True).serial == nanoseconds(LATE_STEP / 2)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("nodes", [EVEN, (4,), (2, 2, 2)])
def test_memory_is_that_of_the_strategies(precision: str, nodes: tuple[int, ...]) -> None:
    """Uniform placements take what the cost model says of their strategies; it counts no activations."""
    model = ModelSizes(
        tuple(UnitSize(f"h.{place}", P, P // 2, 0, 0, 1e9) for place in range(3)),
        UnitSize("", P, P, 0, 0, 1e9),
        working_bytes=2 * STEPPED_TOGETHER,  # so that the optimizer's step needs no more
        state_bytes=STATE_BYTES[precision],
    )
    cluster = cluster_for(model, nodes, (AMPLE,) * sum(nodes), has_host=True)
    problem = pose_placement(model, cluster, (1,) * sum(nodes))
    counts = ModelCounts(4 * P, P // 2 * 3 + P, (P,) * 3)
    for store, strategy in (
        (UnitStore.REPLICATE, "ddp"),
        (UnitStore.NODE, "group_sharding"),
        (UnitStore.WORLD, "fsdp"),
        (UnitStore.HOST, "lsdp"),
    ):
        needed, *_ = problem.memory(uniform_counts(problem, store, False))
        each = STATE_BYTES[precision]
        memory = rank_memory(strategy, counts, nodes, state_bytes=each, activation_bytes=model.working_bytes)[0]
        # The cost model takes all parameters of a unit for its unreduced gradient, also those without one.
        frozen = 0 if store is UnitStore.REPLICATE else (P - P // 2) * STATE_BYTES[precision].unreduced
        assert needed + frozen == memory.device_bytes


def test_slowest_rank_and_wrong_batches() -> None:
    cluster = cluster_for(MODEL, EVEN, (AMPLE,) * 4, flops=(6e12, 6e12, 3e12, 6e12), largest=8)
    fast = pose_placement(MODEL, cluster, (4, 4, 2, 4))
    slow = pose_placement(MODEL, cluster, (4, 4, 4, 4))
    assert slow.phases[0].nanoseconds == pytest.approx(2 * fast.phases[0].nanoseconds, abs=2)
    for sizes in ((4, 4, 4), (4, 4, 0, 4), (4, 4, 9, 4)):
        with pytest.raises(PlanningError):
            pose_placement(MODEL, cluster, sizes)


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"memory_limits": (1, 1)}, "2 memory limits, expected 4"),
        ({"memory_limits": (1, 1, 1, 0)}, "expected positive"),
        ({"nodes": (2, 0)}, "at least one rank"),
        ({"host_limits": (1,)}, "host_limits of 1 nodes"),
    ],
)
def test_clusters_that_are_refused(change: dict[str, object], complaint: str) -> None:
    good = cluster_for(MODEL, EVEN, (AMPLE,) * 4)
    fields = {name: getattr(good, name) for name in ("nodes", "profiles", "memory_limits", "link", "inside")}
    with pytest.raises(PlanningError, match=complaint):
        PlacementCluster(**{**fields, **change})


@pytest.mark.parametrize("sizes", [(-1, 0, 0, 0, 0), (1, 2, 0, 0, 0), (1, 1, float("nan"), 0, 0)])
def test_units_that_are_refused(sizes: tuple[float, ...]) -> None:
    with pytest.raises(PlanningError):
        UnitSize("h.0", *sizes)


@pytest.mark.parametrize("nodes", [(2, 2), (1, 2), (1, 1, 1, 1)])
@pytest.mark.parametrize(
    "store, strategy",
    [
        (UnitStore.REPLICATE, "ddp"),
        (UnitStore.WORLD, "fsdp"),
        (UnitStore.WORLD_KEPT, "zero2"),
        (UnitStore.NODE, "lsdp"),
    ],
)
def test_memory_of_hosts_is_that_of_the_strategies(store: UnitStore, strategy: str, nodes: tuple[int, ...]) -> None:
    """Where ranks compute in host memory, too: what is mapped, waits, or stays in the heap."""
    units = tuple(UnitSize(f"h.{place}", P, P, 1_000_000, 0, 1e9) for place in range(3))
    model = ModelSizes(units, UnitSize("", P // 2, P // 2, 0, 0, 1e9))
    placed_on = cluster_for(model, nodes, (AMPLE,) * sum(nodes), streams=False)
    problem = pose_placement(model, placed_on, (2,) * sum(nodes))
    counts = uniform_counts(problem, store, False) or uniform_counts(problem, UnitStore.REPLICATE, False)
    needed = problem.memory(counts)
    sizes = ModelCounts(7 * P // 2, 7 * P // 2, (P,) * 3)
    expected = rank_memory(strategy, sizes, nodes, activation_bytes=6e6, computes_on_hosts=True)
    by_rank = {rank: need for row, need in zip(problem.rows, needed, strict=True) for rank in row.ranks}
    for node, size in enumerate(nodes):
        rank = sum(nodes[:node])
        bound = expected[node].total_bytes
        # Where nodes differ, the row of one that is alone counts gradients that wait, too, as the others' peaks.
        assert by_rank[rank] >= bound - 1
        assert by_rank[rank] <= bound + (1 if size == max(nodes) else waiting(model, nodes))


def waiting(model: ModelSizes, nodes: tuple[int, ...]) -> float:
    return waiting_bytes(4 * model.trainable, len(nodes)) + 1


def test_hosts_need_the_whole_model_at_the_start() -> None:
    ample = posed(EVEN, streams=False)
    assert all(row.ranks for row in ample.rows)  # no other rows where limits are far above the model itself
    whole = 4 * sum(unit.parameters for unit in MODEL.everything)
    placed_on = cluster_for(MODEL, EVEN, (whole + whole // 4,) * 4, streams=False)
    *_, start = pose_placement(MODEL, placed_on, (1,) * 4).rows
    assert start.fixed == whole and start.limit == whole + whole // 4 and not start.ranks
