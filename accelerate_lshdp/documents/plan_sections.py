# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The sections of a plan but the cluster: immutable records, checked when they are made, read from plan files."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from accelerate_lshdp.documents.records import BOOLEAN, Record, choice, entry, integer, number, optional, records
from accelerate_lshdp.documents.value_checks import LARGEST_BATCH, PlanError, require_integer
from accelerate_lshdp.documents.wire_format import WIRE_FORMATS


REBALANCE_EVERY, DEAD_BAND = 10, 0.03
POWERSGD_RANK, POWERSGD_WARMUP_STEPS = 8, 10
COMMUNICATION_DTYPES = tuple(WIRE_FORMATS)
#: Nodes of an elastic run: the launchers of all of them tell each other what they know.
LARGEST_ELASTIC = 16
ON_PARTITION = ("wait", "continue")
INTRA_NODE = ("auto", "shared_memory", "collectives")


@dataclass(frozen=True, slots=True)
class RankBatch(Record):
    """One rank's part of a global batch: `accumulation_steps` micro-batches of `micro_batch_size` samples each."""

    rank: int = entry(integer())
    micro_batch_size: int = entry(integer(least=1))
    accumulation_steps: int = entry(integer(least=1), default=1)

    def _check_together(self) -> None:
        if self.batch_size > LARGEST_BATCH:
            raise PlanError(
                f"found {self.micro_batch_size} x {self.accumulation_steps} samples, expected at most {LARGEST_BATCH}."
                " Lower micro_batch_size or accumulation_steps."
            )

    @property
    def batch_size(self) -> int:
        """Samples of this rank in a global batch."""
        return self.micro_batch_size * self.accumulation_steps


@dataclass(frozen=True, slots=True)
class Batch(Record):
    """One global batch, cut over ranks 0..world-1.

    Args:
        ranks: one entry a rank, in any order; kept in rank order.
        allow_unequal_accumulation: accept different numbers of micro-batches on different ranks, hence loops of
            unequal length.

    Raises:
        PlanError: a rank is missing or there twice, or a value is impossible.
    """

    ranks: tuple[RankBatch, ...] = entry(records(RankBatch, "rank"))
    allow_unequal_accumulation: bool = entry(BOOLEAN, default=False)

    def _check_together(self) -> None:
        by_rank: dict[int, RankBatch] = {}
        for part in self.ranks:
            if part.rank in by_rank:
                raise PlanError(f"found rank {part.rank} twice, expected it once. Remove one of them.", path="ranks")
            by_rank[part.rank] = part
        # Entries are unique here, so as many as the largest number plus one means that none is missing.
        missing = next((rank for rank in range(len(by_rank)) if rank not in by_rank), None)
        if missing is not None:
            raise PlanError(
                f"found {len(by_rank)} ranks up to {max(by_rank)} but no rank {missing}, expected ranks"
                f" 0 to {len(by_rank) - 1}. Add or renumber them.",
                path="ranks",
            )
        object.__setattr__(self, "ranks", tuple(by_rank[rank] for rank in range(len(by_rank))))
        if self.total > LARGEST_BATCH:
            raise PlanError(f"found {self.total} samples, expected at most {LARGEST_BATCH}. Lower them.", path="total")
        counts = [part.accumulation_steps for part in self.ranks]
        if len(set(counts)) > 1 and not self.allow_unequal_accumulation:
            raise PlanError(
                f"found accumulation_steps {counts}, expected the same number on every rank. Make them equal, or set"
                " batch.allow_unequal_accumulation (loops then differ in length; ranks that share parameters cannot).",
                path="ranks",
            )

    @property
    def total(self) -> int:
        """Samples in a global batch."""
        return sum(part.batch_size for part in self.ranks)

    @classmethod
    def read(cls, document: object) -> Batch:
        """The `batch` section of a plan file, which has the total beside the ranks.

        Raises:
            PlanError: as every record; or the total is not the sum of the ranks' batch sizes.
        """
        entries = cls._read_entries(document, also=("total",))
        # The total is redundant on purpose: a file edited by hand in one place only is an error, not another batch.
        batch, total = cls(**entries), document["total"]
        require_integer(total, "total", least=1)
        if batch.total != total:
            sizes = " + ".join(str(part.batch_size) for part in batch.ranks)
            raise PlanError(
                f"found {total}, expected {batch.total}, the sum of the ranks' batch sizes ({sizes}). Correct the"
                " total or the ranks.",
                path="total",
            )
        return batch

    def to_dict(self) -> dict[str, Any]:
        """The section of a plan file."""
        return {"total": self.total, **Record.to_dict(self)}


