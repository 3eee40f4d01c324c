# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What real steps show beside what ranks measure by themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from training_cases import collate, image_dataset, image_loss, make_optimizer, tiny_vit

from accelerate_lshdp import LSHDPAccelerator
from accelerate_lshdp.documents.profile_sections import MeasuredRank
from accelerate_lshdp.engine.wire.reduction import ExactReduction, PendingReduction
from accelerate_lshdp.planning import TimeCurve
from accelerate_lshdp.profiling import ProfilingOptions, Subject, profile_ranks, rehearsal, session
from accelerate_lshdp.profiling.rank_session import RankSession
from accelerate_lshdp.profiling.rehearsal import LEAST_STEPS, MOST_STEPS, plan_rehearsal
from accelerate_lshdp.profiling.rehearsed_rank import (
    RehearsedRank,
    RehearsedStep,
)


TIMEOUT_SECONDS = 60
BUSY_SECONDS = 0.05


@given(
    speeds=st.lists(st.floats(1, 100), min_size=1, max_size=5),
    largest=st.integers(1, 64),
    seconds=st.floats(0.01, 1000),
)
def test_all_ranks_rehearse_equally_long_and_in_time(speeds: list[float], largest: int, seconds: float) -> None:
    curves = [TimeCurve((1, largest + 1), (1 / speed, (largest + 1) / speed)) for speed in speeds]
    plans = plan_rehearsal(curves, seconds)
    assert len({plan.steps for plan in plans}) == 1 and LEAST_STEPS <= plans[0].steps <= MOST_STEPS
    times = [curve(plan.micro_batch_size) for curve, plan in zip(curves, plans, strict=True)]
    for curve, plan, taken in zip(curves, plans, times, strict=True):
        if plan.micro_batch_size > 1:
            assert 3 * taken * (plan.steps + 1) <= seconds * 1.01
        if plan.micro_batch_size < largest + 1 and plan.micro_batch_size > 1:
            # One more sample would take longer than what all ranks are given.
            assert (
                curve(plan.micro_batch_size + 1)
                > min(min(c.seconds[-1] for c in curves), seconds / (3 * (LEAST_STEPS + 1))) * 0.99
            )


def a_rank(*, load: float = 0.0) -> MeasuredRank:
    curve, ready = TimeCurve((1, 4), (1.0, 4.0)), TimeCurve((1, 4), (0.5, 2.0))
    return MeasuredRank(
        rank=0,
        time=curve,
        spread=(0.0, 0.0),
        max_micro_batch_size=4,
        limited_by="time",
        device="a processor",
        optimizer_seconds=0.1,
        memory=None,
        memory_limit_bytes=None,
        bucket_ready=(ready,),
        communication_load_seconds=load,
    )


def learn_from_steps(measured: MeasuredRank, steps: list[RehearsedStep]) -> MeasuredRank:
    return RehearsedRank(measured, cores=None).learn([steps])


def learn_from_cpu_seconds(
    measured: MeasuredRank, steps: list[RehearsedStep], others: Sequence[RehearsedStep] = ()
) -> MeasuredRank:
    return RehearsedRank(measured, cores=0.5).learn([steps, others])


def timed(*pairs: tuple[float, float]) -> list[RehearsedStep]:
    """Steps of two samples: seconds without and with sending."""
    return [RehearsedStep(2, *pair) for pair in pairs]


def test_what_sending_adds_is_a_load_on_each_step() -> None:
    learned = learn_from_steps(a_rank(), timed((2.0, 2.25), (2.01, 2.26), (1.99, 2.25), (2.0, 2.9)))
    assert learned.communication_load_seconds == pytest.approx(0.255)
    assert learned == a_rank(load=learned.communication_load_seconds)


def test_a_machine_whose_speed_changed_scales_the_curve_and_not_the_load() -> None:
    # From one pair to the next everything takes half as long again; neighbours differ by the same 0.3 s.
    learned = learn_from_steps(a_rank(), timed((2.4, 2.7), (2.4, 2.7), (2.4, 2.7), (2.5, 2.8), (3.6, 3.9)))
    assert learned.communication_load_seconds == pytest.approx(0.3)
    assert learned.time.seconds == pytest.approx((1.2, 4.8))
    assert learned.bucket_ready[0].seconds == pytest.approx((0.6, 2.4))
    faster = learn_from_steps(a_rank(), timed(*[(1.6, 1.9)] * 4))
    assert faster.time.seconds == pytest.approx((0.8, 3.2))
    assert faster.communication_load_seconds == pytest.approx(0.3)


