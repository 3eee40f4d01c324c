# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The sections of a profile: immutable values, checked when they are made, and their readers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from accelerate_lshdp.documents.curves import MemoryCurve, RankProfile, TimeCurve
from accelerate_lshdp.documents.value_checks import (
    PlanError,
    describe,
    located,
    require_choice,
    require_integer,
    require_name,
    require_number,
    require_object,
)


#: What kept a rank from larger micro-batches: its memory, the time budget, the user's maximum, or the data set.
LIMITS = ("memory", "time", "request", "data")
_LARGEST_BYTES = 2**63 - 1

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class ProfiledScript:
    """The script that was profiled, and the size of its model.

    Args:
        script: its path or module name; None: profiling was called from Python.
        arguments: of the script.
        parameters: number of trainable and frozen parameters.
        gradient_bytes: bytes of a step's gradients before they are compressed.
    """

    script: str | None
    arguments: tuple[str, ...]
    parameters: int
    gradient_bytes: int

    def __post_init__(self) -> None:
        if self.script is not None:
            require_name(self.script, "script", "the path or module name of a script, or null")
        arguments = require_array(self.arguments, "arguments")
        for index, argument in enumerate(arguments):
            if not isinstance(argument, str):
                raise PlanError(f"found {describe(argument)}, expected a string.", path=f"arguments[{index}]")
        require_integer(self.parameters, "parameters", least=0, most=_LARGEST_BYTES)
        require_integer(self.gradient_bytes, "gradient_bytes", least=0, most=_LARGEST_BYTES)
        object.__setattr__(self, "arguments", tuple(arguments))


