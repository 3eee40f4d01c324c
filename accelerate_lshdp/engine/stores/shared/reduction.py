# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Sums gradients over the ranks of a node in shared memory, and then between nodes, while the backward goes on.

The gradient of a bucket exists once a node. Rank 0 writes its part, rank 1 adds its own, and so on: always in this
order, so that a run gives the same bits every time. One rank of the node owns the bucket: when all have added, it sums
the bucket with the owners on other nodes. A thread of each rank does this beside the backward (torch's kernels leave
the interpreter to the others); what it has done, and what it may do, is in a small table in shared memory.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from accelerate_lshdp.engine.stores.shared.backward_pacing import BackwardPacing
from accelerate_lshdp.engine.stores.shared.memory import NodeMemory, NodeMemoryError
from accelerate_lshdp.engine.stores.shared.table import BARRIER_PURPOSES, BarrierPurpose, NodeTable
from accelerate_lshdp.engine.wire.reduction import GradientReduction, PendingReduction
from accelerate_lshdp.runtime.wait_clock import WaitClock


#: How long a thread sleeps when nobody wakes it; it wakes up to look at the clock only.
_NAP_SECONDS = 1.0
#: How many buckets a rank that keeps in step may be ahead of the others of its node.
_LEAD = 1
_SAME_CALLS_HINT = (
    "All ranks of a node share its parameters, so they do the same with them together: load_state_dict, clipping and "
    "steps on all ranks or on none. For something of one rank alone, use a copy.deepcopy of the model"
)


@dataclass
class SharedBucket:
    """Some gradients of a node.

    Attributes:
        buffer: all of them, 1-D, in shared memory.
        views: of each one.
        owner: local rank that sums it between nodes and updates its parameters.
        reduction: sums it between nodes; None on one node, and on ranks that do not own it.
    """

    buffer: torch.Tensor
    views: list[torch.Tensor]
    owner: int
    reduction: GradientReduction | None


@dataclass
class _Contribution:
    """This rank's part of a bucket in one backward."""

    backward: int
    index: int
    gradients: list[torch.Tensor | None]
    fresh: list[bool]  # whether a gradient takes the place of what is there, for the first rank
    synchronise: bool


