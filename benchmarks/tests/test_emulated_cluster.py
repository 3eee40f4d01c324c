# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The emulated cluster's nodes are where they should be, as fast as they should be, and can be disturbed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import laboratory.emulated_cluster.network as cluster_network
import pytest
from laboratory.emulated_cluster import (
    Cluster,
    ClusterError,
    EmulatedCluster,
    Link,
    Node,
)
from laboratory.emulated_cluster.system import call
from launching import has_ended


MISSING = EmulatedCluster.missing()
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(MISSING is not None, reason=f"no emulated cluster here: {MISSING}"),
    pytest.mark.timeout(60),
]

# Receives until the senders close, and prints how many bytes came in and bits per second.
RECEIVER = """
import selectors, socket, sys, time
server = socket.create_server(("0.0.0.0", 5000))
print("listening", flush=True)
links, count, started, buffer = selectors.DefaultSelector(), 0, None, bytearray(1 << 20)
for _ in range(int(sys.argv[1])):
    links.register(server.accept()[0], selectors.EVENT_READ)
while links.get_map():
    for key, _ in links.select():
        received = key.fileobj.recv_into(buffer)
        started = started or time.monotonic()
        count += received
        if not received:
            links.unregister(key.fileobj)
print(count, count * 8 / (time.monotonic() - started), flush=True)
"""
SENDER = """
import socket, sys, time
link, data = socket.create_connection((sys.argv[1], 5000), timeout=30), bytes(1 << 16)
ends = time.monotonic() + float(sys.argv[2])
while time.monotonic() < ends:
    link.sendall(data)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmulatedCluster]:
    description = Cluster((Node(1, cores=1.0),) * 3, Link(1e9))
    with EmulatedCluster(description) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def everything_ends(cluster: EmulatedCluster) -> Iterator[None]:
    """What a test that fails has left running or disconnected must not make the next one fail."""
    yield
    for node in range(len(cluster.nodes)):
        cluster.kill_node(node)
        cluster.restore_link(node)
        cluster.set_cpu(node, 1.0)


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


class Receiver:
    """On a node; tells what has come in when all its senders have closed."""

    def __init__(self, cluster: EmulatedCluster, node: int, senders: int) -> None:
        command = python(RECEIVER, str(senders))
        self._process = cluster.popen(node, command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout.readline() == "listening\n"

    def result(self) -> tuple[int, float]:
        count, rate = self._process.communicate(timeout=30)[0].split()
        return int(count), float(rate)


def send(cluster: EmulatedCluster, sender: int, receiver: int, seconds: float) -> subprocess.Popen:
    return cluster.popen(sender, python(SENDER, cluster.nodes[receiver].address, str(seconds)))


def transfer(cluster: EmulatedCluster, rate: float, *ways: tuple[int, int]) -> list[tuple[int, float]]:
    """Sends for a second between these (sender, receiver); of each receiver, its bytes and its rate.

    The limit holds always. A busy machine may keep streams below it, but not three times in a row.
    """
    for _ in range(3):
        nodes = {receiver for _, receiver in ways}
        receivers = [Receiver(cluster, node, sum(node == receiver for _, receiver in ways)) for node in nodes]
        for sender, receiver in ways:
            send(cluster, sender, receiver, seconds=1.0)
        results = [receiver.result() for receiver in receivers]
        assert all(reached < 1.05 * rate for _, reached in results)
        if all(reached > 0.6 * rate for _, reached in results):
            return results
    raise AssertionError(f"a limit of {rate} b/s was not nearly reached: {results}")


def test_nobody_speaks_unasked() -> None:
    with EmulatedCluster(Cluster((Node(1, cores=1.0),) * 2, Link(1e9))) as cluster:
        time.sleep(1.5)  # an interface with an IPv6 address announces it in the first second
        assert cluster.traffic() == [(0, 0)] * 2


@pytest.mark.parametrize("rate", [1e9, pytest.param(250e6, marks=pytest.mark.slow)])
def test_a_transfer_reaches_the_rate_and_is_counted(cluster: EmulatedCluster, rate: float) -> None:
    cluster.set_network(Link(rate))
    transfer(cluster, rate, (0, 1))
    before = cluster.traffic()
    receiver = Receiver(cluster, 1, senders=1)
    send(cluster, 0, 1, seconds=1.0)
    count, _ = receiver.result()
    after = cluster.traffic()
    for counted in (after[0].sent_bytes - before[0].sent_bytes, after[1].received_bytes - before[1].received_bytes):
        assert count < counted < 1.06 * count  # a header in each packet at most
    assert after[1].sent_bytes - before[1].sent_bytes < 0.05 * count  # acknowledgements
    assert after[2].sent_bytes - before[2].sent_bytes < 1000


@pytest.mark.slow
def test_sending_and_receiving_are_limited_each_for_itself(cluster: EmulatedCluster) -> None:
    rate = 100e6
    cluster.set_network(Link(rate))
    transfer(cluster, rate, (0, 1), (1, 0))  # both directions of a link
    transfer(cluster, rate, (0, 1), (2, 1))  # two senders to one receiver


def wait_for_traffic(cluster: EmulatedCluster, node: int, count: int) -> None:
    """Until a node has sent so many bytes more."""
    before, deadline = cluster.traffic()[node].sent_bytes, time.monotonic() + 20
    while cluster.traffic()[node].sent_bytes < before + count:
        assert time.monotonic() < deadline, "nothing is sent"
        time.sleep(0.02)


def test_one_link_can_be_made_slow_while_programs_run(cluster: EmulatedCluster) -> None:
    cluster.set_network(Link(1e9))
    receiver = Receiver(cluster, 1, senders=1)
    sender = send(cluster, 0, 1, seconds=60)
    wait_for_traffic(cluster, 0, 10_000_000)
    cluster.set_network(Link(10e6), node=0)
    before, started = cluster.traffic()[0].sent_bytes, time.monotonic()
    wait_for_traffic(cluster, 0, 500_000)
    # A bucket full of tokens may have been left.
    rate = (cluster.traffic()[0].sent_bytes - before - 72_000) * 8 / (time.monotonic() - started)
    assert 0.3 * 10e6 < rate < 1.05 * 10e6
    sender.kill()
    cluster.set_network(Link(1e9))
    receiver.result()


def test_a_cut_link_carries_nothing_until_it_is_restored(cluster: EmulatedCluster) -> None:
    cluster.set_network(Link(1e8))
    receiver = Receiver(cluster, 1, senders=1)
    sender = send(cluster, 0, 1, seconds=60)
    wait_for_traffic(cluster, 0, 1_000_000)
    cluster.cut_link(0)
    before = cluster.traffic()[0]  # node 1 may still answer what it has
    time.sleep(0.3)
    assert cluster.traffic()[0] == before
    cluster.restore_link(0)
    wait_for_traffic(cluster, 0, 1_000_000)  # on the same connection
    assert sender.poll() is None
    sender.kill()
    assert receiver.result()[0] > 1_500_000


@pytest.mark.skipif(
    MISSING is None and EmulatedCluster.missing(Cluster((Node(1, cores=1.0),), Link(1e9, 1e-3))) is not None,
    reason="this kernel has no sch_netem",
)
def test_delay_is_one_way_and_can_be_taken_back(cluster: EmulatedCluster) -> None:
    code = """
