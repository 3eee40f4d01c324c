# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`doctor` finds each fault that is planted on emulated machines, names what mends it, and finds nothing on good ones.

The machines have ssh servers, host names and mounts of their own (`SshMachines`); the command runs on the first one.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from emulated_machines import Machines, emulated_machines
from laboratory.emulated_cluster import EmulatedCluster, Link
from laboratory.emulated_cluster.debian_tools import DebianTools
from laboratory.emulated_cluster.system import call


MISSING = EmulatedCluster.missing()
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(MISSING is not None, reason=f"no emulated cluster here: {MISSING}"),
    pytest.mark.timeout(110),
]

COUNT = 3
PORT = 29500


@pytest.fixture
def machines(debian_tools: DebianTools, tmp_path: Path) -> Iterator[Machines]:
    with emulated_machines(COUNT, tmp_path, debian_tools) as made:
        for node in range(COUNT):
            (made.own_folder(node) / "train.py").write_text("print('training')\n")
        yield made


def doctor(machines: Machines) -> tuple[int, list[tuple[str, str]], str]:
    """Exit code, (finding, fix) of each finding, and everything that was printed."""
    process = machines.start("doctor", ["--same", "train.py"])
    output, _ = process.communicate(timeout=90)
    lines = output.splitlines()
    pairs = zip(lines, [*lines[1:], ""], strict=True)
    found = [(line, fix.strip()) for line, fix in pairs if line.startswith(("problem: ", "warning: "))]
    return process.returncode, found, output


def test_good_machines_have_nothing_wrong(machines: Machines) -> None:
    code, found, output = doctor(machines)
    assert (code, found) == (0, []), output
    assert "found nothing wrong" in output
    assert output.count(" Mb/s, ") == COUNT * (COUNT - 1), output


# Each plants one fault.


def debian_name(machines: Machines) -> None:
    hosts = machines.ssh.folder(1) / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 machine1\n")


def another_network(machines: Machines) -> None:
    machines.ssh.run(2, ["ip", "link", "add", "wifi0", "type", "veth", "peer", "name", "wifi1"])
    machines.ssh.run(2, ["ip", "address", "add", "10.204.0.3/24", "dev", "wifi0"])
    for end in ("wifi0", "wifi1"):
        machines.ssh.run(2, ["ip", "link", "set", end, "up"])
    (machines.ssh.folder(2) / "hosts").write_text("127.0.0.1 localhost\n10.204.0.3 machine2\n")


def wrong_variable(machines: Machines) -> None:
    machines.environment["GLOO_SOCKET_IFNAME"] = "lo"


def closed_main_port(machines: Machines) -> None:
    machines.ssh.close_port(0, "--dport", str(PORT))


def closed_from_one(machines: Machines) -> None:
    machines.ssh.close_port(2, "-s", machines.cluster.nodes[1].address, "--dport", "1024:65535")


def no_datagrams(machines: Machines) -> None:
    machines.ssh.drop_datagrams(1)


def taken_port(machines: Machines) -> None:
    listening = f"import socket, time; kept = socket.create_server(('', {PORT})); print(flush=True); time.sleep(100)"
    process = machines.ssh.popen(0, [sys.executable, "-c", listening], stdout=subprocess.PIPE)
    process.stdout.readline()


def another_torch(machines: Machines) -> None:
    machines.python_with(1, "torch-2.10.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.10.0\n")


def another_transformers(machines: Machines) -> None:
    metadata = "Metadata-Version: 2.1\nName: transformers\nVersion: 5.5.0\n"
    machines.python_with(2, "transformers-5.5.0.dist-info/METADATA", metadata)


def broken_torch(machines: Machines) -> None:
    machines.python_with(1, "torch.py", "raise OSError('libcudart.so.12: cannot open shared object file')\n")


def no_package(machines: Machines) -> None:
    # An interpreter of the same version without what is installed for this one.
    program = machines.folder / "bare"
    program.write_text(f'#!/bin/sh\nPYTHONPATH= exec {sys.executable} -S "$@"\n')
    program.chmod(0o755)
    machines.hosts[1]["python"] = str(program)


def no_python(machines: Machines) -> None:
    machines.hosts[1]["python"] = "/opt/missing/bin/python"


def wrong_clock(machines: Machines) -> None:
    machines.python_with(2, "sitecustomize.py", "import time\nnow = time.time\ntime.time = lambda: now() + 3600\n")


