# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Descriptions of clusters are read exactly, and what is wrong in one is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accelerate_lshdp.documents.cluster import Cluster, Link, Node
from accelerate_lshdp.documents.cluster_file import load_cluster, read_cluster, write_cluster


YAML = """\
nodes:
  - {cpu: 0.8, memory: 4 GiB, ranks: 2}
  - {cpu: 1}
network: {rate: 250 Mb/s, delay: 0.2 ms}
"""


def test_yaml_is_read_and_written_back(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(YAML)
    cluster = load_cluster(path)
    nodes = (Node(2, cores=0.8, memory_bytes=4 * 2**30), Node(1, cores=1.0))
    assert cluster == Cluster(nodes, Link(250e6, 0.2e-3))
    assert read_cluster(write_cluster(cluster)) == cluster


@pytest.mark.parametrize(
    ("rate", "bits_per_second"), [("1 Gb/s", 1e9), ("2.5Gb/s", 2.5e9), ("100 kb/s", 1e5), ("1e9 b/s", 1e9)]
)
def test_rates(rate: str, bits_per_second: float) -> None:
    document = {"nodes": [{"cpu": 1}], "network": {"rate": rate}}
    assert read_cluster(document).link == Link(bits_per_second, 0.0)


NODES, NETWORK = [{"cpu": 0.5}], {"rate": "1 Gb/s"}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (None, 'found null, expected an object with keys out of "nodes", "network"'),
        ({"nodes": NODES}, "network: found nothing under this key"),
        (
            {"nodes": NODES, "network": NETWORK, "name": "x"},
            "name: found an unknown key, expected only",
        ),
        ({"nodes": [], "network": NETWORK}, "nodes: found an empty list"),
        ({"nodes": "two", "network": NETWORK}, 'nodes: found "two" .a string., expected a list'),
        ({"nodes": [{"cpu": 0.5}, {"ranks": 1}], "network": NETWORK}, r"nodes\[1\].cpu: found nothing"),
        ({"nodes": [{"cpu": 0}], "network": NETWORK}, r"nodes\[0\].cpu: found 0, expected cores of a node"),
        (
            {"nodes": [{"cpu": "80 %"}], "network": NETWORK},
            r'nodes\[0\].cpu: found "80 %" .*expected cores of a node',
        ),
        (
            {"nodes": [{"cpu": 1, "ranks": 1.5}], "network": NETWORK},
            "ranks: found 1.5 .*expected an integer",
        ),
        ({"nodes": [{"cpu": 1, "memory": 4}], "network": NETWORK}, "memory: found 4, expected a number with one of"),
        ({"nodes": [{"cpu": 1, "memory": "4 Gb"}], "network": NETWORK}, 'memory: found "4 Gb"'),
        ({"nodes": NODES, "network": {"rate": "1 GB/s"}}, 'network.rate: found "1 GB/s" .*: 1 Gb/s'),
        ({"nodes": NODES, "network": {"rate": "0 b/s"}}, 'network.rate: found "0 b/s" .*expected 10 kb/s to'),
        ({"nodes": NODES, "network": {"rate": "1.2.3 Gb/s"}}, 'network.rate: found "1.2.3 Gb/s"'),
        ({"nodes": NODES, "network": {"rate": "1 Gb/s", "delay": "-1 ms"}}, 'network.delay: found "-1 ms"'),
        (
            {"nodes": NODES, "network": {"rate": "1 Gb/s", "delay": "20 s"}},
            'delay: found "20 s" .*expected 0 to 10 s',
        ),
    ],
)
def test_what_is_wrong_is_named(document: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_cluster(document)


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    for text in ("nodes: []\nnetwork: {rate: 1 Gb/s}\n", "nodes: [\n"):
        path.write_text(text)
        with pytest.raises(ValueError, match="cluster.yaml: "):
            load_cluster(path)
