# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Simulated steps under CPU quotas: answers by hand, a simulation in tiny time steps, and steps that were measured."""

from __future__ import annotations

import random
from functools import partial
from statistics import median

import pytest
from laboratory.shared_machine import Processors, simulate_under_quotas
from simulation_in_ticks import in_tiny_steps, random_step
from test_planning_strategy_time import predict

from accelerate_lshdp.documents.network import LinkCost
from accelerate_lshdp.planning import RankProfile, TimeCurve
from accelerate_lshdp.planning.cost.cluster_model import CommunicationCost, ModelSize
from accelerate_lshdp.planning.cost.step_simulation import Segment, Transfer, simulate_step


def test_a_quota_gives_back_what_was_not_used() -> None:
    # Rank 0 has half a core. It waits for 0.1 s, which its quota keeps: then it computes twice as fast until it has
    # used 0.1 s of its own time more than passed, which is after 0.1 s; 0.2 s of its work are done by then.
    segments = [Segment((0.2,)), Segment((1.0,), needs=0)]
    transfers = [Transfer(0.1, (0.0,), after=0)]
    without = simulate_step(segments, transfers, [0])
    kept = simulate_under_quotas(segments, transfers, [0], [Processors.under_quota(0.5, 1, 1.0)])
    assert without.seconds == pytest.approx(1.3)
    assert kept.seconds == pytest.approx(0.2 + 0.1 + 0.1 + 0.8)
    # At most half of the quota's period, on average.
    short = simulate_under_quotas(segments, transfers, [0], [Processors.under_quota(0.5, 1, 0.04)])
    assert short.seconds == pytest.approx(1.3 - 0.02)
    assert Processors.under_quota(4.0, 2, 0.1) == Processors(1.0, 0.0, 2.0)  # what its ranks can use


def test_nodes_that_compute_share_a_machine() -> None:
    nodes = [Processors.under_quota(quota, 1, 0.1, machine_cores=2) for quota in (0.25, 0.8)]
    assert [node.peak for node in nodes] == pytest.approx([4.0, 1.25])
    # Beside three others half a core is what each of them can count on.
    assert [node.peak_beside(4) for node in nodes] == pytest.approx([2.0, 1.0])
    assert [node.credit_seconds(4) for node in nodes] == pytest.approx([0.05, 0.0])
    assert [node.credit_seconds() for node in nodes] == pytest.approx([0.075, 0.02])


def test_a_node_gets_all_of_its_quota_when_others_wait() -> None:
    # Both together want more than the machine gives. When the first one is done, at 1, the second one has 4 s to go.
    crowded = [Processors(quota_cores=1.0, crowded_cores=0.9), Processors(quota_cores=0.5, crowded_cores=0.4)]
    played = simulate_under_quotas([Segment((1.0, 5.0))], [], [0, 1], crowded)
    assert played.seconds == pytest.approx(1 + 4 * 0.4 / 0.5)
    # A machine that has enough for all of them changes nothing.
    enough = [Processors(quota_cores=1.0, crowded_cores=1.0), Processors(quota_cores=0.5, crowded_cores=0.5)]
    assert simulate_under_quotas([Segment((1.0, 5.0))], [], [0, 1], enough).seconds == pytest.approx(5)


def test_what_cannot_be_used_beside_others_is_used_after_them() -> None:
    """Two nodes with half a core each, of one core: only the one that computes alone is faster than its quota.

    Before, both have waited long enough to save what half a period leaves.
    """
    nodes = [Processors.under_quota(0.5, 1, 1.0, machine_cores=1)] * 2
    segments, wait = [Segment((0.1, 0.1)), Segment((1.0, 3.0), needs=0)], [Transfer(5.0, (0.0, 0.0), after=0)]
    assert [nodes[0].credit_seconds(count) for count in (1, 2)] == pytest.approx([0.5, 0.0])
    played = simulate_under_quotas(segments, wait, [0, 1], nodes)
    assert played.seconds == pytest.approx(0.1 + 5 + 3 - 0.5)
    assert played.busy_seconds == pytest.approx([0.1 + 1.0, 0.1 + 3 - 0.5])