def another_script(machines: Machines) -> None:
    (machines.own_folder(1) / "train.py").write_text("print('another training')\n")


def no_script(machines: Machines) -> None:
    (machines.own_folder(2) / "train.py").unlink()


def no_folder(machines: Machines) -> None:
    machines.hosts[1]["folder"] = str(machines.folder / "missing")


def full_disk(machines: Machines) -> None:
    script = (machines.own_folder(1) / "train.py").read_text()
    machines.ssh.run(1, ["mount", "-t", "tmpfs", "-o", "size=64M", "disk", machines.own_folder(1)])
    machines.ssh.run(1, ["sh", "-c", f'printf %s "$1" > {machines.own_folder(1)}/train.py', "sh", script])


def small_shared_memory(machines: Machines) -> None:
    machines.ssh.run(1, ["mount", "-o", "remount,size=16M", "/dev/shm"])


def refused_key(machines: Machines) -> None:
    (machines.ssh.folder(2) / "authorized_keys").write_text("")


def unknown_host_key(machines: Machines) -> None:
    known = machines.folder / "ssh" / "known_hosts"
    address = machines.cluster.nodes[1].address
    known.write_text("".join(line for line in known.read_text().splitlines(True) if not line.startswith(address)))


def no_server(machines: Machines) -> None:
    machines.ssh.stop_server(2)


def pulled_cable(machines: Machines) -> None:
    machines.cluster.cut_link(1)


def wrong_address(machines: Machines) -> None:
    # Another one than the machine has: a router that passes connections on has it.
    machines.hosts[1]["ssh"] = machines.hosts[1]["address"]
    call("ip", "-n", machines.cluster.nodes[0].namespace, "address", "add", "10.203.0.77/32", "dev", "lo")
    machines.hosts[1]["address"] = "10.203.0.77"


def no_gpu(machines: Machines) -> None:
    del machines.hosts[2]["cpu"]
    machines.hosts[2]["device"] = "RTX 3090"


def slow_link(machines: Machines) -> None:
    machines.cluster.set_network(Link(50e6), node=2)


@dataclass(frozen=True)
class Fault:
    """What is planted, and what has to be found: where it is, words of the finding, and of what mends it."""

    plant: Callable[[Machines], None]
    where: str
    words: str
    fix: str
    problem: bool = True


FAULTS = [
    Fault(debian_name, "node 1", "its name machine1 stands for 127.0.1.1", "export GLOO_SOCKET_IFNAME=eth0"),
    Fault(
        another_network, "node 2", "stands for 10.204.0.3, so ranks would listen on wifi0", "GLOO_SOCKET_IFNAME=eth0"
    ),
    Fault(wrong_variable, "node 0", "GLOO_SOCKET_IFNAME is 'lo', expected 'eth0'", "export GLOO_SOCKET_IFNAME=eth0"),
    Fault(closed_from_one, "node 1 -> node 2", "though the other way works", "ufw allow from 10.203.0.2"),
    Fault(taken_port, "node 0", "port 29500, where the machines meet, cannot be listened to", "--main-port"),
    Fault(another_torch, "node 1", "found torch 2.10.0, expected torch ", "-m pip install torch=="),
    Fault(another_transformers, "node 2", "found transformers 5.5.0, expected", "-m pip install transformers=="),
    Fault(broken_torch, "node 1", "torch cannot be imported (OSError: libcudart", "--force-reinstall torch=="),
    Fault(no_package, "node 1", "found no accelerate_lshdp", "Install it there"),
    Fault(no_python, "node 1", "found no Python at /opt/missing/bin/python", "python: PATH"),
    Fault(wrong_clock, "node 2", "its clock is 3600 s ahead", "timedatectl set-ntp true", problem=False),
    Fault(another_script, "node 1", "found another one than here: train.py", "scp train.py 10.203.0.2:"),
    Fault(no_script, "node 2", "found no train.py in", "scp train.py 10.203.0.3:"),
    Fault(no_folder, "node 1", "found no folder", "mkdir -p"),
    Fault(full_disk, "node 1", "MB free in", "Make room", problem=False),
    Fault(small_shared_memory, "node 1", "in /dev/shm", "mount -o remount,size=50% /dev/shm", problem=False),
    Fault(refused_key, "node 2", "Permission denied", "ssh-copy-id 10.203.0.3"),
    Fault(unknown_host_key, "node 1", "Host key verification failed", "ssh 10.203.0.2 true"),
    Fault(no_server, "node 2", "Connection refused", "Start an ssh server there"),
    Fault(pulled_cable, "node 1", "cannot be reached by ssh", "Start it"),
    Fault(no_gpu, "node 2", "torch finds 0 GPUs, expected 1", "install the driver"),
    Fault(slow_link, "node 2", "Mb/s at most", "ethtool eth0", problem=False),
]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.plant.__name__)
def test_a_fault_is_found_alone(machines: Machines, fault: Fault) -> None:
    fault.plant(machines)
    code, found, output = doctor(machines)
    assert is_found(fault, found), output
    assert all(where_of(line).startswith(fault.where) for line, _ in found), output
    assert code == int(fault.problem), output


