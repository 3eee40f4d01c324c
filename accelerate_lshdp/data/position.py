# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""How far a loader's data is trained, in samples: what a checkpoint keeps and a resumed pass starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate_lshdp.data.place import MicroBatchPlace, StreamReading
from accelerate_lshdp.data.size_switch import CutSchedule


_NUMBERS = ("epoch", "samples", "global_batches", "evaluation_passes", "next_worker")
_FLAGS = ("exhausted", "complete")  # older states do not have them


@dataclass(frozen=True, slots=True)
class LoaderPosition:
    """How far an epoch is trained (or read, without an accelerator that trains), in completed global batches."""

    epoch: int
    samples: int


@dataclass(frozen=True, slots=True)
class StartPoint:
    """Where a training pass starts in its epoch."""

    samples: int = 0
    global_batches: int = 0
    reading: StreamReading | None = None
    """Streams only; None: skip `global_batches` whole global batches."""
    order: str | None = None
    """Hash of the order that the epoch must have; None: any."""


@dataclass(slots=True)
class PassProgress:
    """How far one pass over an epoch is trained (or read, if nobody reports training)."""

    epoch: int = 0
    samples: int = 0
    global_batches: int = 0
    reading: StreamReading | None = None
    order: str | None = None
    generator_state: str | None = None
    """Of the user's generator, at the start of the pass; None: no pass is open, the generator itself tells."""
    next_generator_state: str | None = None
    """Of it, behind the order of a restored pass that had been read as far as its last batch."""
    advanced: bool = False
    """Something was trained since the pass started."""
    exhausted: bool = False
    """The loader has yielded all of it, trained or not."""
    complete: bool = False
    """Its last batch was trained."""

    def count(self, place: MicroBatchPlace, reading: StreamReading | None) -> bool:
        """Move behind a batch that was trained. Returns whether that is further than before."""
        end = place.first_sample + place.total_samples
        if end <= self.samples:
            return False
        self.advanced = True
        if place.ends_global_batch:
            self.samples, self.global_batches, self.reading = end, place.global_batch + 1, reading
            self.complete = place.last_in_pass
        return True


