# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Several uneven nodes behind a slow network, on one Linux machine: for real, by the kernel's own means.

Network namespaces, a bridge and ``tc`` make the network, cgroups make the nodes' speed and memory. Needs root.
"""

from __future__ import annotations

from accelerate_lshdp.documents.cluster import ClusterDescription, NetworkDescription, NodeDescription
from laboratory.emulated_cluster.cluster import EmulatedCluster, Node
from laboratory.emulated_cluster.network import Traffic
from laboratory.emulated_cluster.system import ClusterError


__all__ = [
    "ClusterDescription",
    "ClusterError",
    "EmulatedCluster",
    "NetworkDescription",
    "Node",
    "NodeDescription",
    "Traffic",
]
