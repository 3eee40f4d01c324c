# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Trainings whose gradients stay on the emulated device between the micro-batches of a step."""

from __future__ import annotations

import contextlib
import copy
import logging
from typing import Any

import streamed_models as models
import streamed_training
import torch
import torch.distributed as dist
import torch_device as device
from streamed_training import OPTIONS, Case, backward, make_model, place
from torch import nn

from accelerate_lshdp.engine.stores.streamed.kept_gradients import MARGIN
from accelerate_lshdp.engine.stores.streamed.store import StreamedStore


def bytes_to_host(nodes: list[int], is_short: bool) -> dict[str, Any]:
    """What `streamed_training.train` finds; with ``is_short`` on a device that gradients have no room to stay on."""
    case = Case(nodes=tuple(nodes), accumulation=3, dtype="float32")
    device.join_device_world()
    before = device.counts()["device_bytes"]
    found = streamed_training.train(case)
    if is_short:
        # The same on all ranks, as they decide together.
        peak = torch.tensor(float(found["counts"]["peak_device_bytes"] - before))
        dist.all_reduce(peak, op=dist.ReduceOp.MIN)
        # How many buckets waited is chance: room for more of them, and not for all gradients.
        limit = device.counts()["device_bytes"] + int(peak) + found["gradient_bytes"] * 3 // 4
        found = streamed_training.train(Case(**{**vars(case), "delays": (("limit", limit),)}))
    return found


class _Training:
    """Steps of three micro-batches, the same on all ranks, and the same in one process."""

    def __init__(self, nodes: tuple[int, ...] = (1,), model: str = "Plain", blocks: str = "host") -> None:
        device.join_device_world()
        self.case = Case(nodes=nodes, model=model, blocks=blocks)
        self.model = make_model(self.case)
        self.alone = copy.deepcopy(self.model)
        self.engine, self.prepared = place(self.case, self.model)
        self.optimizers = [torch.optim.AdamW(each.parameters(), **OPTIONS) for each in (self.model, self.alone)]

    def micro_batch(self, number: int, fails: bool = False) -> None:
        tokens = models.batch(number)
        share = self.engine.loss_multiplier / dist.get_world_size()
        loss = models.loss_of(self.model, tokens.to("emulated")) * share
        if fails:
            loss.register_hook(_fail)
        backward(self.prepared, loss, synchronise=number % 3 == 2)
        models.loss_of(self.alone, tokens).backward()

    def step(self, numbers: range) -> None:
        for number in numbers:
            self.micro_batch(number)
        self.engine.before_step()
        self.engine.hide_gradients_of_others(self.optimizers[0], may_be_late=True)
        for optimizer in self.optimizers:
            optimizer.step()
        self.engine.after_step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def error(self) -> float:
        pairs = zip(self.model.parameters(), self.alone.parameters(), strict=True)
        return max((one.detach() - other.detach()).abs().max().item() for one, other in pairs)

    @property
    def store(self) -> StreamedStore:
        (store,) = (store for store in self.prepared.stores if isinstance(store, StreamedStore))
        return store


def _fail(gradient: torch.Tensor) -> None:
    raise ValueError("the power is out")


USES = {
    "read": lambda model: model.head.weight.grad.norm(),
    "set to zero": lambda model: model.head.weight.grad.zero_(),
    "clipped": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
    "printed": lambda model: str(model.head.weight.grad),
}


def used_between(how: str, nodes: list[int]) -> tuple[str, float]:
    """What is said where gradients are used between two micro-batches, and how far the parameters are off later."""
    training = _Training(tuple(nodes))
    training.step(range(3))
    training.micro_batch(3)
    try:
        USES[how](training.model)
        USES[how](training.alone)
        said = ""
    except RuntimeError as error:
        said = str(error)
    training.step(range(4, 6))
    return said, training.error()


def stepped_between(nodes: list[int]) -> tuple[str, float]:
    """What is said of a step before the last micro-batch, and how far the parameters are off after it."""
    training = _Training(tuple(nodes))
    training.step(range(3))
    try:
        training.step(range(3, 5))
        return "", training.error()
    except RuntimeError as error:
        return str(error), 0.0


