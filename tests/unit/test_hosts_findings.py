# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What is wrong with machines, from what they say about themselves: each fault alone, and good machines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from accelerate_lshdp.documents.cluster import Node
from accelerate_lshdp.documents.hosts import Host
from accelerate_lshdp.hosts.connection import HostError
from accelerate_lshdp.hosts.examination import Examination, Machine, _rounds
from accelerate_lshdp.hosts.findings import Finding, find
from accelerate_lshdp.hosts.link_probe import LinkFigures
from accelerate_lshdp.hosts.machine_facts import Device, MachineFacts


GOOD = LinkFigures(delay_seconds=1e-4, bits_per_second=9.4e8)


def facts_of(node: int) -> MachineFacts:
    address = f"192.0.2.{node + 1}"
    return MachineFacts(
        host_name=f"machine{node}",
        python="3.11.7",
        executable="/env/bin/python",
        packages={"torch": "2.13.0+cu126", "accelerate": "1.15.0", "transformers": "5.23.0"},
        torch_error=None,
        devices=(Device("RTX 3090", 24 * 10**9, 23 * 10**9),),
        cores=8,
        memory_bytes=64 * 10**9,
        shared_bytes=32 * 10**9,
        folder="/home/anna/run",
        folder_error=None,
        free_bytes=10**12,
        interfaces={"lo": ["127.0.0.1", "::1"], "eth0": [address], "wlan0": ["198.51.100.7"]},
        files={"train.py": "abc"},
        own_name_address=address,
        own_name_interface="eth0",
    )


def machines(count: int) -> Examination:
    made = [
        Machine(
            Host(Node(1, f"192.0.2.{node + 1}", "RTX 3090")),
            facts_of(node),
            address=f"192.0.2.{node + 1}",
            clock_offset=0.1 * node,
            clock_uncertainty=0.01,
        )
        for node in range(count)
    ]
    links = {(one, other): GOOD for one in range(count) for other in range(count) if one != other}
    to_main_port = {node: LinkFigures() for node in range(1, count)}
    return Examination(tuple(made), links, to_main_port, 29500, {"train.py": "abc"})


def with_facts(node: int, **changes: Any) -> Callable[[Examination], Examination]:
    """What a machine would look like whose facts are others."""

    def change(examination: Examination) -> Examination:
        machine = examination.machines[node]
        return _with_machine(examination, node, replace(machine, facts=replace(machine.facts, **changes)))

    return change


def with_machine(node: int, **changes: Any) -> Callable[[Examination], Examination]:
    return lambda examination: _with_machine(examination, node, replace(examination.machines[node], **changes))


def with_links(**changes: Any) -> Callable[[Examination], Examination]:
    return lambda examination: replace(examination, **changes)


def with_link(pair: tuple[int, int], figures: LinkFigures) -> Callable[[Examination], Examination]:
    return lambda examination: replace(examination, links={**examination.links, pair: figures})


def _with_machine(examination: Examination, node: int, machine: Machine) -> Examination:
    changed = list(examination.machines)
    changed[node] = machine
    return replace(examination, machines=tuple(changed))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_good_machines_have_no_findings(count: int) -> None:
    assert find(machines(count)) == []


SAME = {"torch": "2.13.0", "accelerate": "1.15.0", "transformers": "5.23.0"}
SLOW = {pair: replace(GOOD, bits_per_second=9e7) for pair in [(0, 2), (1, 2), (2, 0), (2, 1)]}

