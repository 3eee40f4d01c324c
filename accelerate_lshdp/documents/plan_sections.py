# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The sections of a plan: immutable values, checked when they are made, and their readers."""

from __future__ import annotations

from dataclasses import dataclass, fields

from accelerate_lshdp.documents.value_checks import (
    LARGEST_BATCH,
    PlanError,
    describe,
    located,
    require_boolean,
    require_choice,
    require_integer,
    require_list,
    require_name,
    require_number,
    require_object,
    require_sections,
)
from accelerate_lshdp.documents.wire_format import WIRE_FORMATS


REBALANCE_EVERY, DEAD_BAND = 10, 0.03
POWERSGD_RANK, POWERSGD_WARMUP_STEPS = 8, 10
COMMUNICATION_DTYPES = tuple(WIRE_FORMATS)
INTRA_NODE = ("auto", "shared_memory", "collectives")


@dataclass(frozen=True, slots=True)
class RankBatch:
    """One rank's part of a global batch: `accumulation_steps` micro-batches of `micro_batch_size` samples each."""

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
    """One global batch, cut over ranks 0..world-1.

    Args:
        ranks: one entry a rank, in any order; kept in rank order.
        allow_unequal_accumulation: accept different numbers of micro-batches on different ranks, hence loops of
            unequal length.

    Raises:
        PlanError: a rank is missing or there twice, or a value is impossible.
    """

    ranks: tuple[RankBatch, ...]
    allow_unequal_accumulation: bool = False

    def __post_init__(self) -> None:
        require_boolean(self.allow_unequal_accumulation, "allow_unequal_accumulation")
        ranks = require_sections(self.ranks, "ranks", RankBatch)
        by_rank: dict[int, RankBatch] = {}
        for entry in ranks:
            if entry.rank in by_rank:
                raise PlanError(f"found rank {entry.rank} twice, expected it once. Remove one of them.", path="ranks")
            by_rank[entry.rank] = entry
        # Entries are unique here, so as many as the largest number plus one means that none is missing.
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
                " batch.allow_unequal_accumulation (loops then differ in length; ranks that share parameters cannot).",
                path="ranks",
            )

    @property
    def total(self) -> int:
        """Samples in a global batch."""
        return sum(entry.batch_size for entry in self.ranks)


@dataclass(frozen=True, slots=True)
class Automatic:
    """Automatic batch sizes: the run measures its own steps and re-balances the batch sizes while it trains.

    Args:
        total: samples in a global batch, which never changes. None: the script's own batch size times the number of
            ranks, which is known as soon as the script trains.
        rebalance_every: optimizer steps between two checks whether other sizes are better, once sizes are stable.
        dead_band: the part of the step time (0 to 1) that new sizes have to save; less is taken for noise.
    """

    total: int | None = None
    rebalance_every: int = REBALANCE_EVERY
    dead_band: float = DEAD_BAND

    def __post_init__(self) -> None:
        if self.total is not None:
            require_integer(self.total, "total", least=1)
        require_integer(self.rebalance_every, "rebalance_every", least=1)
        require_number(self.dead_band, "dead_band", positive=False)
        # 0 and 0.0 are written differently in JSON, but are the same setting and must have one digest.
        object.__setattr__(self, "dead_band", float(self.dead_band))
        if self.total is not None and self.total > LARGEST_BATCH:
            raise PlanError(f"found {self.total} samples, expected at most {LARGEST_BATCH}. Lower it.", path="total")
        if self.dead_band >= 1:
            raise PlanError(
                f"found {self.dead_band}, expected less than 1: a share of the step time, such as 0.03.",
                path="dead_band",
            )

    def to_dict(self) -> dict[str, int | float]:
        """The section of a plan file."""
        total = {} if self.total is None else {"total": self.total}
        return {**total, "rebalance_every": self.rebalance_every, "dead_band": self.dead_band}


