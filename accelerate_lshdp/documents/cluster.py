# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`ClusterDescription`: the nodes of a cluster and the network between them, read from a YAML file.

nodes:
  - {cpu: 0.8, memory: 4 GiB}           # cores; memory and ranks (1) can be left out
  - {cpu: 0.3, ranks: 2}
network: {rate: 1 Gb/s, delay: 0.2 ms}  # of every node's link, in each direction; the delay can be left out
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate_lshdp.documents.strict_reading import read_yaml
from accelerate_lshdp.documents.value_checks import describe


_BYTES = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BITS_PER_SECOND = {"b/s": 1.0, "kb/s": 1e3, "Mb/s": 1e6, "Gb/s": 1e9}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
# Far above any machine, and small enough for lists with one entry a rank.
_MOST_CORES, _MOST_RANKS, _MOST_BYTES = 2**20, 4096, 2**60


@dataclass(frozen=True)
class NodeDescription:
    """One machine.

    Args:
        cpu: cores that all processes of the node share, e.g. 0.8 or 2.
        memory_bytes: memory that these processes may use in all; the kernel ends one that exceeds it. None: no limit.
        ranks: number of training processes on the node.

    Raises:
        ValueError: an impossible value.
    """

    cpu: float
    memory_bytes: int | None = None
    ranks: int = 1

    def __post_init__(self) -> None:
        _require_number("cpu", self.cpu, "cores of a node, more than 0", 0 < self.cpu <= _MOST_CORES)
        if self.memory_bytes is not None and not 1 <= self.memory_bytes <= _MOST_BYTES:
            raise ValueError(
                f"memory: found {self.memory_bytes} bytes, expected at least 1 and no more than a machine has; leave"
                " it out for no limit"
            )
        if not 1 <= self.ranks <= _MOST_RANKS:
            raise ValueError(f"ranks: found {self.ranks}, expected at least 1 and at most {_MOST_RANKS}")


@dataclass(frozen=True)
class NetworkDescription:
    """The links between the nodes and the switch that they share.

    Args:
        bits_per_second: rate of every node's link in each direction (full duplex), headers included; 1 Gb/s = 1e9.
        delay_seconds: one-way delay from one node to another, in addition to that of the machine itself.

    Raises:
        ValueError: an impossible value.
    """

    bits_per_second: float
    delay_seconds: float = 0.0

    def __post_init__(self) -> None:
        slow_enough = 1e4 <= self.bits_per_second <= 1e12
        _require_number("rate", self.bits_per_second, "10 kb/s to 1000 Gb/s", slow_enough)
        _require_number("delay", self.delay_seconds, "0 to 10 s", 0 <= self.delay_seconds <= 10)


