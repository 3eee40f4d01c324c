# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The plan: who trains how much, how the model is placed, and how gradients travel.

A `Plan` is the one thing that moves between commands, ranks and runs. It is immutable, checked when it is made, written as
JSON with a version, and reading it needs neither torch nor a device.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from accelerate_lshdp.plan_validation import (
    LARGEST_BATCH,
    PlanError,
    describe,
    located,
    parse_json,
    read_text,
    require_boolean,
    require_choice,
    require_integer,
    require_json,
    require_list,
    require_name,
    require_number,
    require_object,
)


__all__ = [
    "PLAN_VARIABLE",
    "PLAN_VERSION",
    "Batch",
    "Cluster",
    "Communication",
    "Link",
    "Node",
    "Plan",
    "PlanError",
    "RankBatch",
    "Strategy",
]

PLAN_VERSION = 1
PLAN_VARIABLE = "ACCELERATE_LSHDP_PLAN"
_COMMUNICATION_DTYPES = ("fp32", "bf16")
# What the planner adds. It explains a plan and does not change the training, so it is carried as it is.
_ANNOTATIONS = ("profile", "predicted", "certificate")


class Strategy(str, Enum):
    """Where parameters, gradients and optimizer state live."""

    DDP = "ddp"
    ZERO2 = "zero2"
    FSDP = "fsdp"
    FSDP_OFFLOAD = "fsdp_offload"
    GROUP_SHARDING = "group_sharding"
    LSDP = "lsdp"

    def __str__(self) -> str:
        return self.value

    @property
    def is_world_sharded(self) -> bool:
        """Each rank keeps 1/world of the parameters, so all ranks form one shard group."""
        return self in (Strategy.ZERO2, Strategy.FSDP, Strategy.FSDP_OFFLOAD)

    @property
    def is_node_sharded(self) -> bool:
        """Each node keeps a full copy, sharded over its ranks."""
        return self in (Strategy.GROUP_SHARDING, Strategy.LSDP)

    @property
    def is_offloaded(self) -> bool:
        """Parameters and optimizer state live in host memory."""
        return self in (Strategy.FSDP_OFFLOAD, Strategy.LSDP)


@dataclass(frozen=True, slots=True)
class RankBatch:
    """What one rank does in a global batch: `accumulation_steps` micro-batches of `micro_batch_size` samples each."""

    rank: int
    micro_batch_size: int
    accumulation_steps: int = 1

    def __post_init__(self) -> None:
        require_integer(self.rank, "rank", least=0)
        require_integer(self.micro_batch_size, "micro_batch_size", least=1)
        require_integer(self.accumulation_steps, "accumulation_steps", least=1)
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
class Batch:
    """One global batch, cut over ranks 0..world-1 (kept in rank order, whatever order they are given in).

    `allow_unequal_accumulation` accepts different numbers of micro-batches on different ranks, hence loops of different length.
    """

    ranks: tuple[RankBatch, ...]
    allow_unequal_accumulation: bool = False

    def __post_init__(self) -> None:
        require_boolean(self.allow_unequal_accumulation, "allow_unequal_accumulation")
        ranks = list(self.ranks)
        if not ranks or not all(isinstance(rank, RankBatch) for rank in ranks):
            raise PlanError(
                "found something else, expected at least one RankBatch. Give one for each rank.", path="ranks"
            )
        by_rank: dict[int, RankBatch] = {}
        for entry in ranks:
            if entry.rank in by_rank:
                raise PlanError(f"found rank {entry.rank} twice, expected it once. Remove one of them.", path="ranks")
            by_rank[entry.rank] = entry
        missing = next((rank for rank in range(len(ranks)) if rank not in by_rank), None)
        if missing is not None:
            raise PlanError(
                f"found {len(ranks)} ranks up to {max(by_rank)} but no rank {missing}, expected ranks"
                f" 0 to {len(ranks) - 1}. Add or renumber them.",
                path="ranks",
            )
        object.__setattr__(self, "ranks", tuple(by_rank[rank] for rank in range(len(ranks))))
        if self.total > LARGEST_BATCH:
            raise PlanError(f"found {self.total} samples, expected at most {LARGEST_BATCH}. Lower them.", path="total")
        counts = [entry.accumulation_steps for entry in self.ranks]
        if len(set(counts)) > 1 and not self.allow_unequal_accumulation:
            raise PlanError(
                f"found accumulation_steps {counts}, expected the same number on every rank. Make them equal, or set"
                " allow_unequal_accumulation (loops then differ in length between ranks).",
                path="ranks",
            )

    @property
    def total(self) -> int:
        """Samples in a global batch."""
        return sum(entry.batch_size for entry in self.ranks)


