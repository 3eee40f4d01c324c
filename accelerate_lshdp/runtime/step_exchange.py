# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Exchanges the few numbers that ranks tell each other in a step, over the host so that no device is waited for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from accelerate_lshdp.runtime.groups import new_group
from accelerate_lshdp.runtime.option_advice import option_advice
from accelerate_lshdp.runtime.wait_clock import WaitClock


#: Calls in which all ranks take part; their numbers, from 1, are what ranks send.
ANNOUNCED_CALLS = (
    "backward",
    "gather",
    "gather_for_metrics",
    "reduce",
    "pad_across_processes",
    "wait_for_everyone",
    "a second loss that is not known yet",
)


class RankReport(NamedTuple):
    """The values that a rank sends to all others at the end of a step's backward."""

    compute_seconds: float
    """In the step's forwards and backwards, without communication."""
    wait_seconds: float
    """Blocked in communication: in the step's forwards and backwards, and in the exchange of the step before."""
    optimizer_seconds: float
    """In the optimizer step before this one."""
    data_seconds: float
    """Waiting for the step's batches."""
    read_ahead: int = 0
    """Global batches that its loaders have cut beyond the current one."""
    largest_micro_batch: int = 0
    """What it believes fits its memory; 0: no limit known."""
    sizes_checksum: int = 0
    """Of the sizes of all ranks that it trained this step with; 0: they are fixed."""
    global_batch: int = -1
    """Index in its epoch of the global batch that it trained last; -1: batches of no prepared loader."""
    optimizer_steps: int = 0
    """Steps that its optimizers have made, all together."""
    samples_hash: int = 0
    """Of the samples of all ranks in the global batches that it trained since its last report; 0: not known."""
    problem: int = 0
    """What makes the step wrong on this rank, counted from 1 in `ranks_in_step.PROBLEMS`; 0: nothing."""
    stop_signal: int = 0
    """Number of a signal that has asked it to save and end; 0: none has."""
    pauses: int = 0
    """Whether its launcher wants it to leave after this step, as nodes come or go."""


_REPORT_BYTES = len(RankReport._fields) * np.dtype(np.float64).itemsize


class Announcement:
    """A call in which all ranks take part, announced on all of them, and not yet checked."""

    def __init__(self, work: dist.Work, calls: torch.Tensor, counts: Sequence[int], clock: WaitClock) -> None:
        self._work = work
        self._calls = calls
        self._counts = counts
        self._clock = clock

    def require_all(self) -> None:
        """Waits until all ranks have announced a call.

        Raises:
            RuntimeError: on all ranks, if one of them has more micro-batches of its step before it.
        """
        with self._clock.waiting():
            self._work.wait()
        early = {rank: ANNOUNCED_CALLS[int(call) - 1] for rank, call in enumerate(self._calls.tolist()) if call}
        if early:
            made = ", ".join(f"{call} (rank {rank})" for rank, call in early.items())
            raise RuntimeError(
                f"found {made} in a micro-batch that is not the last one of its step. The plan gives ranks different "
                f"numbers of micro-batches ({list(self._counts)}), so they all meet in the last one only: call it "
                "under `if accelerator.sync_gradients:`, and give accumulate() all models that the loss depends on. "
                f"For a second loss say what losses are means over: {option_advice('loss_weighting', 'sample')}"
            )


class PendingReports:
    """The reports of all ranks while they are being exchanged, beside the last gradients.

    Args:
        work: the exchange; None: there is one rank.
        rows: uint8, one row a rank: its report in float64, then a bit for each parameter.
        lengths: number of parameters of each model.
        clock: counts the time that it blocks.
    """

    def __init__(self, work: dist.Work | None, rows: torch.Tensor, lengths: Sequence[int], clock: WaitClock) -> None:
        self._work = work
        self._rows = rows
        self._lengths = lengths
        self._clock = clock

    def wait(self) -> tuple[list[RankReport], list[torch.Tensor]]:
        """Waits for the reports of all ranks, which have the same bits on all of them.

        Returns:
            The reports, one a rank; and for each model how many ranks used each parameter.
        """
        if self._work is not None:
            with self._clock.waiting():
                self._work.wait()
        rows = self._rows.numpy()
        reports = np.frombuffer(rows[:, :_REPORT_BYTES].tobytes(), np.float64).reshape(len(rows), -1).tolist()
        used = np.unpackbits(rows[:, _REPORT_BYTES:], axis=1, count=sum(self._lengths)).sum(axis=0)
        counts = torch.from_numpy(used.astype(np.float64)).split(list(self._lengths))
        return [RankReport(*row[:4], *map(int, row[4:])) for row in reports], list(counts)


class PendingRows:
    """Rows of numbers, one a rank, while they are being exchanged; ranks that do not need them need not wait."""

    def __init__(self, work: dist.Work | None, rows: torch.Tensor, clock: WaitClock) -> None:
        self._work = work
        self._rows = rows
        self._clock = clock

    def wait(self) -> list[list[float]]:
        """Waits for the rows of all ranks; shape (world, numbers of a row)."""
        if self._work is not None:
            with self._clock.waiting():
                self._work.wait()
            self._work = None
        return self._rows.tolist()


#: The group in which ranks exchange rows about losses, one a world.
_loss_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


