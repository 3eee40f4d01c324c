# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Predicted steps of all strategies: against formulas by hand, measured steps, and what must always hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerate_lshdp.documents.network import LinkCost
from accelerate_lshdp.documents.strategy import STRATEGIES, SharedBy
from accelerate_lshdp.planning import RankProfile, TimeCurve
from accelerate_lshdp.planning.cost.cluster_model import ClusterModel, CommunicationCost, ModelSize
from accelerate_lshdp.planning.cost.strategy_time import predict_step


WIRE = LinkCost(0.0, 1e-8)
FREE = LinkCost(0.0, 0.0)
#: 80 MB in 4 units of 15 MB; the rest is the root.
MODEL = ModelSize(80e6, 80e6, (15e6,) * 4)


def rank(seconds_per_sample: float = 0.1, optimizer: float = 0.0, **options) -> RankProfile:
    return RankProfile(
        TimeCurve([1, 64], [seconds_per_sample, 64 * seconds_per_sample]), 64, fixed_seconds=optimizer, **options
    )


def predict(strategy: str, nodes=(1, 1), sizes=None, link: LinkCost = WIRE, model: ModelSize = MODEL, **options):
    world = sum(nodes)
    profiles = options.pop("profiles", [rank()] * world)
    dtype = options.pop("communication_dtype", "fp32")
    steps = {name: options.pop(name) for name in ("wire_bytes", "load_seconds") if name in options}
    cluster = ClusterModel(nodes, link, **options)
    batches = [(size, 1) if isinstance(size, int) else size for size in sizes or [6] * world]
    return predict_step(strategy, profiles, batches, model, cluster, communication_dtype=dtype, **steps)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_network_that_costs_nothing_leaves_computing_and_the_optimizer(strategy: str) -> None:
    profiles = [rank(0.1, 0.25), rank(0.2, 0.5)]
    predicted = predict(strategy, sizes=[6, 3], link=FREE, profiles=profiles)
    share = 2 if STRATEGIES[strategy].shared_by is SharedBy.WORLD else 1
    assert predicted.seconds == pytest.approx(0.6 + 0.5 / share)
    assert [part.compute_seconds for part in predicted.ranks] == pytest.approx([0.6, 0.6])
    assert [part.optimizer_seconds for part in predicted.ranks] == pytest.approx([0.25 / share, 0.5 / share])
    assert [part.wait_seconds for part in predicted.ranks] == pytest.approx([0.25 / share, 0], abs=1e-9)


@pytest.mark.parametrize(
    ("strategy", "nodes", "micro_batches", "sent"),
    [
        # In units of all parameters; a quarter of them (the root) is gathered once a micro-batch.
        ("ddp", (1, 1, 1, 1), 1, 1.5),
        ("hdp", (1, 1, 1, 1), 3, 1.5),
        ("ddp", (2, 2), 1, 1.0),
        ("hdp", (1, 2), 1, 1.0),
        ("torch_ddp", (2, 2), 1, 1.5),
        ("lsdp", (1, 1, 1, 1), 1, 1.5),
        ("lsdp", (2, 2), 3, 1.0),
        ("lshdp", (1, 2), 1, 1.0),
        ("group_sharding", (2, 2), 1, 1.0),
        ("fsdp", (1, 1, 1, 1), 1, 0.75 * (2 * 0.75 + 0.25 + 1)),
        ("fsdp", (1, 1, 1, 1), 3, 0.75 * (3 * (2 * 0.75 + 0.25) + 1)),
        ("fsdp_offload", (2, 2), 1, 0.5 * (2 * 0.75 + 0.25 + 1)),
        ("zero2", (1, 1), 1, 0.5 * 2),
        ("zero2", (1, 1), 3, 0.5 * 2),
        ("zero1", (1, 1), 3, 0.5 * 2),
        ("torch_ddp", (1, 1), 1, 1.0),
        ("torch_fsdp", (2, 2), 1, 0.75 * (2 * 0.75 + 0.25 + 2)),
        ("torch_hsdp", (2, 2), 1, 1.0),
        ("fsdp", (4,), 1, 0.0),
    ],
)
def test_bytes_between_nodes(strategy: str, nodes: tuple[int, ...], micro_batches: int, sent: float) -> None:
    predicted = predict(strategy, nodes, sizes=[(2, micro_batches)] * sum(nodes))
    assert predicted.bytes_between_nodes == pytest.approx([sent * 80e6] * len(nodes))