@dataclass(frozen=True, slots=True)
class Communication:
    """How gradients travel between ranks: `dtype` is "fp32" or "bf16"."""

    dtype: str = "fp32"

    def __post_init__(self) -> None:
        require_choice(self.dtype, "dtype", _COMMUNICATION_DTYPES)


@dataclass(frozen=True, slots=True)
class Link:
    """The network between nodes, in bits per second (1 Gb/s = 1e9) and seconds."""

    bandwidth_bits_per_second: float
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        require_number(self.bandwidth_bits_per_second, "bandwidth_bits_per_second", positive=True)
        require_number(self.latency_seconds, "latency_seconds", positive=False)


@dataclass(frozen=True, slots=True)
class Node:
    """One machine: how many ranks it runs, and optionally its address and what it computes on ("cpu", "cuda", a model name)."""

    ranks: int
    address: str | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        require_integer(self.ranks, "ranks", least=1)
        if self.address is not None:
            require_name(self.address, "address", "a host name or address")
        if self.device is not None:
            require_name(self.device, "device", "the name of a device")


@dataclass(frozen=True, slots=True)
class Cluster:
    """The machines, in rank order: the first node runs ranks 0..ranks-1, and so on."""

    nodes: tuple[Node, ...]
    link: Link | None = None

    def __post_init__(self) -> None:
        nodes = tuple(self.nodes)
        if not nodes or not all(isinstance(node, Node) for node in nodes):
            raise PlanError(
                "found something else, expected at least one Node. Give one for each machine.", path="nodes"
            )
        if self.link is not None and not isinstance(self.link, Link):
            raise PlanError(f"found {describe(self.link)}, expected a Link or None.", path="link")
        object.__setattr__(self, "nodes", nodes)

    @property
    def node_sizes(self) -> list[int]:
        """Ranks on each node."""
        return [node.ranks for node in self.nodes]


