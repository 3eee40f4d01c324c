# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Which batch the script is working on: the link between loaders, ``accumulate``, forwards and ``backward``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerate_lshdp.data.batch_marks import tensors_in
from accelerate_lshdp.data.current_batch import BatchAtHand
from accelerate_lshdp.data.place import MicroBatchPlace, PlacedBatch
from accelerate_lshdp.data.yielded_batches import TrackedBatch, YieldedBatches


UNRECOGNISED = (
    "could not tell of which batch the loss is: several batches of a prepared loader are alive, or one was left out, "
    "and the prepared models were called with tensors of none of them. Call a prepared model with the tensors that "
    "the loader yielded (or views of them), or keep only the batch that is trained; leave out the first batches of an "
    "epoch with accelerator.skip_first_batches(loader, n)"
)
DIFFERENT_SHARES = (
    "found batches of two loaders that were fetched together, but count differently (shares of their global batches, "
    "loss tokens, or micro-batches of the step), so a loss of both has no one weight. Call accelerator.backward for "
    "each of them, give short last batches up with drop_last=True, or make one dataset of the two"
)


class BatchTracker:
    """Follows batches from the loader to the backward.

    A batch is the one that is trained if a prepared model is called with its tensors (with gradients switched on).
    Where no forward tells, it is the only one that may be meant: of passes that go on, if there are any, and not of
    those that the script validates on. Batches of several loaders in one backward are taken together. A further
    ``accumulate`` or ``backward`` without a new batch belongs to the same batch (two losses, two models).

    Attributes:
        current: the place of the batch that is worked on; None before the first and for batches of no loader.
        accumulating: whether the script is inside ``accumulate``.
        problem: what makes the step wrong on this rank, until ranks have told each other; None: nothing.
    """

    def __init__(self) -> None:
        self.current: MicroBatchPlace | None = None
        self.accumulating = False
        self.problem: str | None = None
        self._yielded = YieldedBatches()
        self._passes = 0
        self._open: list[tuple[Any, int]] = []  # loaders in training passes, and the numbers of these
        self._group: list[TrackedBatch] = []  # what is worked on
        self._seen: list[TrackedBatch] = []  # what forwards were given since the last backward
        self._chosen = False  # whether the caller of `accumulate` has said which batch it trains
        self._counted: list[TrackedBatch] = []
        self._over = False  # whether the pass of the current batch has ended
        self._doubtful = False  # whether `accumulate` began with one of several batches that look alike
        self._recognised: list[TrackedBatch] = []  # what forwards told that the last backward was of
        self._validates: dict[int, bool] = {}  # by pass: whether models in eval mode were given it, and none trained
        self._unsure = False  # whether the last backward may be of other batches, which count alike by their samples
        self._at_hand = BatchAtHand()
        self._trains_in_block = False  # whether there was a backward since `accumulate` began
        self._begun: tuple[int, int] | None = None  # the accumulation window of the last backward
        self._evaluating: list[Any] = []
        self._last_evaluates = False  # whether the loader that was used last is in an evaluation pass

    # What loaders say

    def begin_pass(self, loader: Any, evaluation: bool) -> None:
        """A pass over a loader begins. What an earlier one has left is trained only if a forward is given it."""
        if evaluation:
            self._evaluating.append(loader)
            self._last_evaluates = True
            return
        self._passes += 1
        self._open = [(other, number) for other, number in self._open if other is not loader]
        self._open.append((loader, self._passes))
        self._at_hand.pass_begins(self._passes)
        for batch in [b for b in self._yielded.batches if b.loader() is loader and (b.is_blind or not b.alive)]:
            self._yielded.drop(batch)
        if any(batch.loader() is loader for batch in self._group):
            self.current, self._group = None, []

    def end_pass(self, loader: Any) -> None:
        """A pass has ended, or the script has left it; the batches that it yielded may still be trained."""
        if any(other is loader for other in self._evaluating):
            self._evaluating = [other for other in self._evaluating if other is not loader]
            return
        for _, number in [one for one in self._open if one[0] is loader]:
            self._at_hand.pass_ends(number)
        self._open = [(other, number) for other, number in self._open if other is not loader]
        self._over = not self.accumulating

    def batch_yielded(self, loader: Any, placed: PlacedBatch) -> None:
        """A training pass is about to hand this batch to the script."""
        self._last_evaluates = False
        number = next((number for other, number in self._open if other is loader), self._passes)
        batch = TrackedBatch(loader, number, placed)
        self._yielded.add(batch, self._group)
        self._at_hand.turns_to([batch])

    # What is asked about batches

    def is_waiting(self, loader: Any) -> bool:
        """Whether a batch that this loader yielded was not worked on yet."""
        return any(batch.loader() is loader and batch.alive for batch in self._untaken())

    def _is_open(self, batch: TrackedBatch) -> bool:
        """Whether the pass that yielded it goes on."""
        return any(number == batch.pass_number for _, number in self._open)

    def _untaken(self) -> list[TrackedBatch]:
        """Batches that were not trained, of the newest pass over each loader."""
        newest: dict[int, int] = {}
        for batch in self._yielded.batches:
            newest[id(batch.loader())] = max(newest.get(id(batch.loader()), 0), batch.pass_number)
        return [
            batch
            for batch in self._yielded.batches
            if not batch.taken and batch.pass_number == newest[id(batch.loader())]
        ]

    def _candidates(self) -> list[TrackedBatch]:
        """Batches that a loss may be of without a forward that tells: alive, or gone with a copy that is trained."""
        found = self._untaken()
        of_open = [batch for batch in found if self._is_open(batch)]
        # Beside a pass that goes on, what an earlier one has left is a sample to look at, or of a validation.
        if of_open or any(self._is_open(batch) for batch in self._group):
            found = of_open
        return [batch for batch in found if not self._validates.get(batch.pass_number)] or found

    def places_of(self, batches: Sequence[Any]) -> list[MicroBatchPlace]:
        """The places of batches that the caller holds, in order; empty if they are of no training pass."""
        found = [self._yielded.recognise(tensors_in(batch)) for batch in batches]
        if all(len(known) == 1 for known in found):
            return [known[0].place for known in found]
        waiting = [batch for batch in self._untaken() if batch.is_blind]  # these are alive until they are taken
        return [batch.place for batch in waiting] if not any(found) and len(waiting) == len(batches) else []

    def place_at_hand(self, data: Any) -> MicroBatchPlace | None:
        """The place of the batch that metrics are of, which need not be the one that was trained last.

        Args:
            data: the metrics; they may hold tensors of the batch.
        """
        found = self._yielded.recognise(tensors_in(data))
        if len(found) == 1:
            return found[0].place
        if self._at_hand.batch is not None:
            return self._at_hand.batch.place
        return self.current if self.accumulating else None

    @property
    def in_evaluation_pass(self) -> bool:
        """Whether the script works on an evaluation pass, not on a training pass beside one that it left open."""
        return bool(self._evaluating) and self._last_evaluates and not self._recognised

    # What the script does

    def choose(self, batch: Any) -> None:
        """The next ``accumulate`` trains this batch, as its caller knows (of blind ones, and copies: the oldest)."""
        found = self._yielded.recognise(tensors_in(batch))
        oldest = [b for b in self._yielded.batches if not b.taken][:1]
        self._work_on(found[:1] or [batch for batch in self._untaken() if batch.alive][:1] or oldest)
        self._chosen = True

    def expect(self) -> MicroBatchPlace | None:
        """The place that ``accumulate`` begins with: a guess, which the forward inside puts right.

        Returns:
            The place of the oldest batch that was not trained yet, else of the current one.
        """
        self._seen = []
        self._trains_in_block = False
        if not self._chosen:
            group = self._first_of_each_loader() or self._only_missed()
            if group:
                self._work_on(group)
            elif self._over:
                self._work_on([])
        # Nothing will tell which of several it is.
        self._doubtful = sum(batch.is_blind for batch in self._candidates()) > 1 and not self._chosen
        for batch in self._group:
            batch.taken |= batch.is_blind
        return self.current

    def _first_of_each_loader(self) -> list[TrackedBatch]:
        first: dict[int, TrackedBatch] = {}
        for batch in self._candidates():
            if batch.alive:
                first.setdefault(id(batch.loader()), batch)
        return list(first.values())

    def _only_missed(self) -> list[TrackedBatch]:
        """The one batch that is neither trained nor alive: the script trains a copy of it (on another device)."""
        missed = [batch for batch in self._candidates() if not batch.alive]
        return missed if len(missed) == 1 else []

    def forward(self, inputs: Any, trains: bool = True, validates: bool = False) -> bool:
        """A prepared model is called.

        Args:
            inputs: its arguments.
            trains: whether gradients are switched on.
            validates: whether they are not, and the model is in eval mode.

        Returns:
            Whether the current place is another one now.
        """
        if self._chosen:
            return False
        found = self._yielded.recognise(tensors_in(inputs))
        if found or not self.accumulating:
            self._at_hand.turns_to(found)
        if not trains:
            for batch in found if validates else ():
                self._validates.setdefault(batch.pass_number, True)
            return False
        self._seen += [batch for batch in found if batch not in self._seen]
        if not found or (self._seen[0] in self._group and self.current is self._seen[0].place):
            return False
        self._work_on(list(self._seen))
        return True

    def take(self) -> MicroBatchPlace | None:
        """The place of the batch that a backward is of; None for a batch of no loader.

        Where that is not known, or batches count differently, sets `problem`.
        """
        seen, self._seen = self._meant(), []
        self._trains_in_block = True
        self._recognised, self._unsure = seen, False
        if seen:
            self._work_on(seen + self._fetched_with(seen))
        elif self.accumulating and self._group and all(batch.is_blind for batch in self._group):
            self.problem = self.problem or (UNRECOGNISED if self._doubtful else None)
        elif not self._chosen:
            self._take_only_one()
        if any(self._is_open(batch) and batch.alive and not batch.taken for batch in self._group):
            # The script works on this pass again, also if another one was begun since it has fetched the batch.
            self._last_evaluates = False
        for batch in self._group:
            batch.taken = True
            self._validates[batch.pass_number] = False
        self._forget_missed()
        for other in self._group[1:]:
            if not _count_alike(self._group[0].place, other.place):
                self.problem = self.problem or DIFFERENT_SHARES
        return self.current

    def require_one_weight(self, by_labels: bool) -> None:
        """What `take` does not know of: batches that count alike by their samples differ by their labels.

        Sets `problem` if the loss is of several, or may be of others.
        """
        if not by_labels:
            return
        for batch in self._group:
            # Such a loss is of the batches that forwards were given; what was fetched with them is still to come.
            batch.taken = batch in self._recognised or not self._recognised
        self._group = [batch for batch in self._group if batch.taken]
        if len(self._group) > 1:
            self.problem = self.problem or DIFFERENT_SHARES
        elif self._unsure:
            self.problem = self.problem or UNRECOGNISED

    def _meant(self) -> list[TrackedBatch]:
        """Those batches that forwards were given of which the backward is: not those of a validation before."""
        meant = [batch for batch in self._seen if batch.alive] or self._seen
        return [batch for batch in meant if self._is_open(batch)] or meant

    def _fetched_with(self, seen: list[TrackedBatch]) -> list[TrackedBatch]:
        """Batches of other loaders that were fetched for the same loss, of which the forwards were given copies."""
        loaders = [batch.loader() for batch in seen]
        return [
            batch
            for batch in self._first_of_each_loader()
            if self._is_open(batch)
            and not any(batch.loader() is loader for loader in loaders)
            and _count_alike(seen[0].place, batch.place)
        ]

    def _take_only_one(self) -> None:
        """Takes what can be meant where no forward was given anything of a batch."""
        candidates = self._candidates()
        group = self._first_of_each_loader() or self._only_missed()
        if candidates and not group:
            self.problem = self.problem or UNRECOGNISED
            return
        if not group and self._over and not self.accumulating:
            self._work_on([])
        group = group or self._group  # a further loss of the same batch
        if not group or _always_counts_as_whole(group[0].place):
            self._work_on(group)
            return
        # Of batches of one pass of which none was trained, one that is gone may have been left out, or copied.
        passes = [batch.pass_number for batch in group]
        several = any(batch.pass_number in passes and batch not in group for batch in candidates)
        # A trained one that the script still holds as a whole may be meant as well, or trained again with this one.
        goes_on = any(self._is_open(batch) for batch in group)
        held = [b for b in self._yielded.batches if b.taken and b.whole and (self._is_open(b) or not goes_on)]
        self._unsure = any(batch not in group for batch in held)
        if several or not all(_count_alike(group[0].place, batch.place) for batch in held):
            self.problem = self.problem or UNRECOGNISED
        self._work_on(group)

    def _forget_missed(self) -> None:
        """A batch that is gone when a later one is trained was skipped."""
        last = max((index for index, batch in enumerate(self._yielded.batches) if batch in self._group), default=-1)
        for batch in [b for b in self._yielded.batches[: max(0, last)] if not b.alive and b not in self._group]:
            self._yielded.drop(batch)

    def _work_on(self, group: list[TrackedBatch]) -> None:
        if not any(batch in self._group for batch in group):
            self._counted = []
        self._group = group
        self.current = group[0].place if group else None
        self._at_hand.turns_to(group)
        self._over = False if group else self._over

    @property
    def in_window(self) -> bool:
        """Whether the script is between two micro-batches of a step, in a pass that goes on."""
        return self.within_window and self._is_open(self._group[0])

    @property
    def working_on(self) -> list[TrackedBatch]:
        """The batches that are worked on, of as many loaders."""
        return self._group

    @property
    def trained(self) -> list[TrackedBatch]:
        """Those that the current backward is of, without those that were only fetched with them, as far as known."""
        return [batch for batch in self._group if batch in self._recognised] or self._group

    # What a step says

    def begins_window(self) -> bool:
        """Whether the current batch is the first of its optimizer step that is trained; asked once a backward."""
        if self.current is None or self.current.window < 0:
            return False
        window = self._group[0].window
        begins, self._begun = window != self._begun, window
        return begins

    def leave(self) -> list[TrackedBatch]:
        """``accumulate`` ends; returns the batches that it worked on without a backward."""
        passed_over = [] if self._trains_in_block else self._group
        self.accumulating = self._chosen = False
        return passed_over

    def first_time(self) -> list[TrackedBatch]:
        """The batches that are worked on, each once: two losses of a batch count once."""
        first = [batch for batch in self._group if batch not in self._counted]
        self._counted += first
        return first

    @property
    def within_window(self) -> bool:
        """Whether this rank still has micro-batches of the current optimizer step before it."""
        return self.current is not None and not self.current.window_end

    @property
    def within_global_batch(self) -> bool:
        """Whether this rank still has micro-batches of the current global batch before it."""
        return self.current is not None and not self.current.ends_global_batch


def _count_alike(one: MicroBatchPlace, other: MicroBatchPlace) -> bool:
    """Whether losses of both have the same weight, and both are as far in their optimizer steps."""
    return (
        one.samples * other.total_samples == other.samples * one.total_samples
        and (one.tokens, one.window_tokens) == (other.tokens, other.window_tokens)
        and (one.micro_batch, one.micro_batches, one.window_start, one.window_end)
        == (other.micro_batch, other.micro_batches, other.window_start, other.window_end)
    )


def _always_counts_as_whole(place: MicroBatchPlace) -> bool:
    """Whether losses of all batches of its loader have a weight of 1: one process, without accumulation."""
    return len(place.cut.sizes) == 1 and place.micro_batches == 1 and place.accumulation_steps == 1