def test_steps_that_are_shorter_with_sending_scale_the_curve_to_them() -> None:
    learned = learn_from_steps(a_rank(), timed((2.0, 1.8), (2.0, 1.8), (2.02, 1.81), (2.0, 1.79)))
    assert learned.time.seconds == pytest.approx((0.9, 3.6)) and learned.communication_load_seconds == 0
    assert learned.bucket_ready[0].seconds == pytest.approx((0.45, 1.8))


@pytest.mark.parametrize(
    ("pairs", "factor"),
    [
        ([(2.0, 1.2), (2.0, 2.9), (2.0, 1.4), (2.0, 3.0)], 1.0),
        ([(2.0, 2.0)] * 3, 1.0),
        ([(2.1, 2.4), (2.4, 1.9), (1.8, 2.1), (2.1, 1.8)], 1.05),
    ],
)
def test_differences_that_chance_makes_are_no_load(pairs: list[tuple[float, float]], factor: float) -> None:
    """But they scale the curve: all ranks rehearse at the same time, when the machine may be slow for all of them."""
    learned = learn_from_steps(a_rank(), timed(*pairs))
    assert learned.communication_load_seconds == 0
    assert learned.time.seconds == pytest.approx((factor, 4 * factor))


def counted(size: int, alone: float, sending: float, cpu: float, added: float, beside: float) -> RehearsedStep:
    return RehearsedStep(size, alone, sending, cpu, added, beside)


def test_limited_cpu_time_that_sending_takes_delays_a_step_even_if_it_was_taken_while_the_rank_waited() -> None:
    # Half a core computes for 2 s; threads beside it take 0.1 s, and the computing thread half as much more.
    steps = [counted(2, 2.0, 2.0, 1.0, added, 0.1) for added in (0.05, 0.04, 0.3)]
    learned = learn_from_cpu_seconds(a_rank(), steps)
    assert learned == a_rank(load=learned.communication_load_seconds)
    assert learned.communication_load_seconds == pytest.approx(0.15 / 0.5)


def test_steps_of_several_sizes_show_one_speed() -> None:
    steps = [counted(size, 1.5 * size, 1.5 * size, 0.6 * size, -0.01, 0.08) for size in (1, 2, 3)]
    learned = learn_from_cpu_seconds(a_rank(), steps)
    assert learned.time.seconds == pytest.approx((1.5, 6.0))
    # The computing thread was a little faster by chance.
    assert learned.communication_load_seconds == pytest.approx(0.08 / 0.4)


def test_speed_is_that_of_all_rehearsals_whichever_showed_the_load() -> None:
    rank = RehearsedRank(a_rank(), cores=None)
    rank.learn([timed(*[(2.2, 2.3)] * 6)])
    learned = rank.learn([timed(*[(2.0, 2.0)] * 7)])  # the machine is faster again, and the rank waits
    assert learned.time.seconds == pytest.approx((1.0, 4.0))
    assert learned.communication_load_seconds == pytest.approx(0.1)


def test_cpu_seconds_of_a_rank_that_sleeps_tell_nothing() -> None:
    steps = [counted(2, 2.0, 2.4, 0.4, 0.0, 0.3)] * 4
    assert RehearsedRank(a_rank(), cores=0.5).learn([steps]).communication_load_seconds == pytest.approx(0.4)
    assert RehearsedRank(a_rank(), cores=0.3).learn([steps]).communication_load_seconds == pytest.approx(0.3 / 0.2)


def test_how_much_computing_is_slowed_is_learned_of_all_ranks() -> None:
    # Alone, this rank's computing seems to be slowed by 0.3 s.
    own = [counted(2, 2.0, 2.0, 1.0, 0.3, 0.1)]
    others = [counted(4, 2.0, 2.0, 1.0, added, 0.2) for added in (0.1, 0.08, 0.12, 0.1)]
    learned = learn_from_cpu_seconds(a_rank(), own, others)
    assert learned.communication_load_seconds == pytest.approx(0.1 * 1.5 / 0.5)