def seconds_under_quota(cpu_seconds: float, until_refill: float, quota: float, period: float) -> float:
    """As the kernel does it: computing with the whole quota at hand, stopped when it is used until the next period."""
    now, refill, left = 0.0, until_refill, quota * period
    while cpu_seconds > (run := min(left, refill - now)):
        cpu_seconds -= run
        now, refill, left = refill, refill + period, quota * period
    return now + cpu_seconds


@pytest.mark.parametrize("quota", [0.2, 0.3, 0.5, 0.8])
def test_what_a_quota_gives_back_is_that_of_random_moments(quota: float) -> None:
    generator, period, count = random.Random(1), 0.02, 20_000
    saved = []
    for _ in range(count):
        cpu_seconds = generator.uniform(5, 6) * quota * period
        taken = seconds_under_quota(cpu_seconds, generator.random() * period, quota, period)
        saved.append(cpu_seconds / quota - taken)
    assert Processors.under_quota(quota, 1, period).credit_seconds() == pytest.approx(sum(saved) / count, rel=0.02)


def test_messages_of_a_node_that_has_saved_quota_are_not_held_back() -> None:
    segments = [Segment((0.2,)), Segment((0.1,), needs=0)]
    saved = [Processors.under_quota(0.5, 1, 1.0)]

    def seconds(held_back: float, processors: list[Processors]) -> float:
        second = Transfer(0.05, (0.0,), after=0, held_back_seconds=held_back)
        return simulate_under_quotas(segments, [Transfer(0.1, (0.0,), after=0), second], [0], processors).seconds

    assert seconds(9.0, saved) == seconds(0.0, saved)
    assert seconds(0.0, [Processors()]) == pytest.approx(0.2 + 0.1 + 0.1)
    assert seconds(9.0, [Processors()]) == pytest.approx(0.2 + 0.1 + 0.1 + 0.05 * (1 - 0.1 / 9.05))


@pytest.mark.parametrize("seed", range(12))
def test_equals_a_simulation_in_tiny_steps(seed: int) -> None:
    generator = random.Random(seed)
    ranks = generator.randint(1, 3)
    played = random_step(generator, ranks)
    quotas = [Processors()] * ranks
    if seed % 2:
        shares = [generator.uniform(0.2, 1) for _ in range(ranks)]
        crowded = generator.choice([0.0, 0.8])
        quotas = [Processors.under_quota(share, 1, 0.3, sum(shares), crowded * share) for share in shares]
    exact = simulate_under_quotas(*played, quotas).seconds
    assert exact == pytest.approx(in_tiny_steps(*played, quotas), abs=0.03)
    if not seed % 2:
        assert exact == simulate_step(*played).seconds


def test_what_ranks_do_not_use_of_a_quota_while_they_wait_they_use_afterwards() -> None:
    """With 15 units half a second long, and 0.1 s of a period saved whenever everybody waits for so long."""
    processors = (Processors(2.0, 0.2, 0.5), Processors(2.0, 0.2, 0.5))
    simulate = partial(simulate_under_quotas, processors=processors)
    sooner = predict("zero2").seconds - predict("zero2", simulate=simulate).seconds
    # What is reduced after its backward gives time for the next unit's; gathers are in the forward.
    assert 0.1 < sooner <= 9 * processors[0].credit_seconds()
    assert predict("lsdp", simulate=simulate).seconds <= predict("lsdp").seconds


