# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The controller of the automatic mode finds the optimum, stays there, follows changes, decides alike everywhere."""

from __future__ import annotations

import copy
import json
import math
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerate_lshdp.planning import RankProfile, TimeCurve, plan_fixed_total
from accelerate_lshdp.planning.online.learned_curves import LearnedCurve
from accelerate_lshdp.planning.online.rebalancing import Decision, Rebalancer


def equal_split(total: int, ranks: int) -> list[int]:
    return [total // ranks + (rank < total % ranks) for rank in range(ranks)]


@dataclass
class Cluster:
    """Ranks with known curves (seconds of 1, 2, ... samples), noisy clocks and loaders that prefetch."""

    curves: list[list[float]]
    total: int
    fixed: list[float]
    noise: float = 0.05
    outliers: float = 0.03
    prefetched: int = 2
    seed: int = 0
    slowdowns: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.sizes = equal_split(self.total, len(self.curves))
        self.coming: list[tuple[int, list[int]]] = []
        self.steps = 0

    def seconds(self, rank: int, size: int) -> float:
        return self.slowdowns.get(rank, 1.0) * self.curves[rank][size - 1]

    def observed(self, seconds: float) -> float:
        if self.steps == 0:
            seconds *= 3  # memory is allocated
        if self.rng.random() < self.outliers:
            seconds *= 2
        return seconds * math.exp(self.rng.gauss(0, self.noise))

    def step(self, controller: Rebalancer, limits: Sequence[int | None] | None = None) -> Decision | None:
        while self.coming and self.coming[0][0] <= self.steps:
            self.sizes = self.coming.pop(0)[1]
        times = [self.observed(self.seconds(rank, size)) for rank, size in enumerate(self.sizes)]
        decision = controller.observe(self.sizes, times, self.fixed, limits or [None] * len(self.curves))
        self.steps += 1
        if decision is not None:
            self.coming.append((self.steps + self.prefetched, list(decision.new)))
        return decision

    def profiles(self) -> list[RankProfile]:
        return [
            RankProfile(
                TimeCurve(
                    range(1, self.total + 1), [self.seconds(rank, size) + fixed for size in range(1, len(c) + 1)]
                ),
                self.total,
            )
            for rank, (c, fixed) in enumerate(zip(self.curves, self.fixed, strict=True))
        ]

    def regret(self) -> float:
        """By which part the present sizes are slower than the best ones, by the true curves."""
        slowest = max(
            self.seconds(rank, size) + fixed
            for rank, (size, fixed) in enumerate(zip(self.sizes, self.fixed, strict=True))
        )
        return slowest / plan_fixed_total(self.profiles(), self.total).step_seconds - 1


def affine(offset: float, size: float) -> float:
    return offset + (1 - offset) * size


def random_cluster(seed: int, kind: str = "affine") -> Cluster:
    """2 to 8 ranks, speeds up to 10:1, totals of 16 to 1024, up to half of a rank's time independent of the size."""
    rng = random.Random(seed)
    ranks = rng.choice([2, 3, 4, 6, 8])
    total = rng.choice([16, 32, 64, 128, 256, 512, 1024])
    equal = total / ranks
    curves, fixed = [], []
    for _ in range(ranks):
        slowness = 1 / rng.uniform(1, rng.choice([3, 10]))
        offset = rng.uniform(0, 0.5)
        # Kernels work in tiles: time grows in steps of so many samples.
        tile = max(1, int(equal / rng.choice([8, 16]))) if kind == "plateaus" else 1
        curves.append([slowness * affine(offset, math.ceil(b / tile) * tile / equal) for b in range(1, total + 1)])
        fixed.append(slowness * rng.choice([0, 0.05, 0.1]))
    return Cluster(curves, total, fixed, seed=seed)


def start(cluster: Cluster, **options) -> Rebalancer:
    return Rebalancer(equal_split(cluster.total, len(cluster.curves)), **options)


def regrets_after(steps: int, clusters: Sequence[Cluster], controllers: Sequence[Rebalancer]) -> list[float]:
    """Regrets of the clusters after some more steps, the smallest first."""
    for cluster, controller in zip(clusters, controllers, strict=True):
        for _ in range(steps):
            cluster.step(controller)
    return sorted(cluster.regret() for cluster in clusters)


@pytest.mark.parametrize("kind", ["affine", pytest.param("plateaus", marks=pytest.mark.slow)])
def test_it_finds_the_optimum_within_30_steps(kind: str) -> None:
    clusters = [random_cluster(seed, kind) for seed in range(60)]
    controllers = [start(cluster) for cluster in clusters]
    at_start = sorted(cluster.regret() for cluster in clusters)
    assert at_start[30] > 0.8  # the equal split is bad, or there would be nothing to find
    after_20 = regrets_after(20, clusters, controllers)
    assert after_20[30] <= 0.03
    assert after_20[44] <= 0.08
    after_30 = regrets_after(10, clusters, controllers)
    assert after_30[30] <= 0.03
    assert after_30[54] <= 0.08


def test_without_noise_sizes_settle_near_the_optimum() -> None:
    for seed in range(20):
        cluster = random_cluster(seed)
        cluster.noise = cluster.outliers = 0.0
        controller = start(cluster)
        assert regrets_after(40, [cluster], [controller])[0] <= 0.03, f"cluster {seed}"
        decisions = len(controller.decisions)
        regrets_after(100, [cluster], [controller])
        assert len(controller.decisions) == decisions, f"cluster {seed} does not settle"


@pytest.mark.parametrize("kind", ["affine", pytest.param("plateaus", marks=pytest.mark.slow)])
def test_noise_alone_does_not_move_settled_sizes(kind: str) -> None:
    clusters = [random_cluster(seed, kind) for seed in range(15)]
    controllers = [start(cluster) for cluster in clusters]
    regrets_after(40, clusters, controllers)
    settled = [len(controller.decisions) for controller in controllers]
    ends = regrets_after(300, clusters, controllers)
    moved = [len(controller.decisions) - before for controller, before in zip(controllers, settled, strict=True)]
    assert max(moved) <= 2, moved
    assert sum(moved) <= 5, moved
    assert ends[13] <= 0.08


def test_equal_ranks_keep_equal_batches() -> None:
    for seed in range(10):
        cluster = Cluster([[affine(0.2, b / 16) for b in range(1, 65)]] * 4, 64, [0.0] * 4, seed=seed)
        controller = start(cluster)
        regrets_after(300, [cluster], [controller])
        assert max(controller.batch_sizes) - min(controller.batch_sizes) <= 4
        assert len(controller.decisions) <= 3


@pytest.mark.parametrize(
    "factor", [pytest.param(1.5, marks=pytest.mark.slow), 2.0, pytest.param(4.0, marks=pytest.mark.slow)]
)
def test_a_change_of_speed_and_its_end_are_followed_within_30_steps(factor: float) -> None:
    clusters = [random_cluster(seed) for seed in range(20)]
    controllers = [start(cluster, rebalance_every=30) for cluster in clusters]
    regrets_after(50, clusters, controllers)
    for cluster in clusters:
        cluster.slowdowns[cluster.seed % len(cluster.curves)] = factor
    after_change = regrets_after(30, clusters, controllers)
    assert after_change[10] <= 0.03
    assert after_change[18] <= 0.08
    for cluster in clusters:
        cluster.slowdowns.clear()
    after_end = regrets_after(30, clusters, controllers)
    assert after_end[10] <= 0.03
    assert after_end[18] <= 0.08


def test_a_change_that_is_not_a_factor_is_followed_too() -> None:
    """Another job takes a constant time of each step: the shape is a new one, and has to be learned anew."""
    curves = [[speed * affine(0.1, b / 32) for b in range(1, 129)] for speed in (1.0, 1.6, 2.0, 2.7)]
    cluster = Cluster(curves, 128, [0.02] * 4, noise=0.02)
    controller = start(cluster, rebalance_every=100)
    regrets_after(40, [cluster], [controller])
    cluster.curves[0] = [seconds + 0.8 for seconds in cluster.curves[0]]
    assert regrets_after(30, [cluster], [controller])[0] <= 0.03
    assert "slower" in controller.decisions[-2].reason
    assert controller.decisions[-1].reason == "re-balance"


@pytest.mark.parametrize("steps_after_decision", range(8))
def test_a_change_that_comes_with_a_switch_is_followed_too(steps_after_decision: int) -> None:
    curves = [[speed * affine(0.3, b / 32) for b in range(1, 129)] for speed in (1.0, 1.6, 2.0, 2.7)]
    cluster = Cluster(curves, 128, [0.02] * 4, noise=0.02, outliers=0.0)
    controller = start(cluster)
    while not controller.decisions:
        cluster.step(controller)
    regrets_after(steps_after_decision, [cluster], [controller])
    cluster.slowdowns[0] = 2.0
    assert regrets_after(40, [cluster], [controller])[0] <= 0.08


@pytest.mark.parametrize("rate", [pytest.param(0.003, marks=pytest.mark.slow), 0.01])
def test_a_rank_that_slows_down_little_by_little_is_followed(rate: float) -> None:
    clusters = [random_cluster(seed) for seed in range(12)]
    controllers = [start(cluster) for cluster in clusters]
    regrets_after(40, clusters, controllers)
    slowdown = 1.0
    while slowdown < 2:
        slowdown *= 1 + rate
        for cluster, controller in zip(clusters, controllers, strict=True):
            cluster.slowdowns[cluster.seed % len(cluster.curves)] = slowdown
            cluster.step(controller)
    after = regrets_after(30, clusters, controllers)
    assert after[6] <= 0.03
    assert after[10] <= 0.08


def test_decisions_say_what_was_seen_and_why() -> None:
    curves = [[speed * b / 8 for b in range(1, 33)] for speed in (1.0, 1.0, 2.0, 2.0)]
    cluster = Cluster(curves, 32, [0.25] * 4, noise=0.001, outliers=0.0)
    controller = start(cluster)
    regrets_after(30, [cluster], [controller])
    first = controller.decisions[0]
    assert (first.reason, first.step, first.old) == ("start", 5, (8, 8, 8, 8))
    assert first.measured_seconds == pytest.approx([1.25, 1.25, 2.25, 2.25], rel=0.01)
    truth = [cluster.seconds(rank, size) + 0.25 for rank, size in enumerate(first.new)]
    assert first.predicted_seconds == pytest.approx(truth, rel=0.05)
    assert str(first).startswith("start: batch sizes [8, 8, 8, 8] -> [1")
    cluster.slowdowns[1] = 1.9
    regrets_after(30, [cluster], [controller])
    assert "rank 1 became 1.9x slower" in [decision.reason for decision in controller.decisions]
    cluster.slowdowns.clear()
    regrets_after(30, [cluster], [controller])
    assert "rank 1 recovered" in [decision.reason for decision in controller.decisions]
    cluster.slowdowns[3] = 0.4
    regrets_after(30, [cluster], [controller])
    assert "rank 3 became 2.5x faster" in [decision.reason for decision in controller.decisions]
    documents = json.loads(json.dumps([decision.to_dict() for decision in controller.decisions]))
    assert [Decision.from_dict(document) for document in documents] == controller.decisions


def test_steps_under_older_sizes_are_not_taken_for_the_outcome_of_new_ones() -> None:
    """Loaders may switch as late as at the end of an epoch."""
    cluster = Cluster(
        [[b / 8 for b in range(1, 17)], [3 * b / 8 for b in range(1, 17)]], 16, [0.0, 0.0], prefetched=60
    )
    controller = start(cluster)
    for _ in range(60):
        cluster.step(controller)
    assert [decision.new for decision in controller.decisions] == [(12, 4)]
    assert regrets_after(40, [cluster], [controller])[0] == 0
    assert len(controller.decisions) == 1


def test_a_change_is_acted_upon_while_a_switch_is_still_to_come() -> None:
    cluster = Cluster(
        [[b / 8 for b in range(1, 17)], [3 * b / 8 for b in range(1, 17)]], 16, [0.0, 0.0], prefetched=60
    )
    cluster.noise = cluster.outliers = 0.0
    controller = start(cluster)
    regrets_after(20, [cluster], [controller])
    cluster.slowdowns[1] = 1 / 3
    regrets_after(20, [cluster], [controller])
    assert controller.decisions[-1].old == (8, 8)
    assert controller.batch_sizes == [8, 8]


def test_an_epochs_short_last_batch_teaches_nothing() -> None:
    one, other = Rebalancer([8, 8]), Rebalancer([8, 8])
    for step in range(40):
        assert one.observe([8, 8], [1.0, 1.0], [0, 0], [None, None]) is None
        assert other.observe([8, 8], [1.0, 1.0], [0, 0], [None, None]) is None
        if step > 10:
            assert other.observe([1, 0], [0.9, 1e-3], [0, 0], [None, None]) is None
    assert other.batch_sizes == one.batch_sizes == [8, 8]
    assert other.state_dict()["curves"] == one.state_dict()["curves"]


def test_a_measured_profile_gives_the_shape() -> None:
    """Where the first cut from one size alone is off, the profile's shape makes it right at once, at any level."""
    cluster = random_cluster(7, "plateaus")
    cluster.noise = cluster.outliers = 0.0
    cluster.fixed = [0.0] * len(cluster.curves)
    profiles = [
        RankProfile(TimeCurve(range(1, cluster.total + 1), [1.7 * seconds for seconds in curve]), cluster.total)
        for curve in cluster.curves
    ]
    for options, exact in (({}, False), ({"profiles": profiles}, True)):
        controller, twin = start(cluster, **options), copy.deepcopy(cluster)
        while not controller.decisions:
            twin.step(controller)
        for _ in range(4):
            twin.step(controller)
        assert (twin.regret() <= 1e-9) == exact


def test_a_profiles_maximum_is_kept() -> None:
    profiles = [RankProfile(TimeCurve([1, 16], [0.1, 1.6]), 12), RankProfile(TimeCurve([1, 16], [0.1, 1.6]), 16)]
    controller = Rebalancer([8, 8], profiles=profiles)
    for _ in range(10):
        controller.observe([8, 8], [0.1, 1.6], [0, 0], [None, None])
    assert controller.batch_sizes == [12, 4]


def test_a_rank_grows_at_most_fourfold_at_once() -> None:
    controller = Rebalancer([10] * 7)
    for _ in range(6):
        controller.observe([10] * 7, [0.001] + [1.0] * 6, [0.0] * 7, [None] * 7)
    assert controller.batch_sizes == [40] + [5] * 6
    for _ in range(4):
        controller.observe([40] + [5] * 6, [0.004] + [0.5] * 6, [0.0] * 7, [None] * 7)
    assert controller.batch_sizes == [64] + [1] * 6


def test_limits_are_kept_and_a_rank_beyond_its_limit_is_taken_back() -> None:
    def fast_first(limit: int | None) -> Rebalancer:
        controller = Rebalancer([8, 8])
        for _ in range(6):
            controller.observe([8, 8], [0.1, 1.0], [0, 0], [limit, None])
        return controller

    assert fast_first(None).batch_sizes[0] > 11
    controller = fast_first(11)
    assert controller.batch_sizes == [11, 5]
    decision = controller.observe([11, 5], [0.14, 0.6], [0, 0], [9, None])
    assert decision.new == (9, 7)
    assert decision.reason == "rank 0 has memory for 9 samples only"
    # No cut of 16 samples fits 7 + 7: what runs goes on.
    assert controller.observe([9, 7], [0.12, 0.9], [0, 0], [7, 7]) is None
    assert controller.batch_sizes == [9, 7]


def test_where_a_limit_leaves_no_other_way_ranks_grow_at_once() -> None:
    controller = Rebalancer([1, 31])
    for _ in range(6):
        controller.observe([1, 31], [0.3, 0.3], [0, 0], [None, 10])
    assert controller.batch_sizes == [22, 10]


steps_strategy = st.integers(2, 4).flatmap(
    lambda ranks: st.tuples(
        st.lists(st.integers(1, 20), min_size=ranks, max_size=ranks),
        st.lists(
            st.tuples(
                st.lists(st.floats(1e-4, 1e3), min_size=ranks, max_size=ranks),
                st.lists(st.floats(0, 10), min_size=ranks, max_size=ranks),
                st.integers(0, 3),
            ),
            min_size=5,
            max_size=25,
        ),
        st.lists(st.one_of(st.none(), st.integers(1, 40)), min_size=ranks, max_size=ranks),
    )
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(steps_strategy, st.integers(0, 24))
def test_whatever_is_observed(run, saved_at: int) -> None:
    """The total is kept, each rank has a sample, limits hold; a twin and one loaded from a file decide the same."""
    sizes, steps, limits = run
    total, arguments = sum(sizes), {"rebalance_every": 3, "dead_band": 0.01}
    controller, twin = Rebalancer(sizes, **arguments), Rebalancer(sizes, **arguments)
    feasible = sum(total if limit is None else limit for limit in limits) >= total
    history = [sizes]
    for number, (times, fixed, late) in enumerate(steps):
        if number == saved_at:
            state = json.loads(json.dumps(twin.state_dict()))
            twin = Rebalancer(equal_split(total, len(sizes)), **arguments)
            twin.load_state_dict(state)
        trained = history[max(0, len(history) - 1 - late)]
        # Steady enough for decisions, with what hypothesis draws as disturbance.
        times = [seconds if number % 5 == 4 else 0.1 * size for seconds, size in zip(times, trained, strict=True)]
        decision = controller.observe(trained, times, fixed, limits)
        assert twin.observe(np.array(trained), times, fixed, limits) == decision
        new = controller.batch_sizes
        assert sum(new) == total and min(new) >= 1
        if decision is not None:
            assert list(decision.new) == new != history[-1] and list(decision.old) == trained
            assert min(decision.predicted_seconds) > 0
            assert not feasible or all(limit is None or b <= limit for b, limit in zip(new, limits, strict=True))
            history.append(new)
    assert twin.state_dict() == controller.state_dict()


def test_a_run_saved_in_its_middle_goes_on_identically() -> None:
    for saved_at in (1, 4, 9, 33, 57):
        cluster = random_cluster(5)
        twin_cluster = copy.deepcopy(cluster)
        controller, twin = start(cluster), start(twin_cluster)
        for step in range(90):
            if step == 50:
                cluster.slowdowns[0] = twin_cluster.slowdowns[0] = 2.0
            if step == saved_at:
                state = json.loads(json.dumps(twin.state_dict()))
                twin = start(twin_cluster)
                twin.load_state_dict(state)
            assert cluster.step(controller) == twin_cluster.step(twin)
        assert len(controller.decisions) >= 3
        assert twin.decisions == controller.decisions
        assert twin.state_dict() == controller.state_dict()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (([8, 8], [1.0, math.nan], [0, 0], [None] * 2), "rank 1 took nan s for forward and backward"),
        (([8, 8], [0.0, 1.0], [0, 0], [None] * 2), "rank 0 took 0.0 s for forward and backward"),
        (([8, 8], [1.0, -1.0], [0, 0], [None] * 2), "rank 1 took -1.0 s for forward and backward"),
        (([8, 8], [1.0, math.inf], [0, 0], [None] * 2), "rank 1 took inf s for forward and backward"),
        (([8, 8], [1.0, 1.0], [0, -0.1], [None] * 2), "rank 1 took -0.1 s besides"),
        (([8, 8], [1.0, 1.0], [math.nan, 0], [None] * 2), "rank 0 took nan s besides"),
        (([8, 8], [1.0, 1.0], [0, 0], [None, 0]), "rank 1 has memory for 0 samples"),
        (([8, 8], [1.0, 1.0], [0, 0], [7.5, None]), "limits, rank 0"),
        (([16, 0], [1.0, 1.0], [0, 0], [None] * 2), "a batch of 0 samples on rank 1"),
        (([16, 16], [1.0, 1.0], [0, 0], [None] * 2), "at most the total of 16"),
        (([8.0, 8], [1.0, 1.0], [0, 0], [None] * 2), "8.0 in batch_sizes"),
        (([16], [1.0], [0], [None]), "expected 2 of each"),
    ],
)
def test_impossible_steps_are_refused_and_forgotten(step, message: str) -> None:
    controller = Rebalancer([8, 8])
    before = controller.state_dict()
    with pytest.raises(ValueError, match=message):
        controller.observe(*step)
    assert controller.state_dict() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "at least 1 sample for each rank"),
        (([4, 0],), "at least 1 sample for each rank"),
        (([4, True],), "True in batch_sizes"),
        (("44",), "expected a list of integers"),
    ],
)
def test_impossible_starts_are_refused(arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rebalancer(*arguments)


def test_impossible_options_are_refused() -> None:
    profile = RankProfile(TimeCurve([1], [1.0]), 1)
    for options in ({"rebalance_every": 0}, {"dead_band": 1.0}, {"dead_band": math.nan}, {"profiles": [profile]}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Rebalancer([4, 4], **options)


def changed(change: Callable[[dict], object]) -> Callable[[dict], Mapping]:
    def apply(state: dict) -> dict:
        state = copy.deepcopy(state)
        change(state)
        return state

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: [state], "expected an object with the keys"),
        (changed(lambda state: state.pop("steps")), "expected an object with the keys"),
        (changed(lambda state: state.update(more=1)), "expected an object with the keys"),
        (changed(lambda state: state.update(version=2)), "version 2"),
        (changed(lambda state: state.update(steps=1.5)), "1.5 in steps"),
        (changed(lambda state: state.update(steps=-1)), "-1 in steps"),
        (changed(lambda state: state.update(batch_sizes=[17, 0])), "expected 17 samples on 2 ranks"),
        (changed(lambda state: state.update(batch_sizes="89")), "batch_sizes '89'"),
        (changed(lambda state: state.update(curves=state["curves"][:1])), "found curves"),
        (changed(lambda state: state.update(slowdowns=[1.0, math.nan])), "found slowdowns"),
        (changed(lambda state: state.update(slowdowns=[1.0, 0])), "found slowdowns"),
        (changed(lambda state: state["fixed_seconds"][0].append("0.1")), "found fixed_seconds"),
        (changed(lambda state: state["curves"][0].update(size=True)), "sizes and numbers of steps"),
        (changed(lambda state: state["curves"][0].update(others=[3])), "sizes and numbers of steps"),
        (changed(lambda state: state["curves"][0].update(present=[math.inf])), "found times"),
        (changed(lambda state: state["curves"][0].update(level=-1.0)), "found times"),
        (changed(lambda state: state["curves"][0].pop("level")), "expected an object with the keys"),
        (changed(lambda state: state["decisions"][0].update(reason=3)), "as reason"),
        (changed(lambda state: state["decisions"][0].update(new=[1.0, 2])), "1.0 in new"),
        (changed(lambda state: state["decisions"][0].pop("old")), "expected an object with the keys"),
    ],
)
def test_damaged_states_are_refused_and_change_nothing(damage, message: str) -> None:
    controller = Rebalancer([9, 8])
    for _ in range(8):
        controller.observe([9, 8], [1.0, 3.0], [0.1, 0.1], [None, None])
    state = controller.state_dict()
    assert state["decisions"]
    fresh = Rebalancer([9, 8])
    with pytest.raises(ValueError, match=message):
        fresh.load_state_dict(damage(state))
    assert fresh.state_dict() == Rebalancer([9, 8]).state_dict()


