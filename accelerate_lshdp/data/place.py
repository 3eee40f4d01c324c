"""Where a batch stands in its epoch, global batch and optimizer step, and what a loader asks of the accelerator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from accelerate_lshdp.data.cut import GlobalBatchCut
from accelerate_lshdp.data.position import StreamReading
from accelerate_lshdp.data.size_switch import CutSchedule


if TYPE_CHECKING:
    from accelerate_lshdp.data.tokens import BatchLabels
    from accelerate_lshdp.documents.plan import RankBatch


@dataclass(frozen=True, slots=True)
class MicroBatchPlace:
    """Where a batch of a training pass stands. Counts are of samples unless they are named otherwise."""

    epoch: int
    global_batch: int
    """Index of the global batch in the epoch, counted from the epoch's start, also after a skip."""
    first_sample: int
    """Samples of the epoch before this global batch."""
    total_samples: int
    """Samples of this global batch, over all ranks."""
    samples: int
    """Real samples of this rank in this micro-batch; 0: it holds a repeated sample, whose loss must not count."""
    micro_batch: int
    """0 .. micro_batches - 1 on this rank."""
    micro_batches: int
    """This rank's accumulation steps for one global batch."""
    window_start: bool
    """First micro-batch of an optimizer step on this rank."""
    window_end: bool
    """Last micro-batch of an optimizer step on this rank: gradients are synchronised here."""
    tokens: int | None
    """Loss tokens of this micro-batch on this rank; only with a token counter."""
    window_tokens: int | None
    """This rank's loss tokens over the whole optimizer step; only with a token counter."""
    last_in_pass: bool
    accumulation_steps: int
    """Global batches of an optimizer step, as the script had set it when the pass began."""
    cut: GlobalBatchCut
    """The sizes of all ranks that this global batch was cut with, a short one in proportion to them."""
    window: int
    """The global batch that its optimizer step began with; -1: in an earlier pass."""
    samples_hash: int
    """Of the indices of all samples of this global batch, for ranks to compare; 0: they are not known (streams)."""
    labels: BatchLabels | None = field(default=None, compare=False, repr=False)
    """Its integer labels, if they may say by how much its loss counts."""

    @property
    def ends_global_batch(self) -> bool:
        """Whether this rank has read its whole share of the global batch with this micro-batch."""
        return self.micro_batch == self.micro_batches - 1


class PlacedBatch(NamedTuple):
    """A collated micro-batch of a training pass, where it stands, and how far its stream is read with it."""

    batch: Any
    place: MicroBatchPlace
    reading: StreamReading | None
    """At the end of its global batch; None: the data is no stream."""


class LoaderContext(Protocol):
    """What a loader needs from the accelerator. Attributes are read at the start of a pass, `seed` when prepared."""

    rank: int
    world_size: int
    rank_batches: tuple[RankBatch, ...] | None
    """The plan's sizes, or None: the loader's own batch_size on every rank."""
    follows_script: bool
    """Each loader's global batch is that of plain accelerate, its own batch_size x ranks; the plan's sizes say how it
    is divided."""
    expects_training: bool
    """An optimizer is prepared, and nothing says that the next pass is for evaluation but the mode of the models."""
    seed: int
    """Agreed by all ranks; shuffling starts from it."""
    gradient_accumulation_steps: int
    """The script's own g: an optimizer step is g global batches."""
    sync_with_dataloader: bool
    """The last global batch of a pass always ends an optimizer step."""
    token_counter: Callable[[Any], int] | None
    """Loss tokens of a collated micro-batch, which is still on the host."""

    def is_evaluation_pass(self) -> bool: ...

    def check_agreement(self, digest: str, what: str) -> None:
        """Collective. Raises on all ranks if the digests differ; `what` says what should have been equal."""

    def reports_training(self) -> bool:
        """Whether batches of a pass that begins now are reported as trained (`batch_trained` of the loader)."""

    def begin_pass(self, loader: Any) -> None: ...

    def end_pass(self, loader: Any) -> None: ...

    def batch_yielded(self, loader: Any, placed: PlacedBatch) -> None:
        """A training pass is about to yield a batch, on its device."""


class PlaceWriter:
    """Writes the places of one rank's micro-batches, global batch after global batch.

    `open_window` is the number of global batches already in the optimizer step that this pass goes on with (only with
    `sync_with_dataloader=False`, where a step may span two passes).
    """

    def __init__(
        self,
        cuts: CutSchedule,
        rank: int,
        epoch: int,
        *,
        accumulation_steps: int,
        sync_with_dataloader: bool,
        first_sample: int = 0,
        global_batch: int = 0,
        open_window: int = 0,
    ) -> None:
        self.cuts = cuts
        self.rank = rank
        self.epoch = epoch
        self.accumulation_steps = accumulation_steps
        self.sync_with_dataloader = sync_with_dataloader
        self.first_sample = first_sample
        self.global_batch = global_batch
        self.open_window = open_window
        self._window = -1

    def write(self, total_samples: int, *, last: bool, samples_hash: int = 0) -> list[MicroBatchPlace]:
        """The places of the next global batch, of `total_samples` samples over all ranks, in the order of yielding."""
        starts = self.open_window == 0
        if starts:
            self._window = self.global_batch
        self.open_window += 1
        ends = self.open_window >= self.accumulation_steps or (last and self.sync_with_dataloader)
        if ends:
            self.open_window = 0
        cut = self.cuts.at(self.global_batch)
        micro_batches = cut.micro_batches(self.rank, total_samples)
        count = len(micro_batches)
        places = [
            MicroBatchPlace(
                epoch=self.epoch,
                global_batch=self.global_batch,
                first_sample=self.first_sample,
                total_samples=total_samples,
                samples=len(offsets),
                micro_batch=index,
                micro_batches=count,
                window_start=starts and index == 0,
                window_end=ends and index == count - 1,
                tokens=None,
                window_tokens=None,
                last_in_pass=last and index == count - 1,
                accumulation_steps=self.accumulation_steps,
                cut=cut,
                window=self._window,
                samples_hash=samples_hash,
            )
            for index, offsets in enumerate(micro_batches)
        ]
        self.first_sample += total_samples
        self.global_batch += 1
        return places