def steps_late() -> list[bool]:
    """Whether the optimizer's step is made late, for each of some steps of several micro-batches."""
    training, late = _Training(), []
    for first in range(0, 12, 3):
        training.step(range(first, first + 3))
        late.append(training.store._late.is_pending)
    assert training.error() < 1e-12
    return late


def short_of_memory(how: str) -> tuple[list[bool], float]:
    """Whether gradients are kept for each of some steps, and how far the parameters are off.

    ``how``: "two models" that fit alone, on a device that has no room for both; or a "failure" of a backward.
    """
    trainings = [_Training(model="Plain") for _ in range(2 if how == "two models" else 1)]
    kept = []
    for first in range(0, 9, 3):
        for training in trainings:
            if how == "failure" and first == 3:
                training.micro_batch(first)
                with contextlib.suppress(ValueError):
                    training.micro_batch(first + 1, fails=True)
                for optimizer in training.optimizers:
                    optimizer.zero_grad()
            else:
                training.step(range(first, first + 3))
        if how == "two models" and first == 0:
            size = sum(parameter.nbytes for parameter in trainings[0].model.parameters())
            device.configure(limit=int((device.counts()["peak_device_bytes"] + 1.5 * size) / 0.9))
        kept.append([training.store._micro_batches.all_keep for training in trainings])
    device.configure()
    return kept, max(training.error() for training in trainings)


def kept_beside(blocks: str, nodes: list[int]) -> list[bool]:
    """Whether gradients are kept after each of some steps, where blocks are not in host memory."""
    training, kept = _Training(tuple(nodes), blocks=blocks), []
    for first in range(0, 9, 3):
        training.step(range(first, first + 3))
        kept.append(training.store._micro_batches.all_keep)
    return kept


def held_between() -> list[bool]:
    """Whether there are gradients, and some are not 0: between two micro-batches, and after they are dropped."""
    training = _Training()
    training.step(range(3))
    training.micro_batch(3)
    held = [training.prepared.has_gradients(), training.prepared.holds_gradients()]
    training.model.zero_grad()
    return [*held, training.prepared.has_gradients(), training.prepared.holds_gradients()]


def closed_between(nodes: list[int]) -> tuple[bool, float, float]:
    """Whether closing a model between micro-batches drops gradients; how far they and the parameters are off."""
    training = _Training(tuple(nodes))
    training.step(range(3))
    training.micro_batch(3)
    training.engine.close()
    pairs = list(zip(training.model.parameters(), training.alone.parameters(), strict=True))
    gradients = [(one.grad - other.grad).abs().max().item() for one, other in pairs if one.grad is not None]
    return not gradients, max(gradients, default=0.0), training.error()


def failed_between() -> float:
    """How far the parameters are off after a step that was given up in its second micro-batch, and another one."""
    training = _Training()
    training.step(range(3))
    training.micro_batch(3)
    try:
        training.micro_batch(4, fails=True)
    except ValueError:
        for optimizer in training.optimizers:
            optimizer.zero_grad()
    training.step(range(6, 9))
    assert device.races() == []
    return training.error()


def warned() -> str:
    """The warning of a device that has too little memory."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("accelerate_lshdp.engine.stores.streamed.kept_gradients")
    logger.addHandler(handler)
    training = _Training()
    training.step(range(3))
    # How many buckets waited is chance: room for more of them, and not for all gradients beside the margin.
    gradients = sum(parameter.nbytes for parameter in training.alone.parameters())
    peak = device.counts()["peak_device_bytes"]
    limit = peak + gradients * 3 // 2
    assert peak + gradients > (1 - MARGIN) * limit
    device.configure(limit=limit)
    training.step(range(3, 6))
    training.step(range(6, 9))
    device.configure()
    logger.removeHandler(handler)
    assert training.error() < 1e-12
    return "\n".join(said)