@pytest.mark.parametrize("sizes", [[8, 8, 8], [8, 9], [24]])
def test_a_state_of_another_run_is_refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="expected 16 samples on 2 ranks"):
        Rebalancer([8, 8]).load_state_dict(Rebalancer(sizes).state_dict())


def test_what_is_learned_is_positive_and_goes_through_what_was_seen() -> None:
    rng = random.Random(3)
    for _ in range(200):
        curve = LearnedCurve()
        for _ in range(rng.randint(1, 5)):
            size, seconds = rng.randint(1, 60), rng.uniform(0.01, 2)
            for _ in range(rng.randint(4, 12)):
                curve.record(size, seconds)
                curve.detect_speed_change()
        assert (curve.table(100) > 0).all()
    curve = LearnedCurve()
    for size in (4, 8, 16, 32):
        for _ in range(20):
            curve.record(size, 0.3 + 0.05 * size)
            assert curve.detect_speed_change() is None
    expected = 0.3 + 0.05 * np.arange(1, 65)
    np.testing.assert_allclose(curve.table(64), expected, rtol=0.02)


def record(curve: LearnedCurve, size: int, *seconds: float) -> list[float]:
    """The changes that the curve tells."""
    changes = []
    for value in seconds:
        curve.record(size, value)
        changes.append(curve.detect_speed_change())
    return [change for change in changes if change is not None]


