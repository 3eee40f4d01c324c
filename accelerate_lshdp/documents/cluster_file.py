# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Reads a cluster from a YAML file that a person wrote, with units.

nodes:
  - {device: RTX 3090, ranks: 2, memory: 64 GiB}           # ranks: devices; memory: of the host; cpu: its cores
  - {device: my card, tflops: 12, device_memory: 16 GiB}   # of each rank; tflops: what it reaches in training
  - {cpu: 0.8, memory: 4 GiB}                              # no device: computes on its cores, which must be there
network: {rate: 1 Gb/s, delay: 0.2 ms}                     # of every node's link, each way; the delay can be left out
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from accelerate_lshdp.documents.cluster import Cluster, Link, Node
from accelerate_lshdp.documents.strict_reading import read_yaml
from accelerate_lshdp.documents.value_checks import (
    PlanError,
    describe,
    located,
    require_integer,
    require_list,
    require_name,
    require_object,
)


_BYTES = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BITS_PER_SECOND = {"b/s": 1.0, "kb/s": 1e3, "Mb/s": 1e6, "Gb/s": 1e9}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
# Far above any machine, and small enough for lists with one entry a rank.
_MOST_CORES, _MOST_RANKS, _MOST_BYTES, _MOST_TERAFLOPS = 2**20, 4096, 2**60, 1e6
#: Keys of a node that say how it is reached, which `hosts` reads, and what each of them is.
HOST_KEYS = {
    "ssh": "a destination for ssh, such as anna@studio",
    "python": "the path of a Python interpreter",
    "folder": "the path of a folder",
    "interface": "the name of a network interface",
}


def load_cluster(path: str | os.PathLike[str]) -> Cluster:
    """The cluster in a YAML file.

    Raises:
        PlanError: the file cannot be read, or as `read_cluster`; its source is the path.
    """
    with located(source=os.fspath(path)):
        return read_cluster(read_yaml(path, "cluster"))


def read_cluster(document: object) -> Cluster:
    """The cluster that the values of a YAML file describe; its link is there.

    Raises:
        PlanError: unknown or missing keys, wrong types, impossible values; it says where.
    """
    section = require_object(document, required=("nodes", "network"))
    return Cluster(read_nodes(section["nodes"], "nodes"), read_link(section["network"], "network"))


def read_nodes(document: object, path: str, *, with_processors: bool = True) -> tuple[Node, ...]:
    """The nodes of a file. Raises PlanError.

    Args:
        document: the list of them.
        path: where it is, for messages.
        with_processors: whether each must say what it computes on, by `cpu` or `device`.
    """
    nodes = require_list(document, path, "node")
    return tuple(_read_node(entry, f"{path}[{index}]", with_processors) for index, entry in enumerate(nodes))


def read_link(document: object, path: str) -> Link:
    """The link of every node. Raises PlanError."""
    section = require_object(document, path, required=("rate",), optional=("delay",))
    rate = _quantity(section["rate"], f"{path}.rate", _BITS_PER_SECOND, "1 Gb/s", 1e4, 1e12, "10 kb/s to 1000 Gb/s")
    delay = section.get("delay", 0)
    return Link(rate, _quantity(delay, f"{path}.delay", _SECONDS, "0.2 ms", 0, 10, "0 to 10 s"))


def write_cluster(cluster: Cluster) -> dict[str, Any]:
    """The values that `read_cluster` reads, in units that lose no precision."""
    keys = {"cores": "cpu", "teraflops": "tflops", "memory_bytes": "memory", "device_memory_bytes": "device_memory"}
    nodes = [
        {
            keys.get(name, name): f"{value} B" if name in ("memory_bytes", "device_memory_bytes") else value
            for name, value in node.to_dict().items()
            if value is not None
        }
        for node in cluster.nodes
    ]
    # repr is the shortest text that reads back as the same float.
    link = cluster.link
    network = {"rate": f"{link.bandwidth_bits_per_second!r} b/s", "delay": f"{link.latency_seconds!r} s"}
    return {"nodes": nodes, "network": network}


def _read_node(document: object, path: str, with_processors: bool) -> Node:
    known = ("cpu", "memory", "ranks", "device", "tflops", "device_memory", "address", *HOST_KEYS)
    section = require_object(document, path, optional=known)
    if "device" not in section:
        if with_processors:
            # A host with devices may leave out its cores; a node that computes on its cores may not.
            require_object(document, path, required=("cpu",), optional=known[1:])
        if "device_memory" in section:
            raise PlanError(
                "found it without a device, expected both. Name the device, or leave it out.",
                path=f"{path}.device_memory",
            )
    require_integer(section.get("ranks", 1), f"{path}.ranks", least=1, most=_MOST_RANKS)
    for name, what in {"device": "the name of a product", "address": "a host name or address", **HOST_KEYS}.items():
        if name in section:
            require_name(section[name], f"{path}.{name}", what)
    readers: Mapping[str, tuple[str, Callable[[Any, str], float]]] = {
        "cpu": ("cores", lambda value, at: _number(value, at, _MOST_CORES, "cores of a node")),
        "tflops": ("teraflops", lambda value, at: _number(value, at, _MOST_TERAFLOPS, "1e12 operations a second")),
        "memory": ("memory_bytes", _bytes),
        "device_memory": ("device_memory_bytes", _bytes),
    }
    figures = {
        name: read(section[key], f"{path}.{key}")
        for key, (name, read) in readers.items()
        if section.get(key) is not None
    }
    return Node(section.get("ranks", 1), section.get("address"), section.get("device"), **figures)


def _bytes(found: object, path: str) -> int:
    return int(_quantity(found, path, _BYTES, "4 GiB", 1, _MOST_BYTES, "at least 1 B and no more than a machine has"))


def _number(found: object, path: str, most: float, what: str) -> float:
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 < found <= most:
        raise PlanError(f"found {describe(found)}, expected {what}, more than 0. Correct this value.", path=path)
    return float(found)


def _quantity(
    found: object, path: str, units: Mapping[str, float], example: str, least: float, most: float, between: str
) -> float:
    """A number with a unit, in [least, most]; 0 needs no unit."""
    text = str(found) if isinstance(found, (str, int, float)) and not isinstance(found, bool) else ""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*(\S*)\s*", text)
    # NaN stands for everything that is no number with a known unit, so that one test below refuses all of it.
    try:
        number = float(match[1]) if match else math.nan
    except ValueError:
        number = math.nan
    # Upper and lower case differ here, as in "MB" and "Mb": a megabit is not a megabyte.
    value = number * units.get(match[2], math.nan) if match and number else number
    if not math.isfinite(value):
        raise PlanError(
            f"found {describe(found)}, expected a number with one of the units {', '.join(units)}: {example}. Correct"
            " this value.",
            path=path,
        )
    if not least <= value <= most:
        raise PlanError(f"found {describe(found)}, expected {between}. Correct this value.", path=path)
    return value
