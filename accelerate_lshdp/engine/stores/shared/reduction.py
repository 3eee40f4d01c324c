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

import numpy as np
import torch

from accelerate_lshdp.engine.stores.shared.bucket import Contribution, GradientSource, SharedBucket
from accelerate_lshdp.engine.stores.shared.memory import NodeMemory
from accelerate_lshdp.engine.stores.shared.node_ranks import NAP_SECONDS, NodeRanks
from accelerate_lshdp.engine.stores.shared.table import NodeTable
from accelerate_lshdp.engine.wire.reduction import PendingReduction
from accelerate_lshdp.runtime.profiler_labels import label
from accelerate_lshdp.runtime.wait_clock import WaitClock


class NodeReduction(NodeRanks):
    """Sums the buckets of a model over the ranks of its node, in a thread, and between nodes.

    Calls come from the training loop's thread. One condition (``_changed``) guards what both threads use: the queue,
    the owned buckets, the pending reductions, the flags and the thread's error.

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
        super().__init__(memory, table, clock, timeout_seconds)
        self._source = GradientSource() if source is None else source
        self._on_host = GradientSource()  # of what was set aside
        self._most_waiting: int | None = None
        self._patience: float | None = None
        self._sets_aside = False
        self._held_up_since: float | None = None
        self.changes = 0
        self.beside: threading.Thread | None = None
        self._buckets = buckets
        self._queue: deque[Contribution] = deque()
        self._owned: deque[int] = deque()  # owned buckets that wait for the other ranks of the node
        self._pending: dict[int, PendingReduction | None] = {}
        self._busy = self._closed = self._abandoned = False
        self._process = os.getpid()
        # A daemon, as a rank that fails elsewhere must be able to exit; `close` joins it in the usual case.
        self._thread = threading.Thread(target=self._serve, name="lshdp-node", daemon=True)
        self._thread.start()

    # The training loop's calls

    def begin(self, most_waiting: int | None = None, patience_seconds: float | None = None) -> None:
        """Begins a backward. From now on other ranks may write where this rank's last gradients are.

        Args:
            most_waiting: buckets of this rank that may wait to be added; `ready` waits while there are more. None: any
                number.
            patience_seconds: how long gradients that are computed wait for other ranks in `ready`; then, for the rest
                of the backward, buckets that wait are copied to host memory. None: as long as it takes.
        """
        self._most_waiting = most_waiting
        self._patience = patience_seconds
        self._sets_aside = False
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
            has_to_wait = self._are_too_many()
        self._memory.wake_self()
        if has_to_wait:
            with self.clock.waiting():
                self._wait_for_memory()

    def _are_too_many(self) -> bool:
        """Whether gradients of more buckets wait where they were computed than may; under the lock."""
        return self._most_waiting is not None and len(self._waiting()) > self._most_waiting

    def _waiting(self) -> list[Contribution]:
        return [contribution for contribution in self._queue if contribution.takes_memory]

    def _wait_for_memory(self) -> None:
        if self._patience is None:
            # Ranks wait for those before them alone, and the first one for its own thread (and for buckets that all
            # have handed in before this one, where it goes on with their sum): so this ends, if those before this one
            # need nothing of it until they have handed in all of their buckets.
            self._wait(lambda: not self._are_too_many(), "add its gradients", self._held_up_by)
            return
        # Else one of them may wait for this one, and then it would not end. To set gradients aside needs no other one,
        # but copies them once more: so not at once. That another one fails changes nothing here: all that fail at the
        # same place have handed in the same buckets.
        if not self._sets_aside:
            self._held_up_since = None
            self._wait(
                lambda: not self._are_too_many() or self._is_out_of_patience(),
                "add its gradients",
                self._gone_before,
                nap_seconds=self._patience / 10,  # nobody wakes it when the device has computed
            )
            with self._changed:
                self._sets_aside = self._are_too_many()
            self._memory.wake_self()
        self._wait(lambda: not self._are_too_many(), "add its gradients", self._gone_before)

    def _is_out_of_patience(self) -> bool:
        """Whether gradients that are computed have waited too long for other ranks; under the lock."""
        first = self._queue[0]
        if self._may_add(first) or not self._source.is_computed(first.noted):
            self._held_up_since = None
            return False
        if self._held_up_since is None:
            self._held_up_since = time.monotonic()
        return time.monotonic() - self._held_up_since >= self._patience

    def _gone_before(self) -> set[int]:
        """The ranks of the node that this one's next part comes after, and that have ended."""
        return self._memory.gone.intersection(self._held_up_by())

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
            done, after = self._table.entered, self._buckets[first.index].after
            if after is not None:
                done = np.minimum(done, self._table.added[:, after])
            return np.flatnonzero(done < first.backward).tolist()
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

    # The thread

    @torch.no_grad()
    def _serve(self) -> None:
        try:
            while not self._closed:
                # All that can be done now, then sleep: a wake-up that comes in between is kept in the socket.
                if not self._advance():
                    self._memory.wait_for_wake(NAP_SECONDS)
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
            aside = None
            if contribution is None and owned is None and self._sets_aside and self._are_too_many():
                aside = self._waiting()[0]
            self._busy = not (contribution is None and owned is None and aside is None)
        if not self._busy:
            return False
        # The table has said that others are done; this orders the reads of their sums after it.
        self._fence()
        # Outside of the lock: the backward hands in more meanwhile. `_busy` tells `finish` that it is not over yet.
        if owned is not None:  # before adding more: the network should not wait
            self._start(owned)
        elif contribution is not None:
            self._add(contribution)
        else:
            self._set_aside(aside)
        with self._changed:
            self._busy = False
            self._changed.notify_all()
        return True

    def _may_add(self, contribution: Contribution) -> bool:
        table = self._table
        if self._rank > 0:
            return table.added[self._rank - 1, contribution.index] >= contribution.backward
        # Nobody may still be adding to the sum that this one goes on with, in the same memory.
        after = self._buckets[contribution.index].after
        if after is not None and table.added[-1, after] < contribution.backward:
            return False
        # The first rank writes over gradients of the last step: all ranks must have done with them.
        return bool((table.entered >= contribution.backward).all())

    def _is_added(self, index: int) -> bool:
        return self._table.added[-1, index] >= self._backward

    def _set_aside(self, contribution: Contribution) -> None:
        views = self._buckets[contribution.index].views
        aside = self._source.set_aside(contribution.noted, contribution.gradients, views)
        with self._changed:
            contribution.gradients, contribution.is_aside = aside, True

    def _add(self, contribution: Contribution) -> None:
        with label("node_reduce"):
            self._bring(contribution)
        # Before it leaves the queue: what does not wait any more takes no memory.
        contribution.gradients = []
        # `_busy` keeps `finish` waiting until this is published, too.
        with self._changed:
            self._queue.popleft()
        self._publish(self._table.added, (self._rank, contribution.index), contribution.backward)

    def _bring(self, contribution: Contribution) -> None:
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
        source = self._on_host if contribution.is_aside else self._source
        source.bring(contribution.noted, copied, summed)

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
