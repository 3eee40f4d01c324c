# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The file of the machines that commands reach over ssh."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelerate_lshdp.documents.cluster import Node
from accelerate_lshdp.documents.cluster_file import load_cluster
from accelerate_lshdp.documents.hosts import Host, load_hosts
from accelerate_lshdp.documents.value_checks import PlanError


def write(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return path


def test_an_address_is_enough(tmp_path: Path) -> None:
    (host,) = load_hosts(write(tmp_path, "nodes: [{address: 192.0.2.1}]"))
    assert host == Host(Node(1, "192.0.2.1"))
    assert (host.address, host.trains_on_cpu) == ("192.0.2.1", None)


def test_everything_that_can_be_said(tmp_path: Path) -> None:
    text = """
nodes:
  - {address: 192.0.2.1, cpu: 8, memory: 32 GiB}
  - {address: b, ranks: 2, device: RTX 2080 Ti, ssh: anna@studio, python: /bin/py, folder: /run, interface: eth1}
network: {rate: 1 Gb/s}
"""
    path = write(tmp_path, text)
    first, second = load_hosts(path)
    assert first == Host(Node(1, "192.0.2.1", cores=8.0, memory_bytes=32 * 2**30))
    assert second == Host(Node(2, "b", "RTX 2080 Ti"), "anna@studio", "/bin/py", "/run", "eth1")
    assert [host.trains_on_cpu for host in (first, second)] == [True, False]
    # One file serves estimates, too.
    assert load_cluster(path).nodes == (first.node, second.node)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: [{ranks: 1}]", r"nodes\[0\]: found no address, expected where the other machines reach this one"),
        ("nodes: [{address: a}, {address: a}]", r"nodes\[1\]\.address: found the address of nodes\[0\] once more"),
        ("nodes: [{address: a, shs: b}]", r"shs"),
        ("nodes: [{address: a, python: ''}]", r"nodes\[0\]\.python: found .*, expected the path of a Python"),
        ("nodes: [{address: a, ranks: 0}]", r"nodes\[0\]\.ranks: found 0"),
        ("nodes: []", r"nodes"),
        ("network: {rate: 1 Gb/s}", r"nodes"),
        ("nodes: [{address: a}]\nnetwork: {rate: fast}", r"network\.rate: found"),
        ("nodes: [{address: 5}]", r"nodes\[0\]\.address: found 5"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(PlanError, match=message) as caught:
        load_hosts(path)
    assert str(path) in str(caught.value)


def test_an_estimate_still_needs_processors(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cpu"):
        load_cluster(write(tmp_path, "nodes: [{address: a}]\nnetwork: {rate: 1 Gb/s}"))
