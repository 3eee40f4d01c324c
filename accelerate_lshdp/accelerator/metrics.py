# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Collectives that a script calls itself: gathering metrics under unequal batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils.operations import gather_object, recursively_apply

from accelerate_lshdp.accelerator.session import Session
from accelerate_lshdp.data.place import MicroBatchPlace
from accelerate_lshdp.runtime.groups import carried
from accelerate_lshdp.runtime.uneven_gather import gather_unequal


def meet(session: Session, call: str) -> None:
    """Says that this rank calls something in which all ranks take part (collective).

    Args:
        session: of this rank.
        call: its name, one of `step_exchange.ANNOUNCED_CALLS`.

    Raises:
        RuntimeError: on all ranks, if one of them is not in the last micro-batch of its step.
    """
    session.engine.collective_begins()
    tracker, finder = session.tracker, session.losses.finder
    several = session.exchange.counts is not None and tracker.accumulating
    if several and finder is not None and tracker.current is not None:
        finder.look_before_meeting(tracker.current)
    meeting = session.exchange.announce(call, tracker.within_window)
    if meeting is not None:
        meeting.require_all()


def gather(session: Session, tensor: Any) -> Any:
    """Concatenates tensors of all ranks along the first dimension, whose size may differ between ranks."""
    meet(session, "gather")
    return gather_unequal(tensor)


def on_carried_tensors(data: Any, call: Callable[[Any], Any]) -> Any:
    """Lets a collective of accelerate work on tensors that the world carries; its results are where the tensors were.

    Args:
        data: a tensor, or nested lists, tuples and dictionaries of tensors.
        call: gives as many tensors, for tensors that may be copies in host memory.
    """
    if not dist.is_initialized():
        return call(data)
    devices: list[torch.device] = []

    def take(tensor: torch.Tensor) -> torch.Tensor:
        devices.append(tensor.device)
        return carried(tensor)

    taken = recursively_apply(take, data)
    places = iter(devices)
    return recursively_apply(lambda tensor: tensor.to(next(places)), call(taken))


def gather_metrics(session: Session, place: MicroBatchPlace, data: Any, use_gather_object: bool) -> Any:
    """Gathers what was computed of a batch, without the samples that were only repeated to give every rank a batch.

    Args:
        session: of this rank.
        place: of the batch.
        data: tensors, whose first dimension is that of samples, or objects.
        use_gather_object: whether tensors are gathered as objects, too.
    """
    if not use_gather_object and _holds_tensors_only(data):
        if place.samples == 0:
            data = recursively_apply(lambda tensor: tensor[:0] if tensor.ndim else tensor, data)
        return gather(session, data)
    meet(session, "gather_for_metrics")
    if place.samples == 0:
        data = []  # objects of all ranks are put one after the other, of whatever type this one's are
    return gather_object(data)


def _holds_tensors_only(data: Any) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True