FAULTS: dict[str, tuple[Callable[[Examination], Examination], str, str, str, bool]] = {
    # name: (change, where, words, fix, whether a run would fail)
    "unreachable": (
        with_machine(1, facts=None, error=HostError("cannot be reached by ssh (x)", "Start it")),
        "node 1 (192.0.2.2)",
        "cannot be reached",
        "Start it",
        True,
    ),
    "unknown name": (with_machine(2, address=None), "node 2", "its name is not known", "Correct the address", True),
    "loopback": (
        with_machine(0, address="127.0.1.1"),
        "node 0 (192.0.2.1)",
        "its address stands for 127.0.1.1, which means another machine on each of them",
        "ip -brief address",
        True,
    ),
    "missing package": (
        with_facts(1, packages={**SAME, "transformers": None}),
        "node 1",
        "found no transformers in /env/bin/python",
        "/env/bin/python -m pip install transformers",
        True,
    ),
    "another release": (
        with_facts(1, packages={**SAME, "torch": "2.10.0+cpu"}),
        "node 1",
        "found torch 2.10.0+cpu, expected torch 2.13.0+cu126 as on node 0",
        "-m pip install torch==2.13.0",
        True,
    ),
    "another Python": (with_facts(2, python="3.12.1"), "node 2", "found Python 3.12.1", "Python 3.11", True),
    "broken torch": (with_facts(1, torch_error="OSError: x"), "node 1", "cannot be imported", "torch==2.13.0", True),
    "no devices": (with_facts(1, devices=()), "node 1", "torch finds 0 GPUs, expected 1", "install the driver", True),
    "too few devices": (
        with_machine(1, host=Host(Node(2, "192.0.2.2", "RTX 3090"))),
        "node 1",
        "torch finds 1 GPUs, expected 2",
        "write ranks: 1",
        True,
    ),
    "used device": (
        with_facts(1, devices=(Device("RTX 3090", 24 * 10**9, 9 * 10**9),)),
        "node 1",
        "other programs have 15.0 of 24.0 GB of GPU 0 (RTX 3090)",
        "CUDA_VISIBLE_DEVICES",
        False,
    ),
    "too few cores": (
        with_machine(1, host=Host(Node(9, "192.0.2.2", cores=8.0))),
        "node 1",
        "found 8 cores for 9 ranks",
        "ranks: 8",
        False,
    ),
    "folder": (
        with_facts(1, folder_error="it cannot be written to"),
        "node 1",
        "the folder /home/anna/run cannot be used",
        "chown",
        True,
    ),
    "full disk": (with_facts(1, free_bytes=10**8), "node 1", "found 100 MB free", "Make room", False),
    "full /dev/shm": (with_facts(1, shared_bytes=64 * 2**20), "node 1", "67 MB free in /dev/shm", "--shm-size", False),
    "loopback name": (
        with_facts(1, own_name_address="127.0.1.1", own_name_interface=None),
        "node 1",
        "stands for 127.0.1.1, so ranks would listen on the loopback, expected eth0",
        "export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0",
        True,
    ),
    "name of another network": (
        with_facts(1, own_name_address="198.51.100.7", own_name_interface="wlan0"),
        "node 1",
        "so ranks would listen on wlan0, expected eth0",
        "export GLOO_SOCKET_IFNAME=eth0",
        True,
    ),
    "variable": (
        with_facts(1, named_interfaces={"GLOO_SOCKET_IFNAME": "eth1"}),
        "node 1",
        "GLOO_SOCKET_IFNAME is 'eth1', expected 'eth0'",
        "export GLOO_SOCKET_IFNAME=eth0",
        True,
    ),
    "variable of NCCL": (
        with_facts(1, named_interfaces={"NCCL_SOCKET_IFNAME": "^eth"}),
        "node 1",
        "NCCL_SOCKET_IFNAME is '^eth'",
        "NCCL_SOCKET_IFNAME=eth0",
        True,
    ),
    "address of a router": (
        with_machine(1, address="203.0.113.5"),
        "node 1",
        "its address is none of its own (192.0.2.2, 198.51.100.7)",
        "VPN",
        True,
    ),
    "named interface": (
        with_machine(1, host=Host(Node(1, "192.0.2.2", "RTX 3090"), interface="eth7")),
        "node 1",
        "found no network interface eth7 that is up, but lo, eth0, wlan0",
        "ip link set eth7 up",
        True,
    ),
    "taken port": (with_facts(0, port_error="in use"), "node 0", "port 29500", "sport = :29500", True),
    "another script": (
        with_facts(2, files={"train.py": "xyz"}),
        "node 2",
        "found another one than here: train.py",
        "scp train.py 192.0.2.3:/home/anna/run/train.py",
        True,
    ),
    "no script": (with_facts(2, files={"train.py": None}), "node 2", "found no train.py", "scp train.py", True),
    "clock": (with_machine(1, clock_offset=-90.0), "node 1", "its clock is 90 s behind", "timedatectl", False),
    "one direction": (
        with_link((2, 1), LinkFigures("no answer within 3 s")),
        "node 2 -> node 1",
        "no answer within 3 s, at a port of 192.0.2.2 that the system chose, though the other way works",
        "Let node 2 in on node 1: sudo ufw allow from 192.0.2.3",
        True,
    ),
    "large packets": (
        with_link((0, 1), LinkFigures("x", stalled=True, delay_seconds=1e-4)),
        "node 0 -> node 1",
        "small messages arrive and large ones do not",
        "sudo ip link set eth0 mtu 1400 on node 0, sudo ip link set eth0 mtu 1400 on node 1",
        True,
    ),
    "datagrams": (
        with_link((2, 1), LinkFigures(delay_seconds=1e-4, bits_per_second=9.4e8, datagrams_lost=True)),
        "node 2 -> node 1",
        "datagrams (UDP) are not answered, though connections are",
        "on node 1: sudo ufw allow from 192.0.2.3 proto udp to any",
        False,
    ),
    "main port": (
        with_links(to_main_port={1: LinkFigures("no answer within 3 s"), 2: LinkFigures()}),
        "node 1 -> node 0",
        "at port 29500 of 192.0.2.1, where the machines meet; other ports answer",
        "to any port 29500 proto tcp",
        True,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_alone(name: str) -> None:
    change, where, words, fix, is_problem = FAULTS[name]
    found = find(change(machines(3)))
    assert len(found) == 1, found
    assert found[0].where.startswith(where) and words in found[0].what and fix in found[0].fix, found
    assert found[0].is_problem is is_problem


def test_a_slow_machine_is_found_and_not_its_partners() -> None:
    found = find(with_links(links={**machines(3).links, **SLOW})(machines(3)))
    assert {(each.where, each.is_problem) for each in found} == {("node 2 (192.0.2.3)", False)}
    assert {each.what.split()[1] for each in found} == {"sends", "gets"}


def test_files_are_compared_with_those_of_the_first_machine_where_there_are_none_here() -> None:
    elsewhere = with_links(files={"train.py": None})
    assert find(elsewhere(machines(3))) == []
    (found,) = find(elsewhere(with_facts(1, files={"train.py": "xyz"})(machines(3))))
    assert (found.where, found.what) == (
        "node 1 (192.0.2.2)",
        "found another one than on node 0: train.py, expected the same",
    )


def test_a_file_that_is_nowhere_is_said_once() -> None:
    nowhere = machines(3)
    for node in range(3):
        nowhere = with_facts(node, files={"train.py": None})(nowhere)
    found = find(with_links(files={"train.py": None})(nowhere))
    assert [each.where for each in found] == ["node 0 (192.0.2.1)"]


def test_many_files_make_one_finding() -> None:
    names = [f"part{number}.py" for number in range(9)]
    examination = replace(machines(2), files=dict.fromkeys(names, "abc"))
    for node, digest in enumerate(["abc", None]):
        examination = with_facts(node, files=dict.fromkeys(names, digest))(examination)
    (found,) = find(examination)
    assert "found no part0.py, part1.py, part2.py, part3.py, part4.py and 4 more" in found.what
    assert found.fix == "rsync -aR . 192.0.2.2:/home/anna/run/"


def test_problems_come_before_warnings() -> None:
    changed = with_facts(2, files={"train.py": None})(with_machine(1, clock_offset=-90.0)(machines(3)))
    assert [each.is_problem for each in find(changed)] == [True, False]


def test_an_interface_that_is_named_in_the_file_is_taken() -> None:
    """Of a machine behind a translated address, say."""
    host = Host(Node(1, "192.0.2.2", "RTX 3090"), interface="wlan0")
    changed = with_machine(1, host=host)(with_facts(1, own_name_interface="wlan0")(machines(2)))
    assert find(changed) == []


@pytest.mark.parametrize(
    ("variable", "value", "is_right"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", True),
        ("GLOO_SOCKET_IFNAME", "eth", False),
        ("GLOO_SOCKET_IFNAME", "eth1,eth0", True),
        ("NCCL_SOCKET_IFNAME", "eth", True),
        ("NCCL_SOCKET_IFNAME", "=eth", False),
        ("NCCL_SOCKET_IFNAME", "=eth0", True),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", True),
        ("NCCL_SOCKET_IFNAME", "^=eth0", False),
        ("NCCL_SOCKET_IFNAME", "ib0,eth0", True),
    ],
)
def test_variables_name_interfaces_as_their_libraries_read_them(variable: str, value: str, is_right: bool) -> None:
    found: list[Finding] = find(with_facts(1, named_interfaces={variable: value})(machines(2)))
    assert [each.where for each in found] == ([] if is_right else ["node 1 (192.0.2.2)"]), found


@pytest.mark.parametrize("count", range(2, 10))
def test_every_pair_meets_once_and_nobody_twice_at_a_time(count: int) -> None:
    nodes = [3 * node for node in range(count)]
    rounds = list(_rounds(nodes))
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met)) == count * (count - 1) // 2
    for pairs in rounds:
        members = [node for pair in pairs for node in pair]
        assert len(members) == len(set(members))
