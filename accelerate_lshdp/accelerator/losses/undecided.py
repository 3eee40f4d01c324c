# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A loss of which it is not clear yet what it is a mean over: what it still may be, and when to look again."""

from __future__ import annotations

from collections.abc import Sequence

from accelerate_lshdp.accelerator.losses.observations import SeenLoss, fitting_kinds, is_own, kind_of
from accelerate_lshdp.accelerator.losses.parts import Composition
from accelerate_lshdp.data.place import MicroBatchPlace


#: Looks at a loss that fits several answers, as where all rows have as many labels. Further ones are further apart.
_MOST_TRIALS = 10
#: Looks before an answer counts where numbers are rounded so much that others may fit by chance.
_TRIALS_IN_LOW_PRECISION = 3
_ORDER = (
    Composition.LABELS,
    Composition.SHIFTED_LABELS,
    Composition.SUM,
    Composition.SAMPLES,
    Composition.GLOBAL,
)


class OpenLoss:
    """What all ranks have seen of a loss; the same on all of them.

    Args:
        by_labels: whether the script says that it is a mean over labels.
        world_size: number of ranks.
    """

    def __init__(self, *, by_labels: bool, world_size: int) -> None:
        self.by_labels = by_labels
        self.world_size = world_size
        self.possible: set[Composition] | None = None
        self.guess: Composition | None = None
        """What it is taken for until it is clear."""
        self.by_class = False
        """Whether the class of the model says it."""
        self.warned_undecided = False
        self._trials = 0
        self._batches = 0
        self._sizes: set[tuple] = set()

    def wants_values(self, place: MicroBatchPlace) -> bool:
        """Whether to compare the loss in this batch; asked once for each.

        A batch of other sizes may tell what those before could not.
        """
        self._batches += 1
        sizes = (place.cut.sizes, place.cut.steps, place.total_samples)
        new, doubled = sizes not in self._sizes, self._batches & (self._batches - 1) == 0
        self._sizes.add(sizes)
        return new or doubled or self._trials < _MOST_TRIALS

    def look(self, everyone: Sequence[SeenLoss], place: MicroBatchPlace) -> tuple[Composition, bool]:
        """Takes in what ranks have seen.

        Returns:
            What the loss is taken for now, and whether it is clear.
        """
        telling = [seen for seen in everyone if seen.tells]
        preferred = self._preferred(everyone)
        if not telling:  # labels that are all -100 make a mean over them NaN
            uneven = any(seen.ignored for seen in everyone) and all(seen.counted for seen in everyone)
            return self.guess or preferred or (Composition.LABELS if uneven else Composition.UNKNOWN), False
        self._trials += 1
        compared = any(seen.compared for seen in telling)
        if compared or self.possible is None:
            fitting = self._fitting(everyone, compared, preferred, place)
            self.possible = fitting if self.possible is None else self.possible & fitting
        order = sorted(_ORDER, key=lambda kind: kind is not preferred)
        self.guess = next((kind for kind in order if kind in self.possible), Composition.UNKNOWN)
        looked = self._trials > 1 or any(seen.looked for seen in everyone)  # others were settled before it came
        if not looked:
            self.possible = None
        return self.guess, looked and self._is_clear(everyone, preferred)

    def is_of_class(self, everyone: Sequence[SeenLoss]) -> bool:
        """Whether the guess is what the class of the model says of its own loss."""
        return is_own(everyone) and self.guess is self._preferred(everyone)

    def _preferred(self, everyone: Sequence[SeenLoss]) -> Composition | None:
        """The likeliest of what fits."""
        of_class = kind_of(everyone[0].kind_of_class)
        if self.by_labels:
            return of_class if of_class in (Composition.LABELS, Composition.SHIFTED_LABELS) else Composition.LABELS
        dimensions = max(seen.dimensions for seen in everyone)
        if dimensions == 1 or of_class is Composition.SAMPLES:
            return Composition.SAMPLES
        return of_class if dimensions > 1 else None

    def _fitting(
        self, everyone: Sequence[SeenLoss], compared: bool, preferred: Composition | None, place: MicroBatchPlace
    ) -> set[Composition]:
        fitting = fitting_kinds(everyone, {1.0, 1.0 / place.accumulation_steps})
        if self.by_labels:
            fitting = {kind for kind in fitting if kind.by_labels}
            # Of two that the script allows, whatever the values say.
            self.by_class = not fitting
            return fitting or {preferred}
        # Values that disagree win over a class: a script's own may compute something else.
        has_class = any(seen.kind_of_class >= 0 for seen in everyone)
        self.by_class = not compared and has_class and preferred is not None and is_own(everyone)
        return {preferred} if self.by_class else fitting

    def _is_clear(self, everyone: Sequence[SeenLoss], preferred: Composition | None) -> bool:
        if not self.possible:
            return True
        telling = [seen for seen in everyone if seen.tells]
        if self.world_size > 1 and len(telling) < 2:
            return False
        if self._trials < _TRIALS_IN_LOW_PRECISION and any(seen.low_precision for seen in telling):
            return False
        if len(self.possible) == 1:
            return True
        likeliest = self.guess is preferred and (self.guess is Composition.SAMPLES or is_own(everyone))
        return likeliest and Composition.GLOBAL not in self.possible and self._trials >= _MOST_TRIALS
