# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Lossy formats in training: all ranks stay the same, what they send, other plans, frozen parameters, and the end."""

from __future__ import annotations

import gc
import logging
import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from exactness import full
from launching import launch
from lossy_reductions import new_reduction
from payload_counting import PayloadCounter
from torch.distributed.distributed_c10d import _world
from torch.utils.data import DataLoader
from training_cases import CASES, collate, make_optimizer, relative_error

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator, Plan
from accelerate_lshdp.documents.plan import Communication, PlanError
from accelerate_lshdp.engine.wire import int8 as int8_reduction
from accelerate_lshdp.engine.wire import two_messages as two_message_reduction
from accelerate_lshdp.engine.wire.formats import wire_bytes
from accelerate_lshdp.engine.wire.reduction import OrderedReductions
from accelerate_lshdp.profiling import ProfilingOptions, Subject, profile_ranks


FORMATS = {"int8": {}, "powersgd": {"powersgd_rank": 2, "powersgd_warmup_steps": 1}}


def train(dtype: str, strategy: str, sizes: tuple, steps: int = 4) -> dict:
    """Parameters after some steps of a tiny ViT."""
    case = CASES["vit"]
    plan = Plan.from_batch_sizes(sizes, strategy=strategy, communication_dtype=dtype, **FORMATS.get(dtype, {}))
    # Several buckets, so that every rank of a node has some to send.
    accelerator = LSHDPAccelerator(plan=plan, lsdp_plugin=LSDPPlugin(bucket_megabytes=0.02))
    model = case.model()
    optimizer = make_optimizer(model, 1e-3, 0.0)
    loader = DataLoader(case.dataset(steps * plan.total_batch_size, torch.float32), batch_size=2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(case.loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    return {name: full(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("dtype", ["int8", "powersgd"])
@pytest.mark.parametrize(
    ("strategy", "sizes", "nodes"),
    [
        ("ddp", (3, 1, 2), (1, 2)),
        ("ddp", (3, 1, 2, 2), (2, 2)),
        ("lsdp", (3, 1, 2), (1, 2)),
        ("lsdp", ((3, 2), (1, 2)), (1, 1)),
        pytest.param("group_sharding", (3, 1, 2, 2), (2, 2), marks=pytest.mark.slow),
    ],
)
def test_replicas_stay_identical_and_near_the_exact_ones(workers, dtype, strategy, sizes, nodes):
    pool = workers(len(sizes))
    exact = pool.run(train, "fp32", strategy, sizes, nodes=nodes)[0]
    results = pool.run(train, dtype, strategy, sizes, nodes=nodes)
    for parameters in results:
        assert all(torch.equal(value, results[0][name]) for name, value in parameters.items())
    assert 0 < relative_error(results[0], exact) < 0.05


def send_one_buffer(dtype: str) -> tuple[dict, int]:
    """Bytes of the messages for one buffer, counted at the collectives, and by the formula."""
    communication = Communication(dtype, **({"powersgd_warmup_steps": 0} if dtype == "powersgd" else {}))
    reduction = new_reduction(communication)
    shapes = [torch.Size(shape) for shape in ((300, 400), (400,), (200, 300), (300,))]
    buffer = torch.ones(sum(shape.numel() for shape in shapes))
    with pytest.MonkeyPatch.context() as monkeypatch:
        counter = PayloadCounter(monkeypatch, [1] * dist.get_world_size())
        reduction.start(buffer, 0, shapes).wait()
    return dict(counter.sent), wire_bytes(communication, buffer, shapes)


@pytest.mark.parametrize("dtype", ["bf16", "int8", "powersgd"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_between_nodes_follow_the_formula(workers, dtype, world_size):
    for sent, formula in workers(world_size).run(send_one_buffer, dtype):
        assert sum(sent.values()) == pytest.approx(2 * (world_size - 1) / world_size * formula, rel=0.02)


def resume_elsewhere(folder: str, plan: Plan, saves: bool) -> list[str]:
    """Saves or loads a checkpoint; returns warnings."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("accelerate_lshdp.accelerator.run_checkpoints").addHandler(handler)
    case = CASES["vit"]
    accelerator = LSHDPAccelerator(plan=plan)
    model = case.model()
    optimizer = make_optimizer(model, 1e-3, 0.0)
    loader = DataLoader(case.dataset(16, torch.float32), batch_size=2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if not saves:
        accelerator.load_state(folder)
    for batch in loader:
        accelerator.backward(case.loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    if saves:
        accelerator.save_state(folder)
    logging.getLogger("accelerate_lshdp.accelerator.run_checkpoints").removeHandler(handler)
    return [message for message in heard if "starts anew" in message]


def test_another_plan_starts_anew_and_says_so_once(workers, tmp_path):
    first = Plan.from_batch_sizes([3, 1], strategy="ddp", communication_dtype="int8")
    other = Plan.from_batch_sizes([1, 3], strategy="ddp", communication_dtype="int8")
    folder = str(tmp_path / "checkpoint")
    workers(2).run(resume_elsewhere, folder, first, True)
    assert workers(2).run(resume_elsewhere, folder, first, False) == [[], []]
    said = [message for heard in workers(2).run(resume_elsewhere, folder, other, False) for message in heard]
    assert len(said) == 1 and "what int8 keeps from step to step" in said[0]


def refused_environment() -> str:
    os.environ.update(LSDP_COMMUNICATION_DTYPE="powersgd", LSDP_POWERSGD_RANK="3", LSDP_STRATEGY="fsdp")
    with pytest.raises(PlanError) as refusal:
        LSHDPAccelerator()
    os.environ["LSDP_STRATEGY"] = "ddp"
    assert LSHDPAccelerator().plan.communication == Communication("powersgd", 3)
    return str(refusal.value)


def test_options_from_the_environment(workers):
    (message,) = workers(1).run(refused_environment)
    assert 'found "powersgd" with strategy "fsdp"' in message


def test_keyword_against_plan() -> None:
    plan = Plan.equal(communication_dtype="powersgd", powersgd_rank=2)
    with pytest.raises(ValueError, match="powersgd_rank='4' was given as a keyword, but the plan says '2'"):
        LSDPPlugin(powersgd_rank=4).resolve(plan)


def abandon_then_train(dtype: str) -> bool:
    """A backward that fails on all ranks while buffers are under way; the next one uses the same buffers."""
    reduction = new_reduction(Communication(dtype))
    ordered = OrderedReductions(reduction, clock=LSHDPAccelerator().session.timer.clock, count=2)
    shapes = [torch.Size((40, 50))]
    ordered.ready(0, torch.ones(2000), shapes)
    ordered.reset()
    buffers = [torch.ones(2000), torch.full((2000,), 2.0)]
    for index, buffer in enumerate(buffers):
        ordered.ready(index, buffer, shapes)
    ordered.finish()
    ranks = dist.get_world_size()
    return bool((buffers[1] - 2 * ranks).abs().max() < 0.05) and bool(buffers[0].isfinite().all())


@pytest.mark.parametrize("dtype", ["int8", "powersgd"])
def test_abandoned_backward(workers, dtype):
    assert workers(2).run(abandon_then_train, dtype) == [True, True]


def start_before_the_other_rank() -> bool:
    """Rank 1 starts only after rank 0 has come back from starting both of its buffers."""
    reduction = new_reduction(Communication("int8"))
    signal = dist.new_group([0, 1])
    buffers = [torch.ones(3000), torch.ones(50)]
    if dist.get_rank() == 1:
        dist.barrier(signal)
    pending = [reduction.start(buffer, index, [buffer.shape]) for index, buffer in enumerate(buffers)]
    if dist.get_rank() == 0:
        assert not pending[0].is_done() and not pending[1].is_done()
        dist.barrier(signal)
    for one in pending:
        one.wait()
    return all(bool((buffer - 2).abs().max() < 0.02) for buffer in buffers)


def test_starting_does_not_wait(workers):
    assert workers(2).run(start_before_the_other_rank) == [True, True]


def fail_between_the_messages() -> tuple[str, bool]:
    """What waiting raises, and whether the next step works."""
    reduction = new_reduction(Communication("int8"))
    shapes = [torch.Size((100,))]
    with pytest.MonkeyPatch.context() as monkeypatch:

        def fail(self: object, buffer: torch.Tensor) -> None:
            raise MemoryError("no memory for the sum")

        monkeypatch.setattr(int8_reduction._Int8Buffer, "combine", fail)
        pending = reduction.start(torch.ones(100), 0, shapes)
        with pytest.raises(MemoryError) as error:
            pending.wait()
    buffer = torch.ones(100)
    reduction.start(buffer, 0, shapes).wait()
    return str(error.value), bool((buffer - 2).abs().max() < 0.05)


def test_errors_of_the_thread_reach_the_rank(workers):
    assert workers(2).run(fail_between_the_messages) == [("no memory for the sum", True)] * 2


def drop_the_reduction() -> tuple[bool, bool]:
    """Whether both sums are right of which only the pending reductions are kept; and whether the thread ends."""
    threads = set(threading.enumerate())
    buffers = [torch.ones(3000), torch.ones(50)]
    reduction = new_reduction(Communication("int8"))
    pending = [reduction.start(buffer, index, [buffer.shape]) for index, buffer in enumerate(buffers)]
    del reduction
    gc.collect()
    for one in pending:
        one.wait()
    del pending, one
    gc.collect()
    started = [thread for thread in threading.enumerate() if thread not in threads]
    for thread in started:
        thread.join(timeout=10)
    right = all(bool((buffer - 2).abs().max() < 0.02) for buffer in buffers)
    return right, not any(thread.is_alive() for thread in started)


@pytest.mark.timeout(60)
def test_sums_end_that_outlive_their_reduction(workers):
    assert workers(2).run(drop_the_reduction) == [(True, True)] * 2


class ArrivesLate:
    """A message that arrives just after somebody lost patience with it; it may have failed."""

    def __init__(self, failure: str | None) -> None:
        self.failure = failure
        self.waits = 0

    def is_completed(self) -> bool:
        return self.waits > 0

    def wait(self, *timeout: timedelta) -> None:
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")
        if self.failure is not None:
            raise RuntimeError(self.failure)


def test_a_message_that_arrives_when_patience_ends_has_arrived():
    message = ArrivesLate(None)
    two_message_reduction._Worker()._wait(message)
    assert message.waits == 2
    with pytest.raises(RuntimeError, match="Connection closed"):
        two_message_reduction._Worker()._wait(ArrivesLate("Connection closed by peer"))


def profiled(dtype: str) -> tuple[int, int]:
    """Bytes on the wire of all buckets, and those of the gradients."""
    accelerator = LSHDPAccelerator(lsdp_plugin=LSDPPlugin(communication_dtype=dtype))
    case = CASES["vit"]
    model = case.model()
    gradients = sum(parameter.numel() * 4 for parameter in model.parameters())
    loader = DataLoader(case.dataset(64, torch.float32), batch_size=4, collate_fn=collate)
    subject = Subject(model, loader, make_optimizer(model, 1e-3, 0.0), case.loss)
    profile = profile_ranks(subject, ProfilingOptions(seconds=2.0, strategy="lsdp", max_batch=2), accelerator)
    return sum(profile.bucket_bytes), gradients


@pytest.mark.parametrize(
    ("dtype", "share"), [("int8", (0.25, 0.27)), pytest.param("powersgd", (0.1, 0.9), marks=pytest.mark.slow)]
)
def test_profiles_count_what_the_format_sends(workers, dtype, share):
    for sent, gradients in workers(2).run(profiled, dtype, nodes=(1, 1)):
        assert share[0] < sent / gradients < share[1]


def train_profile_train(dtype: str) -> tuple[int, int, bool]:
    """Groups of the world before and after a profile, and whether a training after it is the one before it."""
    first = train(dtype, "lsdp", (1, 2, 1, 2), steps=2)
    before = len(_world.pg_map)
    profiled(dtype)
    gc.collect()
    after = len(_world.pg_map)
    again = train(dtype, "lsdp", (1, 2, 1, 2), steps=2)
    return before, after, all(torch.equal(value, again[name]) for name, value in first.items())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "powersgd"])
def test_a_profile_leaves_no_groups_and_disturbs_no_later_training(workers, dtype):
    for before, after, alike in workers(4).run(train_profile_train, dtype, nodes=(2, 2)):
        assert after == before and alike


def frozen_later(dtype: str) -> list[str]:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("accelerate_lshdp.engine.wire.two_messages").addHandler(handler)
    reduction = new_reduction(Communication(dtype, **FORMATS[dtype]))
    for sizes in ((30, 40), (30, 40)), ((30, 40),):
        shapes = [torch.Size(sizes_of) for sizes_of in sizes]
        for _ in range(2):
            buffer = torch.ones(sum(shape.numel() for shape in shapes))
            reduction.start(buffer, 3, shapes).wait()
    assert (buffer - 2).abs().max() < 0.05
    return heard


@pytest.mark.parametrize("dtype", ["int8", "powersgd"])
def test_a_buffer_with_other_parameters_drops_what_was_kept(workers, dtype):
    for heard in workers(2).run(frozen_later, dtype):
        assert len(heard) == 1 and "gradient buffer 3 has other parameters than before" in heard[0]


#: Rank 1 leaves while rank 0 waits for its message, or both leave with a message under way.
ENDING = """
import os, sys, time
import torch, torch.distributed as dist
from accelerate_lshdp.engine.wire.formats import make_reduction, make_second_group
from accelerate_lshdp.runtime.shutdown import install_clean_exit
from accelerate_lshdp.documents.plan import Communication

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
install_clean_exit()
communication = Communication(sys.argv[1])
reduction = make_reduction(communication, dist.group.WORLD, make_second_group(communication, [(0, 1)]))
for step in range(3):
    reduction.start(torch.ones(5000), 0, [torch.Size((50, 100))]).wait()
dist.barrier()
if rank == 0:
    pending = reduction.start(torch.ones(5000), 0, [torch.Size((50, 100))])
    if sys.argv[2] == "wait":
        try:
            pending.wait()
        except RuntimeError as error:
            print("ended:", "onnection" in str(error))
elif sys.argv[2] == "both":
    time.sleep(0.3)
"""


@pytest.mark.parametrize(
    ("dtype", "what"), [("int8", "both"), pytest.param("powersgd", "wait", marks=pytest.mark.slow)]
)
def test_ends_cleanly_with_messages_under_way(tmp_path: Path, dtype: str, what: str) -> None:
    script = tmp_path / "ending.py"
    script.write_text(ENDING)
    ended = launch([script, dtype, what], 2, timeout=60).processes
    assert [process.returncode for process in ended] == [0, 0], ended
    assert what == "both" or "ended: True" in ended[0].stdout
