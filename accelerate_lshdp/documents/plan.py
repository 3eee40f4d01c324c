# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`Plan`: batch sizes of all ranks, the strategy that places the model, and the format of gradients on the network.

A plan is what commands, ranks and runs exchange. It is immutable, checked when it is made, and written as JSON with a
version. Reading it needs neither torch nor a device.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from accelerate_lshdp.documents.atomic_files import write_atomically
from accelerate_lshdp.documents.cluster import Cluster, Link, Node
from accelerate_lshdp.documents.placement import ModelPlacement, check_placement
from accelerate_lshdp.documents.plan_checks import check_elastic, check_fits_run, check_sections_agree
from accelerate_lshdp.documents.plan_digest import digest_of
from accelerate_lshdp.documents.plan_sections import (
    DEAD_BAND,
    POWERSGD_RANK,
    POWERSGD_WARMUP_STEPS,
    REBALANCE_EVERY,
    Automatic,
    Batch,
    Communication,
    Elastic,
    RankBatch,
)
from accelerate_lshdp.documents.plan_text import describe_plan
from accelerate_lshdp.documents.records import OBJECT, Record, entry, member, optional, record
from accelerate_lshdp.documents.strategy import Strategy
from accelerate_lshdp.documents.strict_reading import parse_json, read_text, require_json
from accelerate_lshdp.documents.value_checks import (
    PlanError,
    describe,
    located,
    plain_integer,
    require_object,
    require_version,
)


__all__ = [
    "PLAN_VARIABLE",
    "PLAN_VERSION",
    "Automatic",
    "Batch",
    "Cluster",
    "Communication",
    "Elastic",
    "Link",
    "Node",
    "Plan",
    "PlanError",
    "RankBatch",
    "Strategy",
]

PLAN_VERSION = 1
PLAN_VARIABLE = "ACCELERATE_LSHDP_PLAN"
_ANNOTATIONS = ("profile", "predicted", "certificate")
_KEYS = ("batch", "automatic", "communication", "cluster", "placement", "elastic", *_ANNOTATIONS)


