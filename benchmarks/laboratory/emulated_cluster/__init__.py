# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Several uneven nodes behind a slow network, on one Linux machine: for real, by the kernel's own means.

Network namespaces, a bridge and ``tc`` make the network, cgroups make the nodes' speed and memory. Needs root.
"""

from __future__ import annotations

from accelerate_lshdp.documents.cluster import Cluster, Link, Node
from laboratory.emulated_cluster.cluster import EmulatedCluster, RunningNode
from laboratory.emulated_cluster.network import Traffic
from laboratory.emulated_cluster.system import ClusterError


__all__ = [
    "Cluster",
    "ClusterError",
    "EmulatedCluster",
    "Link",
    "Node",
    "RunningNode",
    "Node",
    "RunningNode",
    "Traffic",
]
