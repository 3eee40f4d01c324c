# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Sums gradients over the ranks of a node in shared memory, and then between nodes, while the backward goes on.

The gradient of a bucket exists once a node. Rank 0 writes its part, rank 1 adds its own, and so on: always in this
order, so that a run gives the same bits every time. One rank of the node owns the bucket: when all have added, it sums
the bucket with the owners on other nodes. A thread of each rank does this beside the backward (torch's kernels leave
the interpreter to the others); what it has done, and what it may do, is in a small table in shared memory.

Threads wait on a condition variable, ranks on sockets (`memory`): nothing here spins, because a spinning rank takes
processor time from the ranks of its node that it waits for (where they share a quota, 1.36 s a step instead of 0.99).
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from accelerate_lshdp.engine.stores.shared.bucket import Contribution, GradientSource, SharedBucket
from accelerate_lshdp.engine.stores.shared.memory import NodeMemory, NodeMemoryError
from accelerate_lshdp.engine.stores.shared.table import BARRIER_PURPOSES, BarrierPurpose, NodeTable
from accelerate_lshdp.engine.wire.reduction import PendingReduction
from accelerate_lshdp.runtime.profiler_labels import label
from accelerate_lshdp.runtime.wait_clock import WaitClock


#: How long a thread sleeps when nobody wakes it; it wakes up to look at the clock only.
_NAP_SECONDS = 1.0
_SAME_CALLS_HINT = (
    "All ranks of a node share its parameters, so they do the same with them together: load_state_dict, clipping and "
    "steps on all ranks or on none. For something of one rank alone, use a copy.deepcopy of the model"
)


