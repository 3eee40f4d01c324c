# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Profiling runs of real ranks: one document on all of them, or one error on all of them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from training_cases import collate, image_dataset, image_loss, tiny_vit

from accelerate_lshdp import LSHDPAccelerator, Plan
from accelerate_lshdp.documents.plan import Strategy
from accelerate_lshdp.planning import plan_fixed_total
from accelerate_lshdp.profiling import Profile, ProfilingOptions, Subject, profile_ranks
from accelerate_lshdp.profiling.memory import MemoryMeter
from accelerate_lshdp.profiling.network import all_reduce_sizes
from accelerate_lshdp.profiling.probing import with_margin
from accelerate_lshdp.profiling.rank_session import RankSession
from accelerate_lshdp.profiling.rehearsal import Rehearsal
from accelerate_lshdp.profiling.rehearsed_rank import RehearsedStep
from accelerate_lshdp.profiling.single_rank import SingleRankTrainer
from accelerate_lshdp.profiling.subject import Samples, copy_container, output_loss


SAMPLE_SECONDS, STEP_SECONDS = 0.1, 0.5
# On a rank whose time and memory are formulas of the micro-batch.
BASE_BYTES, SAMPLE_BYTES = 1_000_000, 100_000


class FormulaMeter(MemoryMeter):
    """As if training needed a fixed number of bytes and some for each sample."""

    def __init__(self) -> None:
        self.samples = self.most = 0

    def saw(self, samples: int) -> None:
        self.samples = max(self.samples, samples)
        self.most = max(self.most, samples)

    def restart(self) -> None:
        self.samples = 0

    def peak(self) -> int:
        return BASE_BYTES + SAMPLE_BYTES * self.samples

    def default_limit(self, local_ranks: int) -> int:
        return with_margin(BASE_BYTES + 6 * SAMPLE_BYTES)


