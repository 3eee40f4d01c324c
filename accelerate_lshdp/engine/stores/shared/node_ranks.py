# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""How the ranks of a node wait for each other: by what each has published in the node's table, or an error that says
which of them does not come, and why.

Threads wait on a condition variable, ranks on sockets (`memory`): nothing here spins, because a spinning rank takes
processor time from the ranks of its node that it waits for (where they share a quota, 1.36 s a step instead of 0.99).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

import numpy as np

from accelerate_lshdp.engine.stores.shared.memory import NodeMemory, NodeMemoryError, OtherNodeRankError
from accelerate_lshdp.engine.stores.shared.table import BARRIER_PURPOSES, BarrierPurpose, NodeTable
from accelerate_lshdp.runtime.wait_clock import WaitClock


#: How long a thread sleeps when nobody wakes it; it wakes up to look at the clock only.
NAP_SECONDS = 1.0
_SAME_CALLS_HINT = (
    "All ranks of a node share its parameters, so they do the same with them together: load_state_dict, clipping and "
    "steps on all ranks or on none. For something of one rank alone, use a copy.deepcopy of the model"
)


class NodeRanks:
    """The ranks of a node as one of them sees them.

    A thread has to look at the node's sockets, and to notify ``_changed`` when another rank has published something.

    Args:
        memory: of the node.
        table: of the node, already mapped.
        clock: counts the time spent waiting.
        timeout_seconds: how long to wait for another rank.
    """

    def __init__(self, memory: NodeMemory, table: NodeTable, clock: WaitClock, timeout_seconds: float) -> None:
        self.clock = clock
        self.timeout_seconds = timeout_seconds
        self._memory = memory
        self._table = table
        self._rank = memory.local_rank
        self._backward = 0
        self._barriers = 0
        self._collectives = 0
        self._purpose: BarrierPurpose | None = None
        self._barrier_error: RuntimeError | None = None  # why ranks no longer come to the same barriers
        self._changed = threading.Condition()
        self._error: BaseException | None = None  # of the thread

    def collective_begins(self) -> None:
        """Takes note that this rank calls a collective of the world: it comes to no barrier before that ends."""
        # A rank that waits at a barrier for this one, and is awaited in the collective, can say so instead of hanging.
        self._collectives += 1
        self._publish(self._table.collectives, self._rank, self._collectives)

    def publish_change(self) -> None:
        """Says that this rank has changed parameters by hand since the last backward."""
        self._publish(self._table.changed, self._rank, self._backward + 1)

    def others_have_changed(self) -> bool:
        """Whether another rank of the node has said so, too."""
        changed = np.delete(self._table.changed, self._rank)
        return bool((changed == self._backward + 1).any())

    def barrier(self, purpose: BarrierPurpose) -> None:
        """Waits until all ranks of the node have come here.

        Args:
            purpose: what for.

        Raises:
            RuntimeError: another rank has gone, came for something else, or waits for this one elsewhere.
        """
        if self._barrier_error is not None:
            raise type(self._barrier_error)(str(self._barrier_error))
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
            self._barrier_error = error.with_traceback(None)  # which would keep tensors of the script alive
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

    # Whether all keep their gradients for themselves until the last micro-batch of a step

    def vote(self, number: int, keeps: bool, has_kept: bool | None) -> None:
        """Says whether this rank can, from the next step on; just before it begins a backward that synchronises.

        Args:
            number: of these backwards, on all ranks the same.
            keeps: whether it can.
            has_kept: whether it has kept those of this step; None: there are none.
        """
        # Seen by whoever sees that this backward has begun, which is published next.
        self._table.votes[number % 2, self._rank] = (int(keeps), -1 if has_kept is None else int(has_kept))

    def all_keep(self, number: int) -> bool:
        """Whether all can; after that backward, which all have begun by then.

        Raises:
            RuntimeError: on all ranks, if some have kept their gradients of this step, and others have not.
        """
        # In turn, as a rank may vote again before another one has read this: but no more than once.
        votes = self._table.votes[number % 2]
        if {0, 1} <= set(votes[:, 1].tolist()):
            raise RuntimeError(
                "the gradients of this step are wrong: some ranks of this node have failed in one of its backwards, "
                "and others have not. Let all ranks drop their gradients and begin the step again"
            )
        return bool(votes[:, 0].all())

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
            raise OtherNodeRankError(
                f"the optimizer's step of local rank {others[0]} of this node failed, and this rank needs the "
                "parameters that it steps; its own output says why"
            )

    # Waiting and telling

    def _wait(
        self,
        done: Callable[[], bool],
        what: str,
        missing: Callable[[], Iterable[int]] | None = None,
        nap_seconds: float = NAP_SECONDS,
    ) -> None:
        """Waits until ``done``; raises what `_problem` finds before. The node's thread wakes it at every change.

        Args:
            done: whether the wait is over.
            what: names it in messages.
            missing: the ranks of the node that are waited for; others may have ended. None: all of them.
            nap_seconds: how long it sleeps if nobody wakes it.
        """
        deadline = time.monotonic() + self.timeout_seconds
        with self._changed:
            while not done():
                problem = self._problem(what, time.monotonic() > deadline, missing)
                if problem is None:
                    self._changed.wait(timeout=nap_seconds)
                elif not done():  # a rank may have done its part before it ended
                    raise problem from self._error
        self._fence()

    def _problem(
        self, what: str, late: bool, missing: Callable[[], Iterable[int]] | None = None
    ) -> RuntimeError | None:
        """The reason why waiting any longer is of no use; None while it is."""
        if self._error is not None:
            return RuntimeError(f"summing gradients on this node failed: {self._error}")
        if (elsewhere := self._find_rank_elsewhere()) is not None:
            return NodeMemoryError(f"{elsewhere}, while this one waited for it to {what}. {_SAME_CALLS_HINT}")
        failed = self._table.failed >= self._backward
        # Not those that have done their part of this backward, and failed in the next one.
        failed &= (self._table.failed == self._backward) | (self._table.added < self._backward).any(axis=1)
        if missing is not None:
            # Nor those that had done, before they gave up, what this rank waits for: what is left is its own.
            failed &= np.isin(np.arange(failed.size), list(missing()))
        # Where the own backward has failed, too, its ranks go on together in the next one.
        if failed.any() and not failed[self._rank]:
            return OtherNodeRankError(
                f"the backward of local rank {int(failed.argmax())} of this node failed, while others waited for it "
                f"to {what}; its own output says why"
            )
        gone = self._memory.gone if missing is None else self._memory.gone.intersection(missing())
        if gone:
            rank = min(gone)
            return OtherNodeRankError(
                f"local rank {rank} of this node has ended, but was to {what}; its own output says why"
            )
        if late:
            return NodeMemoryError(
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