@dataclass(frozen=True, slots=True)
class Plan:
    """One training plan. `batch=None` means equal batches: every loader keeps its own batch_size on every rank.

    `profile`, `predicted` and `certificate` are JSON objects from the planner, carried unchanged. `source` names the file or
    variable that the plan was read from, for error messages; it is not part of the plan.

    Raises:
        PlanError: a value that is malformed, or parts that contradict each other.
    """

    strategy: Strategy = Strategy.LSDP
    batch: Batch | None = None
    communication: Communication = Communication()
    cluster: Cluster | None = None
    profile: dict[str, Any] | None = field(default=None, hash=False, repr=False)
    predicted: dict[str, Any] | None = field(default=None, hash=False, repr=False)
    certificate: dict[str, Any] | None = field(default=None, hash=False, repr=False)
    source: str | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        require_choice(self.strategy, "strategy", [strategy.value for strategy in Strategy])
        object.__setattr__(self, "strategy", Strategy(self.strategy))
        for name, kind in (("batch", Batch), ("communication", Communication), ("cluster", Cluster)):
            value = getattr(self, name)
            if not isinstance(value, kind) and (value is not None or name == "communication"):
                raise PlanError(f"found {describe(value)}, expected a {kind.__name__}.", path=name)
        for name in _ANNOTATIONS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, dict):
                raise PlanError(f"found {describe(value)}, expected an object. Write one, or leave it out.", path=name)
            require_json(value, name)
            object.__setattr__(self, name, deepcopy(value))
        if self.batch is not None and self.cluster is not None:
            ranks = sum(self.cluster.node_sizes)
            if ranks != self.world_size:
                raise PlanError(
                    f"found {ranks} ranks on the nodes {self.cluster.node_sizes}, expected the {self.world_size} of"
                    " batch.ranks. Correct one of the two.",
                    path="cluster.nodes",
                )

    @classmethod
    def from_batch_sizes(
        cls,
        sizes: Iterable[int | tuple[int, int]],
        *,
        strategy: Strategy | str = Strategy.LSDP,
        allow_unequal_accumulation: bool = False,
        communication_dtype: str = "fp32",
        cluster: Cluster | None = None,
        profile: dict[str, Any] | None = None,
        predicted: dict[str, Any] | None = None,
        certificate: dict[str, Any] | None = None,
    ) -> Plan:
        """A plan from one entry a rank: a batch size, or (micro-batch size, accumulation steps). They may be mixed.

        Raises:
            PlanError: an entry or a keyword has an impossible value.
        """
        if isinstance(sizes, (str, bytes, Mapping, Set)) or not isinstance(sizes, Iterable):
            raise PlanError(f"found {describe(sizes)} for the batch sizes, expected a list with one entry a rank.")
        ranks = []
        for rank, entry in enumerate(sizes):
            with located(f"batch.ranks[{rank}]"):
                pair = entry if isinstance(entry, (list, tuple)) else (entry, 1)
                if len(pair) != 2:
                    raise PlanError(f"found {describe(entry)}, expected a size or (size, accumulation steps).")
                ranks.append(RankBatch(rank, *(_plain_integer(number) for number in pair)))
        with located("batch"):
            batch = Batch(tuple(ranks), allow_unequal_accumulation)
        with located("communication"):
            communication = Communication(communication_dtype)
        return cls(strategy, batch, communication, cluster, profile, predicted, certificate)

    @classmethod
    def equal(cls, *, strategy: Strategy | str = Strategy.LSDP, communication_dtype: str = "fp32") -> Plan:
        """A plan without sizes: every loader keeps its own batch_size on every rank."""
        with located("communication"):
            communication = Communication(communication_dtype)
        return cls(strategy=strategy, communication=communication)

    @property
    def world_size(self) -> int | None:
        """Number of ranks the plan is made for; None for equal batches, which fit any."""
        return None if self.batch is None else len(self.batch.ranks)

    @property
    def total_batch_size(self) -> int | None:
        """Samples in a global batch; None for equal batches."""
        return None if self.batch is None else self.batch.total

    @property
    def batch_sizes(self) -> list[int] | None:
        """Samples of each rank in a global batch; None for equal batches."""
        return None if self.batch is None else [entry.batch_size for entry in self.batch.ranks]

    @property
    def micro_batches(self) -> list[tuple[int, int]] | None:
        """(micro-batch size, accumulation steps) of each rank; None for equal batches."""
        if self.batch is None:
            return None
        return [(entry.micro_batch_size, entry.accumulation_steps) for entry in self.batch.ranks]

    @property
    def has_accumulation(self) -> bool:
        """Whether some rank has more than one micro-batch in a global batch."""
        return self.batch is not None and any(entry.accumulation_steps > 1 for entry in self.batch.ranks)

    def check(self, world_size: int, shard_groups: Sequence[Sequence[int]], node_sizes: Sequence[int]) -> None:
        """Checks that the plan fits a run.

        Args:
            world_size: number of ranks.
            shard_groups: the ranks that share one copy of the parameters, group by group, covering all ranks once.
            node_sizes: ranks on each node, in rank order.

        Raises:
            PlanError: it does not fit.
        """
        with located(source=self.source):
            if self.world_size not in (None, world_size):
                raise PlanError(
                    f"found batch sizes for {self.world_size} ranks, expected {world_size}, the processes of this run."
                    f" Launch {self.world_size} processes, or make a plan for {world_size}.",
                    path="batch.ranks",
                )
            if self.cluster is not None and self.cluster.node_sizes != list(node_sizes):
                raise PlanError(
                    f"found nodes of {self.cluster.node_sizes} ranks, expected {list(node_sizes)}, the nodes of this"
                    " run. Launch as the plan says, or correct or remove its cluster.",
                    path="cluster.nodes",
                )
            if self.batch is None:
                return
            for group in shard_groups:
                counts = [self.batch.ranks[rank].accumulation_steps for rank in group]
                if len(set(counts)) > 1:
                    raise PlanError(
                        f"found accumulation_steps {counts} on ranks {list(group)}, which share one copy of the"
                        f' parameters under "{self.strategy}", expected equal numbers inside the group (its ranks gather'
                        " parameters together). Make them equal, or use a strategy that does not shard across these"
                        " ranks.",
                        path="batch.ranks",
                    )

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON values, in the layout of a plan file; parts that are not there are left out."""
        document: dict[str, Any] = {"version": PLAN_VERSION, **self._what_changes_training()}
        document.update({name: deepcopy(getattr(self, name)) for name in _ANNOTATIONS})
        return {key: value for key, value in document.items() if value is not None}

    @classmethod
    def from_dict(cls, document: object) -> Plan:
        """The plan in a plan file's layout.

        Raises:
            PlanError: unknown or missing keys, wrong types, impossible or contradicting values; it says where.
        """
        require_json(document)
        require_version(document)
        sections = require_object(
            document,
            required=("version", "strategy"),
            optional=("batch", "communication", "cluster", *_ANNOTATIONS),
        )
        communication = Communication()
        if "communication" in sections:
            with located("communication"):
                communication = Communication(**require_object(sections["communication"], optional=("dtype",)))
        batch = cluster = None
        if sections.get("batch") is not None:
            with located("batch"):
                batch = _read_batch(sections["batch"])
        if sections.get("cluster") is not None:
            with located("cluster"):
                cluster = _read_cluster(sections["cluster"])
        annotations = (sections.get(name) for name in _ANNOTATIONS)
        return cls(sections["strategy"], batch, communication, cluster, *annotations)

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
        target = Path(path)
        beside = target.with_name(f".plan-{secrets.token_hex(8)}.tmp")
        try:
            try:
                with open(beside, "x", encoding="utf-8") as file:
                    file.write(self.to_json())
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(beside, target)
            finally:
                beside.unlink(missing_ok=True)
        except OSError as error:
            raise PlanError(
                f"cannot write the plan ({error.strerror}). Give a file name in a directory that exists and is writable.",
                source=os.fspath(path),
            ) from error

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Plan | None:
        """The plan that ACCELERATE_LSHDP_PLAN holds (JSON, if it starts with "{") or names (a path); None if it is not set.

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
        return cls.from_json(value, source=PLAN_VARIABLE) if value.lstrip().startswith("{") else cls.load(value)

    def digest(self) -> str:
        """SHA-256, in hex, of what changes training: strategy, batch, communication and cluster. Ranks compare it."""
        canonical = json.dumps(self._what_changes_training(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode("ascii")).hexdigest()

    def _what_changes_training(self) -> dict[str, Any]:
        batch = None
        if self.batch is not None:
            batch = {
                "total": self.batch.total,
                "allow_unequal_accumulation": self.batch.allow_unequal_accumulation,
                "ranks": [asdict(entry) for entry in self.batch.ranks],
            }
        cluster = None
        if self.cluster is not None:
            link = None if self.cluster.link is None else asdict(self.cluster.link)
            cluster = {"nodes": [asdict(node) for node in self.cluster.nodes], "link": link}
        return {
            "strategy": self.strategy.value,
            "batch": batch,
            "communication": asdict(self.communication),
            "cluster": cluster,
        }

    def __str__(self) -> str:
        head = f"strategy {self.strategy}, communication {self.communication.dtype}"
        if self.batch is None:
            return f"Plan: {head}\nequal batches: every loader keeps its own batch_size on every rank"
        columns = ["rank", "micro-batch", "accumulation", "batch", "share"]
        rows = [
            [
                entry.rank,
                entry.micro_batch_size,
                entry.accumulation_steps,
                entry.batch_size,
                entry.batch_size / self.batch.total,
            ]
            for entry in self.batch.ranks
        ]
        table = [columns, *([*map(str, row[:-1]), f"{row[-1]:.1%}"] for row in rows)]
        table.append(["total", "", "", str(self.batch.total), "100.0%"])
        if self.cluster is not None:
            nodes = [str(index) for index, size in enumerate(self.cluster.node_sizes) for _ in range(size)]
            for line, cell in zip(table, ["node", *nodes, ""], strict=True):
                line.insert(1, cell)
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table
        ]
        scalars = {k: v for k, v in (self.predicted or {}).items() if isinstance(v, (int, float))}
        if scalars:
            lines.append("predicted: " + ", ".join(f"{name} {value:.4g}" for name, value in scalars.items()))
        return "\n".join([f"Plan: {head}", *lines])


