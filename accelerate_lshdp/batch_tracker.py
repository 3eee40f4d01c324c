"""Which batch the script is working on: the link between loaders, ``accumulate``, forwards and ``backward``."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from accelerate_lshdp.batch_marks import TensorMark, key_of, tensors_in
from accelerate_lshdp.data_places import MicroBatchPlace, PlacedBatch


UNRECOGNISED = (
    "could not tell of which batch the loss is: several batches of a prepared loader are alive, and the prepared "
    "models were called with tensors of none of them. Call a prepared model with the tensors that the loader yielded "
    "(or views of them), or keep only the batch that is trained; leave out the first batches of an epoch with "
    "accelerator.skip_first_batches(loader, n)"
)
DIFFERENT_SHARES = (
    "found batches of two loaders that were fetched together, but count differently (shares of their global batches, "
    "loss tokens, or micro-batches of the step), so a loss of both has no one weight. Call accelerator.backward for "
    "each of them, give short last batches up with drop_last=True, or make one dataset of the two"
)


class TrackedBatch:
    """A batch that a loader yielded in a training pass: its place, and marks that recognise it."""

    def __init__(self, loader: Any, number: int, placed: PlacedBatch) -> None:
        self.loader = weakref.ref(loader)
        self.pass_number = number
        self.place = placed.place
        self.reading = placed.reading
        self.marks = [TensorMark(tensor) for tensor in tensors_in(placed.batch)]
        self.taken = False

    @property
    def window(self) -> tuple[int, int]:
        """The micro-batches of this rank that are accumulated for its optimizer step."""
        return self.pass_number, self.place.window

    @property
    def key(self) -> tuple[int, int, int]:
        """Tells it from others, also from those of other passes."""
        return self.pass_number, self.place.global_batch, self.place.micro_batch

    @property
    def goes_on_from_earlier_pass(self) -> bool:
        """Whether its window began in an earlier pass over its loader."""
        return self.place.window < 0

    @property
    def is_blind(self) -> bool:
        """Whether nothing tells this batch from others: it has no tensors, or all batches share them."""
        return not self.marks

    @property
    def alive(self) -> bool:
        """Whether the script may still train it; one that is blind waits until it is taken."""
        return any(mark.alive for mark in self.marks) if self.marks else not self.taken

    @property
    def whole(self) -> bool:
        """Whether all of it is alive: of trained batches scripts keep parts, such as labels for a metric."""
        return bool(self.marks) and all(mark.alive for mark in self.marks)


class BatchTracker:
    """Follows batches from the loader to the backward.

    A batch is the one that is trained if a prepared model is called with its tensors (with gradients switched on).
    Where no forward tells, it is the only one that is alive. Batches of several loaders in one backward are taken
    together. A further ``accumulate`` or ``backward`` without a new batch belongs to the same batch (two losses, two
    models).

    Attributes:
        current: the place of the batch that is worked on; None before the first and for batches of no loader.
        accumulating: whether the script is inside ``accumulate``.
        problem: what makes the step wrong on this rank, until ranks have told each other; None: nothing.
    """

    def __init__(self) -> None:
        self.current: MicroBatchPlace | None = None
        self.accumulating = False
        self.problem: str | None = None
        self._batches: list[TrackedBatch] = []  # in the order of yielding
        self._marked: dict[tuple[str, int], list[tuple[TrackedBatch, TensorMark]]] = defaultdict(list)
        self._common: dict[tuple[str, int], TensorMark] = {}  # memory that several batches share
        self._prune_at = 16
        self._passes = 0
        self._open: list[tuple[Any, int]] = []  # loaders in training passes, and the numbers of these
        self._group: list[TrackedBatch] = []  # what is worked on
        self._seen: list[TrackedBatch] = []  # what forwards were given since the last backward
        self._chosen = False  # whether the caller of `accumulate` has said which batch it trains
        self._counted: list[TrackedBatch] = []
        self._over = False  # whether the pass of the current batch has ended
        self._doubtful = False  # whether `accumulate` began with one of several batches that look alike
        self._recognised: list[TrackedBatch] = []  # what forwards told that the last backward was of
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
        for batch in [b for b in self._batches if b.loader() is loader and (b.is_blind or not b.alive)]:
            self._drop(batch)
        if any(batch.loader() is loader for batch in self._group):
            self.current, self._group = None, []

    def end_pass(self, loader: Any) -> None:
        """A pass has ended, or the script has left it; the batches that it yielded may still be trained."""
        if any(other is loader for other in self._evaluating):
            self._evaluating = [other for other in self._evaluating if other is not loader]
            return
        self._open = [(other, number) for other, number in self._open if other is not loader]
        self._over = not self.accumulating

    def batch_yielded(self, loader: Any, placed: PlacedBatch) -> None:
        """A training pass is about to hand this batch to the script."""
        self._last_evaluates = False
        if len(self._batches) >= self._prune_at:
            self._prune()
        number = next((number for other, number in self._open if other is loader), self._passes)
        batch = TrackedBatch(loader, number, placed)
        self._batches.append(batch)
        for mark in list(batch.marks):
            self._keep_if_own(batch, mark)

    def _keep_if_own(self, batch: TrackedBatch, mark: TensorMark) -> None:
        """Forgets a mark that another batch has, too: a tensor that all batches share tells nothing."""
        common = self._common.get(mark.key)
        # Of a view only its object tells that it is gone; its memory may be that of a batch to come.
        known = self._marked[mark.key] = [other for other in self._marked[mark.key] if other[1].alive]
        sharing = [other for other in known if other[1].is_of_same(mark)]
        if sharing or (common is not None and common.is_of_same(mark)):
            self._common[mark.key] = mark
            batch.marks.remove(mark)
            for other, same in sharing:
                known.remove((other, same))
                other.marks.remove(same)
        else:
            known.append((batch, mark))

    def _prune(self) -> None:
        """Drops what nobody can train any more, so that a loader that is only read leaves nothing behind."""
        dead = [batch for batch in self._batches if not batch.alive]
        missed = [batch for batch in dead if not batch.taken and batch not in self._group]
        blind = [batch for batch in self._batches if batch.is_blind and not batch.taken]
        # Two are as good as many: they say that it is unknown which was trained.
        for batch in [*(b for b in dead if b.taken and b not in self._group), *missed[:-2], *blind[:-2]]:
            self._drop(batch)
        self._prune_at = 16 + 2 * len(self._batches)

    def _drop(self, batch: TrackedBatch) -> None:
        if batch in self._batches:
            self._batches.remove(batch)
        for mark in batch.marks:
            left = [pair for pair in self._marked.get(mark.key, ()) if pair[0] is not batch]
            if left:
                self._marked[mark.key] = left
            else:
                self._marked.pop(mark.key, None)

    # What is asked about batches

    def is_waiting(self, loader: Any) -> bool:
        """Whether a batch that this loader yielded was not worked on yet."""
        return any(batch.loader() is loader for batch in self._untaken())

    def _untaken(self) -> list[TrackedBatch]:
        """Batches to come, of the newest pass over each loader."""
        newest: dict[int, int] = {}
        for batch in self._batches:
            newest[id(batch.loader())] = max(newest.get(id(batch.loader()), 0), batch.pass_number)
        return [
            batch
            for batch in self._batches
            if not batch.taken and batch.alive and batch.pass_number == newest[id(batch.loader())]
        ]

    def places_of(self, batches: Sequence[Any]) -> list[MicroBatchPlace]:
        """The places of batches that the caller holds, in order; empty if they are of no training pass."""
        found = [self._recognise(tensors_in(batch)) for batch in batches]
        if all(len(known) == 1 for known in found):
            return [known[0].place for known in found]
        waiting = [batch for batch in self._untaken() if batch.is_blind]
        return [batch.place for batch in waiting] if not any(found) and len(waiting) == len(batches) else []

    def _recognise(self, tensors: Iterable[Any]) -> list[TrackedBatch]:
        """The batches in whose memory any of these tensors lies, in the order of yielding."""
        found = set()
        for tensor in tensors:
            found.update(batch for batch, mark in self._marked.get(key_of(tensor), ()) if mark.covers(tensor))
        return [batch for batch in self._batches if batch in found] if found else []

    @property
    def in_evaluation_pass(self) -> bool:
        """Whether the script works on an evaluation pass, not on a training pass beside one that it left open."""
        return bool(self._evaluating) and self._last_evaluates and not self._recognised

    # What the script does

    def choose(self, batch: Any) -> None:
        """The next ``accumulate`` trains this batch, as its caller knows (of blind ones, and copies: the oldest)."""
        found = self._recognise(tensors_in(batch))
        oldest = [b for b in self._batches if not b.taken][:1]
        self._work_on(found[:1] or self._untaken()[:1] or oldest)
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
            # Beside a pass that goes on, what another one has left is a sample that was looked at, or of a validation.
            group = [batch for batch in group if self._is_open(batch)] or group
            if group:
                self._work_on(group)
            elif self._over:
                self._work_on([])
        # Nothing will tell which of several it is.
        self._doubtful = sum(batch.is_blind for batch in self._untaken()) > 1 and not self._chosen
        for batch in self._group:
            batch.taken |= batch.is_blind
        return self.current

    def _is_open(self, batch: TrackedBatch) -> bool:
        """Whether the pass that yielded it goes on."""
        return any(number == batch.pass_number for _, number in self._open)

    def _first_of_each_loader(self) -> list[TrackedBatch]:
        first: dict[int, TrackedBatch] = {}
        for batch in self._untaken():
            first.setdefault(id(batch.loader()), batch)
        return list(first.values())

    def _only_missed(self) -> list[TrackedBatch]:
        """The one batch that is neither trained nor alive: the script trains a copy of it (on another device)."""
        missed = [batch for batch in self._batches if not batch.taken and not batch.alive]
        return missed if len(missed) == 1 else []

    def forward(self, inputs: Any) -> bool:
        """A prepared model is called, with gradients switched on.

        Args:
            inputs: its arguments.

        Returns:
            Whether the current place is another one now.
        """
        if self._chosen:
            return False
        found = self._recognise(tensors_in(inputs))
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
        self._recognised = seen
        if seen:
            self._work_on(seen + self._fetched_with(seen))
        elif self.accumulating and all(batch.is_blind for batch in self._group):
            self.problem = self.problem or (UNRECOGNISED if self._doubtful else None)
        elif not self._chosen:
            self._take_only_one()
        if any(self._is_open(batch) and batch.alive and not batch.taken for batch in self._group):
            # The script works on this pass again, also if another one was begun since it has fetched the batch.
            self._last_evaluates = False
        for batch in self._group:
            batch.taken = True
        self._forget_missed()
        for other in self._group[1:]:
            if not _count_alike(self._group[0].place, other.place):
                self.problem = self.problem or DIFFERENT_SHARES
        return self.current

    def require_one_weight(self, by_labels: bool) -> None:
        """Sets `problem` if the batches of the current loss may count differently by their labels, which `take` does
        not know of."""
        if by_labels and len(self._group) > 1:
            self.problem = self.problem or DIFFERENT_SHARES

    def _meant(self) -> list[TrackedBatch]:
        """Those batches that forwards were given of which the backward is: not those of a validation before."""
        meant = [batch for batch in self._seen if batch.alive] or self._seen
        going_on = [number for _, number in self._open]
        return [batch for batch in meant if batch.pass_number in going_on] or meant

    def _fetched_with(self, seen: list[TrackedBatch]) -> list[TrackedBatch]:
        """Batches of other loaders that were fetched for the same loss, of which the forwards were given copies."""
        loaders = [batch.loader() for batch in seen]
        going_on = [number for _, number in self._open]
        return [
            batch
            for batch in self._first_of_each_loader()
            if batch.pass_number in going_on
            and not any(batch.loader() is loader for loader in loaders)
            and _count_alike(seen[0].place, batch.place)
        ]

    def _take_only_one(self) -> None:
        """Takes what can be meant where no forward was given anything of a batch."""
        untaken = self._untaken()
        group = self._first_of_each_loader()
        if untaken:
            # A trained batch that the script still holds as a whole may be meant as well.
            held = any(batch.taken and batch.whole for batch in self._group)
            if len(untaken) > len(group) or held:
                self.problem = self.problem or UNRECOGNISED
            self._work_on(group)
            return
        missed = self._only_missed()
        if missed:
            self._work_on(missed)
        elif any(not batch.taken and batch not in self._group for batch in self._batches if not batch.alive):
            self.problem = self.problem or UNRECOGNISED
        elif self._over and not self.accumulating:
            self._work_on([])

    def _forget_missed(self) -> None:
        """A batch that is gone when a later one is trained was skipped."""
        last = max((index for index, batch in enumerate(self._batches) if batch in self._group), default=-1)
        for batch in [b for b in self._batches[: max(0, last)] if not b.alive and b not in self._group]:
            self._drop(batch)

    def _work_on(self, group: list[TrackedBatch]) -> None:
        if not any(batch in self._group for batch in group):
            self._counted = []
        self._group = group
        self.current = group[0].place if group else None
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


def _count_alike(one: MicroBatchPlace, other: MicroBatchPlace) -> bool:
    """Whether losses of both have the same weight, and both are as far in their optimizer steps."""
    return (
        one.samples * other.total_samples == other.samples * one.total_samples
        and (one.tokens, one.window_tokens) == (other.tokens, other.window_tokens)
        and (one.micro_batch, one.micro_batches, one.window_start, one.window_end)
        == (other.micro_batch, other.micro_batches, other.window_start, other.window_end)
    )