def test_a_rank_that_waits_keeps_the_load_that_it_had_when_others_waited_for_it() -> None:
    rank = RehearsedRank(a_rank(), cores=None)
    assert rank.learn([timed(*[(2.0, 2.4)] * 6)]).communication_load_seconds == pytest.approx(0.4)
    assert rank.learn([timed(*[(2.0, 2.0)] * 6)]).communication_load_seconds == pytest.approx(0.4)
    assert rank.learn([timed(*[(2.0, 2.6)] * 6)]).communication_load_seconds == pytest.approx(0.6)


def test_of_seconds_and_counted_cpu_seconds_the_larger_load_counts() -> None:
    rank = RehearsedRank(a_rank(), cores=0.5)
    first = rank.learn([[counted(2, 2.0, 2.05, 1.0, 0.0, beside) for beside in (0.1, 0.1, 0.4)]])
    assert first.communication_load_seconds == pytest.approx(0.2)
    # All rehearsals count, of any size.
    second = rank.learn([[counted(3, 3.0, 3.0, 1.5, 0.0, 0.4)] * 3])
    assert second.communication_load_seconds == pytest.approx(0.8)
    third = rank.learn([[counted(2, 2.0, 3.0, 1.0, 0.0, 0.1)] * 3])
    assert third.communication_load_seconds == pytest.approx(1.0)


class BusyReduction(ExactReduction):
    """Takes the computing thread's time for each buffer, as copying does on a CPU."""

    def start(self, buffer: torch.Tensor, index: int, shapes: Sequence[torch.Size]) -> PendingReduction:
        end = time.perf_counter() + BUSY_SECONDS
        while time.perf_counter() < end:
            pass
        return super().start(buffer, index, shapes)


def measured_load(strategy: str) -> tuple[float, int, float]:
    """Communication load, number of buckets, and what the planner takes for it."""
    rehearsal.make_reduction = lambda communication, group, second_group=None: BusyReduction(group)
    accelerator = LSHDPAccelerator()
    model = tiny_vit()
    loader = DataLoader(image_dataset(64), batch_size=4, collate_fn=collate)
    subject = Subject(model, loader, make_optimizer(model, 1e-3, 0.0), image_loss)
    options = ProfilingOptions(seconds=3.0, strategy=strategy, max_batch=8)
    profile = profile_ranks(subject, options, accelerator)
    rank = profile.ranks[dist.get_rank()]
    planned = profile.rank_profiles()[rank.rank]
    return rank.communication_load_seconds, len(profile.bucket_bytes), planned.communication_load_seconds


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["lsdp", "ddp"])
def test_time_that_sending_takes_from_computing_is_found(workers, strategy):
    for load, buckets, planned in workers(2).run(measured_load, strategy, nodes=(1, 1), timeout=TIMEOUT_SECONDS):
        assert 0.7 * buckets * BUSY_SECONDS < load < 3 * buckets * BUSY_SECONDS
        assert planned == load


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class BurningReduction(ExactReduction):
    """Takes CPU time for each buffer: of the thread that computes, of another one, or while that one waits."""

    where = "computing"

    def start(self, buffer: torch.Tensor, index: int, shapes: Sequence[torch.Size]) -> PendingReduction:
        if self.where == "computing":
            burn(BUSY_SECONDS)
        pending = super().start(buffer, index, shapes)
        if self.where == "beside":
            thread = threading.Thread(target=burn, args=(BUSY_SECONDS,))
            thread.start()
            return Until(pending, lambda: not thread.is_alive())
        if self.where == "waiting":
            end = time.perf_counter() + 3 * BUSY_SECONDS
            return Until(pending, lambda: burn(BUSY_SECONDS / 10) or time.perf_counter() > end)
        return pending


class Until(PendingReduction):
    """Done when the sum is there and a condition holds."""

    def __init__(self, pending: PendingReduction, holds: Callable[[], bool]) -> None:
        self._pending = pending
        self._holds = holds

    def is_done(self) -> bool:
        return self._holds() and self._pending.is_done()

    def wait(self) -> None:
        self._pending.wait()


