# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The sections of a profile: immutable records, checked when they are made, read from profile files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

from accelerate_lshdp.documents.curves import MemoryCurve, RankProfile, TimeCurve
from accelerate_lshdp.documents.records import (
    LARGEST_COUNT,
    STRING,
    Record,
    Value,
    choice,
    entry,
    integer,
    name,
    number,
    optional,
    record,
    several,
)
from accelerate_lshdp.documents.value_checks import PlanError, describe, require_integer, require_object


#: What kept a rank from larger micro-batches: its memory, the time budget, the user's maximum, or the data set.
LIMITS = ("memory", "time", "request", "data")

_Curve = TypeVar("_Curve", TimeCurve, MemoryCurve)


def _curve(kind: type[_Curve], measured: str) -> Value:
    """A curve, whose points a document has as lists: sizes under "batch_sizes", values under `measured`."""

    def accept(value: Any, path: str) -> _Curve:
        if not isinstance(value, kind):
            raise PlanError(f"found {describe(value)}, expected a {kind.__name__}.", path=path)
        return value

    def read(value: Any, path: str) -> _Curve:
        points = require_object(value, path, required=("batch_sizes", measured))
        return _read_points(kind, points, measured, f"{path}." if path else "")

    def write(curve: _Curve) -> dict[str, Any]:
        return {"batch_sizes": list(curve.batch_sizes), measured: list(getattr(curve, measured))}

    return Value(accept, read, write)


def _read_points(kind: type[_Curve], section: dict[str, Any], measured: str, before: str = "") -> _Curve:
    # Entry by entry first: an error then names the place in the file, which the curve's own checks do not know.
    sizes = several(integer(least=1)).from_document(section["batch_sizes"], f"{before}batch_sizes")
    values = several(number(positive=True)).from_document(section[measured], f"{before}{measured}")
    try:
        return kind(sizes, section[measured] if kind is MemoryCurve else values)
    except ValueError as error:
        raise PlanError(str(error), path=f"{before}{measured}") from None


@dataclass(frozen=True, slots=True)
class ProfiledScript(Record):
    """The script that was profiled, and the size of its model.

    Args:
        script: its path or module name; None: profiling was called from Python.
        arguments: of the script.
        parameters: number of trainable and frozen parameters.
        gradient_bytes: bytes of a step's gradients before they are compressed.
    """

    script: str | None = entry(optional(name("the path or module name of a script, or null")))
    arguments: tuple[str, ...] = entry(several(STRING))
    parameters: int = entry(integer(most=LARGEST_COUNT))
    gradient_bytes: int = entry(integer(most=LARGEST_COUNT))


@dataclass(frozen=True, slots=True)
class HostRates(Record):
    """What a rank on a device does with the memory of its host, measured while the others of its node do the same.

    Args:
        to_device_bytes_per_second: of copies from registered memory.
        to_host_bytes_per_second: of copies to it.
        optimizer_seconds_per_parameter: of AdamW on this rank's share of the cores, with the copy in the precision of
            the forward.
        memory_bytes: of the host that were free before the model was made.
    """

    to_device_bytes_per_second: float = entry(number(positive=True))
    to_host_bytes_per_second: float = entry(number(positive=True))
    optimizer_seconds_per_parameter: float = entry(number(positive=True))
    memory_bytes: int = entry(integer(least=1, most=LARGEST_COUNT))


