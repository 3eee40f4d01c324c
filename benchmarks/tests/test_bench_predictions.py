# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Predicted steps of a benchmark's cases: the machine's speed, the optimizer, and what FSDP2 does itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from laboratory import planned
from laboratory.planned import GOODPUT, ClusterMeasurements, Format, Overheads
from laboratory.shared_machine import Processors
from laboratory.speed_check import CheckedRank, Speed, speed_of

from accelerate_lshdp.comparing.cases import Case
from accelerate_lshdp.documents.cluster import Cluster, Link, Node
from accelerate_lshdp.documents.plan import Strategy
from accelerate_lshdp.documents.profile import Profile
from accelerate_lshdp.documents.profile_sections import MeasuredRank, MessageTimes, Network, ProfiledScript
from accelerate_lshdp.planning import TimeCurve
from accelerate_lshdp.planning.cost.cluster_model import CommunicationCost, ModelSize


OPTIMIZER_SECONDS = 0.25
PLAIN_OPTIMIZER_SECONDS = 0.75
AS_PROFILED = Speed((1.0, 1.0), (PLAIN_OPTIMIZER_SECONDS, PLAIN_OPTIMIZER_SECONDS), (1.0, 1.0))


def a_rank(number: int, seconds_per_sample: float) -> MeasuredRank:
    curve = TimeCurve((1, 8), (seconds_per_sample, 8 * seconds_per_sample))
    ready = TimeCurve((1, 8), (seconds_per_sample / 2, 4 * seconds_per_sample))
    return MeasuredRank(
        rank=number,
        time=curve,
        spread=(0.0, 0.0),
        max_micro_batch_size=8,
        limited_by="time",
        device="a processor",
        optimizer_seconds=OPTIMIZER_SECONDS,
        memory=None,
        memory_limit_bytes=None,
        bucket_ready=(ready,),
    )


def measured_cluster(**changes) -> ClusterMeasurements:
    """Two nodes with a whole core each; the second one is half as fast. Nothing is known to cost anything else."""
    times = MessageTimes(0.0, 0.0, ((1, 1e-9),))
    network = Network(times, times)
    profile = Profile(
        strategy=Strategy.LSDP,
        subject=ProfiledScript(None, (), 1000, 4000),
        cluster=Cluster((Node(1, device="cpu"), Node(1, device="cpu"))),
        ranks=(a_rank(0, 0.1), a_rank(1, 0.2)),
        bucket_bytes=(4000,),
        network=network,
        measured_seconds=1.0,
        versions={"torch": "2.13.0"},
    )
    values = {
        "nodes": (Node(1, cores=1.0), Node(1, cores=1.0)),
        "profile": profile,
        "networks": {"fast": (Link(1e12), network)},
        "model": ModelSize(4000, 4000, (1500, 1500)),
        "formats": {"fp32": Format(4000, CommunicationCost())},
        "shared_memory": False,
    }
    return ClusterMeasurements(**{**values, **changes})


def predicted(strategy: str, speed: Speed = AS_PROFILED, known: ClusterMeasurements | None = None) -> float:
    return (known or measured_cluster()).predicted_seconds(Case(strategy), [(4, 1), (4, 1)], "fast", speed)


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        ("ddp", OPTIMIZER_SECONDS),
        ("lsdp", OPTIMIZER_SECONDS),
        ("fsdp", OPTIMIZER_SECONDS / 2),
        ("torch_ddp", PLAIN_OPTIMIZER_SECONDS),
        ("torch_hsdp", PLAIN_OPTIMIZER_SECONDS),
        ("torch_fsdp", PLAIN_OPTIMIZER_SECONDS / 2),
    ],
)
def test_a_step_is_computing_at_the_speed_of_the_check_and_the_optimizer(strategy: str, optimizer: float) -> None:
    assert predicted(strategy) == pytest.approx(0.8 + optimizer, abs=1e-3)
    # The optimizer of the engine's processes was profiled and is slowed down, too; that of plain ones was checked.
    own = optimizer if strategy.startswith("torch") else 1.5 * optimizer
    slowed = replace(AS_PROFILED, slowdowns=(1.5, 1.5))
    assert predicted(strategy, slowed) == pytest.approx(1.5 * 0.8 + own, abs=1e-3)
    # The first rank, which was twice as fast, takes longer than the second one.
    uneven = replace(AS_PROFILED, slowdowns=(4.0, 1.5))
    own = optimizer if strategy.startswith("torch") else 4 * optimizer
    assert predicted(strategy, uneven) == pytest.approx(4 * 0.4 + own, abs=1e-3)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "torch_ddp"])