class StepExchange:
    """Small messages between all ranks (collective to make and to use).

    Args:
        rank: this process's rank.
        world_size: number of ranks; with one rank nothing is sent.
        clock: counts the time that it blocks, for a rank that is late makes the others wait here, too.
        counts: micro-batches of a global batch, one entry a rank, if they differ; None: all ranks have as many.
    """

    def __init__(self, rank: int, world_size: int, clock: WaitClock, counts: Sequence[int] | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.clock = clock
        self.counts = counts
        self.group: dist.ProcessGroup | None = None
        self._announcement_group: dist.ProcessGroup | None = None
        self._beside_gradients_group: dist.ProcessGroup | None = None
        self._before_backward_group: dist.ProcessGroup | None = None
        self._loss_group: dist.ProcessGroup | None = None
        if world_size > 1:
            # Numbers are on the host, where gloo takes them; another backend would need a device, and a wait for it.
            on_host = dist.get_backend() == "gloo"
            self.group = dist.group.WORLD if on_host else new_group(backend="gloo")
            if counts is not None:
                self._announcement_group = new_group(backend="gloo")

    def announce(self, call: str, within_window: bool) -> Announcement | None:
        """Announces a call in which all ranks take part; None if they cannot be in different micro-batches.

        Under unequal numbers of micro-batches a rank may make such a call where another one is reducing gradients. The
        two would be taken for one collective, so every call of both kinds is announced first, on a group of its own.
        The announcement does not block.

        Args:
            call: one of ``ANNOUNCED_CALLS``.
            within_window: whether this rank has more micro-batches of the step before it.
        """
        if self._announcement_group is None:
            return None
        number = 1 + ANNOUNCED_CALLS.index(call) if within_window else 0
        work, calls = self._send_to_all(torch.tensor([number]), self._announcement_group)
        return Announcement(work, calls.view(-1), self.counts, self.clock)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of ``values`` (host, float64) over ranks."""
        if self.group is not None:
            with self.clock.waiting():
                dist.all_reduce(values, group=self.group)
        return values

    def make_model_groups(self, shard_groups: Sequence[Sequence[int]] | None) -> None:
        """Makes the groups for `rows_beside_gradients` and `rows_before_backward` (collective).

        Args:
            shard_groups: those that share parameters; None: no rank waits for another in the middle of autograd.
        """
        if self.group is None or self._beside_gradients_group is not None:
            return
        # A group of its own: gradients are under way in the others, in an order that may differ from rank to rank.
        self._beside_gradients_group = new_group(backend="gloo")
        if shard_groups is None or max(map(len, shard_groups)) == 1:
            return
        # Ranks of one shard group have equal numbers of micro-batches, others may have not.
        for ranks in [range(self.world_size)] if self.counts is None else shard_groups:
            group = new_group(list(ranks), backend="gloo")
            self._before_backward_group = group if self.rank in ranks else self._before_backward_group

    def rows_before_backward(self, row: torch.Tensor) -> dict[int, torch.Tensor]:
        """The rows (host) of the ranks that are in the same micro-batch: all that this one waits for in autograd."""
        return self._exchange_rows(row, self._before_backward_group)

    def rows_beside_gradients(self, row: torch.Tensor) -> dict[int, torch.Tensor]:
        """The rows (host) of all ranks, while gradients travel in any order in other groups."""
        return self._exchange_rows(row, self._beside_gradients_group)

    def _exchange_rows(self, row: torch.Tensor, group: dist.ProcessGroup | None) -> dict[int, torch.Tensor]:
        """Sends a row to every rank of a group and waits for theirs; returns rows by rank."""
        if group is None:
            return {self.rank: row}
        work, rows = self._send_to_all(row, group)
        with self.clock.waiting():
            work.wait()
        return dict(zip(dist.get_process_group_ranks(group), rows, strict=True))

    def make_loss_group(self) -> None:
        """Makes the group for `share_row`, once a process (collective)."""
        if self.group is not None and self._loss_group is None:
            # One for all accelerators of the process: torch keeps a group that is dropped, and a profile makes many.
            if dist.group.WORLD not in _loss_groups:
                _loss_groups[dist.group.WORLD] = new_group(backend="gloo")
            self._loss_group = _loss_groups[dist.group.WORLD]

    def share_row(self, row: Sequence[float]) -> PendingRows:
        """Begins to send a row of numbers to every rank, as many on all of them; does not wait.

        It goes over a group of its own: where other ranks send no row, it must not be matched with their gradients.
        """
        own = torch.tensor(row, dtype=torch.float64)
        work, rows = (None, own[None]) if self._loss_group is None else self._send_to_all(own, self._loss_group)
        return PendingRows(work, rows, self.clock)

    def after_backward(self, report: RankReport, usages: Sequence[torch.Tensor]) -> PendingReports:
        """Begins to exchange what each rank reports, and which parameters any rank used; does not wait.

        Args:
            report: of this rank.
            usages: one tensor for each prepared model, in the order of ``prepare``, whether the loss used it or not
                (all ranks send as many numbers); 1 where this rank has a gradient for a parameter.
        """
        # One message for everything; float64 holds the integers (up to 2**53) exactly. Its length is fixed: a rank
        # that has left the step of the others must still send as many bytes.
        used = torch.cat(list(usages)).numpy() if usages else np.empty(0)
        row = np.concatenate([np.array(report, np.float64).view(np.uint8), np.packbits(used > 0)])
        own = torch.from_numpy(row)
        work, rows = (None, own[None]) if self.group is None else self._send_to_all(own, self.group)
        return PendingReports(work, rows, [len(usage) for usage in usages], self.clock)

    def _send_to_all(self, row: torch.Tensor, group: dist.ProcessGroup) -> tuple[dist.Work, torch.Tensor]:
        """Begins to send a row to every rank of a group; returns the work and all rows, shape (ranks, row)."""
        # Every rank sends to every other one at once. A ring, as gloo's all-reduce is, would pass 2 (W - 1) messages
        # one after the other, and each of them wakes a thread that may have to wait for a processor.
        sent = row.repeat(group.size())
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=group, async_op=True)
        return work, received.view(group.size(), -1)