def test_formats_shrink_gradients_and_not_parameters() -> None:
    sent = {
        dtype: predict("lsdp", communication_dtype=dtype).bytes_between_nodes[0] for dtype in ("fp32", "bf16", "int8")
    }
    assert sent["bf16"] == pytest.approx(sent["fp32"] / 2)
    assert sent["int8"] == pytest.approx(sent["fp32"] / 4 * (1 + 4 / 1024))
    assert predict("lsdp", communication_dtype="powersgd", wire_bytes=1e6).bytes_between_nodes[0] == pytest.approx(1e6)
    gathered = 0.5 * 1.75 * 80e6
    assert predict("fsdp", communication_dtype="bf16").bytes_between_nodes[0] == pytest.approx(gathered + 0.25 * 80e6)
    with pytest.raises(ValueError, match="without wire_bytes"):
        predict("lsdp", communication_dtype="powersgd")


def test_gradients_overlap_with_the_backward() -> None:
    # 6 samples take 0.6 s, 0.2 of them the forward; units of 15/80 of the gradient take 0.15 s on the wire, the root
    # 0.2. The network is idle until the first unit is ready, and then busy to the end.
    predicted = predict("lsdp", profiles=[rank(), rank()])
    assert predicted.seconds == pytest.approx(0.2 + 0.4 * 15 / 80 + 0.8)
    assert predicted.ranks[0].wait_seconds == pytest.approx(predicted.seconds - 0.6)
    # A measured readiness is used instead of an even one: here all gradients are ready at the end.
    late = [TimeCurve([1, 64], [0.1, 6.4])] * 5
    profiles = [rank(bucket_ready=late)] * 2
    predicted = predict("lsdp", model=replace(MODEL, ready_bytes=(15e6,) * 4 + (20e6,)), profiles=profiles)
    assert predicted.seconds == pytest.approx(0.6 + 0.8)
    with pytest.raises(ValueError, match="ready_bytes"):
        predict("lsdp", model=replace(MODEL, ready_bytes=(80e6,)), profiles=profiles)


@pytest.mark.parametrize(
    ("strategy", "nodes", "copied", "exchanges"),
    [
        # Units are gathered twice, the root once; all are reduced.
        ("fsdp", (1, 1), 3 * 60e6 + 2 * 20e6, 3 * 4 + 2),
        ("torch_fsdp", (1, 1), 3 * 60e6 + 2 * 20e6, 3 * 4 + 2),
        ("zero2", (1, 1), 2 * 60e6 + 2 * 20e6, 2 * 4 + 2),
        ("torch_hsdp", (1, 1), 3 * 80e6, 3 * 5),
        ("lsdp", (1, 1), 0, 0),
        ("ddp", (1, 1), 0, 0),
        # Two ranks of a node copy the same units, each for itself.
        ("torch_hsdp", (2, 2), 2 * 3 * 80e6, 2 * 3 * 5),
    ],
)
def test_units_are_copied_and_prepared_where_parameters_are_shared(
    strategy: str, nodes: tuple[int, ...], copied: float, exchanges: int
) -> None:
    free = predict(strategy, nodes, link=FREE).seconds
    costs = {
        "copies": CommunicationCost(copy_seconds_per_byte=1e-9),
        "units": CommunicationCost(seconds_per_unit=1e-3),
    }
    taken = {
        name: predict(strategy, nodes, link=FREE, communication_costs=(cost,) * 2).seconds
        for name, cost in costs.items()
    }
    assert taken["copies"] - free == pytest.approx(copied * 1e-9, abs=1e-9)
    assert taken["units"] - free == pytest.approx(exchanges * 1e-3, abs=1e-9)


def test_measured_loads_make_backwards_longer_in_place_of_handling() -> None:
    communication_costs = (CommunicationCost(seconds_per_byte=1e-8),) * 2
    predicted = predict("lsdp", load_seconds=[0.2, 0.1], communication_costs=communication_costs)
    assert predicted.seconds == pytest.approx(0.2 + 0.6 * 15 / 80 + 0.8)
    assert [part.communication_seconds for part in predicted.ranks] == pytest.approx([0.2, 0.1])
    assert [part.compute_seconds for part in predicted.ranks] == pytest.approx([0.6, 0.6])
    # Measured readiness is stretched from the end of the forward on.
    late = [TimeCurve([1, 64], [0.1, 6.4])]
    model = replace(MODEL, ready_bytes=(80e6,))
    assert predict("lsdp", load_seconds=[0.2, 0.1], model=model, profiles=[rank(bucket_ready=late)] * 2).seconds == (
        pytest.approx(0.8 + 0.8)
    )
    # Strategies that wait for each exchange have no use for it.
    waiting = [
        predict("fsdp", load_seconds=loads, communication_costs=communication_costs).seconds
        for loads in (None, [0.2, 0.2])
    ]
    assert waiting[0] == waiting[1]