import socket, sys, time
def trip():
    started = time.monotonic()
    try:
        socket.create_connection((sys.argv[1], 5001), timeout=10)
    except ConnectionRefusedError:
        return time.monotonic() - started
trip()
print(min(trip() for _ in range(3)))
"""
    for delay, least, most in ((0.02, 0.04, 0.08), (0.0, 0.0, 0.02)):
        cluster.set_network(Link(1e9, delay))
        process = cluster.popen(0, python(code, cluster.nodes[1].address), stdout=subprocess.PIPE, text=True)
        assert least <= float(process.communicate(timeout=30)[0]) < most


def test_a_kernel_without_delays_says_so(
    cluster: EmulatedCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refusing = tmp_path / "tc"
    refusing.write_text("#!/bin/sh\necho 'Error: Specified qdisc kind is unknown.' >&2; exit 2\n")
    refusing.chmod(0o755)
    monkeypatch.setattr(
        cluster_network, "call", lambda *command, lines=(): call(str(refusing), *command[1:], lines=lines)
    )
    with pytest.raises(ClusterError, match="this kernel has no sch_netem: .* leave the delay out"):
        cluster.set_network(Link(1e9, 0.001))


def test_a_program_is_on_its_node_from_its_first_instruction(cluster: EmulatedCluster) -> None:
    code = """
import json, os, socket, sys
told = os.read(int(sys.argv[1]), 100).decode()
print(json.dumps([os.getpid(), told, socket.if_nameindex(), open("/proc/self/cgroup").read(), os.environ["EXTRA"],
                  os.environ["GLOO_SOCKET_IFNAME"], os.getcwd()]))
