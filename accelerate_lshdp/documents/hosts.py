# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`Host`: a machine that commands reach from another one, and `load_hosts`, which reads them from a YAML file.

nodes:
  - {address: 192.0.2.1}                              # the machine on which the command runs may be one of them
  - address: 192.0.2.2
    ranks: 2
    device: RTX 2080 Ti                               # cpu: 8 for a machine that trains on its processor
    ssh: anna@studio                                  # what `ssh` is given; without it the address
    python: /home/anna/.venv/bin/python               # without it the same path as here
    folder: /home/anna/digits                         # without it the same path as here
    interface: enp3s0                                 # without it the one that has the address

The file may hold everything that `cluster_file` reads, so one file serves `doctor`, and `estimate` once its nodes have
a device or cores and it has a network.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from accelerate_lshdp.documents.cluster import Node
from accelerate_lshdp.documents.cluster_file import HOST_KEYS, read_link, read_nodes
from accelerate_lshdp.documents.strict_reading import read_yaml
from accelerate_lshdp.documents.value_checks import PlanError, located, require_list, require_object


@dataclass(frozen=True, slots=True)
class Host:
    """A machine of a run, and how it is reached.

    Args:
        node: its ranks, address and what else the file says about it.
        ssh: the destination for ``ssh``: a host of its configuration, or ``user@address``. None: the address.
        python: the interpreter there that has this package. None: the path of the one that runs here.
        folder: where commands run there. None: the path of the current folder here.
        interface: the network interface there that the other machines reach. None: the one that has the address.
    """

    node: Node
    ssh: str | None = None
    python: str | None = None
    folder: str | None = None
    interface: str | None = None

    @property
    def address(self) -> str:
        """Where the other machines reach it."""
        assert self.node.address is not None, "load_hosts requires it"
        return self.node.address

    @property
    def trains_on_cpu(self) -> bool | None:
        """Whether its ranks train on processors; None: the file does not say."""
        if self.node.device is None:
            return None if self.node.cores is None else True
        return self.node.trains_on_cpu


def load_hosts(path: str | os.PathLike[str]) -> tuple[Host, ...]:
    """The hosts in a YAML file, in the order of their nodes.

    Raises:
        PlanError: the file cannot be read, has unknown keys or impossible values, leaves out an address or has one
            twice; its source is the path.
    """
    with located(source=os.fspath(path)):
        document = require_object(read_yaml(path, "cluster"), required=("nodes",), optional=("network",))
        entries = require_list(document["nodes"], "nodes", "node")
        if "network" in document:
            read_link(document["network"], "network")
        nodes = read_nodes(entries, "nodes", with_processors=False)
        seen: dict[str, int] = {}
        for index, node in enumerate(nodes):
            if node.address is None:
                raise PlanError(
                    "found no address, expected where the other machines reach this one, such as 192.0.2.1. Add it.",
                    path=f"nodes[{index}]",
                )
            if node.address in seen:
                raise PlanError(
                    f"found the address of nodes[{seen[node.address]}] once more, expected one of its own for each"
                    " machine. Correct one of them.",
                    path=f"nodes[{index}].address",
                )
            seen[node.address] = index
        return tuple(
            Host(node, **{key: entry[key] for key in HOST_KEYS if entry.get(key) is not None})
            for node, entry in zip(nodes, entries, strict=True)
        )