def test_two_stages_take_turns() -> None:
    communication_costs = (CommunicationCost(seconds_per_byte=1e-9),) * 2
    # A gather and a reduce-scatter: each sends 40 MB between the nodes, and handles 80 MB inside each.
    assert predict("zero2", (2, 2), communication_costs=communication_costs).seconds == pytest.approx(
        0.6 + 2 * (0.4 + 0.08)
    )
    assert predict("zero2", (2, 2), communication_costs=communication_costs, link=FREE).seconds == pytest.approx(
        0.6 + 2 * (0.04 + 0.08)
    )


def test_powersgd_has_few_buckets() -> None:
    # 16 buckets that are ready at the end, 2 rounds of 10 ms each: PowerSGD puts five of them into one.
    ready = {"profiles": [rank(bucket_ready=[TimeCurve([1, 64], [0.1, 6.4])] * 16)] * 2}
    ready["model"] = replace(MODEL, ready_bytes=(5e6,) * 16)
    slow = LinkCost(0.01, 0.0)
    assert predict("lsdp", link=slow, **ready).seconds == pytest.approx(0.6 + 16 * 0.02)
    few = predict("lsdp", link=slow, communication_dtype="powersgd", wire_bytes=1e6, **ready)
    assert few.seconds == pytest.approx(0.6 + 4 * 0.02)


def test_world_sharded_strategies_wait_for_everything_without_streams() -> None:
    sent = 0.5 * (2 * 60e6 + 20e6 + 80e6)
    assert predict("fsdp").seconds == pytest.approx(0.6 + sent * 1e-8)
    # With streams, what does not fit beside computing is left: the network is the bottleneck here, or computing.
    slow = predict("fsdp", streams=True).seconds
    assert sent * 1e-8 <= slow < 0.6 + sent * 1e-8
    # What nothing hides: the root and the first unit before the forward, a unit before the backward, and a unit and
    # the root after it.
    fast = predict("fsdp", streams=True, link=LinkCost(0.0, 1e-9)).seconds
    assert fast == pytest.approx(0.6 + 0.5 * (2 * 20e6 + 3 * 15e6) * 1e-9)


def test_handling_delays_the_slow_node_only() -> None:
    communication_costs = (CommunicationCost(), CommunicationCost(seconds_per_byte=4e-9))
    predicted = predict("lsdp", link=LinkCost(0.0, 1e-9), communication_costs=communication_costs, sizes=[6, 12])
    # Half of a processor at most: 0.32 s of communication beside 1.2 s of computing, all but that of the root in time.
    assert predicted.ranks[1].communication_seconds > 0.2
    assert predicted.ranks[0].communication_seconds == 0
    assert 1.2 + 0.3 <= predicted.seconds <= 1.2 + 0.32 + 0.08
    assert CommunicationCost(1.0, 2.0, 3.0, 4.0, 5.0, 6.0).on(0.5) == CommunicationCost(2.0, 4.0, 6.0, 8.0, 10.0, 12.0)


def test_exchanges_inside_a_node_cost_processors_or_a_link() -> None:
    nodes = (2, 2)
    communication_costs = (CommunicationCost(seconds_per_byte=1e-9),) * 2
    computing = predict("lsdp", nodes, link=FREE)
    sockets = predict("lsdp", nodes, link=FREE, communication_costs=communication_costs)
    # Two all-gathers and a reduce-scatter, each 80 MB from the two ranks together; then the reduction between nodes.
    assert sockets.bytes_inside_nodes == pytest.approx([3 * 80e6] * 2)
    assert sockets.seconds == pytest.approx(computing.seconds + 0.24 + 0.08, rel=0.05)
    shared = predict("lsdp", nodes, link=FREE, communication_costs=communication_costs, shared_memory=True)
    assert shared.bytes_inside_nodes == (0, 0)
    assert computing.seconds < shared.seconds < sockets.seconds - 0.2
    assert predict("lsdp", nodes, link=FREE, inside=LinkCost(0, 1e-9)).seconds == pytest.approx(
        computing.seconds + 0.12
    )
    offloaded = {"link": FREE, "device_link": LinkCost(0, 1e-9)}
    # To the device in the forward; in the backward again, while gradients come back.
    assert predict("lsdp", **offloaded).seconds == pytest.approx(0.6 + 2 * 0.08)
    assert predict("group_sharding", **offloaded).seconds == pytest.approx(0.6)


def test_world_sharded_strategies_use_links_inside_nodes_and_to_devices() -> None:
    # Units are gathered twice, the root once, and all are reduced: 220 MB, half of them for each of two ranks.
    inside = LinkCost(0, 1e-9)
    assert predict("fsdp", (2,), link=FREE).seconds == pytest.approx(0.6)
    assert predict("fsdp", (2,), link=FREE, inside=inside).seconds == pytest.approx(0.6 + 0.11)
    assert predict("fsdp", (2, 2), link=FREE, inside=inside).seconds == pytest.approx(0.6 + 0.11)
    # Where the ring goes through both kinds of links, the slower one counts.
    assert predict("torch_ddp", (2,), link=FREE, inside=LinkCost(0, 1e-8)).seconds > 0.6 + 0.2
    assert predict("torch_ddp", (2, 2), inside=inside).seconds == pytest.approx(predict("torch_ddp", (2, 2)).seconds)
    offloaded = {"link": FREE, "device_link": inside}
    assert predict("fsdp_offload", **offloaded).seconds == pytest.approx(0.6 + 0.11)
    assert predict("fsdp", **offloaded).seconds == pytest.approx(0.6)