class NodeReduction:
    """The thread and the calls of the training loop.

    Args:
        memory: of the node.
        table: mapped.
        buckets: in the order in which they are delivered.
        clock: counts the time spent waiting.
        timeout_seconds: how long to wait for another rank.
        should_pace: whether this rank is to keep in step with the others of its node (`backward_pacing`).
    """

    def __init__(
        self,
        memory: NodeMemory,
        table: NodeTable,
        buckets: Sequence[SharedBucket],
        clock: WaitClock,
        timeout_seconds: float,
        should_pace: Callable[[], bool] = lambda: False,
    ) -> None:
        self.clock = clock
        self.timeout_seconds = timeout_seconds
        self._pacing = BackwardPacing(should_pace if memory.size > 1 else lambda: False)
        self._memory = memory
        self._table = table
        self._buckets = buckets
        self._rank = memory.local_rank
        self._backward = 0
        self._barriers = 0
        self._collectives = 0
        self._purpose: BarrierPurpose | None = None
        self._barrier_error: str | None = None  # why ranks no longer come to the same barriers
        self._changed = threading.Condition()
        self._queue: deque[_Contribution] = deque()
        self._owned: deque[int] = deque()  # owned buckets that wait for the other ranks of the node
        self._pending: dict[int, PendingReduction | None] = {}
        self._busy = self._closed = self._abandoned = False
        self._error: BaseException | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._serve, name="lshdp-node", daemon=True)
        self._thread.start()

    # The training loop's calls

    def begin(self) -> None:
        """A backward begins. From now on other ranks may write where this rank's last gradients are."""
        if self._abandoned:
            self._finish_abandoned()
        self._backward += 1
        self._publish(self._table.entered, self._rank, self._backward)
        self._memory.wake_self()
        self._pacing.begin()

    def ready(self, index: int, gradients: list[torch.Tensor | None], fresh: list[bool], synchronise: bool) -> None:
        """Hands in this rank's part of a bucket; buckets come in the same order on all ranks.

        Args:
            index: of the bucket.
            gradients: one a view of the bucket; None: this rank has none.
            fresh: for each, whether the sum starts anew, or goes on from earlier backwards.
            synchronise: whether the sum is to go between nodes after this.
        """
        with self._changed:
            self._queue.append(_Contribution(self._backward, index, gradients, fresh, synchronise))
            if synchronise and self._buckets[index].owner == self._rank:
                self._owned.append(index)
        self._memory.wake_self()

    def pace(self, index: int) -> None:
        """Waits a moment if this rank, which has handed in a bucket, is too far ahead of the others of its node.

        Args:
            index: of the bucket.
        """
        table, behind = self._table, index - _LEAD
        # A rank that has not begun its backward may be busy with something else for long.
        if behind < 0 or not self._pacing.patience or not (table.entered >= self._backward).all():
            return
        begun = now = time.monotonic()
        ends = begun + self._pacing.patience
        with self.clock.waiting(), self._changed:
            while table.added[-1, behind] < self._backward and now < ends and self._problem("", late=False) is None:
                self._changed.wait(timeout=min(_NAP_SECONDS, ends - now))
                now = time.monotonic()
        self._pacing.waited(now - begun, timed_out=now >= ends)

    def finish(self, synchronise: bool, complete: Callable[[int], None]) -> None:
        """Waits until this rank's parts are added and, if ``synchronise``, until all buckets hold their final sums.

        Args:
            synchronise: as in ``ready``.
            complete: called for each bucket that this rank owns when it holds the sum over all nodes.

        Raises:
            RuntimeError: another rank has gone, failed, or did not come in time.
        """
        table, backward = self._table, self._backward
        with self.clock.waiting():
            self._wait(lambda: not self._queue and not self._busy, "add its gradients")
            if not synchronise:
                return
            for index, bucket in enumerate(self._buckets):
                if bucket.owner == self._rank:
                    self._wait(lambda index=index: index in self._pending, "add their gradients")
                    pending = self._pending.pop(index)
                    if pending is not None:
                        pending.wait()
                    complete(index)
                    self._publish(table.final, index, backward)
            self._wait(lambda: bool((table.final >= backward).all()), "sum gradients between nodes")
        self._pacing.finish()

    def abandon(self) -> None:
        """Gives up a backward that failed, on this rank at least; the others of the node wait for it no longer.

        What was handed in still goes its way: if the backward failed on all ranks at the same place, they have handed
        in the same buckets, and the reductions of later backwards keep finding their partners on other nodes.
        """
        self._abandoned = True
        self._publish(self._table.failed, self._rank, self._backward)

    def _finish_abandoned(self) -> None:
        with self.clock.waiting():
            self._wait(
                lambda: not (self._queue or self._owned or self._busy), "finish their part of a backward that failed"
            )
            for pending in self._pending.values():
                if pending is not None:
                    pending.wait()
        self._pending.clear()
        self._abandoned = False

    def collective_begins(self) -> None:
        """This rank calls something in which all ranks of the world take part: it comes to no barrier before that."""
        self._collectives += 1
        self._publish(self._table.collectives, self._rank, self._collectives)

    def barrier(self, purpose: BarrierPurpose) -> None:
        """Waits until all ranks of the node have come here.

        Args:
            purpose: what for.

        Raises:
            RuntimeError: another rank has gone, came for something else, or waits for this one elsewhere.
        """
        if self._barrier_error is not None:
            raise RuntimeError(self._barrier_error)
        self._barriers += 1
        purposes = self._table.purposes[self._barriers % 2]
        purposes[self._rank] = BARRIER_PURPOSES.index(purpose)
        self._purpose = purpose
        self._publish(self._table.arrived, self._rank, self._barriers)
        try:
            with self.clock.waiting():
                self._wait(lambda: bool((self._table.arrived >= self._barriers).all()), f"come to {purpose.value}")
            if len(set(purposes.tolist())) > 1:
                came = (
                    f"local rank {rank} to {BARRIER_PURPOSES[i].value}" for rank, i in enumerate(purposes.tolist())
                )
                raise RuntimeError(
                    f"the ranks of this node do different things: {', '.join(came)}. {_SAME_CALLS_HINT}"
                )
        except RuntimeError as error:
            self._barrier_error = str(error)
            raise
        finally:
            self._purpose = None

    def exchange(self, numbers: dict[int, float]) -> np.ndarray:
        """Posts numbers, each place by one rank of the node, and returns those of all ranks.

        Args:
            numbers: value by place, from 0.

        Returns:
            Shape (numbers of the table,); places that nobody posted to hold what they held.
        """
        row = self._table.posted[(self._barriers + 1) % 2]
        for place, value in numbers.items():
            row[place] = value
        self.barrier(BarrierPurpose.CLIPPING)
        return row.copy()

    def close(self) -> None:
        """Ends the thread."""
        if os.getpid() != self._process:
            return  # a copy in a forked process, which has no thread but may have its lock
        with self._changed:
            self._closed = True
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._memory.wake_self()
            self._thread.join()

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self.timeout_seconds
        with self._changed:
            while not done():
                problem = self._problem(what, time.monotonic() > deadline)
                if problem is None:
                    self._changed.wait(timeout=_NAP_SECONDS)
                elif not done():  # a rank may have done its part before it ended
                    kind = NodeMemoryError if self._error is None else RuntimeError
                    raise kind(problem) from self._error
        self._fence()

    def _problem(self, what: str, late: bool) -> str | None:
        """Why there is nothing to wait for any more; None: there is."""
        if self._error is not None:
            return f"summing gradients on this node failed: {self._error}"
        if (elsewhere := self._find_rank_elsewhere()) is not None:
            return f"{elsewhere}, while this one waited for it to {what}. {_SAME_CALLS_HINT}"
        failed = self._table.failed >= self._backward
        if failed.any() and not failed[self._rank]:
            return (
                f"the backward of local rank {int(failed.argmax())} of this node failed, while others waited for it "
                f"to {what}; its own output says why"
            )
        if self._memory.gone:
            rank = min(self._memory.gone)
            return f"local rank {rank} of this node has ended, but was to {what}; its own output says why"
        if late:
            return (
                f"waited {self.timeout_seconds:g} s for the other ranks of this node to {what}. One of them hangs, "
                "has left the training loop, made a different number of backward passes, or waits for another node "
                "itself; their own output says more"
            )
        return None

    def _find_rank_elsewhere(self) -> str | None:
        """Which rank waits for this one in another place, where it will not come before that one has come here."""
        table = self._table
        # What a rank does later is read first: if it was here before that, this is seen, too.
        if self._purpose is None:
            ahead = table.arrived > self._barriers
            self._fence()
            for rank in np.flatnonzero(ahead & (table.entered < self._backward)):
                purpose = BARRIER_PURPOSES[table.purposes[table.arrived[rank] % 2, rank]]
                return f"local rank {rank} of this node has come to {purpose.value}"
            return None
        trains, gathers = table.entered > self._backward, table.collectives > self._collectives
        self._fence()
        absent = table.arrived < self._barriers
        for rank in np.flatnonzero(absent & (trains | gathers)):
            where = "backward" if trains[rank] else "gather, wait_for_everyone or the like"
            return f"local rank {rank} of this node has gone on to its next {where}"
        return None

    def _publish(self, numbers: np.ndarray, place: tuple[int, ...] | int, value: int) -> None:
        """Tells the other ranks by a number in the table."""
        self._fence()
        numbers[place] = value
        self._memory.wake_peers()

    def _fence(self) -> None:
        """What this thread has read and written is in order before what follows; for processors that reorder.

        Python has no call for it, but giving back a lock and taking it orders the two.
        """
        for _ in range(2):
            with self._changed:
                pass

    # The thread

    @torch.no_grad()
    def _serve(self) -> None:
        try:
            while not self._closed:
                if not self._advance():
                    self._memory.wait_for_wake(_NAP_SECONDS)
                    with self._changed:
                        self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            # The others see that this rank takes part no more.
            self._memory.close()

    def _advance(self) -> bool:
        """Does one thing that can be done now; False if there is none."""
        with self._changed:
            contribution = self._queue[0] if self._queue and self._may_add(self._queue[0]) else None
            owned = self._owned[0] if self._owned and self._is_added(self._owned[0]) else None
            self._busy = contribution is not None or owned is not None
        if not self._busy:
            return False
        self._fence()
        if owned is not None:  # before adding more: the network should not wait
            self._start(owned)
        else:
            self._add(contribution)
        with self._changed:
            self._busy = False
            self._changed.notify_all()
        return True

    def _may_add(self, contribution: _Contribution) -> bool:
        table = self._table
        if self._rank > 0:
            return table.added[self._rank - 1, contribution.index] >= contribution.backward
        # The first rank writes over gradients of the last step: all ranks must have done with them.
        return bool((table.entered >= contribution.backward).all())

    def _is_added(self, index: int) -> bool:
        return self._table.added[-1, index] >= self._backward

    def _add(self, contribution: _Contribution) -> None:
        views = self._buckets[contribution.index].views
        copied: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        summed: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for view, gradient, fresh in zip(views, contribution.gradients, contribution.fresh, strict=True):
            first = fresh and self._rank == 0
            if gradient is None:
                if first:
                    view.zero_()
                continue
            into, of = copied if first else summed
            into.append(view)
            of.append(gradient)
        if copied[0]:
            torch._foreach_copy_(*copied)
        if summed[0]:
            torch._foreach_add_(*summed)
        with self._changed:
            self._queue.popleft()
        self._publish(self._table.added, (self._rank, contribution.index), contribution.backward)

    def _start(self, index: int) -> None:
        bucket = self._buckets[index]
        pending = None
        if bucket.reduction is not None:
            pending = bucket.reduction.start(bucket.buffer, index, [view.shape for view in bucket.views])
        with self._changed:
            self._owned.popleft()
            self._pending[index] = pending
