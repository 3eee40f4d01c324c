# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The topology of a run: which rank runs on which node.

A *node* is what one launcher process started: torchrun and ``accelerate launch`` tell every rank its node
(``GROUP_RANK``) and how many ranks the node has (``LOCAL_WORLD_SIZE``). Nodes may have different numbers of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch.distributed as dist


#: The one explicit override, for tests and for launchers that set neither variable: ranks per node, as in ``1,2``.
NODES_VARIABLE = "ACCELERATE_LSHDP_NODES"


class TopologyError(RuntimeError):
    """The launcher's description of nodes and ranks does not add up."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The place of this rank among all ranks.

    Args:
        rank: this process's rank in the world.
        node_sizes: number of ranks on each node; ranks are numbered node by node.
        device_types: of the devices that the ranks of each node train on (``"cpu"``, ``"cuda"``); empty: all alike.
    """

    rank: int
    node_sizes: tuple[int, ...]
    device_types: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.node_sizes or min(self.node_sizes) < 1:
            raise TopologyError(f"every node needs at least one rank, found ranks per node {list(self.node_sizes)}")
        if not 0 <= self.rank < self.world_size:
            raise TopologyError(f"rank {self.rank} is outside a world of {self.world_size} ranks")
        if self.device_types and len(self.device_types) != len(self.node_sizes):
            raise TopologyError(
                f"found device types {list(self.device_types)}, expected one for each of {len(self.node_sizes)} nodes"
            )

    @property
    def world_size(self) -> int:
        return sum(self.node_sizes)

    @property
    def num_nodes(self) -> int:
        return len(self.node_sizes)

    @property
    def node_groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node."""
        # Launchers number ranks node by node, which `discover` has checked.
        ends = list(accumulate(self.node_sizes))
        return tuple(tuple(range(end - size, end)) for end, size in zip(ends, self.node_sizes, strict=True))

    @property
    def node(self) -> int:
        return next(index for index, ranks in enumerate(self.node_groups) if self.rank in ranks)

    @property
    def local_rank(self) -> int:
        return self.node_groups[self.node].index(self.rank)

    def name_of(self, rank: int) -> str:
        """The name of a rank in a message, the same on all ranks: on a single node its place there."""
        alone = len(self.node_sizes) == 1 and self.world_size > 1
        return f"local rank {rank} of this node" if alone else f"rank {rank}"

    @property
    def is_uneven(self) -> bool:
        """Whether nodes have different numbers of ranks."""
        return len(set(self.node_sizes)) > 1

    @property
    def mixes_devices(self) -> bool:
        """Whether ranks of different nodes train on different types of devices, so that only their hosts can meet."""
        return len(set(self.device_types)) > 1

    @classmethod
    def discover(
        cls, rank: int, world_size: int, environ: Mapping[str, str] = os.environ, *, device_type: str = ""
    ) -> Topology:
        """Agrees on the topology with all ranks (collective, if a process group exists).

        Args:
            rank: this process's rank.
            world_size: number of processes.
            environ: where the launcher's variables are read from.
            device_type: of the device that this rank trains on; empty: it does not matter.

        Raises:
            TopologyError: if the launcher's variables do not describe whole nodes of contiguous ranks, or ranks of one
                node train on different types of devices.
        """
        local_size = int(environ.get("LOCAL_WORLD_SIZE", world_size))
        node, local_rank = int(environ.get("GROUP_RANK", rank // local_size)), int(environ.get("LOCAL_RANK", -1))
        own = (device_type, environ.get(NODES_VARIABLE), node, local_rank, local_size)
        everyone = [own] * world_size
        if world_size > 1:
            # Checked only after the exchange, and on the same values: all ranks raise the same error, or none does.
            dist.all_gather_object(everyone, own)
        sizes = _agreed_sizes([place for _, *place in everyone])
        return cls(rank, sizes, _types_of_nodes([each for each, *_ in everyone], sizes))


def _agreed_sizes(everyone: Sequence[Sequence[Any]]) -> tuple[int, ...]:
    """Ranks per node, from each rank's (value of ``NODES_VARIABLE``, node, local rank, ranks on the node)."""
    world_size = len(everyone)
    overrides = {override for override, *_ in everyone}
    if overrides == {None}:
        return _node_sizes([place for _, *place in everyone]) if world_size > 1 else (1,)
    if len(overrides) > 1:
        raise TopologyError(f"{NODES_VARIABLE} differs between ranks: {sorted(map(str, overrides))}; set one value")
    sizes = _parse_sizes(overrides.pop())
    if sum(sizes) != world_size:
        raise TopologyError(
            f"{NODES_VARIABLE} describes {sum(sizes)} ranks on nodes {list(sizes)}, but {world_size} were "
            "launched; correct it or leave it unset"
        )
    return sizes


def _types_of_nodes(types: Sequence[str], sizes: Sequence[int]) -> tuple[str, ...]:
    """The type of the devices of each node; empty if all are alike."""
    if len(set(types)) == 1:
        return ()
    ends = list(accumulate(sizes))
    found = [set(types[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    for node, own in enumerate(found):
        if len(own) > 1:
            raise TopologyError(
                f"the ranks of node {node} train on devices of types {sorted(own)}, expected one type on a node: "
                "nodes may differ, and a machine that has both can be started as two nodes"
            )
    return tuple(own.pop() for own in found)


def _parse_sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise TopologyError(f"{NODES_VARIABLE}={text!r} should be ranks per node, such as 1,2") from None


def _node_sizes(places: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Ranks per node from each rank's (node, local rank, ranks on the node); checks that they agree."""
    # Launchers number ranks node by node, so the ranks of one node follow each other; local ranks are not compared, as
    # some launchers do not give them.
    sizes: list[int] = []
    rank = 0
    while rank < len(places):
        node, _, size = places[rank]
        members = places[rank : rank + size]
        if len(members) < size or any(member[0] != node or member[2] != size for member in members):
            raise TopologyError(
                "the launcher's variables do not describe whole nodes of consecutive ranks: "
                f"(GROUP_RANK, LOCAL_RANK, LOCAL_WORLD_SIZE) of ranks 0..{len(places) - 1} are {list(places)}. "
                f"Start one launcher a node, each with its own machine rank, "
                f"or set {NODES_VARIABLE} to the number of ranks per node"
            )
        sizes.append(size)
        rank += size
    return tuple(sizes)
