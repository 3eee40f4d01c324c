# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The loader that scripts iterate: it tells training from evaluation passes, and keeps the position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.logging import get_logger
from accelerate.state import GradientState
from accelerate.utils import send_to_device, synchronize_rng_states

from accelerate_lshdp.data.context import LoaderContext
from accelerate_lshdp.data.cut import GlobalBatchCut
from accelerate_lshdp.data.loader_sizes import LoaderSizes
from accelerate_lshdp.data.pass_start import PassStart
from accelerate_lshdp.data.place import MicroBatchPlace, PlacedBatch, StreamReading
from accelerate_lshdp.data.place_writer import PlaceWriter
from accelerate_lshdp.data.position import LoaderPosition, LoaderProgress, StartPoint, check_state
from accelerate_lshdp.data.size_switch import CutSchedule
from accelerate_lshdp.data.timing import FetchClock
from accelerate_lshdp.data.tokens import with_window_tokens


if TYPE_CHECKING:
    from accelerate_lshdp.documents.plan import RankBatch


logger = get_logger(__name__)

TRAINING, EVALUATION = "training", "evaluation"


class HeterogeneousDataLoader(DataLoaderShard):
    """A prepared loader of which every rank reads its own number of samples of each global batch.

    Whether a pass is for training or evaluation is decided when it starts (`iter(loader)`), by the accelerator, unless
    `purpose` says it (TRAINING or EVALUATION). `len(loader)` is that of a whole pass that would begin now
    (also where only its rest follows a restored position, as with torchdata's loaders), and
    `total_batch_size` that of the pass in progress, if there is one; but for a loader that shuffles they are those of
    training passes until its first evaluation pass. A pass for evaluation is that of stock accelerate. In a training
    pass a batch is reported to the context, with its place, at the moment it is yielded; map-style data is not read
    ahead of it beyond what workers prefetch (and beyond the optimizer step, if loss tokens are counted).
    """

    def __init__(
        self,
        source: Any,
        context: LoaderContext,
        *,
        device: torch.device | None = None,
        non_blocking: bool = False,
        rng_types: list[Any] | None = None,
        use_stateful_dataloader: bool = False,
        generator: torch.Generator,
        seed: int,
    ) -> None:
        # Not the parent's constructor: it asks a StatefulDataLoader for its state, which starts workers and an
        # iterator over a sampler that has no pass yet. The state of this loader is its position.
        self.base_dataloader = source.base_dataloader
        self.use_stateful_dataloader = use_stateful_dataloader
        self.device = device
        self.rng_types = rng_types
        self.synchronized_generator = None
        self.skip_batches = 0
        self.gradient_state = GradientState()
        self._non_blocking = non_blocking
        self._source = source
        self._context = context
        self._generator = generator
        self._seed = seed
        self._progress = LoaderProgress()
        self._start = PassStart(source, context, self._progress)
        self._sizes = LoaderSizes(source, context)
        self._passes: list[str] = []
        self.fetch_clock = FetchClock()
        self.purpose: str | None = None

    # Position

    @property
    def dataset(self) -> Any:
        """The user's dataset."""
        return self._source.dataset

    @property
    def iteration(self) -> int:
        """The epoch of the position: of the pass in progress, of one that was left, else of the next one."""
        return self._progress.epoch

    @property
    def position(self) -> LoaderPosition:
        return LoaderPosition(self._progress.epoch, self._progress.position.samples)

    @property
    def has_restored_position(self) -> bool:
        """Whether a position was loaded, and no training pass has begun since."""
        return self._progress.restored

    @property
    def is_evaluating(self) -> bool:
        """Whether the pass in progress is an evaluation pass."""
        return self._passes[-1:] == [EVALUATION]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, also to one that was left before its end.

        A restored position in another epoch is given up, with a warning.
        """
        progress = self._progress
        progress.evaluation_passes = epoch
        if epoch != progress.epoch:
            if progress.armed:
                logger.warning(
                    f"set_epoch({epoch}) gives up the restored position (epoch {progress.epoch}, sample"
                    f" {progress.position.samples}). Start the loop at epoch {progress.epoch} to go on from there."
                )
            self._start.leave_restored_epoch()
            progress.start_epoch(epoch)
        progress.pinned = True
        self._source.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position and what the order of the samples depends on, for JSON."""
        now = self._source.generator_state()
        return {
            **self._progress.state_dict(),
            "seed": self._seed,
            "sampler_generator": self._progress.position.generator_state or now,
            "next_sampler_generator": self._progress.next_generator_state(now),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave, under any plan and world size. The next pass starts there after `resume`.

        Raises ValueError if the state is malformed or belongs to another kind of loader.
        """
        check_state(state)
        self._source.set_generator_state(state["sampler_generator"])
        self._progress.load_state_dict(state)
        self._seed = state["seed"]
        self._source.set_seed(self._seed)
        if self.use_stateful_dataloader:
            self._go_on_unasked()

    def check_fits(self, state: dict[str, Any]) -> None:
        """Raises ValueError if a state, of which `check_state` found nothing wrong, is of another kind of loader."""
        before = self._source.generator_state()
        later = state.get("next_sampler_generator")
        try:
            for saved in (state["sampler_generator"], *([] if later is None else [later])):
                self._source.set_generator_state(saved)
        except RuntimeError as error:
            raise ValueError(f"found a sampler_generator of another kind in a loader state: {error}") from error
        finally:
            self._source.set_generator_state(before)

    def _go_on_unasked(self) -> None:
        """As torchdata's loaders: the next pass is the rest of the epoch, or the next epoch if nothing is left."""
        try:
            is_over = self._sizes.count(len(self._source) - self.position.samples, self._sizes.cut()) <= 0
        except TypeError:  # a stream without a length: an empty pass tells
            is_over = False
        if is_over:
            self._start.leave_restored_epoch()
            self._progress.start_epoch(self.position.epoch + 1)
        else:
            self.resume()

    def resume(self) -> None:
        """Let the next training pass start at the restored position. Raises ValueError if there is none."""
        self._start.require_position()
        self._progress.armed = True

    def skipping(self, num_batches: int | None) -> HeterogeneousDataLoader:
        """A loader over the same data whose passes skip that many of this rank's batches; see `skip_first_batches`."""
        view = object.__new__(HeterogeneousDataLoader)
        view.__dict__.update(self.__dict__)
        view._passes = []
        view._start = self._start.skipping(num_batches)
        return view

    # Sizes

    @property
    def can_switch(self) -> bool:
        """Whether `switch_sizes` works now: not outside a training pass, nor if worker processes read a stream."""
        return TRAINING in self._passes and self._source.can_switch

    @property
    def read_ahead(self) -> int:
        """Global batches that this rank has cut in the pass in progress, beyond that of the batch yielded last.

        They wait in workers, for their loss tokens to be counted, or as the stream's next. The number changes only
        while a batch is fetched. 0 where sizes cannot be switched.
        """
        return self._progress.current_pass.ahead if self.can_switch else 0

    def switch_sizes(self, rank_batches: Sequence[RankBatch], ahead: int) -> int | None:
        """Use other sizes in the rest of the pass in progress; each global batch keeps its samples, in order.

        All ranks call this after the same batch, with the largest `read_ahead` that any of them had after it. Returns
        the first global batch with the new sizes, the same on all ranks, or None if not `can_switch`. A new pass takes
        the sizes of the plan.

        Raises ValueError if the total, or a rank's number of micro-batches, is another one; RuntimeError if this rank
        has cut that global batch already.
        """
        if not self.can_switch:
            return None
        cuts = self._progress.current_pass
        first = cuts.last_yielded + 1 + ahead
        cut = GlobalBatchCut.from_plan(rank_batches)
        cuts.switch(first, cut.scaled(cuts.total) if self._context.follows_script else cut)
        return first

    def follow_sizes(self, other: HeterogeneousDataLoader, *, with_last: bool) -> None:
        """Use, in the pass that begins, the sizes of another loader's pass in progress, also those to come.

        Args:
            other: the other loader.
            with_last: whether the first batch belongs with the one that `other` yielded last, or with its next one.
        """
        cuts = other._progress.current_pass
        self._progress.current_pass.follow(cuts, cuts.last_yielded if with_last else cuts.last_yielded + 1)

    def _evaluates_next(self) -> bool:
        """Whether a pass that starts now is an evaluation pass."""
        return self._context.is_evaluation_pass() if self.purpose is None else self.purpose == EVALUATION

    def _reports_evaluation(self) -> bool:
        """Whether `total_batch_size` is that of evaluation passes."""
        return self.is_evaluating if self._passes else self._length_is_of_evaluation()

    def _length_is_of_evaluation(self) -> bool:
        """Whether `len` is that of an evaluation pass.

        Scripts compute their steps right after `prepare`, while a model of from_pretrained still is in eval mode.
        """
        if not self._evaluates_next():
            return False
        known = self.purpose is not None or self._progress.evaluated
        return known or not (self._context.expects_training and self._source.shuffles)

    def __len__(self) -> int:
        """Micro-batches of this rank in a pass that starts now. Raises TypeError if the data has no length."""
        if self._length_is_of_evaluation():
            return max(0, self._source.evaluation_length() - self._start.skipped_in_evaluation)
        skip = self._start.training_skip()
        cut = self._sizes.cut()
        steps = cut.steps[self._context.rank]
        samples = len(self._source)
        if isinstance(skip, StartPoint):
            return max(0, self._sizes.count(samples - skip.samples, cut)) * steps
        return max(0, self._sizes.count(samples, cut) * steps - (skip or 0))

    @property
    def total_batch_size(self) -> int:
        """Samples of a batch over all ranks: of a global batch in training, of one iteration in evaluation."""
        if not self._reports_evaluation():
            return self._sizes.cut().total
        return self._sizes.of_evaluation()

    @property
    def total_dataset_length(self) -> int:
        return self.dataset.total_length if hasattr(self.dataset, "total_length") else len(self.dataset)

    def get_sampler(self) -> Any:
        return self._source.sampler

    def set_sampler(self, sampler: Any) -> None:
        raise NotImplementedError(
            "the sampler of a prepared loader is not exchanged. Restore its order with load_state_dict, or prepare a"
            " new loader."
        )

    def __reduce__(self) -> Any:
        raise TypeError(
            "a prepared loader cannot be pickled. Pickle the dataset, or call state_dict() for the position."
        )

    # Passes

    def __iter__(self) -> Iterator[Any]:
        if self._evaluates_next():
            return self._evaluation_pass()
        return self._training_pass()

    @contextmanager
    def _reading(self, kind: str, epoch: int, start: int = 0) -> Iterator[None]:
        """Everything that is true during a pass only, also when the script leaves the loop early."""
        around = (self.end_of_dataloader, self.remainder)
        self._passes.append(kind)
        self.reset()
        self.remainder = self._remainder()
        self.gradient_state._add_dataloader(self)
        self._context.begin_pass(self)
        try:
            if self.rng_types:
                synchronize_rng_states(self.rng_types, None)
            self._source.set_epoch(epoch)
            # The DataLoader draws the seed of its workers from this, not from the global generator.
            self._generator.manual_seed(self._source.worker_seed(kind, self._seed, epoch, start))
            yield
        finally:
            self._context.end_pass(self)
            self._passes.remove(kind)
            self.gradient_state._remove_dataloader(self)
            if self._passes:
                # An evaluation pass inside a training pass over the same loader: removing takes both away.
                self.end_of_dataloader, self.remainder = around
                self.gradient_state._add_dataloader(self)

    def _remainder(self) -> int:
        """Samples of the last batch that are not repeated ones, for gather_for_metrics; 0: all; -1: unknown."""
        if not self.is_evaluating:
            return 0  # Nothing is repeated to fill a global batch; what a rank repeats is told by its place.
        if self._source.drop_last:
            return -1
        try:
            return len(self._source) % self.total_batch_size
        except TypeError:  # no length, or batches of no fixed size
            return -1

    def _evaluation_pass(self) -> Iterator[Any]:
        self._progress.evaluated = True
        with self._reading(EVALUATION, self._progress.evaluation_passes):
            batches = self._source.evaluation_batches()
            missing = object()
            for _ in range(self._start.skipped_in_evaluation):
                next(batches, missing)
            # One batch ahead, to know the last one: gather_for_metrics cuts its repeated samples off.
            current = next(batches, missing)
            while current is not missing:
                current = self._to_device(current)
                following = next(batches, missing)
                self.end_of_dataloader = following is missing
                yield current
                current = following
            self._progress.evaluation_passes += 1

    def _training_pass(self) -> Iterator[Any]:
        context, progress = self._context, self._progress
        cut = self._sizes.cut()
        if progress.current_pass is None:
            self._sizes.say(cut)
        epoch, start = self._start.of_pass(cut)
        cuts = CutSchedule(cut, start.global_batches)
        running = progress.start_pass(epoch, start, self._source.generator_state())
        reports_training = context.reports_training()
        writer = PlaceWriter(
            cuts,
            context.rank,
            epoch,
            accumulation_steps=context.gradient_accumulation_steps,
            sync_with_dataloader=context.sync_with_dataloader,
            first_sample=start.samples,
            global_batch=start.global_batches,
            open_window=0 if context.sync_with_dataloader else progress.open_window,
        )

        def agree(order: str) -> None:
            context.check_agreement(
                f"{order} epoch {epoch} from {start.samples} cut {cut.sizes}/{cut.steps}",
                "the samples of the first global batch of a training pass (give the sampler a generator with the same"
                " seed on every rank, or a set_epoch, and the same dataset; nothing may be divided by rank before)",
            )

        def remember_order(order: str) -> None:
            running.order = order
            if start.order not in (None, order):
                raise ValueError(
                    f"found another order of the samples in epoch {epoch} than before the restart, expected the same:"
                    " its remaining samples are not those that are missing. Give the sampler a generator, or a"
                    " set_epoch that fixes its order, and resume with the same dataset."
                )

        progress.current_pass = cuts
        with self._reading(TRAINING, epoch, start.samples):
            batches = self._source.training_batches(writer, start, self._seed, agree, remember_order)
            if context.token_counter is not None:
                batches = with_window_tokens(batches, context.token_counter)
            for batch, place, reading in self.fetch_clock.timed(batches):
                if progress.current_pass is not cuts:
                    raise RuntimeError(
                        "found a second training pass over a loader, started before the first ended, expected one at a"
                        " time: a loader has one position. Prepare a second loader for the second pass."
                    )
                batch = self._to_device(batch)
                cuts.last_yielded = place.global_batch
                self.end_of_dataloader = place.last_in_pass
                if not reports_training:
                    progress.count(place, reading)
                context.batch_yielded(self, PlacedBatch(batch, place, reading))
                yield batch
            progress.end_pass(running)

    def batch_trained(self, place: MicroBatchPlace, reading: StreamReading | None) -> None:
        """Take a batch of a training pass into the position: the accelerator has trained it."""
        self._progress.count(place, reading)

    def _to_device(self, batch: Any) -> Any:
        if self.device is None:
            return batch
        return send_to_device(batch, self.device, non_blocking=self._non_blocking)