def test_whole_copies_are_summed_inside_the_node_first() -> None:
    # 80 MB to one rank of the node, and the sum back; nothing travels from a node that is alone.
    inside, free = LinkCost(0, 1e-9), predict("ddp", (2, 2), link=FREE).seconds
    assert [free, predict("ddp", (2,)).seconds] == pytest.approx([0.6, 0.6])
    assert predict("ddp", (2,), inside=inside).seconds == pytest.approx(0.6 + 0.16)
    assert predict("ddp", (2, 2), link=FREE, inside=inside).seconds == pytest.approx(0.6 + 0.16)
    assert predict("ddp", (1, 2), link=FREE, inside=inside).bytes_inside_nodes == pytest.approx((0, 160e6))
    # With streams while the backward goes on.
    assert predict("ddp", (2, 2), inside=inside, streams=True).seconds == pytest.approx(predict("ddp", (2, 2)).seconds)
    # Processors move it, or only add it up in memory that they share.
    costs = {"communication_costs": (CommunicationCost(seconds_per_byte=1e-9),) * 2, "link": FREE}
    sockets, shared = (predict("ddp", (2, 2), shared_memory=memory, **costs).seconds for memory in (False, True))
    assert free < shared < sockets - 0.1


def test_accumulation_sends_once_but_gathers_in_every_micro_batch() -> None:
    once = predict("lsdp", sizes=[6, 6])
    twice = predict("lsdp", sizes=[(6, 2), (6, 2)])
    assert twice.seconds == pytest.approx(once.seconds + 0.6)
    assert predict("lsdp", sizes=[(6, 2), (6, 1)]).seconds == pytest.approx(twice.seconds)
    inside = predict("lsdp", (2, 2), sizes=[(6, 3)] * 4).bytes_inside_nodes
    assert inside == pytest.approx([9 * 80e6] * 2)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    strategy=st.sampled_from(sorted(STRATEGIES)),
    nodes=st.sampled_from([(1, 1), (1, 1, 1), (2, 2), (1, 2)]),
    seconds_per_byte=st.floats(0, 5e-8),
    cpu_seconds_per_byte=st.floats(0, 1e-8),
    slower=st.floats(1, 3),
    streams=st.booleans(),
)
def test_a_slower_network_or_more_bytes_are_never_faster(
    strategy: str,
    nodes: tuple[int, ...],
    seconds_per_byte: float,
    cpu_seconds_per_byte: float,
    slower: float,
    streams: bool,
) -> None:
    options = {"communication_costs": (CommunicationCost(cpu_seconds_per_byte),) * len(nodes), "streams": streams}
    usual = predict(strategy, nodes, link=LinkCost(1e-4, seconds_per_byte), **options)
    slow = predict(strategy, nodes, link=LinkCost(1e-4, slower * seconds_per_byte), **options)
    model = ModelSize(slower * 80e6, slower * 80e6, (slower * 15e6,) * 4)
    large = predict(strategy, nodes, link=LinkCost(1e-4, seconds_per_byte), model=model, **options)
    assert slow.seconds >= usual.seconds - 1e-9
    # More buckets make a finer overlap, which may save a little.
    assert large.seconds >= usual.seconds - (0.05 if STRATEGIES[strategy].shared_by is SharedBy.NOBODY else 1e-9)
    assert usual.seconds >= 0.6 - 1e-9
    for part in usual.ranks:
        total = part.compute_seconds + part.optimizer_seconds + part.communication_seconds + part.wait_seconds
        assert total == pytest.approx(usual.seconds)


def test_what_does_not_match_is_an_error() -> None:
    with pytest.raises(ValueError, match="one of torch_ddp"):
        predict("zero7")
    with pytest.raises(ValueError, match="one of each for every rank"):
        predict("ddp", profiles=[rank()])
    with pytest.raises(ValueError, match="communication_costs of 1 nodes"):
        predict("ddp", communication_costs=(CommunicationCost(),))
    with pytest.raises(ValueError, match="at least one node"):
        ClusterModel((), WIRE)
    with pytest.raises(ValueError, match="units of"):
        ModelSize(1e6, 1e6, (2e6,))
    with pytest.raises(ValueError, match="measure again"):
        CommunicationCost(-1.0)