def require_version(document: object) -> None:
    """Raises PlanError if `document` is an object of another version; said first, as every other complaint may follow from it."""
    if not isinstance(document, dict) or "version" not in document:
        return
    version = document["version"]
    if isinstance(version, bool) or not isinstance(version, int) or version != PLAN_VERSION:
        raise PlanError(
            f"found {describe(version)}, expected {PLAN_VERSION}, the version that this accelerate_lshdp reads. Write the"
            " plan again, or install the accelerate_lshdp that wrote it.",
            path="version",
        )


def _plain_integer(value: object) -> object:
    """NumPy and torch integers as int, so that a planner's arrays can be given as they are; anything else unchanged."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return value
    try:
        return operator.index(value)
    except TypeError:  # arrays and floating tensors have __index__ too; the field's own check names them
        return value


def _read_batch(document: object) -> Batch:
    section = require_object(document, required=("total", "ranks"), optional=("allow_unequal_accumulation",))
    require_integer(section["total"], "total", least=1)
    ranks = []
    for index, entry in enumerate(require_list(section["ranks"], "ranks", "rank")):
        with located(f"ranks[{index}]"):
            keys = {"required": ("rank", "micro_batch_size"), "optional": ("accumulation_steps",)}
            ranks.append(RankBatch(**require_object(entry, **keys)))
    batch = Batch(tuple(ranks), section.get("allow_unequal_accumulation", False))
    if batch.total != section["total"]:
        sizes = " + ".join(str(entry.batch_size) for entry in batch.ranks)
        raise PlanError(
            f"found {section['total']}, expected {batch.total}, the sum of the ranks' batch sizes ({sizes}). Correct the"
            " total or the ranks.",
            path="total",
        )
    return batch


def _read_cluster(document: object) -> Cluster:
    section = require_object(document, required=("nodes",), optional=("link",))
    nodes = []
    for index, entry in enumerate(require_list(section["nodes"], "nodes", "node")):
        with located(f"nodes[{index}]"):
            nodes.append(Node(**require_object(entry, required=("ranks",), optional=("address", "device"))))
    link = None
    if section.get("link") is not None:
        with located("link"):
            keys = {"required": ("bandwidth_bits_per_second",), "optional": ("latency_seconds",)}
            link = Link(**require_object(section["link"], **keys))
    return Cluster(tuple(nodes), link)