def test_close_to_a_size_seen_the_line_gives_way() -> None:
    """No line goes through these: the kernels' tiles hold 16 samples."""
    curve, seen = LearnedCurve(), {8: 1.0, 16: 1.0, 20: 1.4, 32: 1.4, 36: 1.8, 48: 1.8}
    for size, seconds in seen.items():
        assert record(curve, size, *[seconds] * 20) == []
    table = curve.table(64)
    for size, seconds in seen.items():
        assert table[size - 1] == pytest.approx(seconds, rel=0.02)


def test_a_change_of_speed_multiplies_the_times_at_other_sizes() -> None:
    curve = LearnedCurve()
    for size in (10, 20):
        assert record(curve, size, *[1 + size / 10] * 8) == []
    before = curve.table(30)
    assert record(curve, 20, *[1.7 * 3] * 8) == pytest.approx([1.7])
    # There are more steps at 20 now, so that they weigh more.
    np.testing.assert_allclose(curve.table(30), 1.7 * before, rtol=0.002)


@pytest.mark.parametrize("slow_from", [0, 1, 2, 3, 4])
def test_a_change_in_the_first_steps_at_a_size_is_noticed(slow_from: int) -> None:
    curve = LearnedCurve()
    assert record(curve, 10, *[1.0] * 8) == []
    changes = record(curve, 11, *[1.1] * slow_from, *[2.2] * 8)
    assert changes == pytest.approx([2.0], rel=0.02)
    assert curve.table(11)[9] == pytest.approx(2.0, rel=0.05)