@dataclass(frozen=True, slots=True)
class MeasuredRank:
    """The measurements of one rank.

    Args:
        rank: its number in the world.
        time: seconds of forward and backward by micro-batch size: medians, smoothed by `profiling.noise`.
        spread: median absolute deviation over median, for each size of `time`.
        max_micro_batch_size: the largest micro-batch that the rank can train on, in samples.
        limited_by: the reason why no larger one was measured, one of `LIMITS`.
        device: the name of its processor.
        optimizer_seconds: median seconds of one optimizer step.
        memory: peak bytes by micro-batch size, None where they cannot be measured.
        memory_limit_bytes: upper limit of `memory`; None: there was no limit.
        bucket_ready: for each gradient bucket, in the order in which they travel, the seconds from the start of the
            forward until it is ready, by micro-batch size.
        communication_load_seconds: seconds that sending gradients adds to this rank's forward and backward in a step.
        accumulation_overhead_seconds: seconds that a micro-batch takes longer if it adds its gradients to those of
            another one.

    Raises:
        PlanError: an impossible value; it says which.
    """

    rank: int
    time: TimeCurve
    spread: tuple[float, ...]
    max_micro_batch_size: int
    limited_by: str
    device: str
    optimizer_seconds: float
    memory: MemoryCurve | None
    memory_limit_bytes: int | None
    bucket_ready: tuple[TimeCurve, ...]
    communication_load_seconds: float = 0.0
    accumulation_overhead_seconds: float = 0.0

    def __post_init__(self) -> None:
        require_integer(self.rank, "rank", least=0)
        spread = require_array(self.spread, "spread")
        if len(spread) != len(self.time.batch_sizes):
            raise PlanError(
                f"found {len(spread)} values for {len(self.time.batch_sizes)} batch sizes, expected one for each.",
                path="spread",
            )
        for index, value in enumerate(spread):
            require_number(value, f"spread[{index}]", positive=False)
        require_integer(self.max_micro_batch_size, "max_micro_batch_size", least=1, most=self.time.batch_sizes[-1])
        require_choice(self.limited_by, "limited_by", LIMITS)
        require_name(self.device, "device", "the name of a processor")
        for name in ("optimizer_seconds", "communication_load_seconds", "accumulation_overhead_seconds"):
            require_number(getattr(self, name), name, positive=False)
        if self.memory_limit_bytes is not None:
            require_integer(self.memory_limit_bytes, "memory_limit_bytes", least=1, most=_LARGEST_BYTES)
        # Lists of a JSON document become tuples, so that the value is hashable and cannot be changed.
        object.__setattr__(self, "spread", tuple(float(value) for value in spread))
        object.__setattr__(self, "bucket_ready", tuple(self.bucket_ready))
        # The planner's own value makes the checks that concern several fields.
        try:
            self.profile()
        except ValueError as error:
            raise PlanError(str(error)) from None

    def slowed_down(self, factor: float) -> MeasuredRank:
        """This rank with `factor` times the seconds of every micro-batch; the optimizer step keeps its seconds."""

        # What runs on the same processor becomes slower by the same factor; the optimizer step is measured apart.
        def scaled(curve: TimeCurve) -> TimeCurve:
            return TimeCurve(curve.batch_sizes, [factor * seconds for seconds in curve.seconds])

        return replace(
            self,
            time=scaled(self.time),
            bucket_ready=tuple(map(scaled, self.bucket_ready)),
            accumulation_overhead_seconds=factor * self.accumulation_overhead_seconds,
        )

    def profile(self) -> RankProfile:
        """The times and limits of this rank, for the planners.

        Sending begins when the first bucket is ready, at its measured time. The seconds that sending takes prolong the
        rest of the backward evenly, so later buckets are ready later than measured.
        """
        return RankProfile(
            self.time,
            self.max_micro_batch_size,
            accumulation_overhead_seconds=self.accumulation_overhead_seconds,
            bucket_ready=self._ready_when_sending(),
            communication_load_seconds=self.communication_load_seconds,
            fixed_seconds=self.optimizer_seconds,
            memory=self.memory,
            memory_limit_bytes=self.memory_limit_bytes,
        )

    def _ready_when_sending(self) -> list[TimeCurve] | None:
        """Seconds until each bucket is ready in a step that sends gradients, from those of steps that do not."""
        if not self.bucket_ready:
            return None
        first, *others = self.bucket_ready
        curves = [first]
        for curve in others:
            seconds = []
            for size, ready in zip(curve.batch_sizes, curve.seconds, strict=True):
                begun = first(size)
                # The part of the backward after the first bucket that is over when this bucket is ready; clipped, as
                # noise may put a bucket before the first one or after the end.
                rest = self.time(size) - begun
                passed = min(1.0, max(0.0, (ready - begun) / rest)) if rest > 0 else 1.0
                seconds.append(ready + passed * self.communication_load_seconds)
            curves.append(TimeCurve(curve.batch_sizes, seconds))
        return curves

    def to_dict(self) -> dict[str, Any]:
        """The rank as JSON values."""
        memory = self.memory and {"batch_sizes": list(self.memory.batch_sizes), "bytes": list(self.memory.bytes)}
        return {
            "rank": self.rank,
            "batch_sizes": list(self.time.batch_sizes),
            "seconds": list(self.time.seconds),
            "spread": list(self.spread),
            "max_micro_batch_size": self.max_micro_batch_size,
            "limited_by": self.limited_by,
            "device": self.device,
            "optimizer_seconds": self.optimizer_seconds,
            "communication_load_seconds": self.communication_load_seconds,
            "accumulation_overhead_seconds": self.accumulation_overhead_seconds,
            "memory": memory,
            "memory_limit_bytes": self.memory_limit_bytes,
            "bucket_ready": [
                {"batch_sizes": list(curve.batch_sizes), "seconds": list(curve.seconds)} for curve in self.bucket_ready
            ],
        }


@dataclass(frozen=True, slots=True)
class MessageTimes:
    """Message times as a line, seconds = latency + bytes * seconds_per_byte, fitted to measured points.

    Args:
        latency_seconds: seconds of a message without content.
        seconds_per_byte: the inverse of the bandwidth in bytes per second.
        points: measured (bytes, seconds).
    """

    latency_seconds: float
    seconds_per_byte: float
    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        require_number(self.latency_seconds, "latency_seconds", positive=False)
        require_number(self.seconds_per_byte, "seconds_per_byte", positive=False)
        points = []
        for index, point in enumerate(require_array(self.points, "points")):
            if not isinstance(point, (list, tuple)) or len(point) != 2:
                raise PlanError(f"found {describe(point)}, expected [bytes, seconds].", path=f"points[{index}]")
            require_integer(point[0], f"points[{index}][0]", least=0, most=_LARGEST_BYTES)
            require_number(point[1], f"points[{index}][1]", positive=True)
            points.append((point[0], float(point[1])))
        object.__setattr__(self, "points", tuple(points))

    def seconds(self, size: int) -> float:
        """The predicted seconds of a message of `size` bytes."""
        return self.latency_seconds + size * self.seconds_per_byte