@dataclass(frozen=True, slots=True)
class Plan(Record):
    """One training plan: batch sizes in samples, one a rank, and how the model and its gradients are distributed.

    Args:
        strategy: where parameters, gradients and optimizer state live.
        batch: batch sizes of all ranks. None: equal batches, every loader keeps its own batch_size on every rank.
        communication: the format of gradients between ranks.
        cluster: the nodes in rank order; None: any.
        profile, predicted, certificate: JSON objects from the planner, carried unchanged.
        automatic: the run finds its batch sizes itself. It starts with `batch`, or without one with an equal split of
            `automatic.total`, or of the script's own batch size times the number of ranks.
        elastic: nodes may be lost and come; batch sizes are automatic then.
        placement: where each unit of the model keeps its parameters, under strategy "osdp"; None: all as the strategy
            says.

    Attributes:
        source: the file or variable that the plan was read from, for error messages; not part of the plan.

    Raises:
        PlanError: a value that is malformed, or parts that contradict each other.
    """

    strategy: Strategy = entry(member(Strategy), default=Strategy.LSDP)
    batch: Batch | None = entry(optional(record(Batch)), default=None)
    communication: Communication = entry(record(Communication), default=Communication())
    cluster: Cluster | None = entry(optional(record(Cluster)), default=None)
    # Sections that the planner adds. They explain a plan and do not change the training, so they are carried unchanged
    # and are no part of the digest.
    profile: dict[str, Any] | None = entry(optional(OBJECT), default=None, hash=False, repr=False)
    predicted: dict[str, Any] | None = entry(optional(OBJECT), default=None, hash=False, repr=False)
    certificate: dict[str, Any] | None = entry(optional(OBJECT), default=None, hash=False, repr=False)
    automatic: Automatic | None = entry(optional(record(Automatic)), default=None)
    placement: ModelPlacement | None = entry(optional(record(ModelPlacement)), default=None)
    elastic: Elastic | None = entry(optional(record(Elastic)), default=None)
    source: str | None = field(default=None, init=False, compare=False, repr=False)

    def _check_together(self) -> None:
        check_placement(self.strategy, self.placement, self.world_size)
        check_sections_agree(
            self.strategy, self.communication, self.batch, self.cluster, self.automatic, self.placement
        )
        check_elastic(self.elastic, self.automatic, self.placement)

    @classmethod
    def from_batch_sizes(
        cls,
        sizes: Iterable[int | tuple[int, int]],
        *,
        strategy: Strategy | str = Strategy.LSDP,
        allow_unequal_accumulation: bool = False,
        communication_dtype: str = "fp32",
        powersgd_rank: int = POWERSGD_RANK,
        powersgd_warmup_steps: int = POWERSGD_WARMUP_STEPS,
        intra_node: str = "auto",
        cluster: Cluster | None = None,
        profile: dict[str, Any] | None = None,
        predicted: dict[str, Any] | None = None,
        certificate: dict[str, Any] | None = None,
        placement: ModelPlacement | None = None,
    ) -> Plan:
        """A plan from one entry a rank: a batch size, or (micro-batch size, accumulation steps). They may be mixed.

        Raises:
            PlanError: an entry or a keyword has an impossible value.
        """
        # Strings, mappings and sets can be iterated too, but their items or order are not one size a rank.
        if isinstance(sizes, (str, bytes, Mapping, Set)) or not isinstance(sizes, Iterable):
            raise PlanError(f"found {describe(sizes)} for the batch sizes, expected a list with one entry a rank.")
        ranks = []
        for rank, size in enumerate(sizes):
            with located(f"batch.ranks[{rank}]"):
                pair = size if isinstance(size, (list, tuple)) else (size, 1)
                if len(pair) != 2:
                    raise PlanError(f"found {describe(size)}, expected a size or (size, accumulation steps).")
                ranks.append(RankBatch(rank, *(plain_integer(number) for number in pair)))
        with located("batch"):
            batch = Batch(tuple(ranks), allow_unequal_accumulation)
        with located("communication"):
            communication = Communication(communication_dtype, powersgd_rank, powersgd_warmup_steps, intra_node)
        return cls(strategy, batch, communication, cluster, profile, predicted, certificate, placement=placement)

    @classmethod
    def equal(
        cls,
        *,
        strategy: Strategy | str = Strategy.LSDP,
        communication_dtype: str = "fp32",
        powersgd_rank: int = POWERSGD_RANK,
        powersgd_warmup_steps: int = POWERSGD_WARMUP_STEPS,
        intra_node: str = "auto",
        placement: ModelPlacement | None = None,
    ) -> Plan:
        """A plan without sizes: every loader keeps its own batch_size on every rank."""
        with located("communication"):
            communication = Communication(communication_dtype, powersgd_rank, powersgd_warmup_steps, intra_node)
        return cls(strategy=strategy, communication=communication, placement=placement)

    @classmethod
    def auto(
        cls,
        total_batch_size: int | None = None,
        *,
        strategy: Strategy | str = Strategy.LSDP,
        rebalance_every: int = REBALANCE_EVERY,
        dead_band: float = DEAD_BAND,
        **communication: str | int,
    ) -> Plan:
        """A plan whose batch sizes the run finds itself, from an equal split of `total_batch_size` samples.

        Args:
            total_batch_size: None: as many as the script's own batch size and the ranks make.
            rebalance_every: optimizer steps between two checks whether other sizes are better, once sizes are stable.
            dead_band: the part of the step time (0 to 1) that new sizes have to save.
            **communication: communication_dtype, powersgd_rank, powersgd_warmup_steps, intra_node, as for `equal`.

        Raises:
            PlanError: a value is impossible.
        """
        with located("automatic"):
            automatic = Automatic(plain_integer(total_batch_size), rebalance_every, dead_band)
        return replace(cls.equal(strategy=strategy, **communication), automatic=automatic)

    def with_batch(self, batch: Batch) -> Plan:
        """This plan with other batch sizes, without the prediction and the certificate of the old ones."""
        return self._changed(batch=batch, predicted=None, certificate=None)

    def with_total(self, batch: Batch) -> Plan:
        """This plan with the global batch size that the run has found, and the batch sizes to start with."""
        return self._changed(batch=batch, automatic=replace(self.automatic, total=batch.total))

    def with_automatic(self, automatic: Automatic) -> Plan:
        """This plan with automatic batch sizes, which start from the sizes of the plan."""
        return self._changed(automatic=automatic)

    def for_ranks(self, ranks: int, *, as_planned: bool) -> Plan:
        """This plan for the ranks that are there now: with its batch sizes if they are for as many, else without.

        Args:
            ranks: how many.
            as_planned: whether they are those that the plan was made for, in their order. Nodes are in another order
                when some have returned, so curves of ranks are not theirs any more.
        """
        if self.batch is None or self.world_size == ranks:
            curves = self.profile if as_planned and self.world_size == ranks else None
            return self._changed(cluster=None, profile=curves)
        total = replace(self.automatic, total=self.batch.total)
        return self._changed(batch=None, automatic=total, cluster=None, profile=None, predicted=None, certificate=None)

    def with_placement(self, placement: ModelPlacement) -> Plan:
        """This plan with another placement of the model's units, without the prediction and certificate of the old.

        Raises:
            PlanError: the plan's strategy is not "osdp", or its format cannot be carried by a unit.
        """
        return self._changed(placement=placement, predicted=None, certificate=None)

    def _changed(self, **changes: Any) -> Plan:
        changed = replace(self, **changes)
        # `source` is no argument of __init__, so `replace` leaves it out.
        object.__setattr__(changed, "source", self.source)
        return changed

    @property
    def world_size(self) -> int | None:
        """Number of ranks of the plan; None for equal batches, which fit any number."""
        return None if self.batch is None else len(self.batch.ranks)

    @property
    def leaves_placement_open(self) -> bool:
        """Whether it leaves to the run where each unit of the model is kept."""
        return self.strategy is Strategy.OSDP and self.placement is None

    @property
    def leaves_total_open(self) -> bool:
        """Whether the global batch is the script's own batch size times the number of ranks."""
        return self.automatic is not None and self.automatic.total is None

    @property
    def total_batch_size(self) -> int | None:
        """Samples in a global batch; None for equal batches, and where it follows from the script's own batch size."""
        if self.batch is None:
            return None if self.automatic is None else self.automatic.total
        return self.batch.total

    @property
    def batch_sizes(self) -> list[int] | None:
        """Samples of each rank in a global batch; None for equal batches, and for automatic ones before the run."""
        return None if self.batch is None else [part.batch_size for part in self.batch.ranks]

    @property
    def micro_batches(self) -> list[tuple[int, int]] | None:
        """(micro-batch size, accumulation steps) of each rank; None for equal batches."""
        if self.batch is None:
            return None
        return [(part.micro_batch_size, part.accumulation_steps) for part in self.batch.ranks]

    @property
    def has_accumulation(self) -> bool:
        """Whether some rank has more than one micro-batch in a global batch."""
        return self.batch is not None and any(part.accumulation_steps > 1 for part in self.batch.ranks)

    def check(self, world_size: int, shard_groups: Sequence[Sequence[int]], node_sizes: Sequence[int]) -> None:
        """Checks that the plan fits a run.

        Args:
            world_size: number of ranks.
            shard_groups: the ranks that share one copy of the parameters, group by group, covering all ranks once.
            node_sizes: ranks on each node, in rank order.

        Raises:
            PlanError: the plan does not fit the run; the message says what to change.
        """
        with located(source=self.source):
            check_fits_run(
                self.strategy,
                self.batch,
                self.cluster,
                world_size=world_size,
                shard_groups=shard_groups,
                node_sizes=node_sizes,
            )

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON values, in the layout of a plan file; parts that are not there are left out."""
        document = {"version": PLAN_VERSION, **Record.to_dict(self)}
        return {key: value for key, value in document.items() if value is not None}

    @classmethod
    def from_dict(cls, document: object) -> Plan:
        """The plan in a plan file's layout.

        Raises:
            PlanError: unknown or missing keys, wrong types, impossible or contradicting values; it says where.
        """
        # First what no JSON can carry, then the version: a file of another version would give misleading errors below.
        require_json(document)
        require_version(document, PLAN_VERSION)
        # A file names its strategy, although the class has a default.
        require_object(document, required=("version", "strategy"), optional=_KEYS)
        sections = {key: value for key, value in document.items() if key != "version"}
        return cls.read(sections)

    def to_json(self) -> str:
        """The text of a plan file."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, *, source: str | None = None) -> Plan:
        """The plan in the text of a plan file; `source` is where the text came from, for error messages.

        Raises:
            PlanError: as `from_dict`, and for text that is empty or not JSON, or has a key twice.
        """
        with located(source=source):
            plan = cls.from_dict(parse_json(text))
        object.__setattr__(plan, "source", source)
        return plan

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """The plan in a file.

        Raises:
            PlanError: as `from_json`, and for a file that is missing, a directory, unreadable or not UTF-8.
        """
        with located(source=os.fspath(path)):
            text = read_text(Path(path))
        return cls.from_json(text, source=os.fspath(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan file. Whatever happens, `path` holds the old file or the whole new one.

        Raises:
            PlanError: the file cannot be written.
        """
        try:
            write_atomically(Path(path), self.to_json())
        except OSError as error:
            raise PlanError(
                f"cannot write the plan ({error.strerror}). Give a file name in a writable directory.",
                source=os.fspath(path),
            ) from error

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Plan | None:
        """The plan that ACCELERATE_LSHDP_PLAN holds (JSON, if it starts with "{") or names (a path); None if unset.

        Args:
            environ: where to look the variable up; `os.environ` if None.

        Raises:
            PlanError: as `load` and `from_json`, and for a variable that is set to nothing.
        """
        value = (os.environ if environ is None else environ).get(PLAN_VARIABLE)
        if value is None:
            return None
        if not value.strip():
            raise PlanError(
                "found nothing, expected a path or JSON. Set it, or unset the variable.", source=PLAN_VARIABLE
            )
        # A path may begin with a brace only in theory; JSON of a plan always does.
        return cls.from_json(value, source=PLAN_VARIABLE) if value.lstrip().startswith("{") else cls.load(value)

    def digest(self) -> str:
        """SHA-256, in hex, of the sections that change training: strategy, batch, communication and cluster.

        Ranks compare digests at the start of a run. Sizes that the run finds itself change the speed only, so with
        `automatic` the digest covers that section instead of `batch`.
        """
        return digest_of(Record.to_dict(self), left_out=_ANNOTATIONS)

    def __str__(self) -> str:
        return describe_plan(
            self.strategy,
            self.communication,
            batch=self.batch,
            automatic=self.automatic,
            cluster=self.cluster,
            placement=self.placement,
            predicted=self.predicted,
        )
