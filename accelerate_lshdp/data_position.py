"""How far a loader has been read, in samples: what a checkpoint keeps and a resumed pass starts from."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LoaderPosition:
    """How far training has read: `samples` are those of the epoch's completed global batches."""

    epoch: int
    samples: int


@dataclass(frozen=True, slots=True)
class StartPoint:
    """Where a training pass starts in its epoch."""

    samples: int = 0
    global_batches: int = 0
    worker_samples: tuple[int, ...] | None = None
    """Streams only: samples that each worker has read; None: skip whole global batches."""
    next_worker: int = 0
    order: str | None = None
    """Hash of the order that the epoch must have; None: any."""


@dataclass(slots=True)
class LoaderProgress:
    """What changes as a loader is read. A loader and its `skip_first_batches` views share one."""

    epoch: int = 0
    samples: int = 0
    global_batches: int = 0
    evaluation_passes: int = 0
    worker_samples: list[int] = field(default_factory=list)
    next_worker: int = 0
    order: str | None = None
    generator_state: str | None = None
    """Of the user's generator, at the start of the pass; None: no pass is open, the generator itself tells."""
    open_window: int = 0
    restored: bool = False
    """A position was loaded and no training pass has started since."""
    armed: bool = False
    """The next training pass starts at the restored position."""

    def start_point(self) -> StartPoint:
        return StartPoint(self.samples, self.global_batches, tuple(self.worker_samples), self.next_worker, self.order)

    def start_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.samples = self.global_batches = self.next_worker = 0
        self.worker_samples = []
        self.order = self.generator_state = None
        self.restored = self.armed = False