def load_of_limited_cpu_time(where: str) -> tuple[float, int]:
    """Communication load and number of buckets under a quota of half a core a rank, of which nobody keeps us."""
    BurningReduction.where = where
    rehearsal.make_reduction = lambda communication, group, second_group=None: BurningReduction(group)
    session.cpu_quota = lambda: 0.5
    accelerator = LSHDPAccelerator()
    model = tiny_vit()
    loader = DataLoader(image_dataset(64), batch_size=4, collate_fn=collate)
    subject = Subject(model, loader, make_optimizer(model, 1e-3, 0.0), image_loss)
    profile = profile_ranks(subject, ProfilingOptions(seconds=3.0, strategy="lsdp", max_batch=8), accelerator)
    return profile.ranks[dist.get_rank()].communication_load_seconds, len(profile.bucket_bytes)


@pytest.mark.parametrize(
    "where", [pytest.param(where, marks=pytest.mark.slow) for where in ("computing", "beside", "waiting")]
)
def test_cpu_time_that_sending_takes_is_a_load_and_that_of_waiting_is_not(workers, where: str) -> None:
    for load, buckets in workers(2).run(load_of_limited_cpu_time, where, nodes=(1, 1), timeout=TIMEOUT_SECONDS):
        if where == "waiting":
            assert load < 0.5 * buckets * BUSY_SECONDS
        else:  # at the rate at which ranks get CPU time, which is that of a whole core or what others leave of it
            assert 0.8 * buckets * BUSY_SECONDS < load < 5 * buckets * BUSY_SECONDS


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["lsdp", "ddp"])
def test_nothing_is_sent_on_one_node(workers, strategy):
    loads = workers(2).run(measured_load, strategy, nodes=(2,), timeout=TIMEOUT_SECONDS)
    assert [load for load, _, _ in loads] == [0.0, 0.0]


def fail_while_sending(after: int) -> None:
    """Rank 1's loss fails at some call of the rehearsal; rank 0 may be waiting for what rank 1 would have sent."""
    accelerator = LSHDPAccelerator()
    sending = False
    calls = 0
    rehearse = RankSession.rehearse

    def watched(self, *arguments):
        nonlocal sending
        sending = True
        return rehearse(self, *arguments)

    def loss(model, batch):
        nonlocal calls
        calls += sending
        if accelerator.process_index == 1 and calls > after:
            raise ValueError("the user's loss failed")
        return image_loss(model, batch)

    RankSession.rehearse = watched
    model = tiny_vit()
    loader = DataLoader(image_dataset(64), batch_size=4, collate_fn=collate)
    subject = Subject(model, loader, make_optimizer(model, 1e-3, 0.0), loss)
    profile_ranks(subject, ProfilingOptions(seconds=3.0, strategy="lsdp", max_batch=4), accelerator)


@pytest.mark.parametrize("after", [1, *(pytest.param(after, marks=pytest.mark.slow) for after in (0, 4))])
def test_a_rank_that_fails_while_others_send_stops_all(workers, after):
    errors = workers(2).run(fail_while_sending, after, nodes=(1, 1), timeout=TIMEOUT_SECONDS, expect_failure=True)
    assert None not in errors and len({error.message for error in errors}) == 1
    assert "the user's loss failed" in errors[0].message and "rank" in errors[0].message


def profile_with_sgd() -> int:
    """Under FSDP2 parameters are shards, which the fused SGD of torch does not take."""
    accelerator = LSHDPAccelerator()
    model = tiny_vit()
    loader = DataLoader(image_dataset(16), batch_size=2, collate_fn=collate)
    subject = Subject(model, loader, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), image_loss)
    profile = profile_ranks(subject, ProfilingOptions(seconds=1.0, strategy="fsdp", max_batch=2), accelerator)
    return len(profile.ranks)


@pytest.mark.timeout(90)
def test_sgd_is_profiled_on_shards(workers) -> None:
    assert workers(2).run(profile_with_sgd, nodes=(1, 1), timeout=60) == [2, 2]
