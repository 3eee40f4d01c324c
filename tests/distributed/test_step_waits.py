# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Waiting for a late rank is waiting, wherever the ranks meet: a step's seconds are explained by its parts."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from exactness import prepared
from training_cases import CASES

from accelerate_lshdp import LSDPPlugin, Plan
from accelerate_lshdp.accelerator.step_statistics import StepStatistics, StepTimer
from accelerate_lshdp.engine.prepared import PreparedModel
from accelerate_lshdp.runtime.step_exchange import RankReport
from accelerate_lshdp.runtime.wait_clock import WaitClock


LATE = 0.5


def train(accelerator, model, optimizer, loader, loss, dawdle) -> StepStatistics:
    model.train()
    for batch in loader:
        value = loss(model, batch)
        dawdle()
        accelerator.backward(value)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.step_statistics


def late_between_backward_and_exchange() -> StepStatistics:
    case = CASES["vit"]
    take_usage = PreparedModel.take_usage

    def taken_late(self: PreparedModel) -> torch.Tensor:
        time.sleep(LATE * dist.get_rank())
        return take_usage(self)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(PreparedModel, "take_usage", taken_late)
        run = prepared(Plan.from_batch_sizes([2, 2], strategy="lsdp"), case.model(), case.dataset(16, torch.float32))
        return train(*run, case.loss, lambda: None)


def test_the_exchange_after_a_backward_is_a_wait_for_those_in_time(workers):
    mine, _ = workers(2).run(late_between_backward_and_exchange, nodes=(1, 1))
    assert mine.wait_seconds[0] >= 0.9 * LATE > mine.wait_seconds[1]
    parts = (mine.compute_seconds, mine.wait_seconds, mine.optimizer_seconds, mine.data_seconds)
    assert sum(part[0] for part in parts) >= 0.8 * mine.seconds


def late_before_tokens_are_counted() -> StepStatistics:
    case = CASES["gpt2"]
    plan = Plan.from_batch_sizes([2, 2], strategy="ddp")
    run = prepared(plan, case.model(), case.dataset(16, torch.float32), plugin=LSDPPlugin(loss_weighting="tokens"))
    return train(*run, case.loss, lambda: time.sleep(LATE * dist.get_rank()))


def test_counting_tokens_is_a_wait_and_no_computing_for_those_in_time(workers):
    mine, _ = workers(2).run(late_before_tokens_are_counted, nodes=(1, 1))
    assert mine.wait_seconds[0] >= 0.9 * LATE > mine.compute_seconds[0]
    assert mine.compute_seconds[1] >= LATE > mine.wait_seconds[1]


def test_a_report_tells_the_exchange_of_the_step_before():
    clock = WaitClock()
    timer = StepTimer(torch.device("cpu"), clock)

    def step(waits: float, exchanges: tuple[float, ...]) -> float:
        timer.forward_begins()
        clock.seconds += waits
        for exchange in exchanges:  # one a backward
            report = timer.backward_ends()
            clock.seconds += exchange
            timer.take_reports([RankReport(*report[:4])])
        for _ in range(2):  # optimizers
            timer.optimizer_begins()
            timer.step_ends()
        return report.wait_seconds

    assert step(1.0, (0.25,)) == 1.0
    assert step(2.0, (0.5, 0.125)) == 2.25
    assert step(4.0, (0.0,)) == 4.625
