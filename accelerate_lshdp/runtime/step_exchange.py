# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Exchanges the few numbers that ranks tell each other in a step, over the host so that no device is waited for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from accelerate_lshdp.runtime.dissemination import Gathering
from accelerate_lshdp.runtime.option_advice import option_advice
from accelerate_lshdp.runtime.parameter_usage import ToldUsage
from accelerate_lshdp.runtime.row_group import RowGroup
from accelerate_lshdp.runtime.shared_rows import PendingRows, SharedRows
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


#: How a report travels: a rank gets one from each of the others in every step. Seconds have seven digits.
_REPORT = np.dtype(
    [
        ("compute_seconds", np.float32),
        ("wait_seconds", np.float32),
        ("optimizer_seconds", np.float32),
        ("data_seconds", np.float32),
        ("read_ahead", np.int32),
        ("largest_micro_batch", np.int64),
        ("sizes_checksum", np.uint32),
        ("global_batch", np.int64),
        ("optimizer_steps", np.int64),
        ("samples_hash", np.int64),
        ("problem", np.uint8),
        ("stop_signal", np.uint8),
        ("pauses", np.uint8),
    ]
)
REPORT_BYTES = _REPORT.itemsize


class Announcement:
    """A call in which all ranks take part, announced on all of them, and not yet checked."""

    def __init__(
        self, work: dist.Work | Gathering, calls: torch.Tensor, counts: Sequence[int], clock: WaitClock
    ) -> None:
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
        rows: uint8, one row a rank: its report, then a byte for each model (`ToldUsage`).
        usages: of this rank, one tensor for each model.
        told: which parameters ranks have used, as they have told each other last.
        group: for a second exchange, of models of which ranks have used other parameters than they told last.
        clock: counts the time that it blocks.
    """

    def __init__(
        self,
        work: dist.Work | Gathering | None,
        rows: torch.Tensor,
        usages: Sequence[torch.Tensor],
        told: ToldUsage,
        group: RowGroup | None,
        clock: WaitClock,
    ) -> None:
        self._work = work
        self._rows = rows
        self._usages = usages
        self._told = told
        self._group = group
        self._clock = clock

    def wait(self) -> tuple[list[RankReport], list[torch.Tensor]]:
        """Waits for the reports of all ranks, which have the same bits on all of them (collective).

        Returns:
            The reports, one a rank; and for each model whether any rank used each parameter.
        """
        if self._work is not None:
            with self._clock.waiting():
                self._work.wait()
        rows = self._rows.numpy()
        reports = np.frombuffer(rows[:, :REPORT_BYTES].tobytes(), _REPORT).tolist()
        told = self._told.hear(rows[:, REPORT_BYTES:])
        used = [self._told.known(index, told[:, index], len(usage)) for index, usage in enumerate(self._usages)]
        # All ranks see the same, so they all know for which models they have to tell more.
        open_ones = [index for index, each in enumerate(used) if each is None]
        for index, each in zip(open_ones, self._unite([self._usages[index] for index in open_ones]), strict=True):
            self._told.take(index, self._usages[index], each)
            used[index] = each
        return [RankReport(*report) for report in reports], [torch.from_numpy(each) for each in used]

    def _unite(self, usages: Sequence[torch.Tensor]) -> list[np.ndarray]:
        """Which parameters of these models any rank has gradients for."""
        if not usages:
            return []
        used = torch.cat(list(usages)).numpy() > 0
        if self._group is not None:
            with self._clock.waiting():
                packed = self._group.unite(torch.from_numpy(np.packbits(used)))
            used = np.unpackbits(packed.numpy(), count=len(used)) > 0
        return np.split(used, np.cumsum([len(usage) for usage in usages])[:-1])


#: The rows about losses, one for each world.
_loss_rows: WeakKeyDictionary[dist.ProcessGroup, SharedRows] = WeakKeyDictionary()


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
        self._told = ToldUsage()
        self._group: RowGroup | None = None
        self._announcement_group: RowGroup | None = None
        self._beside_gradients_group: RowGroup | None = None
        self._before_backward_group: RowGroup | None = None
        self._loss_rows: SharedRows | None = None
        if world_size > 1:
            self._group = RowGroup(shares_world=True)
            if counts is not None:
                self._announcement_group = RowGroup()

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
        work, calls = self._announcement_group.gather(torch.tensor([number], dtype=torch.uint8))
        return Announcement(work, calls.view(-1), self.counts, self.clock)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of ``values`` (host, float64, one dimension) over ranks, with the same bits on all of them."""
        if self._group is None:
            return values
        work, rows = self._group.gather(values)
        with self.clock.waiting():
            work.wait()
        return rows.sum(0)

    def make_model_groups(self, shard_groups: Sequence[Sequence[int]] | None) -> None:
        """Makes the groups for `rows_beside_gradients` and `rows_before_backward` (collective).

        Args:
            shard_groups: those that share parameters; None: no rank waits for another in the middle of autograd.
        """
        if self._group is None or self._beside_gradients_group is not None:
            return
        # A group of its own: gradients are under way in the others, in an order that may differ from rank to rank.
        self._beside_gradients_group = RowGroup()
        if shard_groups is None or max(map(len, shard_groups)) == 1:
            return
        # Ranks of one shard group have equal numbers of micro-batches, others may have not.
        for ranks in [range(self.world_size)] if self.counts is None else shard_groups:
            group = RowGroup(list(ranks))
            self._before_backward_group = group if self.rank in ranks else self._before_backward_group

    def rows_before_backward(self, row: torch.Tensor) -> dict[int, torch.Tensor]:
        """The rows (host) of the ranks that are in the same micro-batch: all that this one waits for in autograd."""
        return self._exchange_rows(row, self._before_backward_group)

    def rows_beside_gradients(self, row: torch.Tensor) -> dict[int, torch.Tensor]:
        """The rows (host) of all ranks, while gradients travel in any order in other groups."""
        return self._exchange_rows(row, self._beside_gradients_group)

    def _exchange_rows(self, row: torch.Tensor, group: RowGroup | None) -> dict[int, torch.Tensor]:
        """Sends a row to every rank of a group and waits for theirs; returns rows by rank."""
        if group is None:
            return {self.rank: row}
        work, rows = group.gather(row)
        with self.clock.waiting():
            work.wait()
        return dict(zip(group.ranks, rows, strict=True))

    def make_loss_rows(self) -> None:
        """Makes the group for `share_loss`, once a process (collective)."""
        if self._group is not None and self._loss_rows is None:
            # One for all accelerators of the process: torch keeps a group that is dropped, and a profile makes many.
            if dist.group.WORLD not in _loss_rows:
                _loss_rows[dist.group.WORLD] = SharedRows()
            self._loss_rows = _loss_rows[dist.group.WORLD]

    def share_loss(self, row: torch.Tensor, values: bytes | None = None) -> PendingRows:
        """Begins to tell every rank of a loss; does not wait.

        Args:
            row: uint8, as many bytes on all ranks.
            values: to be fetched by ranks that want them; the row has to say that there are some. None: there are not.
        """
        if self._loss_rows is None:
            return PendingRows(None, row[None], (self.rank, values), "", self.clock)
        return self._loss_rows.share(row, values, self.clock)

    def after_backward(self, report: RankReport, usages: Sequence[torch.Tensor]) -> PendingReports:
        """Begins to exchange what each rank reports, and which parameters any rank used; does not wait.

        Args:
            report: of this rank.
            usages: one tensor for each prepared model, in the order of ``prepare``, whether the loss used it or not
                (all ranks send as many numbers); 1 where this rank has a gradient for a parameter.
        """
        # One message for everything. Its length is fixed: a rank that has left the step of the others must still send
        # as many bytes. Most models use all parameters or none.
        used = np.array([self._told.told(index, usage) for index, usage in enumerate(usages)], np.uint8)
        own = torch.from_numpy(np.concatenate([np.array([tuple(report)], _REPORT).view(np.uint8), used]))
        work, rows = (None, own[None]) if self._group is None else self._group.gather(own)
        return PendingReports(work, rows, usages, self._told, self._group, self.clock)