@dataclass(frozen=True, slots=True)
class Network:
    """Measured message times: `ping_pong` one way between two nodes, `all_reduce` over all ranks."""

    ping_pong: MessageTimes
    all_reduce: MessageTimes

    def to_dict(self) -> dict[str, Any]:
        """The network as JSON values."""
        return {
            "latency_seconds": self.ping_pong.latency_seconds,
            "seconds_per_byte": self.ping_pong.seconds_per_byte,
            "ping_pong": [list(point) for point in self.ping_pong.points],
            "all_reduce": {
                "latency_seconds": self.all_reduce.latency_seconds,
                "seconds_per_byte": self.all_reduce.seconds_per_byte,
                "points": [list(point) for point in self.all_reduce.points],
            },
        }


def require_array(value: object, path: str) -> list[Any]:
    """Returns `value` as a list; raises PlanError unless it is a list or tuple, empty or not."""
    if not isinstance(value, (list, tuple)):
        raise PlanError(f"found {describe(value)}, expected a list. Measure again.", path=path)
    return list(value)


def read_items(document: object, path: str, read: Callable[[object], _Item]) -> tuple[_Item, ...]:
    """The entries of a list, each read by `read`; raises a PlanError with the index of a wrong entry."""
    items = []
    for index, entry in enumerate(require_array(document, path)):
        with located(f"{path}[{index}]"):
            items.append(read(entry))
    return tuple(items)


def read_script(document: object) -> ProfiledScript:
    """The `subject` section of a profile file."""
    return ProfiledScript(**require_object(document, required=("script", "arguments", "parameters", "gradient_bytes")))


def read_rank(document: object) -> MeasuredRank:
    """One entry of the `ranks` section of a profile file."""
    names = ("rank", "max_micro_batch_size", "limited_by", "device", "optimizer_seconds")
    names = (*names, "communication_load_seconds", "memory_limit_bytes")
    required = (*names, "batch_sizes", "seconds", "spread", "memory", "bucket_ready")
    # Profiles of earlier versions do not have the accumulation overhead.
    section = require_object(document, required=required, optional=("accumulation_overhead_seconds",))
    memory = None
    if section["memory"] is not None:
        with located("memory"):
            points = require_object(section["memory"], required=("batch_sizes", "bytes"))
            memory = _read_curve(MemoryCurve, points["batch_sizes"], points["bytes"], "bytes")
    return MeasuredRank(
        time=_read_curve(TimeCurve, section["batch_sizes"], section["seconds"], "seconds"),
        spread=section["spread"],
        memory=memory,
        bucket_ready=read_items(section["bucket_ready"], "bucket_ready", _read_ready),
        accumulation_overhead_seconds=section.get("accumulation_overhead_seconds", 0.0),
        **{name: section[name] for name in names},
    )


def read_network(document: object) -> Network:
    """The `network` section of a profile file."""
    section = require_object(document, required=("latency_seconds", "seconds_per_byte", "ping_pong", "all_reduce"))
    with located("all_reduce"):
        keys = ("latency_seconds", "seconds_per_byte", "points")
        all_reduce = MessageTimes(**require_object(section["all_reduce"], required=keys))
    return Network(
        MessageTimes(section["latency_seconds"], section["seconds_per_byte"], section["ping_pong"]), all_reduce
    )


def _read_ready(document: object) -> TimeCurve:
    section = require_object(document, required=("batch_sizes", "seconds"))
    return _read_curve(TimeCurve, section["batch_sizes"], section["seconds"], "seconds")


def _read_curve(kind: type[_Item], batch_sizes: object, values: Sequence[Any], name: str) -> _Item:
    # Entry by entry first: an error then names the place in the file, which the curve's own checks do not know.
    for index, size in enumerate(require_array(batch_sizes, "batch_sizes")):
        require_integer(size, f"batch_sizes[{index}]", least=1)
    for index, value in enumerate(require_array(values, name)):
        require_number(value, f"{name}[{index}]", positive=True)
    try:
        return kind(tuple(batch_sizes), tuple(values))
    except ValueError as error:
        raise PlanError(str(error), path=name) from None