@dataclass(frozen=True, slots=True)
class MeasuredRank(Record):
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
        process_bytes: bytes that the rank needs beside the model, its states and activations; None: not measured.
        host: what it does with the memory of its host; None: it computes there, or it was not measured.

    Raises:
        PlanError: an impossible value; it says which.
    """

    rank: int = entry(integer())
    time: TimeCurve = entry(_curve(TimeCurve, "seconds"))
    spread: tuple[float, ...] = entry(several(number()))
    max_micro_batch_size: int = entry(integer(least=1))
    limited_by: str = entry(choice(LIMITS))
    device: str = entry(name("the name of a processor"))
    optimizer_seconds: float = entry(number())
    memory: MemoryCurve | None = entry(optional(_curve(MemoryCurve, "bytes")))
    memory_limit_bytes: int | None = entry(optional(integer(least=1, most=LARGEST_COUNT)))
    bucket_ready: tuple[TimeCurve, ...] = entry(several(_curve(TimeCurve, "seconds")))
    communication_load_seconds: float = entry(number(), default=0.0)
    # Profiles of earlier versions have neither of them.
    accumulation_overhead_seconds: float = entry(number(), default=0.0)
    process_bytes: int | None = entry(optional(integer(most=LARGEST_COUNT)), default=None, omit=True)
    host: HostRates | None = entry(optional(record(HostRates)), default=None, omit=True)

    def _check_together(self) -> None:
        if len(self.spread) != len(self.time.batch_sizes):
            raise PlanError(
                f"found {len(self.spread)} values for {len(self.time.batch_sizes)} batch sizes, expected one each.",
                path="spread",
            )
        largest = self.time.batch_sizes[-1]
        require_integer(self.max_micro_batch_size, "max_micro_batch_size", least=1, most=largest)
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

    @classmethod
    def read(cls, document: object) -> MeasuredRank:
        """One entry of the `ranks` section of a profile file, which has the points of `time` beside the other keys."""
        entries = cls._read_entries(document, also=("batch_sizes", "seconds"), without=("time",))
        return cls(time=_read_points(TimeCurve, document, "seconds"), **entries)

    def to_dict(self) -> dict[str, Any]:
        """The rank as JSON values."""
        document = Record.to_dict(self)
        points = document.pop("time")
        return {"rank": document.pop("rank"), **points, **document}


def _accept_point(value: Any, path: str) -> tuple[int, float]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise PlanError(f"found {describe(value)}, expected [bytes, seconds].", path=path)
    size, seconds = value
    return (
        integer(most=LARGEST_COUNT).accept(size, f"{path}[0]"),
        number(positive=True).accept(seconds, f"{path}[1]"),
    )


@dataclass(frozen=True, slots=True)
class MessageTimes(Record):
    """Message times as a line, seconds = latency + bytes * seconds_per_byte, fitted to measured points.

    Args:
        latency_seconds: seconds of a message without content.
        seconds_per_byte: the inverse of the bandwidth in bytes per second.
        points: measured (bytes, seconds).
    """

    latency_seconds: float = entry(number())
    seconds_per_byte: float = entry(number())
    points: tuple[tuple[int, float], ...] = entry(several(Value(_accept_point, write=list)))

    def seconds(self, size: int) -> float:
        """The predicted seconds of a message of `size` bytes."""
        return self.latency_seconds + size * self.seconds_per_byte


@dataclass(frozen=True, slots=True)
class Network(Record):
    """Measured message times.

    Args:
        ping_pong: one way between two nodes.
        all_reduce: over all ranks.
        inside: an all-reduce of the ranks of each node, on all nodes at once; None: no node has several, or it was not
            measured.
    """

    ping_pong: MessageTimes = entry(record(MessageTimes))
    all_reduce: MessageTimes = entry(record(MessageTimes))
    inside: MessageTimes | None = entry(optional(record(MessageTimes)), default=None, omit=True)

    @classmethod
    def read(cls, document: object) -> Network:
        """The `network` section of a profile file, which has the parts of `ping_pong` beside `all_reduce`."""
        line = ("latency_seconds", "seconds_per_byte")
        section = require_object(document, required=(*line, "ping_pong", "all_reduce"), optional=("inside",))
        all_reduce = record(MessageTimes).from_document(section["all_reduce"], "all_reduce")
        inside = optional(record(MessageTimes)).from_document(section.get("inside"), "inside")
        return cls(MessageTimes(*(section[key] for key in line), section["ping_pong"]), all_reduce, inside)

    def to_dict(self) -> dict[str, Any]:
        """The network as JSON values."""
        line = self.ping_pong.to_dict()
        points = line.pop("points")
        inside = {} if self.inside is None else {"inside": self.inside.to_dict()}
        return {**line, "ping_pong": points, "all_reduce": self.all_reduce.to_dict(), **inside}