@dataclass(slots=True)
class LoaderProgress:
    """What changes as a loader is used. A loader and its `skip_first_batches` views share one."""

    position: PassProgress = field(default_factory=PassProgress)
    """What a checkpoint holds: that of a pass that was left stays until something of the next pass is trained."""
    running: PassProgress | None = None
    """The training pass that started last, of which batches may be trained after its end."""
    micro_batches: tuple[int, ...] = ()
    """Of each rank in a global batch, in the run that read this far; empty if nothing was restored."""
    evaluation_passes: int = 0
    open_window: int = 0
    """Global batches in an optimizer step that the next pass goes on with."""
    evaluated: bool = False
    """An evaluation pass has started."""
    restored: bool = False
    """A position was loaded and no training pass has started since."""
    armed: bool = False
    """The next training pass starts at the restored position."""
    pinned: bool = False
    """The script has asked for the epoch of the position again."""
    current_pass: CutSchedule | None = None
    """Of the training pass that started last."""

    @property
    def epoch(self) -> int:
        return self.position.epoch

    @property
    def next_epoch(self) -> int:
        """The epoch of a plain pass that starts now: the next one if this one was left, read or trained whole."""
        # Trained to its end, but not read to it: restored from a checkpoint of the body of the last batch, where
        # scripts that count are at the next epoch, with nothing to skip.
        left = self.position.advanced or self.position.exhausted or self.position.complete
        return self.epoch + 1 if left and not self.pinned else self.epoch

    def is_over(self, global_batches: int) -> bool:
        """Whether a script that skips so many global batches, not up to the position, means the next epoch.

        A checkpoint of the body of an epoch's last batch is saved before the loader is asked for more, so its pass is
        complete, but not exhausted. Scripts that count steps are at batch 0 of the next epoch there.
        """
        now = self.position
        return not self.pinned and (now.exhausted or (now.complete and global_batches != now.global_batches))

    @property
    def start_point(self) -> StartPoint:
        now = self.position
        return StartPoint(now.samples, now.global_batches, now.reading, now.order)

    def next_generator_state(self, now: str | None) -> str | None:
        """What the user's generator draws the order of the epoch behind the position from; None: not known.

        Only where a pass has come to its last batch: before, some samplers have drawn as much as workers read ahead,
        which is not the same on all ranks.

        Args:
            now: the state that the generator has.
        """
        position, following = self.position, self.running
        if position.generator_state is None:
            return position.next_generator_state
        if not (position.exhausted or position.complete):
            return None
        if following is not position and following.epoch > position.epoch:
            return following.generator_state  # this one has drawn its order, but nothing of it was trained
        return now

    def counts_to_position(self, batches: int) -> bool:
        """Whether that many batches of some rank, in the run that saved, led to the restored position."""
        return self.restored and batches in {self.position.global_batches * steps for steps in self.micro_batches}

    def start_epoch(self, epoch: int) -> None:
        """Forget the position in the epoch before."""
        self.position = PassProgress(epoch)
        self.restored = self.armed = self.pinned = False

    def start_pass(self, epoch: int, start: StartPoint, generator_state: str | None) -> PassProgress:
        """A training pass begins; its position counts from now on, or once something of it is trained."""
        self.running = PassProgress(
            epoch, start.samples, start.global_batches, start.reading, generator_state=generator_state
        )
        if not self.position.advanced:
            self.position = self.running
            self.restored = self.armed = self.pinned = False
        return self.running

    def count(self, place: MicroBatchPlace, reading: StreamReading | None) -> None:
        """Count a batch that was trained, or read: batches that were left out before it are behind it, too."""
        trained = self._pass_of(place)
        if trained is None or not trained.count(place, reading):
            return
        self.position = trained
        self.restored = self.armed = self.pinned = False
        if place.ends_global_batch:
            self.open_window = 0 if place.window_end else self.open_window + 1
        if not (trained.exhausted and trained.complete):
            return
        following = self.running
        if following is not trained and following.epoch == trained.epoch + 1:
            self.position = following  # begun before the last batch of this one was trained
        else:
            self.start_epoch(trained.epoch + 1)

    def _pass_of(self, place: MicroBatchPlace) -> PassProgress | None:
        """The pass that a batch counts in; None: the script has kept it, and has trained later passes since."""
        if self.running is not None and self.running.epoch == place.epoch:
            return self.running
        # A script that fetches ahead begins the next epoch before the last batch of this one is trained.
        before = self.position
        return before if before.advanced and before.epoch == place.epoch else None

    def end_pass(self, trained: PassProgress) -> None:
        """A pass was read to its end. Its epoch is over once its last batch is trained, or none of it ever was."""
        trained.exhausted = True
        if trained.complete or not trained.advanced:
            self.start_epoch(trained.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        now = self.position
        return {
            "epoch": now.epoch,
            "samples": now.samples,
            "global_batches": now.global_batches,
            "micro_batches": list(self.current_pass.initial.steps if self.current_pass else self.micro_batches),
            "evaluation_passes": self.evaluation_passes,
            "order": now.order,
            "worker_samples": list(now.reading.worker_samples) if now.reading else None,
            "next_worker": now.reading.next_worker if now.reading else 0,
            "exhausted": now.exhausted,
            "complete": now.complete,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state of which `check_state` found nothing wrong."""
        self.start_epoch(state["epoch"])
        now, workers = self.position, state["worker_samples"]
        now.samples, now.global_batches = state["samples"], state["global_batches"]
        now.order = state["order"]
        now.exhausted, now.complete = (state.get(name, False) for name in _FLAGS)
        now.next_generator_state = state.get("next_sampler_generator")
        now.reading = StreamReading(tuple(workers), state["next_worker"]) if workers else None
        self.micro_batches = tuple(state["micro_batches"])
        self.evaluation_passes = state["evaluation_passes"]
        self.open_window = 0  # the gradients of a step that was begun are not restored
        self.restored = True


def check_state(state: Mapping[str, Any]) -> None:
    """Raises ValueError if it is nothing that the ``state_dict`` of a loader gives, whatever loader it is for."""
    if type(state.get("seed")) is not int or "sampler_generator" not in state:
        raise ValueError("found a loader state without seed or sampler_generator, expected what state_dict() gives.")
    missing = sorted(set(LoaderProgress().state_dict()) - set(state) - set(_FLAGS))
    if missing:
        raise ValueError(f"found a loader state without {missing}, expected what state_dict() gives.")
    numbers = {name: state[name] for name in _NUMBERS}
    for name in ("micro_batches", "worker_samples"):
        values = [] if name == "worker_samples" and state[name] is None else state[name]
        if not isinstance(values, list | tuple):
            raise ValueError(f"found {name}={values!r:.60} in a loader state, expected a list of integers.")
        numbers.update({f"{name}[{i}]": value for i, value in enumerate(values)})
    for name, value in numbers.items():
        if type(value) is not int or value < 0:
            raise ValueError(f"found {name}={value!r:.60} in a loader state, expected an integer >= 0.")
    for name in _FLAGS:
        if type(state.get(name, False)) is not bool:
            raise ValueError(f"found {name}={state[name]!r:.60} in a loader state, expected true or false.")
    order = state["order"]
    if not (order is None or isinstance(order, str)):
        raise ValueError(f"found order={order!r:.60} in a loader state, expected the hash of an order.")
    for name in ("sampler_generator", "next_sampler_generator"):  # older states do not have the latter
        generator = state.get(name)
        if generator is not None and not _is_hexadecimal(generator):
            raise ValueError(f"found {name}={generator!r:.60} in a loader state, expected hexadecimal digits.")


def _is_hexadecimal(value: object) -> bool:
    try:
        return bool(bytes.fromhex(value))
    except (TypeError, ValueError):
        return False