def test_slow_changes_carry_the_other_sizes_along() -> None:
    curve, seconds = LearnedCurve(), 2.0
    record(curve, 10, *[1.0] * 8)
    for step in range(100):
        seconds *= 1.004
        assert record(curve, 20, seconds) == []
        if step % 10 == 9:
            curve.follow_drift()
    assert curve.table(10)[9] == pytest.approx(seconds / 2, rel=0.1)


def test_outliers_change_nothing() -> None:
    curve = LearnedCurve()
    assert record(curve, 10, 3.0, 1.0, 2.5, 1.0, 1.0, 2.0, 1.0, 1.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0) == []
    assert curve.seconds == 1.0
    # Most of the first steps at this size are outliers; the rank did not become faster afterwards.
    assert record(curve, 11, 1.1, 2.2, 2.2, 1.1, 2.2, *[1.1] * 10) == []


def test_a_faster_rank_is_noticed_beside_an_outlier() -> None:
    curve = LearnedCurve()
    assert record(curve, 10, *[1.0] * 10, 0.5, 0.5, 1.0) == []
    assert record(curve, 10, 0.5) == pytest.approx([0.5])


def test_strong_noise_is_hardly_ever_taken_for_a_change_of_speed() -> None:
    """Steps spread by 15 %, as much as the smallest change: at most one alarm in a thousand of them."""
    alarms = 0
    for seed in range(20):
        rng = random.Random(seed)
        alarms += len(record(LearnedCurve(), 10, *[math.exp(rng.gauss(0, 0.15)) for _ in range(300)]))
    assert alarms <= 6


