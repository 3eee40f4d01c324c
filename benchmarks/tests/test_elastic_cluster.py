# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""An elastic run on machines of its own behind firewalls: what its launchers say, and who trains."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from elastic_cluster import PORT, TOLERANCE, ElasticCluster, difference, train_alone
from laboratory.emulated_cluster import Cluster, EmulatedCluster, Link, Node
from laboratory.emulated_cluster.debian_tools import DebianTools


MISSING = EmulatedCluster.missing()
pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(MISSING is not None, reason=f"no emulated cluster here: {MISSING}"),
    pytest.mark.timeout(400),
]

STEPS, COUNT = 600, 4


def filter_datagrams(cluster: EmulatedCluster, tools: DebianTools, node: int, action: str) -> None:
    """Lets none of the launchers' datagrams in (``-A``), or all of them again (``-D``)."""
    program = tools.find("iptables-legacy")
    rule = [program, action, "INPUT", "-p", "udp", "--dport", str(PORT), "-j", "DROP"]
    command = ["ip", "netns", "exec", cluster.nodes[node].namespace, *rule]
    subprocess.run(command, check=True, env={**os.environ, **tools.environment})


def test_a_machine_that_hears_nothing_is_told_and_let_in_later(debian_tools: DebianTools, tmp_path: Path) -> None:
    """The others hear it all the time, and train without it."""
    folder = tmp_path / "alone"
    folder.mkdir()
    expected = train_alone(folder, STEPS)
    with EmulatedCluster(Cluster((Node(1, cores=2.0),) * COUNT, Link(1e9))) as cluster:
        run = ElasticCluster(cluster, tmp_path, STEPS)
        assert run.wait(lambda: len(run.steps(0)) > 20, 60), run.output(0)
        filter_datagrams(cluster, debian_tools, 3, "-A")
        # It is left out, ends its ranks, and would like to come back.
        assert run.wait(lambda: run.newest()[1] == {0, 1, 2}, 20), run.output(0)
        assert re.search(r"10\.\S+ does not hear this node, which hears it: a firewall", run.output(0)), run.output(0)
        assert "nothing is heard of" in run.output(3), run.output(3)
        generation, _ = run.newest()
        assert not run.wait(lambda: run.newest()[0] > generation, 8), run.output(0)
        filter_datagrams(cluster, debian_tools, 3, "-D")
        assert run.wait(lambda: run.newest()[1] == {0, 1, 2, 3}, 20), run.output(0)
        assert run.end(120) == [0] * COUNT, run.output(0)
    assert difference(tmp_path, expected) < TOLERANCE
