# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Where the gradients of a step's micro-batches are until the last one: on the device, or added on the host.

The ranks of a node decide together, once a step, when they begin its last backward: all keep theirs from the next step
on, or none does. For the host adds those of all ranks in one sum, micro-batch by micro-batch.
"""

from __future__ import annotations

from accelerate_lshdp.engine.stores.shared.reduction import NodeReduction
from accelerate_lshdp.engine.stores.streamed.kept_gradients import KeptGradients


class MicroBatches:
    """Follows the backwards of a rank.

    Args:
        kept: the gradients that are kept.
        reduction: of the node.
        may_keep: whether any may be kept.
        waits_for_step: whether the first optimizer step takes memory of the device for good: moments of other
            parameters, which are there. Until then nobody knows what is left.

    Attributes:
        keeps: whether the backward that is under way keeps its gradients on the device.
        all_keep: whether those of the next step do.
        waits_for_step: see above; until `others_stepped`.
        are_on_host: whether gradients of earlier backwards of this step are in host memory.
    """

    def __init__(self, kept: KeptGradients, reduction: NodeReduction, may_keep: bool, waits_for_step: bool) -> None:
        self._kept = kept
        self._reduction = reduction
        self._may_keep, self.waits_for_step = may_keep, waits_for_step
        self.keeps = self.all_keep = self.are_on_host = False
        self._has_kept: bool | None = None  # the last backward of this step
        self._have_been = self._votes = False  # several in one step
        self._synchronised = 0  # backwards

    def begin(self, synchronise: bool, goes_on: bool) -> None:
        """Begins a backward.

        Args:
            synchronise: whether it is the last one of a step.
            goes_on: whether there were others.
        """
        self._kept.backward_begins()
        self.keeps = self.all_keep and not synchronise
        self._have_been = self._have_been or not synchronise
        if self._have_been:
            self._kept.look()
        self._votes = synchronise and self._have_been and self._may_keep
        if self._votes:
            self._synchronised += 1
            # A whole backward has shown how much memory it takes, if there was one before this in the same step.
            is_known = goes_on and not self.waits_for_step
            keeps = self._kept.fit() if is_known else self.all_keep
            self._reduction.vote(self._synchronised, keeps, self._has_kept)

    def end(self, synchronised: bool) -> None:
        """Ends a backward.

        Raises:
            RuntimeError: on all ranks of the node, if some have kept their gradients and others have not.
        """
        if self._have_been:
            self._kept.look()
        if synchronised:
            self.are_on_host, self._has_kept = False, None
            if self._votes:
                self.all_keep = self._reduction.all_keep(self._synchronised)
            return
        self.are_on_host = self.are_on_host or not self.keeps
        self._has_kept = self.keeps
        if self.keeps:
            self._kept.backward_ends()

    def others_stepped(self) -> None:
        """Takes note that an optimizer has stepped other parameters on the device: their moments are there."""
        self.waits_for_step = False

    def drop(self) -> None:
        """Takes note that all gradients are dropped."""
        self._kept.drop()
        self.are_on_host, self._has_kept = False, None

    def give_up(self) -> None:
        """Takes note that a backward has failed, maybe for want of memory: no more are kept."""
        self._kept.give_up()
        self.are_on_host, self._has_kept, self.all_keep = False, None, False

    def go_on(self, all_keep: bool) -> None:
        """Goes on as another run did."""
        self.all_keep = self._may_keep and all_keep