@dataclass(frozen=True, slots=True)
class Automatic(Record):
    """Automatic batch sizes: the run measures its own steps and re-balances the batch sizes while it trains.

    Args:
        total: samples in a global batch, which never changes. None: the script's own batch size times the number of
            ranks, which is known as soon as the script trains.
        rebalance_every: optimizer steps between two checks whether other sizes are better, once sizes are stable.
        dead_band: the part of the step time (0 to 1) that new sizes have to save; less is taken for noise.
    """

    # `null` is refused in a file: a plan without a total leaves the key out.
    total: int | None = entry(optional(integer(least=1), null=False), default=None, omit=True)
    rebalance_every: int = entry(integer(least=1), default=REBALANCE_EVERY)
    dead_band: float = entry(number(), default=DEAD_BAND)

    def _check_together(self) -> None:
        if self.dead_band >= 1:
            raise PlanError(
                f"found {self.dead_band}, expected less than 1: a share of the step time, such as 0.03.",
                path="dead_band",
            )


@dataclass(frozen=True, slots=True)
class Elastic(Record):
    """Nodes may be lost and come while the run trains, which goes on with those that are there.

    Args:
        min_nodes: with fewer the run waits.
        max_nodes: more are not let in.
        on_partition: what nodes do that cannot reach more than half of the others: "wait" with the state that they
            have, or "continue", where two parts of a network that has split train on, and one of them in vain.
    """

    min_nodes: int = entry(integer(least=1), default=1)
    max_nodes: int = entry(integer(least=1), default=LARGEST_ELASTIC)
    on_partition: str = entry(choice(ON_PARTITION), default=ON_PARTITION[0])

    def _check_together(self) -> None:
        if not self.min_nodes <= self.max_nodes <= LARGEST_ELASTIC:
            raise PlanError(
                f"found {self.min_nodes} to {self.max_nodes} nodes, expected at least as many as least and at most"
                f" {LARGEST_ELASTIC}.",
                path="max_nodes",
            )


@dataclass(frozen=True, slots=True)
class Communication(Record):
    """The format of gradients between ranks, and the mechanism by which ranks of a node share them.

    Args:
        dtype: a name of `documents.wire_format.WIRE_FORMATS`: "fp32" (exact), or a format that sends fewer bytes.
        powersgd_rank: rank of the matrices that approximate gradients under "powersgd" (Vogels et al., 2019).
        powersgd_warmup_steps: number of steps at the start of a run with "powersgd" whose gradients are exact.
        intra_node: how the ranks of a node share parameters and gradients, and sum whole ones: "shared_memory" (CPU
            only: in memory that all of them map), "collectives", or "auto": shared memory where it can be.
    """

    dtype: str = entry(choice(COMMUNICATION_DTYPES), default="fp32")
    powersgd_rank: int = entry(integer(least=1), default=POWERSGD_RANK)
    powersgd_warmup_steps: int = entry(integer(), default=POWERSGD_WARMUP_STEPS)
    intra_node: str = entry(choice(INTRA_NODE), default="auto")

    def _check_together(self) -> None:
        # Only values other than the defaults are refused: a default says nothing about what the user wants.
        defaults = {option.name: option.default for option in fields(self)}
        for owner, name in ((owner, name) for owner, form in WIRE_FORMATS.items() for name in form.options):
            if owner != self.dtype and getattr(self, name) != defaults[name]:
                raise PlanError(
                    f'found {getattr(self, name)} with dtype {self.dtype}, expected none: it belongs to "{owner}".'
                    f' Leave it out, or set dtype to "{owner}".',
                    path=name,
                )

    @property
    def is_lossy(self) -> bool:
        """Whether gradients lose precision on the wire and ranks keep the error for the next step."""
        return WIRE_FORMATS[self.dtype].remembers

    def to_dict(self) -> dict[str, str | int]:
        """The section of a plan file, without options that have no meaning for `dtype`."""
        # "auto" is left out, as plans of earlier versions had no such key and must keep their digests.
        names = ["dtype", *WIRE_FORMATS[self.dtype].options]
        if self.intra_node != "auto":
            names.append("intra_node")
        return {name: getattr(self, name) for name in names}