#: Seconds of a step on 4 emulated nodes at 80, 50, 40, 30 % of a core, by strategy, format and network, with the batch
#: sizes of each: a ViT of 14.3 M parameters, AdamW, as `benchmarks/cluster_uneven.yaml` measured them in one run.
EQUAL, AT_1_GB, AT_250_MB = (8, 8, 8, 8), (15, 8, 6, 3), (14, 8, 6, 4)
MEASURED = [
    ("torch_ddp", "fp32", 1e9, EQUAL, 2.683), ("torch_ddp", "fp32", 250e6, EQUAL, 4.243),
    ("torch_fsdp", "fp32", 1e9, EQUAL, 3.611), ("torch_fsdp", "fp32", 250e6, EQUAL, 8.133),
    ("ddp", "fp32", 1e9, EQUAL, 2.448), ("ddp", "fp32", 250e6, EQUAL, 4.064),
    ("fsdp", "fp32", 1e9, EQUAL, 3.041), ("fsdp", "fp32", 250e6, EQUAL, 7.035),
    ("zero2", "fp32", 1e9, EQUAL, 2.699), ("zero2", "fp32", 250e6, EQUAL, 5.167),
    ("lshdp", "fp32", 1e9, AT_1_GB, 1.611), ("lshdp", "fp32", 250e6, AT_250_MB, 3.549),
    ("lshdp", "bf16", 1e9, AT_1_GB, 1.471), ("lshdp", "bf16", 250e6, AT_250_MB, 2.123),
]  # fmt: skip
#: What was measured of each rank beside: seconds of some sizes, what sending adds, the optimizer step, fused and
#: plain, and the cores that it got while all computed.
CURVES = [
    ([4, 8, 22], [0.370, 0.709, 1.900]), ([4, 8, 15], [0.625, 1.206, 2.317]), ([4, 8, 9], [0.793, 1.553, 1.718]),
    ([3, 4, 8], [0.846, 1.093, 2.084]),
]  # fmt: skip
LOADS = [0.145, 0.201, 0.251, 0.338]
OPTIMIZER = {"fused": (0.014, 0.019, 0.023, 0.038), "plain": (0.038, 0.063, 0.082, 0.133)}
CROWDED_CORES = (0.778, 0.485, 0.378, 0.274)
#: And of the machine: CPU seconds of what is sent, and of what FSDP2 does, and what a message takes longer.
SENDING = CommunicationCost(7.07e-10, 3.4e-3, 4.2e-10)
SHARDING = CommunicationCost(7.07e-10, 0.0, 4.2e-10, copy_seconds_per_byte=6e-11, seconds_per_unit=3.1e-3)
DELAYS = {1e9: 5.0e-3, 250e6: 1.5e-3}


def test_describes_steps_that_were_measured() -> None:
    cores = (0.8, 0.5, 0.4, 0.3)
    model = ModelSize(57e6, 57e6, (7.1e6,) * 8)
    processors = tuple(
        Processors.under_quota(share, 1, 0.02, machine_cores=2, crowded_cores=crowded)
        for share, crowded in zip(cores, CROWDED_CORES, strict=True)
    )
    errors = []
    for strategy, dtype, rate, sizes, seconds in MEASURED:
        optimizer = OPTIMIZER["plain" if strategy.startswith("torch") else "fused"]
        profiles = [
            RankProfile(TimeCurve(*curve), curve[0][-1], fixed_seconds=steps)
            for curve, steps in zip(CURVES, optimizer, strict=True)
        ]
        costs = SHARDING if "fsdp" in strategy or strategy == "zero2" else SENDING
        predicted = predict(
            strategy, (1,) * 4, sizes=sizes, link=LinkCost.from_rate(0.95 * rate, 7e-5), model=model,
            profiles=profiles, communication_dtype=dtype, load_seconds=LOADS,
            communication_costs=tuple(costs.on(share) for share in cores), message_delay_seconds=DELAYS[rate],
            simulate=partial(simulate_under_quotas, processors=processors),
        )  # fmt: skip
        errors.append(abs(predicted.seconds / seconds - 1))
    # Without what waiting nodes gain, or with half of it, or without the crowd, the largest is 8 to 16 %.
    assert median(errors) <= 0.04
    assert max(errors) <= 0.075