def test_the_last_rank_that_computes_gets_all_of_its_quota(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two nodes want 1.5 cores, and got 1.4 while both computed: for 0.4 s, then the second one for 0.4 s.

    In FSDP that is so in each unit.
    """
    known = measured_cluster(nodes=(Node(1, cores=1.0), Node(1, cores=0.5)))
    crowded = replace(AS_PROFILED, cores=(1.0, 0.4))
    monkeypatch.setattr(planned, "QUOTA_PERIOD_SECONDS", 0.0)  # what is left over of a period does not matter here

    def gained(machine: int) -> float:
        monkeypatch.setattr(planned.os, "cpu_count", lambda: machine)
        return predicted(strategy, replace(crowded, cores=(0.0, 0.0)), known) - predicted(strategy, crowded, known)

    assert gained(machine=1) == pytest.approx(0.4 * (1 - 0.4 / 0.5), rel=0.02)
    # A machine that has enough for both gives what they get for other reasons.
    assert gained(machine=2) == 0


def test_a_format_makes_backwards_as_much_longer_as_it_costs_by_bytes_and_reductions() -> None:
    """In full precision 16 reductions of 1 ms of CPU time each, and as much for their bytes, were rehearsed."""
    known = measured_cluster()
    buckets = (5_000_000,) * 16
    ranks = [
        replace(rank, communication_load_seconds=0.32, bucket_ready=rank.bucket_ready * len(buckets))
        for rank in known.profile.ranks
    ]
    # A ring of two ranks sends every byte once.
    exact, short = CommunicationCost(0.016 / 80e6, 0.001), CommunicationCost(0.016 / 80e6, 0.003)
    formats = {"fp32": Format(80e6, exact), "int8": Format(20e6, short), "powersgd": Format(0.0, short)}
    known = replace(known, profile=replace(known.profile, ranks=tuple(ranks), bucket_bytes=buckets), formats=formats)

    def loads(name: str) -> list[float]:
        return known._loads(Case("lsdp", communication_dtype=name), replace(AS_PROFILED, slowdowns=(1.0, 2.0)))

    assert loads("fp32") == pytest.approx([0.32, 0.64])
    assert loads("int8") == pytest.approx([0.32 * (4 + 48) / 32, 0.64 * (4 + 48) / 32])
    # PowerSGD puts five of these buckets into one.
    assert loads("powersgd") == pytest.approx([0.32 * 12 / 32, 0.64 * 12 / 32])


def test_ranks_that_sleep_have_no_quota() -> None:
    nodes = (Node(1, cores=1.0), Node(1, cores=0.5))
    sleeping = measured_cluster(nodes=nodes, emulated_by_sleeping=True)
    assert sleeping._processors(AS_PROFILED) == (Processors(), Processors())


def test_what_ranks_of_a_node_send_each_other_has_its_own_cost() -> None:
    nodes = (Node(2, cores=1.0),)
    known = measured_cluster(nodes=nodes, formats={"fp32": Format(4000, CommunicationCost(seconds_per_byte=1e-5))})
    other = replace(known, plain_overheads=Overheads(inside_seconds_per_byte=3e-5))
    # 4000 bytes are gathered twice and reduced.
    assert predicted("torch_hsdp", known=other) - predicted("torch_hsdp", known=known) == pytest.approx(
        2e-5 * 3 * 4000
    )
    assert predicted("ddp", known=other) == predicted("ddp", known=known)


def test_messages_that_computing_ranks_hold_back_take_longer() -> None:
    """Where they travel meanwhile; the one bucket is two of them between two nodes."""
    wire_seconds = 0.6
    network = Link(8 * 4000 / (wire_seconds * GOODPUT))
    known = measured_cluster(networks={"fast": (network, measured_cluster().networks["fast"][1])})
    busy = replace(known, message_delay_seconds={"fast": 0.01, "another": 9.0})
    for strategy in ("ddp", "lsdp", "torch_ddp"):
        longer = predicted(strategy, known=busy) - predicted(strategy, known=known)
        assert 0 < longer <= 2 * 0.01 * (1 + 1e-9)
    for strategy in ("fsdp", "torch_fsdp"):  # everybody waits for what travels
        assert predicted(strategy, known=busy) == predicted(strategy, known=known)


def test_what_fsdp_does_itself_counts_where_it_shards() -> None:
    own = Overheads(optimizer_seconds=0.1, seconds_per_unit=0.01)
    known = measured_cluster(overheads=own, plain_overheads=replace(own, optimizer_seconds=0.2))
    # Two blocks are gathered twice and reduced, the rest is gathered and reduced.
    units = 0.01 * (2 * 3 + 2)
    assert predicted("fsdp", known=known) - predicted("fsdp") == pytest.approx(0.1 + units)
    assert predicted("torch_fsdp", known=known) - predicted("torch_fsdp") == pytest.approx(0.2 + units)
    assert predicted("torch_hsdp", known=known) - predicted("torch_hsdp") == pytest.approx(0.2 + 0.01 * 3 * 3)
    for strategy in ("ddp", "lsdp", "torch_ddp"):
        assert predicted(strategy, known=known) == predicted(strategy)


@pytest.mark.parametrize("strategy", ["fsdp", "torch_fsdp"])
def test_what_sharding_took_of_the_whole_model_counts_once(strategy: str) -> None:
    """Messages and units are in it: what is left is for the copies of units."""
    messages = {"fp32": Format(4000, CommunicationCost(seconds_per_byte=1e-5))}
    overheads = Overheads(sharding_seconds=0.5, seconds_per_unit=0.01)
    known = measured_cluster(formats=messages, overheads=overheads, plain_overheads=overheads)
    assert predicted(strategy, known=known) - predicted(strategy) == pytest.approx(0.5)


def test_copies_take_nothing_where_messages_took_longer_than_all_of_sharding() -> None:
    messages = {"fp32": Format(4000, CommunicationCost(seconds_per_byte=1e-5))}
    known, without = (
        measured_cluster(formats=messages, overheads=Overheads(sharding_seconds=seconds)) for seconds in (0.01, 0.0)
    )
    assert predicted("fsdp", known=known) == predicted("fsdp", known=without)


@pytest.mark.parametrize(
    ("loads", "ratio"), [((0.016, 0.008), 3), ((0.0, 0.016), 4), ((0.0, 0.001), 1), ((0.0, 0.0), 1)]
)
def test_messages_cost_as_much_more_as_rehearsed_steps_show_on_ranks_without_free_time(
    loads: tuple[float, float], ratio: float
) -> None:
    ranks = [replace(a_rank(rank, 0.1), communication_load_seconds=load) for rank, load in enumerate(loads)]
    costs = CommunicationCost(seconds_per_byte=1e-6)  # 4 ms for what each node sends
    formats = {"fp32": Format(4000, costs)}
    known = measured_cluster(profile=replace(measured_cluster().profile, ranks=tuple(ranks)), formats=formats)
    assert known._under_load(costs).seconds_per_byte == pytest.approx(ratio * 1e-6)


def test_the_machine_is_as_fast_as_its_ranks_on_average() -> None:
    quiet = [CheckedRank(0.5, 0.1, 0.4), CheckedRank(1.0, 0.3, 0.5), CheckedRank(0.25, 0.2, 0.0)]
    checks = [
        quiet,
        quiet,
        [CheckedRank(0.6, 0.1, 0.6), CheckedRank(1.0, 0.3, 0.9), CheckedRank(9.0, 9.0, 9.0)],
        quiet,
    ]
    speed = speed_of(checks, checks, [0.5, 0.5, 0.5], [2, 1])
    assert speed.slowdowns == pytest.approx((1, 2, 0.5))
    assert speed.slowdown == pytest.approx((1 + 2 + 0.5) / 3)
    assert speed.optimizer_seconds == pytest.approx((0.2, 0.2, 0.2))
    assert speed.cores == pytest.approx((0.8, 0.5, 0.0))
    # The engine's processes take no optimizer's step.
    unstepped = [[CheckedRank(0.5, None, 0.5)] * 3]
    assert speed_of(unstepped, unstepped, [0.5, 0.5, 0.5], [2, 1]).optimizer_seconds == (0.0, 0.0, 0.0)


def test_what_is_usual_of_a_rank_shows_in_the_checks_of_all_cases() -> None:
    """Chance that hits one rank while a case takes its turns is the machine's, not the rank's."""
    usual = [[CheckedRank(0.4, 0.1, 0.2), CheckedRank(1.0, 0.1, 0.9)]] * 7
    own = [[CheckedRank(0.8, 0.1, 0.8), CheckedRank(1.0, 0.1, 0.1)]] * 2
    speed = speed_of(own, own + usual, [0.5, 0.5], [1, 1])
    assert speed.slowdowns == pytest.approx((1.5 * 0.4 / 0.5, 1.5 * 1.0 / 0.5))
    assert speed.cores == pytest.approx((0.5, 0.9))


def test_a_check_takes_the_micro_batches_of_the_plan_if_any_case_does_else_equal_ones() -> None:
    assert measured_cluster().check_micro_batches(6, planned=True) == ([4, 2], pytest.approx([0.4, 0.4]))
    assert measured_cluster().check_micro_batches(6, planned=False) == ([3, 3], pytest.approx([0.3, 0.6]))
    # More than the first rank has measured.
    short = [
        replace(rank, time=TimeCurve([1, 2], [0.1, 0.2]), max_micro_batch_size=2)
        for rank in measured_cluster().profile.ranks[:1]
    ]
    known = measured_cluster(
        profile=replace(measured_cluster().profile, ranks=(*short, *measured_cluster().profile.ranks[1:]))
    )
    assert known.check_micro_batches(6, planned=False) == ([2, 4], pytest.approx([0.2, 0.8]))