def test_what_was_seen_at_a_size_is_kept_for_its_return() -> None:
    curve = LearnedCurve()
    for size, steps in ((10, 20), (20, 8)):
        record(curve, size, *[size / 10] * steps)
    record(curve, 10, 3.0)
    assert curve.seconds == 1.0


def test_beyond_its_end_a_profile_goes_on_in_proportion() -> None:
    curve = LearnedCurve(RankProfile(TimeCurve([1, 4, 8], [1.0, 1.5, 2.0]), 8))
    record(curve, 8, *[4.0] * 4)
    np.testing.assert_allclose(curve.table(16)[[0, 3, 7, 11, 15]], [2.0, 3.0, 4.0, 6.0, 8.0], rtol=1e-12)


def test_old_sizes_are_forgotten() -> None:
    curve = LearnedCurve()
    for size in range(1, 60):
        record(curve, size, *[size / 10] * 40)
    state = curve.state_dict()
    assert [size for size, _ in state["others"]] == list(range(51, 59))
    assert max(len(steps) for _, steps in state["others"]) == len(state["present"]) == 32


def test_after_one_size_time_is_proportional() -> None:
    curve = LearnedCurve()
    for _ in range(4):
        curve.record(8, 2.0)
    np.testing.assert_allclose(curve.table(32), np.arange(1, 33) / 4, rtol=1e-12)


def test_rebalancing_needs_no_torch() -> None:
    check = "import sys, accelerate_lshdp.planning.online.rebalancing; sys.exit('torch' in sys.modules)"
    blocked = "import sys; sys.modules['accelerate'] = None; "
    assert subprocess.run([sys.executable, "-c", blocked + check], timeout=60).returncode == 0