@dataclass(frozen=True)
class ClusterDescription:
    """A cluster; see the module for its YAML form.

    Raises:
        ValueError: no node, or more than the 254 that a /24 network has addresses for.
    """

    nodes: tuple[NodeDescription, ...]
    network: NetworkDescription

    def __post_init__(self) -> None:
        # The emulated network gives each node an address of one /24.
        if not 1 <= len(self.nodes) <= 254:
            raise ValueError(f"nodes: found {len(self.nodes)}, expected 1 to 254")

    @staticmethod
    def load(path: str | Path) -> ClusterDescription:
        """Reads a YAML file.

        Raises:
            ValueError: what is wrong in it, with its path.
        """
        document = read_yaml(path, "cluster")
        try:
            return ClusterDescription.from_dict(document)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @staticmethod
    def from_dict(document: Any) -> ClusterDescription:
        """The cluster that the values of a YAML file describe.

        Raises:
            ValueError: unknown or missing keys, wrong types, impossible values.
        """
        document = _section("cluster", document, required={"nodes", "network"})
        if not isinstance(document["nodes"], list):
            raise ValueError(
                f"nodes: found {_shown(document['nodes'])}, expected a list such as [{{cpu: 0.8}}, {{cpu: 0.3}}]"
            )
        nodes = []
        for index, found in enumerate(document["nodes"]):
            where = f"nodes[{index}]"
            found = _section(where, found, required={"cpu"}, optional={"memory", "ranks"})
            try:
                memory = found.get("memory")
                # The class checks ranges, the helpers below types and units; both errors get the place in front.
                nodes.append(
                    NodeDescription(
                        cpu=_number("cpu", found["cpu"]),
                        memory_bytes=None if memory is None else int(_quantity("memory", memory, _BYTES, "4 GiB")),
                        ranks=_whole("ranks", found.get("ranks", 1)),
                    )
                )
            except ValueError as error:
                raise ValueError(f"{where}.{error}") from None
        found = _section("network", document["network"], required={"rate"}, optional={"delay"})
        try:
            network = NetworkDescription(
                bits_per_second=_quantity("rate", found["rate"], _BITS_PER_SECOND, "1 Gb/s"),
                delay_seconds=_quantity("delay", found.get("delay", 0), _SECONDS, "0.2 ms"),
            )
        except ValueError as error:
            raise ValueError(f"network.{error}") from None
        return ClusterDescription(tuple(nodes), network)

    def to_dict(self) -> dict[str, Any]:
        """The values that `from_dict` reads, in units that lose no precision."""
        nodes: list[dict[str, Any]] = []
        for node in self.nodes:
            memory = {} if node.memory_bytes is None else {"memory": f"{node.memory_bytes} B"}
            nodes.append({"cpu": node.cpu, **memory, "ranks": node.ranks})
        # repr is the shortest text that reads back as the same float.
        rate, delay = self.network.bits_per_second, self.network.delay_seconds
        return {"nodes": nodes, "network": {"rate": f"{rate!r} b/s", "delay": f"{delay!r} s"}}


def _section(where: str, found: Any, required: set[str], optional: set[str] = frozenset()) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        raise ValueError(f"{where}: found {_shown(found)}, expected a mapping with {_names(required)}")
    unknown, absent = set(found) - required - optional, required - set(found)
    if unknown:
        raise ValueError(f"{where}: found the unknown key {_names(unknown)}, expected {_names(required | optional)}")
    if absent:
        raise ValueError(f"{where}: {_names(absent)} is missing, expected a value. Add it")
    return found


def _names(keys: set[Any]) -> str:
    return ", ".join(sorted(str(key)[:60] for key in keys))


def _quantity(key: str, found: Any, units: Mapping[str, float], example: str) -> float:
    """A number with a unit; 0 needs none."""
    text = str(found) if isinstance(found, (str, int, float)) else ""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*(\S*)\s*", text)
    # NaN stands for everything that is no number with a known unit, so that one test below refuses all of it.
    try:
        number = float(match[1]) if match else math.nan
    except ValueError:
        number = math.nan
    unit = match[2] if match else ""
    # Upper and lower case differ here, as in "MB" and "Mb": a megabit is not a megabyte.
    value = number * units.get(unit, math.nan) if number else number
    if isinstance(found, bool) or not math.isfinite(value):
        raise ValueError(
            f"{key}: found {_shown(found)}, expected a number with one of the units {', '.join(units)}: {example}"
        )
    return value


def _shown(found: Any) -> str:
    """A value as Python writes it, shortened for a message."""
    # CPython refuses to print integers of more than a few thousand digits.
    if isinstance(found, int) and found.bit_length() > 128:
        return describe(found)
    text = repr(found)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _number(key: str, found: Any) -> float:
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise ValueError(f"{key}: found {_shown(found)}, expected a number")
    # float() of an integer beyond its range raises OverflowError; infinity is refused by the caller's range.
    return float(found) if abs(found) <= 1e300 else math.inf


def _whole(key: str, found: Any) -> int:
    if isinstance(found, bool) or not isinstance(found, int):
        raise ValueError(f"{key}: found {_shown(found)}, expected a whole number")
    return found


def _require_number(key: str, found: float, expected: str, fits: bool) -> None:
    if not fits or not math.isfinite(found):
        raise ValueError(f"{key}: found {found}, expected {expected}")