"""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = cluster.popen(
            2,
            python(code, str(theirs.fileno())),
            env={**os.environ, "EXTRA": "a b"},
            pass_fds=[theirs.fileno()],
            stdout=subprocess.PIPE,
            cwd="/",
        )
        ours.sendall(b"hello")
        pid, told, interfaces, groups, extra, gloo, folder = json.loads(process.communicate(timeout=30)[0])
    assert (pid, told, extra, gloo, folder) == (process.pid, "hello", "a b", "eth0", "/")
    assert sorted(name for _, name in interfaces) == ["eth0", "lo"]
    assert "-node2" in groups and f"lshdp-{os.getpid()}-" in groups
    assert cluster.popen(0, ["sh", "-c", "exit 7"]).wait(timeout=30) == 7
    assert not {name for _, name in socket.if_nameindex()} & {"bridge", "node0", "node1"}  # nothing of it is seen here


def test_cpu_share_holds_and_changes(cluster: EmulatedCluster) -> None:
    code = """
import time
for _ in range(2):
    started, cpu = time.monotonic(), time.process_time()
    while time.monotonic() - started < 0.6: pass
    used = time.process_time() - cpu
    print(used / (time.monotonic() - started), flush=True)
"""
    cluster.set_cpu(0, 0.4)
    process = cluster.popen(0, python(code), stdout=subprocess.PIPE, text=True)
    first = float(process.stdout.readline())
    cluster.set_cpu(0, 0.1)
    second = float(process.communicate(timeout=30)[0])
    cluster.set_cpu(0, 1.0)
    # A busy machine can only take more away from it.
    assert 0.02 < first < 0.4 * 1.15 and second < 0.1 * 1.6 and second < first


def test_memory_of_a_node_counts_shared_pages_once(cluster: EmulatedCluster) -> None:
    code = """
import mmap, os, signal
shared = mmap.mmap(-1, 64 << 20)
for place in range(0, len(shared), 4096): shared[place] = 1
of_parent, of_child = os.pipe()
child = os.fork()
touched = sum(shared[place] for place in range(0, len(shared), 4096))
if child:
    os.read(of_parent, 1)
    print(touched, flush=True)
else:
    os.write(of_child, b"x")
signal.pause()
"""
    process = cluster.popen(0, python(code), stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"16384\n"
    assert len(cluster.pids(0)) == 2
    assert 64 << 20 < cluster.memory_bytes(0) < 100 << 20
    assert cluster.memory_bytes(1) == 0
    started = cluster.pids(0)
    cluster.kill_node(0)
    assert process.wait(timeout=5) == -signal.SIGKILL and all(map(has_ended, started))
    assert cluster.memory_bytes(0) == 0
    process.stdout.close()


def test_run_shows_lines_with_their_node(cluster: EmulatedCluster, capfd: pytest.CaptureFixture[str]) -> None:
    script = "echo one; echo $NAME >&2; printf unfinished"
    assert cluster.run([["sh", "-c", script]] * 3, env={"NAME": "two"}, timeout=30) == [0, 0, 0]
    lines = capfd.readouterr().out.splitlines()
    for node in range(3):
        mine = [line for line in lines if line.startswith(f"node {node} | ")]
        assert mine == [f"node {node} | {text}" for text in ("one", "two", "unfinished")]


def test_run_ends_the_others_when_one_fails(
    cluster: EmulatedCluster, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laboratory.emulated_cluster.running.GRACE_SECONDS", 1.0)
    polite = "trap 'echo ending; exit 3' TERM; sleep 100 & wait"
    deaf = "trap '' TERM; while :; do sleep 0.1; done"
    started = time.monotonic()
    codes = cluster.run([["sh", "-c", polite], ["sh", "-c", deaf], ["sh", "-c", "sleep 0.3; exit 5"]])
    assert codes == [3, -signal.SIGKILL, 5] and time.monotonic() - started < 20
    assert "node 0 | ending" in capfd.readouterr().out
    assert [cluster.pids(node) for node in range(3)] == [[], [], []]


def test_run_that_takes_too_long_is_ended(cluster: EmulatedCluster) -> None:
    with pytest.raises(TimeoutError, match=r"nodes \[1\] had not ended after 0.3 s"):
        cluster.run([["true"], ["sleep", "100"], ["true"]], timeout=0.3)
    assert cluster.pids(1) == []
    with pytest.raises(ValueError, match="found 1 commands, expected one for each of 3 nodes"):
        cluster.run([["true"]])