@dataclass(frozen=True, slots=True)
class Communication:
    """The format of gradients between ranks, and the mechanism by which ranks of a node share them.

    Args:
        dtype: "fp32" (exact), "bf16", "int8" (a quarter of the bytes of fp32) or "powersgd" (matrices of low rank).
        powersgd_rank: rank of the matrices that approximate gradients under "powersgd" (Vogels et al., 2019).
        powersgd_warmup_steps: number of steps at the start of a run with "powersgd" whose gradients are exact.
        intra_node: how the ranks of a node share parameters and gradients: "shared_memory" (CPU only: one copy of both
            in memory that all of them map), "collectives", or "auto": shared memory where it can be.
    """

    dtype: str = "fp32"
    powersgd_rank: int = POWERSGD_RANK
    powersgd_warmup_steps: int = POWERSGD_WARMUP_STEPS
    intra_node: str = "auto"

    def __post_init__(self) -> None:
        require_choice(self.dtype, "dtype", COMMUNICATION_DTYPES)
        require_choice(self.intra_node, "intra_node", INTRA_NODE)
        require_integer(self.powersgd_rank, "powersgd_rank", least=1)
        require_integer(self.powersgd_warmup_steps, "powersgd_warmup_steps", least=0)
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


@dataclass(frozen=True, slots=True)
class Link:
    """The network between nodes: rate in bits per second (1 Gb/s = 1e9), one-way latency in seconds."""

    bandwidth_bits_per_second: float
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        require_number(self.bandwidth_bits_per_second, "bandwidth_bits_per_second", positive=True)
        require_number(self.latency_seconds, "latency_seconds", positive=False)
        # Equal plans must have equal digests, and JSON writes 1000000000 and 1e9 differently.
        object.__setattr__(self, "bandwidth_bits_per_second", float(self.bandwidth_bits_per_second))
        object.__setattr__(self, "latency_seconds", float(self.latency_seconds))


@dataclass(frozen=True, slots=True)
class Node:
    """One machine: its number of ranks and, optionally, its address and device ("cpu", "cuda", a product name)."""

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
    """The nodes of a run in rank order: the first node runs ranks 0..ranks-1, and so on."""

    nodes: tuple[Node, ...]
    link: Link | None = None

    def __post_init__(self) -> None:
        nodes = require_sections(self.nodes, "nodes", Node)
        if self.link is not None and not isinstance(self.link, Link):
            raise PlanError(f"found {describe(self.link)}, expected a Link or None.", path="link")
        object.__setattr__(self, "nodes", nodes)

    @property
    def node_sizes(self) -> list[int]:
        """Ranks on each node."""
        return [node.ranks for node in self.nodes]


def read_batch(document: object) -> Batch:
    """The `batch` section of a plan file. Raises PlanError, with paths inside the section."""
    section = require_object(document, required=("total", "ranks"), optional=("allow_unequal_accumulation",))
    require_integer(section["total"], "total", least=1)
    ranks = []
    for index, entry in enumerate(require_list(section["ranks"], "ranks", "rank")):
        with located(f"ranks[{index}]"):
            keys = {"required": ("rank", "micro_batch_size"), "optional": ("accumulation_steps",)}
            ranks.append(RankBatch(**require_object(entry, **keys)))
    # The total is redundant on purpose: a file edited by hand in one place only is an error, not another batch.
    batch = Batch(tuple(ranks), section.get("allow_unequal_accumulation", False))
    if batch.total != section["total"]:
        sizes = " + ".join(str(entry.batch_size) for entry in batch.ranks)
        raise PlanError(
            f"found {section['total']}, expected {batch.total}, the sum of the ranks' batch sizes ({sizes}). Correct"
            " the total or the ranks.",
            path="total",
        )
    return batch


def read_communication(document: object) -> Communication:
    """The `communication` section of a plan file. Raises PlanError, with paths inside the section."""
    optional = ("dtype", "powersgd_rank", "powersgd_warmup_steps", "intra_node")
    return Communication(**require_object(document, optional=optional))


def read_cluster(document: object) -> Cluster:
    """The `cluster` section of a plan file. Raises PlanError, with paths inside the section."""
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


def read_automatic(document: object) -> Automatic:
    """The `automatic` section of a plan file. Raises PlanError, with paths inside the section."""
    section = require_object(document, optional=("total", "rebalance_every", "dead_band"))
    # `null` is refused in a file: a plan without a total leaves the key out.
    if "total" in section:
        require_integer(section["total"], "total", least=1)
    return Automatic(**section)
