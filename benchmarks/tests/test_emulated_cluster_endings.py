# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""However a program that uses an emulated cluster ends, nothing of the cluster stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_remains import remains
from laboratory.emulated_cluster import (
    Cluster,
    ClusterError,
    EmulatedCluster,
    Link,
    Node,
)
from launching import has_ended


MISSING = EmulatedCluster.missing()
needs_cluster = pytest.mark.skipif(MISSING is not None, reason=f"no emulated cluster here: {MISSING}")
DESCRIPTION = Cluster((Node(1, cores=0.5), Node(1, cores=0.5)), Link(1e9))

# Builds a cluster with two programs on it, one of which ignores everything but SIGKILL, and tells their ids.
SCRIPT = """
import os, signal, subprocess, sys
from laboratory.emulated_cluster import Cluster, EmulatedCluster, Link, Node
from laboratory.emulated_cluster.cgroups import ControlGroup

# Whoever runs the tests in the background may have told their children to ignore these.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
memory = None if ControlGroup.missing(memory=True) else 2**30
description = Cluster((Node(1, cores=0.5, memory_bytes=memory), Node(1, cores=0.5)), Link(1e9))
try:
    with EmulatedCluster(description) as cluster:
        deaf = cluster.popen(0, ["sh", "-c", "trap '' TERM INT HUP; while :; do sleep 1; done"], stdout=-3, stderr=-3)
        other = cluster.popen(1, ["sleep", "100"], stdout=-3, stderr=-3)
        print(deaf.pid, other.pid, flush=True)
        if sys.argv[1] == "raise":
            raise ValueError("of the block")
        if sys.argv[1] == "exit":
            sys.exit(3)
        if sys.argv[1] == "signal":
            signal.pause()
        if sys.argv[1] == "forget":
            EmulatedCluster(description).__enter__()
finally:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL or sys.argv[1] == "forget"
"""


def start(how: str) -> tuple[subprocess.Popen, list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    return process, list(map(int, process.stdout.readline().split()))


@pytest.mark.root
@needs_cluster
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("how", "number", "code"),
    [
        ("normal", None, 0),
        ("raise", None, 1),
        ("exit", None, 3),
        ("forget", None, 0),
        ("signal", signal.SIGINT, -signal.SIGINT),
        ("signal", signal.SIGTERM, 128 + signal.SIGTERM),
        ("signal", signal.SIGHUP, 128 + signal.SIGHUP),
    ],
)
def test_nothing_stays(how: str, number: signal.Signals | None, code: int) -> None:
    process, pids = start(how)
    assert len(pids) == 2
    if number is not None:
        assert len(remains(process.pid)) >= 5  # three namespaces, two groups
        process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code, errors
    assert remains(process.pid) == []
    assert all(map(has_ended, pids))


@pytest.mark.root
@needs_cluster
@pytest.mark.timeout(60)
def test_the_next_run_removes_what_a_killed_one_left() -> None:
    process, pids = start("signal")
    process.kill()
    process.communicate(timeout=30)
    assert len(remains(process.pid)) >= 5 and not any(map(has_ended, pids))
    with EmulatedCluster(DESCRIPTION), EmulatedCluster(DESCRIPTION) as second:
        assert remains(process.pid) == []
        assert all(map(has_ended, pids))
        assert len(remains(os.getpid())) >= 10  # those of live creators stay
        assert second.popen(1, ["true"]).wait(timeout=10) == 0
    assert remains(os.getpid()) == []


@pytest.mark.root
@needs_cluster
def test_a_cluster_that_cannot_be_built_leaves_nothing() -> None:
    too_slow = Cluster((Node(1, cores=0.5), Node(1, cores=0.01)), Link(1e9))
    with pytest.raises(ValueError, match="take a longer period"), EmulatedCluster(too_slow):
        raise AssertionError("it was built")
    assert remains(os.getpid()) == []
    handler = signal.getsignal(signal.SIGTERM)
    with EmulatedCluster(too_slow, period_seconds=0.1) as cluster:
        nodes = cluster.nodes
    assert len(nodes) == 2 and signal.getsignal(signal.SIGTERM) is handler
    with pytest.raises(ClusterError, match="the cluster is not there"):
        cluster.traffic()


def test_missing_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 1000)
        assert "root is needed" in EmulatedCluster.missing()
        with pytest.raises(ClusterError, match="cannot be built: root is needed"), EmulatedCluster(DESCRIPTION):
            raise AssertionError("it was built")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert EmulatedCluster.missing() == "not installed: ip (iproute2), tc (iproute2), nsenter (util-linux)"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "this is darwin" in EmulatedCluster.missing()