class NodeReduction:
    """Sums the buckets of a model over the ranks of its node, in a thread, and between nodes.

    Calls come from the training loop's thread. One condition (``_changed``) guards what both threads use: the queue,
    the owned buckets, the pending reductions and the flags.

    Args:
        memory: of the node.
        table: of the node, already mapped.
        buckets: in the order in which they are delivered.
        clock: counts the time spent waiting.
        timeout_seconds: how long to wait for another rank.
        source: how gradients come into the buckets.

    Attributes:
        beside: a thread that makes an optimizer's step, if there is one.
        changes: how often all ranks of the node have changed their gradients together, by clipping.
    """

    def __init__(
        self,
        memory: NodeMemory,
        table: NodeTable,
        buckets: Sequence[SharedBucket],
        clock: WaitClock,
        timeout_seconds: float,
        source: GradientSource | None = None,
    ) -> None:
        self.clock = clock
        self._source = GradientSource() if source is None else source
        self._most_waiting: int | None = None
        self.timeout_seconds = timeout_seconds
        self.changes = 0
        self.beside: threading.Thread | None = None
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
        self._queue: deque[Contribution] = deque()
        self._owned: deque[int] = deque()  # owned buckets that wait for the other ranks of the node
        self._pending: dict[int, PendingReduction | None] = {}
        self._busy = self._closed = self._abandoned = False
        self._error: BaseException | None = None
        self._process = os.getpid()
        # A daemon, as a rank that fails elsewhere must be able to exit; `close` joins it in the usual case.
        self._thread = threading.Thread(target=self._serve, name="lshdp-node", daemon=True)
        self._thread.start()

    # The training loop's calls

    def begin(self, most_waiting: int | None = None) -> None:
        """Begins a backward. From now on other ranks may write where this rank's last gradients are.

        Args:
            most_waiting: buckets of this rank that may wait to be added; `ready` waits while there are more. None: any
                number.
        """
        self._most_waiting = most_waiting
        # Not in `abandon`, where the error is on its way to the script. Here all ranks have come to train on.
        if self._abandoned:
            self._finish_abandoned()
        self._backward += 1
        # The first rank may start each sum anew when all ranks have published this: they have read the last one.
        self._publish(self._table.entered, self._rank, self._backward)
        self._memory.wake_self()

    def ready(self, index: int, gradients: list[torch.Tensor | None], fresh: list[bool], synchronise: bool) -> None:
        """Hands in this rank's part of a bucket; buckets come in the same order on all ranks.

        Waits while too many of this rank's buckets wait for the ranks before it, as their gradients take memory.

        Args:
            index: of the bucket.
            gradients: one a view of the bucket; None: this rank has none.
            fresh: for each, whether the sum starts anew, or goes on from earlier backwards.
            synchronise: whether the sum is to go between nodes after this.

        Raises:
            RuntimeError: another rank has gone, failed, or did not come in time.
        """
        # The order of this queue is the order of collectives between nodes: the model delivers in the order of
        # indices.
        noted = self._source.note()
        with self._changed:
            self._queue.append(Contribution(self._backward, index, gradients, fresh, synchronise, noted))
            if synchronise and self._buckets[index].owner == self._rank:
                self._owned.append(index)
        self._memory.wake_self()
        if self._most_waiting is not None and len(self._queue) > self._most_waiting:
            # Ranks wait for those before them alone, and the first one for its own thread: so this ends, if those
            # before this one need nothing of it until they have handed in all of their buckets.
            with self.clock.waiting():
                self._wait(lambda: len(self._queue) <= self._most_waiting, "add its gradients", self._held_up_by)

    def finish(self, synchronise: bool, complete: Callable[[int], None]) -> None:
        """Waits until this rank's parts are added and, if ``synchronise``, until all buckets hold their final sums.

        Args:
            synchronise: as in ``ready``.
            complete: called for each bucket that this rank owns when it holds the sum over all nodes.

        Raises:
            RuntimeError: another rank has gone, failed, or did not come in time.
        """
        with self.clock.waiting():
            # The thread reads autograd's tensors until then; afterwards .grad is the place of the sum.
            self._wait(lambda: not self._queue and not self._busy, "add its gradients", self._held_up_by)
            if not synchronise:
                return
            for index, bucket in enumerate(self._buckets):
                if bucket.owner == self._rank:
                    self._finish_owned(index, complete)
            self._wait(lambda: bool((self._table.final >= self._backward).all()), "sum gradients between nodes")

    def _held_up_by(self) -> list[int]:
        """The ranks of the node whose part this rank's next one comes after, and is not there yet."""
        # Others may have ended, or failed in what the script does next: they have done what this rank needs of them.
        if not self._queue:
            return []
        first = self._queue[0]
        if self._rank == 0:
            return np.flatnonzero(self._table.entered < first.backward).tolist()
        return np.flatnonzero(self._table.added[: self._rank, first.index] < first.backward).tolist()

    def _finish_owned(self, index: int, complete: Callable[[int], None] | None = None) -> None:
        self._wait(lambda: index in self._pending, "add their gradients")
        pending = self._pending.pop(index)
        if pending is not None:
            pending.wait()
        # Before it is published: other ranks of the node read the bucket as soon as they see that.
        if complete is not None:
            complete(index)
        self._publish(self._table.final, index, self._backward)

    def abandon(self) -> None:
        """Gives up a backward that failed on this rank; other ranks of the node stop waiting for this one.

        What was handed in still goes its way: if the backward failed on all ranks at the same place, they have handed
        in the same buckets, and the reductions of later backwards keep finding their partners on other nodes.
        """
        # Published at once, so that ranks of the node that did not fail raise this rank's error, and not a time-out.
        self._abandoned = True
        self._publish(self._table.failed, self._rank, self._backward)

    def _finish_abandoned(self) -> None:
        """Waits until nothing of a backward that failed works on the buckets any more."""
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
        """Takes note that this rank calls a collective of the world: it comes to no barrier before that ends."""
        # A rank that waits at a barrier for this one, and is awaited in the collective, can say so instead of hanging.
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
        # Two rows in turn: a fast rank may write its purpose of the next barrier while a slow one still reads this
        # one. It cannot be two barriers ahead, as each waits for all.
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
        # The row of the barrier below: that barrier's fences order these writes before what other ranks read after it.
        row = self._table.posted[(self._barriers + 1) % 2]
        for place, value in numbers.items():
            row[place] = value
        self.barrier(BarrierPurpose.CLIPPING)
        return row.copy()

    # An optimizer's step that is made part by part, by any thread of this rank

    def publish_step(self, parts: int | slice, step: int) -> None:
        """Says that this rank has stepped its parameters of some parts of the model."""
        self._publish(self._table.stepped, (self._rank, parts), step)
        with self._changed:
            self._changed.notify_all()

    def publish_broken_step(self, step: int) -> None:
        """Says that this rank has failed to make a step."""
        self._publish(self._table.broken, self._rank, step)
        with self._changed:
            self._changed.notify_all()

    def has_stepped(self, parts: int | slice, step: int) -> bool:
        """Whether all ranks of the node have stepped their parameters of some parts."""
        made = bool((self._table.stepped[:, parts] >= step).all())
        if made:
            self._fence()  # what is read now is read after that
        return made

    def wait_for_step(self, parts: int | slice, step: int, failed: Callable[[], bool]) -> None:
        """Waits until all ranks of the node have stepped their parameters of some parts, or this one has ``failed``.

        Raises:
            RuntimeError: another rank has gone, failed, or did not come in time.
        """
        stepped = self._table.stepped[:, parts].reshape(self._memory.size, -1)  # a view, as all of them are columns
        broken = self._table.broken
        with self.clock.waiting():
            self._wait(
                lambda: failed() or self.has_stepped(parts, step) or bool((broken >= step).any()),
                "make the optimizer's step",
                lambda: np.flatnonzero((stepped < step).any(axis=1)).tolist(),
            )
        others = np.flatnonzero(broken >= step)
        if others.size and not failed() and not self.has_stepped(parts, step):
            raise RuntimeError(
                f"the optimizer's step of local rank {others[0]} of this node failed, and this rank needs the "
                "parameters that it steps; its own output says why"
            )

    def join_beside(self) -> None:
        """Waits until the thread has ended that steps parameters."""
        thread = self.beside
        # Not one that could not be started; nor does a thread wait for itself, if it drops what is the last reference.
        if thread is not None and thread.ident is not None and thread is not threading.current_thread():
            thread.join()

    def close(self) -> None:
        """Ends the thread."""
        if os.getpid() != self._process:
            return  # a copy in a forked process, which has no thread but may have its lock
        self.join_beside()  # others wait for what it still publishes
        with self._changed:
            self._closed = True
        # The last reference to a model may be dropped in the thread, which cannot wait for its own end.
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._memory.wake_self()
            self._thread.join()

    def _wait(self, done: Callable[[], bool], what: str, missing: Callable[[], Iterable[int]] | None = None) -> None:
        """Waits until ``done``; raises what `_problem` finds before. The node's thread wakes it at every change.

        Args:
            done: whether the wait is over.
            what: names it in messages.
            missing: the ranks of the node that are waited for; others may have ended. None: all of them.
        """
        deadline = time.monotonic() + self.timeout_seconds
        with self._changed:
            while not done():
                problem = self._problem(what, time.monotonic() > deadline, missing)
                if problem is None:
                    self._changed.wait(timeout=_NAP_SECONDS)
                elif not done():  # a rank may have done its part before it ended
                    kind = NodeMemoryError if self._error is None else RuntimeError
                    raise kind(problem) from self._error
        self._fence()

    def _problem(self, what: str, late: bool, missing: Callable[[], Iterable[int]] | None = None) -> str | None:
        """The reason why waiting any longer is of no use; None while it is."""
        if self._error is not None:
            return f"summing gradients on this node failed: {self._error}"
        if (elsewhere := self._find_rank_elsewhere()) is not None:
            return f"{elsewhere}, while this one waited for it to {what}. {_SAME_CALLS_HINT}"
        failed = self._table.failed >= self._backward
        # Where the own backward has failed, too, its ranks go on together in the next one.
        if failed.any() and not failed[self._rank]:
            return (
                f"the backward of local rank {int(failed.argmax())} of this node failed, while others waited for it "
                f"to {what}; its own output says why"
            )
        gone = self._memory.gone if missing is None else self._memory.gone.intersection(missing())
        if gone:
            rank = min(gone)
            return f"local rank {rank} of this node has ended, but was to {what}; its own output says why"
        if late:
            return (
                f"waited {self.timeout_seconds:g} s for the other ranks of this node to {what}. One of them hangs, "
                "has left the training loop, made a different number of backward passes, or waits for another node "
                "itself; their own output says more"
            )
        return None

    def _find_rank_elsewhere(self) -> str | None:
        """Describes a rank that waits for this one at another call, so that neither would ever go on, or None."""
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
        """Writes a number to the table and wakes the other ranks."""
        # What the number announces (sums in the bucket) has to be seen before the number itself.
        self._fence()
        numbers[place] = value
        self._memory.wake_peers()

    def _fence(self) -> None:
        """Memory fence: orders what this thread has read and written before what follows, on processors that reorder.

        Python has no call for it. Releasing a lock (no access before it moves behind it) and acquiring it again (no
        access behind it moves before it) together order both ways; so the lock is taken twice.
        """
        for _ in range(2):
            with self._changed:
                pass

    # The thread

    @torch.no_grad()
    def _serve(self) -> None:
        try:
            while not self._closed:
                # All that can be done now, then sleep: a wake-up that comes in between is kept in the socket.
                if not self._advance():
                    self._memory.wait_for_wake(_NAP_SECONDS)
                    with self._changed:
                        self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            # The closed sockets show the others that this rank takes part no more, also where the process lives on.
            self._memory.close()

    def _advance(self) -> bool:
        """Does one thing that can be done now; False if there is none."""
        with self._changed:
            contribution = self._queue[0] if self._queue and self._may_add(self._queue[0]) else None
            owned = self._owned[0] if self._owned and self._is_added(self._owned[0]) else None
            self._busy = contribution is not None or owned is not None
        if not self._busy:
            return False
        # The table has said that others are done; this orders the reads of their sums after it.
        self._fence()
        # Outside of the lock: the backward hands in more meanwhile. `_busy` tells `finish` that it is not over yet.
        if owned is not None:  # before adding more: the network should not wait
            self._start(owned)
        else:
            self._add(contribution)
        with self._changed:
            self._busy = False
            self._changed.notify_all()
        return True

    def _may_add(self, contribution: Contribution) -> bool:
        table = self._table
        if self._rank > 0:
            return table.added[self._rank - 1, contribution.index] >= contribution.backward
        # The first rank writes over gradients of the last step: all ranks must have done with them.
        return bool((table.entered >= contribution.backward).all())

    def _is_added(self, index: int) -> bool:
        return self._table.added[-1, index] >= self._backward

    def _add(self, contribution: Contribution) -> None:
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
        with label("node_reduce"):
            self._source.bring(contribution.noted, copied, summed)
        # `_busy` keeps `finish` waiting until this is published, too.
        with self._changed:
            self._queue.popleft()
        self._publish(self._table.added, (self._rank, contribution.index), contribution.backward)

    def _start(self, index: int) -> None:
        # By this thread alone, in the order of `_owned`: so the owners on all nodes start the same buckets in the same
        # order. The training loop only waits for them.
        bucket = self._buckets[index]
        pending = None
        if bucket.reduction is not None:
            with label("all_reduce"):
                pending = bucket.reduction.start(bucket.buffer, index, bucket.shapes)
        with self._changed:
            self._owned.popleft()
            self._pending[index] = pending