@pytest.mark.slow
def test_a_closed_main_port_is_found(machines: Machines) -> None:
    closed_main_port(machines)
    code, found, output = doctor(machines)
    assert [where_of(line) for line, _ in found] == ["node 1 -> node 0", "node 2 -> node 0"], output
    assert all(f"at port {PORT}" in line and f"port {PORT} proto tcp" in fix for line, fix in found), output
    assert code == 1


def test_dropped_datagrams_are_found(machines: Machines) -> None:
    no_datagrams(machines)
    code, found, output = doctor(machines)
    ways = ["node 0 -> node 1", "node 1 -> node 0", "node 1 -> node 2", "node 2 -> node 1"]  # answers are dropped, too
    assert [where_of(line) for line, _ in found] == ways, output
    assert all("datagrams (UDP) are not answered" in line and "proto udp" in fix for line, fix in found), output
    assert code == 0


@pytest.mark.slow
def test_an_address_that_the_machine_does_not_have_is_found(machines: Machines) -> None:
    wrong_address(machines)
    code, found, output = doctor(machines)
    lines = [line for line, _ in found if where_of(line) == "node 1 (10.203.0.77)"]
    assert any("its address is none of its own (10.203.0.2)" in line for line in lines), output
    assert code == 1


def test_several_faults_are_found_at_once(machines: Machines) -> None:
    planted = [debian_name, closed_from_one, another_transformers, another_script, small_shared_memory, wrong_clock]
    for plant in planted:
        plant(machines)
    code, found, output = doctor(machines)
    assert all(is_found(fault, found) for fault in FAULTS if fault.plant in planted), output
    assert (code, len(found)) == (1, len(planted)), output


def test_a_command_on_each_machine_needs_no_ssh(machines: Machines) -> None:
    closed_from_one(machines)
    command = [sys.executable, "-m", "accelerate_lshdp.cli.main", "doctor", "--nodes", "1,1,1"]
    command += ["--main-ip", machines.cluster.nodes[0].address, "--node-rank"]
    processes = [
        machines.ssh.popen(
            node,
            [*command, str(node)],
            cwd=machines.own_folder(node),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(COUNT)
    ]
    outputs = [process.communicate(timeout=90)[0] for process in processes]
    assert [process.returncode for process in processes] == [1, 1, 1], outputs
    assert "problem: node 1 -> node 2: no answer within 3 s" in outputs[0]
    assert "found 1 problem and 0 warnings: a run would fail" in outputs[0]
    assert "finished; node 0 has the report" in outputs[2]


def test_nothing_is_left_when_the_command_is_killed(machines: Machines) -> None:
    """Agents end with the connection over which they were started."""
    machines.python_with(1, "sitecustomize.py", "import time\ntime.sleep(5)\n")  # so that it is killed in mid-run
    process = machines.start("doctor", [])
    before = [set(machines.cluster.pids(node)) for node in range(COUNT)]
    time.sleep(3)
    process.kill()
    process.communicate(timeout=10)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        left = [set(machines.cluster.pids(node)) - before[node] for node in range(COUNT)]
        if not any(left):
            return
        time.sleep(0.2)
    raise AssertionError(f"found processes {left}, expected none")


def where_of(line: str) -> str:
    """The place that a finding names."""
    return line.partition(": ")[2].partition(": ")[0]


def is_found(fault: Fault, found: list[tuple[str, str]]) -> bool:
    kind = "problem" if fault.problem else "warning"
    return any(
        line.startswith(f"{kind}: {fault.where}") and fault.words in line and fault.fix in fix for line, fix in found
    )
