"""How far a loader has been read, in samples: what a checkpoint keeps and a resumed pass starts from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from accelerate_lshdp.data_switch import CutSchedule


@dataclass(frozen=True, slots=True)
class LoaderPosition:
    """How far training has read: `samples` are those of the epoch's completed global batches."""

    epoch: int
    samples: int


class StreamReading(NamedTuple):
    """How far the workers of a stream have been read, at the end of a global batch."""

    worker_samples: tuple[int, ...]
    next_worker: int
    """The worker that gives the next global batch."""


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
class LoaderProgress:
    """What changes as a loader is read. A loader and its `skip_first_batches` views share one."""

    epoch: int = 0
    samples: int = 0
    global_batches: int = 0
    reading: StreamReading | None = None
    order: str | None = None
    generator_state: str | None = None
    """Of the user's generator, at the start of the pass; None: no pass is open, the generator itself tells."""
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
    current_pass: CutSchedule | None = None
    """Of the training pass that started last."""

    @property
    def start_point(self) -> StartPoint:
        return StartPoint(self.samples, self.global_batches, self.reading, self.order)

    def counts_to_position(self, batches: int) -> bool:
        """Whether that many batches of some rank, in the run that saved, led to the restored position."""
        return self.restored and batches in {self.global_batches * steps for steps in self.micro_batches}

    def start_epoch(self, epoch: int) -> None:
        """Forget the position in the epoch before."""
        self.epoch = epoch
        self.samples = self.global_batches = 0
        self.reading = self.order = self.generator_state = None
        self.restored = self.armed = False

    def start_pass(self, start: StartPoint) -> None:
        self.start_epoch(self.epoch)
        self.samples, self.global_batches, self.reading = start.samples, start.global_batches, start.reading

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "samples": self.samples,
            "global_batches": self.global_batches,
            "micro_batches": list(self.current_pass.initial.steps if self.current_pass else self.micro_batches),
            "evaluation_passes": self.evaluation_passes,
            "order": self.order,
            "worker_samples": list(self.reading.worker_samples) if self.reading else None,
            "next_worker": self.reading.next_worker if self.reading else 0,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError if the state is malformed."""
        missing = sorted(set(self.state_dict()) - set(state))
        if missing:
            raise ValueError(f"found a loader state without {missing}, expected what state_dict() gives.")
        workers = state["worker_samples"]
        numbers = {name: state[name] for name in ("epoch", "samples", "global_batches", "evaluation_passes")}
        numbers["next_worker"] = state["next_worker"]
        numbers.update({f"micro_batches[{i}]": count for i, count in enumerate(state["micro_batches"])})
        numbers.update({f"worker_samples[{i}]": count for i, count in enumerate(workers or [])})
        for name, value in numbers.items():
            if type(value) is not int or value < 0:
                raise ValueError(f"found {name}={value!r} in a loader state, expected an integer >= 0.")
        self.start_epoch(state["epoch"])
        self.samples, self.global_batches = state["samples"], state["global_batches"]
        self.micro_batches = tuple(state["micro_batches"])
        self.evaluation_passes = state["evaluation_passes"]
        self.order = state["order"]
        self.reading = StreamReading(tuple(workers), state["next_worker"]) if workers else None
        self.restored = True