class Clock:
    """Seconds that pass when a sample is trained on: a third in the forward; and a microsecond at every look."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1e-6
        return self.seconds

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        seconds = SAMPLE_SECONDS * len(batch["labels"])
        self.seconds += seconds / 3
        value = image_loss(model, batch)
        value.register_hook(lambda gradient: self.take(seconds * 2 / 3))
        return value

    def take(self, seconds: float) -> None:
        self.seconds += seconds


def a_subject(loss: Callable[[nn.Module, Any], Tensor] = image_loss, clock: Clock | None = None) -> Subject:
    model = tiny_vit()
    loader = DataLoader(image_dataset(64), batch_size=2, shuffle=True, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if clock is not None:
        optimizer.register_step_post_hook(lambda *_: clock.take(STEP_SECONDS))
    return Subject(model, loader, optimizer, loss)


def an_accelerator() -> LSHDPAccelerator:
    # Its own strategy does not matter.
    return LSHDPAccelerator(plan=Plan.equal(strategy="zero2"))


# ---- what each rank does --------------------------------------------------------------------------------------------


def profile_with_progress(strategy: str, max_batch: int) -> tuple[dict[str, Any], list[str]]:
    clock, phases = Clock(), {}

    def on_progress(phase: str, done: float, total: float) -> None:
        assert 0 <= done <= total
        phases[phase] = done == total

    options = ProfilingOptions(strategy=strategy, max_batch=max_batch, bucket_megabytes=0.02)
    subject = a_subject(clock.loss, clock)
    profile = profile_ranks(subject, options, an_accelerator(), on_progress, clock=clock)
    assert all(phases.values())
    return profile.to_dict(), list(phases)


def groups_that_hooks_see() -> set[int]:
    subject, seen = a_subject(), set()
    for group in subject.optimizer.param_groups:
        group["foreach"] = True
    subject.optimizer.register_step_pre_hook(lambda optimizer, *_: seen.add(len(optimizer.param_groups)))
    with mock.patch("accelerate_lshdp.engine.step_groups.STEPPED_TOGETHER", 1):
        profile_ranks(subject, ProfilingOptions(max_batch=2, seconds=2), an_accelerator())
    return seen


def profile_in_real_time() -> tuple[dict[str, Any], float]:
    began = time.perf_counter()
    profile = profile_ranks(a_subject(), ProfilingOptions(seconds=3.0, max_batch=2), an_accelerator())
    return profile.to_dict(), time.perf_counter() - began


def measured_accumulation(strategy: str) -> float:
    """With half a second for a forward that is not the first one since gradients were dropped."""
    clock, places = Clock(), []

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if type(batch["labels"]) is Tensor:  # not the copy without memory, on which units are measured
            places[:] = places or list(model.parameters())
        if any(parameter.grad is not None for parameter in places):
            clock.take(0.5)
        return clock.loss(model, batch)

    options = ProfilingOptions(strategy=strategy, max_batch=4)
    accelerator = an_accelerator()
    profile = profile_ranks(a_subject(loss, clock), options, accelerator, clock=clock)
    rank = profile.ranks[accelerator.process_index]
    assert rank.time(4) == pytest.approx(4 * SAMPLE_SECONDS, rel=0.01)
    assert profile.rank_profiles()[rank.rank].accumulation_overhead_seconds == rank.accumulation_overhead_seconds
    return rank.accumulation_overhead_seconds


def profile_within_memory(limits: list[int | None]) -> tuple[dict[str, Any], int]:
    meter, clock = FormulaMeter(), Clock()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if type(batch["labels"]) is Tensor:  # the units of the model are measured on tensors without memory
            meter.saw(len(batch["labels"]))
        return clock.loss(model, batch)

    options = ProfilingOptions(strategy="ddp", max_batch=40, memory_limit_bytes=limits[dist.get_rank()])
    subject = a_subject(loss, clock)
    profile = profile_ranks(subject, options, an_accelerator(), meter=lambda device: meter, clock=clock)
    return profile.to_dict(), meter.most


def fail_on_rank_1(how: str, from_samples: int) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if dist.get_rank() == 1 and len(batch["labels"]) >= from_samples:
            if how == "memory":
                raise torch.OutOfMemoryError("simulated: no memory left")
            if how == "exit":
                raise SystemExit("user code gives up")
            if how == "loss":
                return batch["labels"]
            raise KeyError("user code fails")
        return image_loss(model, batch)

    options = ProfilingOptions(seconds=60.0, strategy="lsdp", max_batch=8)
    profile_ranks(a_subject(loss), options, an_accelerator())


def run_out_of_memory(capacity: int) -> dict[str, Any]:
    """Rank 1 cannot train on more than ``capacity`` samples; it notices amid the forward, or in the backward."""
    clock = Clock()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        value = clock.loss(model, batch)
        if dist.get_rank() == 1 and len(batch["labels"]) > capacity:
            value.register_hook(_out_of_memory)
        return value

    def before_layer(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if dist.get_rank() == 1 and capacity < len(args[0]) < 8:
            raise torch.OutOfMemoryError("simulated")

    options = ProfilingOptions(strategy="lsdp", max_batch=8)
    subject = a_subject(loss, clock)
    subject.model.vit.layers[1].register_forward_pre_hook(before_layer)
    return profile_ranks(subject, options, an_accelerator(), meter=lambda device: None, clock=clock).to_dict()


def _out_of_memory(gradient: Tensor) -> None:
    raise torch.OutOfMemoryError("simulated")


def ask_differently() -> None:
    profile_ranks(a_subject(), ProfilingOptions(seconds=5.0 + dist.get_rank()), an_accelerator())


def buckets_of(strategy: str) -> tuple[list[int], list[int]]:
    """Bytes of the buckets of the profile, and of what the engine really sends in one step."""
    clock = Clock()
    options = ProfilingOptions(strategy=strategy, max_batch=1, bucket_megabytes=0.02)
    profile = profile_ranks(a_subject(clock.loss, clock), options, an_accelerator(), clock=clock)
    sent: list[int] = []
    accelerator = LSHDPAccelerator(plan=Plan.equal(strategy=strategy))
    accelerator.session.engine.placement.bucket_bytes = 20_000
    subject = a_subject()
    model, loader = accelerator.prepare(subject.model, subject.train_dataloader)
    all_reduce = dist.all_reduce

    def noting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel() * tensor.itemsize)
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = noting
    try:
        for batch in loader:
            accelerator.backward(image_loss(model, batch))
            break
    finally:
        dist.all_reduce = all_reduce
    return list(profile.bucket_bytes), sent


# ---- documents ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "lsdp"])
def test_a_profile_of_two_nodes(workers, strategy: str) -> None:
    (document, phases), (other_document, _) = workers(2).run(profile_with_progress, strategy, 3, nodes=(1, 1))
    assert document == other_document
    assert phases == [
        "building the model",
        "measuring micro-batches",
        "measuring buckets and the optimizer",
        "measuring the network",
        "rehearsing steps of all ranks",
    ]
    profile = Profile.from_dict(document)
    assert profile.strategy is Strategy(strategy) and profile.cluster.node_sizes == [1, 1]
    assert profile.subject.parameters == sum(p.numel() for p in tiny_vit().parameters())
    assert profile.subject.gradient_bytes == 4 * profile.subject.parameters == sum(profile.bucket_bytes)
    assert len(profile.bucket_bytes) > 2
    for rank in profile.ranks:
        assert rank.time.batch_sizes == (1, 2, 3) and rank.max_micro_batch_size == 3
        assert rank.time.seconds == pytest.approx([0.1, 0.2, 0.3], rel=1e-3)
        assert max(rank.spread) < 0.02 and rank.limited_by == "request"
        assert rank.optimizer_seconds == pytest.approx(STEP_SECONDS, rel=1e-3)
        assert 50e6 < min(rank.memory.bytes) and max(rank.memory.bytes) < rank.memory_limit_bytes
        for place, seconds in enumerate(rank.time.seconds):
            ready = [curve.seconds[place] for curve in rank.bucket_ready]
            assert ready == sorted(ready) and 0.9 * seconds < ready[0] < ready[-1] <= seconds
    assert [size for size, _ in profile.network.all_reduce.points] == all_reduce_sizes(max(profile.bucket_bytes))
    assert [size for size, _ in profile.network.ping_pong.points] == [64, 65_536, 1_048_576]
    # And it can be planned with.
    plan = plan_fixed_total(profile.rank_profiles(), 4, bucket_seconds=profile.bucket_seconds())
    assert plan.batch_sizes == [2, 2]


def test_hooks_of_the_script_see_its_groups(workers) -> None:
    """The optimizer is stepped in parts only where nothing of the script looks at them."""
    assert workers(1).run(groups_that_hooks_see) == [{1}]


def test_a_profile_of_one_rank(workers) -> None:
    """In real time, on a machine that may be busy."""
    ((document, seconds),) = workers(1).run(profile_in_real_time)
    profile = Profile.from_dict(document)
    assert profile.network is None and profile.bucket_bytes == ()
    rank = profile.ranks[0]
    assert rank.bucket_ready == () and rank.time.batch_sizes[0] == 1
    assert 0 < rank.optimizer_seconds < seconds and 0 < rank.time.seconds[0] < seconds
    assert rank.memory.bytes[0] > 50e6
    assert 0 < profile.measured_seconds <= seconds


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "lsdp"])
def test_buckets_are_those_that_the_engine_sends(workers, strategy: str) -> None:
    for measured, sent in workers(2).run(buckets_of, strategy, nodes=(1, 1)):
        assert measured == sent[: len(measured)] and len(measured) > 2


def test_world_sharded_strategies_are_measured_without_their_gathers(workers) -> None:
    (document, _), _ = workers(2).run(profile_with_progress, "fsdp", 1, nodes=(1, 1))
    profile = Profile.from_dict(document)
    assert profile.strategy is Strategy.FSDP and profile.bucket_seconds() is None
    assert sum(profile.bucket_bytes) == profile.subject.gradient_bytes


# ---- limits ---------------------------------------------------------------------------------------------------------


def test_memory_limits_are_kept(workers) -> None:
    """Rank 0 has what is free, room for 6 samples, and rank 1 was given room for 3."""
    limit = with_margin(BASE_BYTES + 3 * SAMPLE_BYTES)
    results = workers(2).run(profile_within_memory, [None, limit], nodes=(1, 1))
    assert [most for _, most in results] == [6, 3]
    ranks = Profile.from_dict(results[0][0]).ranks
    assert [rank.max_micro_batch_size for rank in ranks] == [6, 3]
    assert [rank.limited_by for rank in ranks] == ["memory", "memory"]
    assert ranks[1].memory_limit_bytes == limit
    for rank in ranks:
        for size, reported in zip(rank.memory.batch_sizes, rank.memory.bytes, strict=True):
            assert BASE_BYTES + size * SAMPLE_BYTES <= reported <= rank.memory_limit_bytes
        assert rank.profile().largest_micro_batch == rank.max_micro_batch_size


@pytest.mark.slow
def test_running_out_of_memory_ends_the_search_and_not_the_run(workers) -> None:
    document, _ = workers(2).run(run_out_of_memory, 5, nodes=(1, 1))
    assert [rank["limited_by"] for rank in document["ranks"]] == ["request", "memory"]
    assert document["ranks"][1]["batch_sizes"] == [1, 2, 4, 5]
    assert document["ranks"][0]["memory"] is None


# ---- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "from_samples", "message"),
    [
        ("exception", 1, "rank 1: KeyError: 'user code fails'"),
        ("exception", 4, "rank 1: KeyError: 'user code fails'"),
        ("exit", 2, "rank 1: SystemExit: user code gives up"),
        ("memory", 1, "rank 1: NothingFits: a micro-batch of one sample does not fit the memory"),
        ("loss", 1, "rank 1: ValueError: found a loss that is of shape .1,., expected"),
    ],
)
def test_what_fails_on_one_rank_fails_on_all(workers, how: str, from_samples: int, message: str) -> None:
    """Long before the 60 s that measuring may take: the other rank is told."""
    errors = workers(2).run(fail_on_rank_1, how, from_samples, nodes=(1, 1), timeout=30, expect_failure=True)
    assert [error.type for error in errors] == ["RuntimeError", "RuntimeError"]
    assert re.match(message, errors[0].message)
    assert errors[0].message == errors[1].message


def test_ranks_that_are_asked_differently_stop(workers) -> None:
    errors = workers(2).run(ask_differently, expect_failure=True)
    assert all("do not agree on how to profile" in error.message for error in errors)


def limit_without_a_meter() -> None:
    options = ProfilingOptions(memory_limit_bytes=10**9)
    profile_ranks(a_subject(), options, an_accelerator(), meter=lambda device: None)


def freeze_everything() -> None:
    subject = a_subject()
    subject.model.requires_grad_(dist.get_rank() == 0)
    profile_ranks(subject, ProfilingOptions(), an_accelerator())


def test_what_cannot_be_measured_is_said(workers) -> None:
    (error,) = workers(1).run(limit_without_a_meter, expect_failure=True)
    assert "nothing measures the memory of cpu" in error.message
    errors = workers(2).run(freeze_everything, expect_failure=True)
    assert all("rank 1: ValueError: found a model without trainable" in error.message for error in errors)


def test_impossible_options_are_refused() -> None:
    with pytest.raises(ValueError, match="found strategy 'fast', expected one of ddp"):
        ProfilingOptions(strategy="fast")
    for name in ("seconds", "max_batch", "needed_batch", "total_batch_size", "memory_limit_bytes", "bucket_megabytes"):
        with pytest.raises(ValueError, match=f"found {name}=0, expected more than 0"):
            ProfilingOptions(**{name: 0})
    with pytest.raises(ValueError, match="expected a tuple of names"):
        ProfilingOptions(units="Block")


# ---- samples and one rank alone ------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size
        self.read = 0

    def __iter__(self):
        for value in range(self.size):
            self.read += 1
            yield torch.tensor(value)


def test_samples_are_the_first_ones_of_the_data_set() -> None:
    samples = Samples(DataLoader(list(range(5)), batch_size=2, shuffle=True))
    assert samples.batch(3).tolist() == [0, 1, 2] and samples.batch(1).tolist() == [0]
    assert samples.available(5) == 5 and samples.available(8) == 5
    with pytest.raises(ValueError, match="found 5 samples in the data set, expected 8"):
        samples.batch(8)


def test_a_stream_is_read_once_and_only_as_far_as_needed() -> None:
    stream = Stream(100)
    samples = Samples(DataLoader(stream, batch_size=7))
    assert samples.batch(4).tolist() == [0, 1, 2, 3] and samples.batch(4).tolist() == [0, 1, 2, 3]
    assert stream.read == 4 and samples.available(6) == 6 and stream.read == 6


def test_a_loader_that_does_not_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="found a loader with batch_size=None"):
        Samples(DataLoader([[1, 2]], batch_size=None))


def test_user_code_may_take_entries_out_of_a_batch() -> None:
    batch = {"x": 1, "labels": 2}
    copy_container(batch).pop("labels")
    assert batch == {"x": 1, "labels": 2}


@pytest.mark.parametrize("batch", [[torch.ones(2, 3)], {"input": torch.ones(2, 3)}])
def test_a_model_that_computes_no_loss_needs_one(batch: Any) -> None:
    with pytest.raises(TypeError, match="found a .*: give Subject a loss=lambda model, batch: ..."):
        output_loss(nn.Linear(3, 1), batch)


def test_the_optimizer_follows_the_model() -> None:
    """One process: the same mechanism as in training, and parameters that move."""
    subject = a_subject(lambda model, batch: image_loss(model, {"labels": batch.pop("labels"), **batch}))
    accelerator = LSHDPAccelerator(plan=Plan.equal(strategy="lsdp"), cpu=True)
    rank = SingleRankTrainer(
        accelerator, Strategy.LSDP, units=None, bucket_megabytes=25.0, reducing_ranks=2, reduction=None
    )
    rank.build(subject)
    before = [parameter.detach().clone() for parameter in subject.model.parameters()]
    batch = rank.to_device(Samples(subject.train_dataloader).batch(2))
    for _ in range(2):
        rank.train(batch)
    rank.step()
    rank.drop_gradients()
    after = list(subject.model.parameters())
    assert all(parameter.grad is None for parameter in after)
    assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))


def rehearsed_plans(loads: list[list[float]]) -> tuple[list[int], float]:
    """This rank's sizes in each rehearsal of a plan for 8 samples, and the load that it kept.

    Args:
        loads: of each rank, what its rehearsals find, in turn.
    """
    sizes: list[int] = []
    accelerator = an_accelerator()

    def rehearse(self: RankSession, rehearsal: Rehearsal, sender: Any) -> list[RehearsedStep]:
        sizes.append(rehearsal.micro_batch_size)
        load = loads[accelerator.process_index][len(sizes) - 1]
        alone = SAMPLE_SECONDS * sizes[-1]
        return [RehearsedStep(sizes[-1], alone, alone + load)] * rehearsal.steps

    clock = Clock()
    options = ProfilingOptions(strategy="lsdp", max_batch=7, total_batch_size=8)
    before, RankSession.rehearse = RankSession.rehearse, rehearse
    try:
        ranks = profile_ranks(a_subject(clock.loss, clock), options, accelerator, clock=clock).ranks
    finally:
        RankSession.rehearse = before
    return sizes, round(ranks[accelerator.process_index].communication_load_seconds, 6)


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "lsdp"])
def test_what_adding_to_gradients_takes_is_measured(workers, strategy: str) -> None:
    assert workers(2).run(measured_accumulation, strategy, nodes=(1, 1)) == pytest.approx([0.5] * 2, abs=1e-4)


def test_the_plan_of_a_known_total_is_rehearsed_until_it_repeats(workers) -> None:
    # In its first rehearsal rank 0 turns out to be slow. Then it has one sample and waits, and its load does not show.
    found = workers(2).run(rehearsed_plans, [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]], nodes=(1, 1))
    assert found == [([4, 1], 1.0), ([4, 7], 0.0)]
