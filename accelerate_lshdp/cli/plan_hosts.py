# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""``accelerate-lshdp plan --hosts``: a plan for the machines of a file, which ``launch --hosts`` starts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from accelerate_lshdp.documents.cluster import Node
from accelerate_lshdp.documents.hosts import Host, load_hosts
from accelerate_lshdp.documents.plan import PlanError


if TYPE_CHECKING:
    from accelerate_lshdp.documents.profile import Profile


def check_hosts_arguments(arguments: argparse.Namespace) -> None:
    """Raises ValueError if flags are for configuration files, which ``launch --hosts`` does without."""
    given = {
        "--nodes": arguments.nodes,
        "--cpu or --gpu": arguments.device,
        "--main-ip": arguments.main_ip,
        "--main-port": arguments.main_port,
        "--yaml-dir": arguments.yaml_dir,
        "--force": arguments.force or None,
    }
    found = [flag for flag, value in given.items() if value is not None]
    if arguments.hosts is not None and found:
        raise ValueError(
            f"{', '.join(found)} cannot be combined with --hosts, for which no configuration files are written; leave"
            " one out"
        )


def on_hosts(profile: Profile, path: str) -> tuple[Profile, list[str]]:
    """The profile, with the addresses of the machines of a file, and what ``launch --hosts`` has to be told besides.

    Raises:
        PlanError: the file cannot be read, or has other nodes than were profiled.
    """
    hosts = load_hosts(path)
    sizes, profiled = [host.node.ranks for host in hosts], profile.cluster.node_sizes
    if sizes != profiled:
        raise PlanError(
            f"found machines with {sizes} ranks, but the profile is of nodes with {profiled}. Put them into the order"
            " in which they were profiled, or profile these machines with accelerate-lshdp profile --hosts.",
            path="nodes",
            source=path,
        )
    nodes = profile.cluster.nodes
    known = tuple(replace(node, address=host.address) for node, host in zip(nodes, hosts, strict=True))
    flags = _device_flags(nodes, hosts, path)
    return replace(profile, cluster=replace(profile.cluster, nodes=known)), flags


def _device_flags(nodes: Sequence[Node], hosts: Sequence[Host], path: str) -> list[str]:
    """What lets the machines train on what was profiled, where their file says something else, or nothing."""
    profiled = [node.trains_on_cpu for node in nodes]
    if None in profiled or profiled == [host.trains_on_cpu for host in hosts]:
        return []
    if len(set(profiled)) == 1:
        return ["--cpu" if profiled[0] else "--gpu"]
    node = next(node for node, host in enumerate(hosts) if host.trains_on_cpu is not profiled[node])
    raise PlanError(
        f"found a machine that does not say that it trains on {'its processor' if profiled[node] else 'a GPU'}, as it"
        " was profiled. Write cpu: or device: there.",
        path=f"nodes[{node}]",
        source=path,
    )
