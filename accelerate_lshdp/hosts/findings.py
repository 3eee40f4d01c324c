# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`findings`: what is wrong with the machines of a run, each with what to do about it.

A finding is a *problem* if a run on these machines would fail, and else a *warning*.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from accelerate_lshdp.hosts.connection import destination
from accelerate_lshdp.hosts.examination import Examination, Machine, reachable_nodes
from accelerate_lshdp.hosts.link_probe import LinkFigures
from accelerate_lshdp.hosts.machine_facts import (
    GLOO_VARIABLE,
    NCCL_VARIABLE,
    PACKAGES,
    MachineFacts,
    same_release,
)


#: Seconds by which clocks may differ: above, times in logs and on files no longer tell what came first.
LARGEST_CLOCK_OFFSET = 2.0
#: Free bytes where checkpoints go, and in /dev/shm, below which a small model's do not fit.
LEAST_FREE_BYTES, LEAST_SHARED_BYTES = 2**30, 128 * 2**20
#: A way that has less than this part of the usual rate is slow by a fault, and not by its kind.
LEAST_RATE_SHARE = 0.25
#: Part of a device's memory that other programs may have.
LARGEST_USED_SHARE = 0.2
_NAMES_SHOWN = 5


@dataclass(frozen=True)
class Finding:
    """Something that is wrong.

    Args:
        where: the machine or the way, such as "node 1 (192.0.2.2)".
        what: was found, and what was expected.
        fix: the command or variable that mends it.
        is_problem: whether a run would fail.
    """

    where: str
    what: str
    fix: str
    is_problem: bool = True


def find(examination: Examination) -> list[Finding]:
    """Everything that is wrong, problems before warnings."""
    found = [*_of_machines(examination), *_of_differences(examination), *_of_network(examination)]
    return sorted(found, key=lambda finding: not finding.is_problem)


def name_of(examination: Examination, node: int) -> str:
    """A machine's name in the report."""
    if len(examination.machines) == 1:
        return "this machine" if examination.machines[0].host.ssh is None else examination.machines[0].host.address
    return f"node {node} ({examination.machines[node].host.address})"


def _of_machines(examination: Examination) -> Iterator[Finding]:
    """What is wrong with each machine by itself."""
    several, reachable = len(examination.machines) > 1, reachable_nodes(examination.machines)
    for node, machine in enumerate(examination.machines):
        where = name_of(examination, node)
        if machine.address is None and machine.error is None:
            yield Finding(where, "its name is not known here", f"Correct the address {machine.host.address!r}")
        elif machine.address is not None and node not in reachable:
            yield Finding(
                where,
                f"its address stands for {machine.address}, which means another machine on each of them",
                "Write the address by which the others reach it: ip -brief address shows it there",
            )
        if machine.error is not None:
            yield Finding(where, str(machine.error), machine.error.fix)
        facts = machine.facts
        if facts is None:
            continue
        yield from _of_packages(where, facts)
        yield from _of_devices(where, machine, facts)
        yield from _of_room(where, facts)
        if several and node in reachable:
            assert machine.address is not None, "it can be reached"
            yield from _of_interface(where, machine, machine.address, facts)
        if facts.port_error is not None:
            port = examination.main_port
            yield Finding(
                where,
                f"port {port}, where the machines meet, cannot be listened to ({facts.port_error})",
                f"End what listens there (ss -tlnp 'sport = :{port}' names it), or give all nodes another --main-port",
            )


def _of_packages(where: str, facts: MachineFacts) -> Iterator[Finding]:
    missing = [name for name, version in facts.packages.items() if version is None]
    if missing:
        yield Finding(
            where,
            f"found no {' and no '.join(missing)} in {facts.executable}",
            f"Install there: {facts.executable} -m pip install {' '.join(missing)}",
        )
    if facts.torch_error is not None and "torch" not in missing:
        yield Finding(
            where,
            f"torch cannot be imported ({facts.torch_error})",
            f"Install it again there: {facts.executable} -m pip install --force-reinstall"
            f" torch=={same_release(facts.packages['torch'] or '')}",
        )


def _of_devices(where: str, machine: Machine, facts: MachineFacts) -> Iterator[Finding]:
    host = machine.host
    count = host.node.ranks
    if host.trains_on_cpu is False and len(facts.devices) < count:
        yield Finding(
            where,
            f"torch finds {len(facts.devices)} GPUs, expected {count}, one a rank",
            f"See nvidia-smi there, and write ranks: {len(facts.devices)}"
            if facts.devices
            else "See whether nvidia-smi works there, and install the driver and a CUDA build of torch; or write cpu:"
            " in the place of device:",
        )
    if host.trains_on_cpu and count > facts.cores:
        yield Finding(
            where,
            f"found {facts.cores} cores for {count} ranks",
            f"Write ranks: {facts.cores}",
            is_problem=False,
        )
    for index, device in enumerate(facts.devices[:count] if not host.trains_on_cpu else ()):
        if device.free_bytes < (1 - LARGEST_USED_SHARE) * device.memory_bytes:
            used = device.memory_bytes - device.free_bytes
            yield Finding(
                where,
                f"other programs have {used / 1e9:.1f} of {device.memory_bytes / 1e9:.1f} GB of GPU {index}"
                f" ({device.name})",
                "End them (nvidia-smi names them), or leave that GPU out by CUDA_VISIBLE_DEVICES",
                is_problem=False,
            )


def _of_room(where: str, facts: MachineFacts) -> Iterator[Finding]:
    if facts.folder_error is not None:
        yield Finding(
            where,
            f"the folder {facts.folder} cannot be used ({facts.folder_error})",
            f"sudo chown $USER {shlex.quote(facts.folder)} there; or name another in the file (folder: PATH)",
        )
    elif facts.free_bytes is not None and facts.free_bytes < LEAST_FREE_BYTES:
        yield Finding(
            where,
            f"found {facts.free_bytes / 1e6:.0f} MB free in {facts.folder}, where checkpoints go, expected at least"
            f" {LEAST_FREE_BYTES / 1e6:.0f} MB: one takes 12 bytes a parameter, and the one before stays until it is"
            " written",
            "Make room, or name another folder in the file (folder: PATH)",
            is_problem=False,
        )
    if facts.shared_bytes is not None and facts.shared_bytes < LEAST_SHARED_BYTES:
        yield Finding(
            where,
            f"found {facts.shared_bytes / 1e6:.0f} MB free in /dev/shm, expected at least"
            f" {LEAST_SHARED_BYTES / 1e6:.0f} MB: workers of loaders hand their batches over there, and end with a bus"
            " error where it is full",
            "sudo mount -o remount,size=50% /dev/shm there; for a container docker run --shm-size=8g, or --ipc=host",
            is_problem=False,
        )


def _of_interface(where: str, machine: Machine, address: str, facts: MachineFacts) -> Iterator[Finding]:
    """Whether ranks would listen where the other machines look for them."""
    wanted = machine.host.interface
    if wanted is not None and wanted not in facts.interfaces:
        yield Finding(
            where,
            f"found no network interface {wanted} that is up, but {', '.join(facts.interfaces)}",
            f"Correct interface: in the file, or bring it up: sudo ip link set {wanted} up",
        )
        return
    interface = wanted or facts.interface_of(address)
    if interface is None:
        own = [each for name, each in facts.interfaces.items() if name != "lo"]
        listed = ", ".join(each for addresses in own for each in addresses) or "none"
        yield Finding(
            where,
            f"its address is none of its own ({listed}): ranks tell each other addresses of their own, which the other"
            " machines cannot reach",
            "Write the one of these that the other machines reach, or connect all machines by a VPN and write its"
            " addresses",
        )
        return
    fix = f"export {GLOO_VARIABLE}={interface} {NCCL_VARIABLE}={interface} there, before each command"
    for variable, kind in ((GLOO_VARIABLE, "gloo"), (NCCL_VARIABLE, "NCCL")):
        named = facts.named_interfaces.get(variable)
        if named is not None and not _names(variable, named, interface):
            yield Finding(where, f"{variable} is {named!r}, expected {interface!r}, which has {address}", fix)
        elif named is None and kind == "gloo" and facts.own_name_interface != interface:
            meaning = facts.own_name_address or "nothing that it has"
            takes = facts.own_name_interface or "the loopback"
            yield Finding(
                where,
                f"its name {facts.host_name} stands for {meaning}, so ranks would listen on {takes}, expected"
                f" {interface}, which has {address}",
                fix,
            )


def _names(variable: str, value: str, interface: str) -> bool:
    """Whether a variable's value names an interface; NCCL's may be a list of beginnings, = before a whole name."""
    if variable == GLOO_VARIABLE:
        return interface in value.split(",")
    if value.startswith("^"):
        excluded = value.removeprefix("^")
        parts = excluded.removeprefix("=").split(",")
        return not any(interface == part if excluded.startswith("=") else interface.startswith(part) for part in parts)
    parts = value.removeprefix("=").split(",")
    return any(interface == part if value.startswith("=") else interface.startswith(part) for part in parts)


def _of_differences(examination: Examination) -> Iterator[Finding]:
    """What must be the same on all machines and is not. The first machine that could be asked is the measure."""
    known = {node: machine.facts for node, machine in enumerate(examination.machines) if machine.facts is not None}
    if not known:
        return
    first, *others = known
    model = known[first]
    yield from _of_files(examination)
    for node in others:
        facts, where = known[node], name_of(examination, node)
        as_there = f"as on node {first}"
        if facts.python.rsplit(".", 1)[0] != model.python.rsplit(".", 1)[0]:
            yield Finding(
                where,
                f"found Python {facts.python}, expected {model.python} {as_there}",
                f"Make an environment of Python {model.python.rsplit('.', 1)[0]} there, and name it in the file"
                " (python: PATH)",
            )
        wrong = {
            name: model.packages[name]
            for name in PACKAGES
            if facts.packages[name]
            and model.packages[name]
            and same_release(facts.packages[name] or "") != same_release(model.packages[name] or "")
        }
        if wrong:
            found = ", ".join(f"{name} {facts.packages[name]}" for name in wrong)
            expected = ", ".join(f"{name} {version}" for name, version in wrong.items())
            pins = " ".join(f"{name}=={same_release(version or '')}" for name, version in wrong.items())
            yield Finding(
                where,
                f"found {found}, expected {expected} {as_there}",
                f"Install there: {facts.executable} -m pip install {pins}",
            )
        yield from _of_clock(examination, first, node, where)


def _of_files(examination: Examination) -> Iterator[Finding]:
    """Files that are not the same on all machines."""
    known = {node: machine.facts for node, machine in enumerate(examination.machines) if machine.facts is not None}
    first = min(known)
    expected = {file: here or known[first].files[file] for file, here in examination.files.items()}
    as_there = "here" if all(examination.files.values()) else f"on node {first}"
    for node, facts in known.items():
        missing = [file for file in expected if facts.files[file] is None and (expected[file] or node == first)]
        changed = [file for file in expected if facts.files[file] not in (None, expected[file])]
        where = name_of(examination, node)
        copy = _copy(missing + changed, destination(examination.machines[node].host), facts.folder)
        if missing:
            yield Finding(
                where, f"found no {_listed(missing)} in {facts.folder}, expected the same as {as_there}", copy
            )
        if changed:
            others = "others" if len(changed) > 1 else "another one"
            yield Finding(where, f"found {others} than {as_there}: {_listed(changed)}, expected the same", copy)


def _copy(files: list[str], target: str, folder: str) -> str:
    """The command that copies files of the current folder to a machine."""
    target = f"[{target}]" if ":" in target else target  # a number of IPv6
    if len(files) == 1:
        return f"scp {shlex.quote(files[0])} {shlex.quote(f'{target}:{folder}/{files[0]}')}"
    names = "." if len(files) > _NAMES_SHOWN else " ".join(map(shlex.quote, files))
    return f"rsync -aR {names} {shlex.quote(f'{target}:{folder}/')}"


def _listed(files: list[str]) -> str:
    more = len(files) - _NAMES_SHOWN
    return ", ".join(files[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _of_clock(examination: Examination, first: int, node: int, where: str) -> Iterator[Finding]:
    one, other = examination.machines[first], examination.machines[node]
    if one.clock_offset is None or other.clock_offset is None:
        return
    ahead = other.clock_offset - one.clock_offset
    if abs(ahead) - one.clock_uncertainty - other.clock_uncertainty > LARGEST_CLOCK_OFFSET:
        yield Finding(
            where,
            f"its clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} that of node {first}: times in"
            " logs and on files mislead",
            "sudo timedatectl set-ntp true on both",
            is_problem=False,
        )


def _of_network(examination: Examination) -> Iterator[Finding]:
    """Ways between machines that do not carry what a run needs."""
    broken = {pair for pair, link in examination.links.items() if link.error is not None}
    for pair in sorted(broken):
        source, target = pair
        link = examination.links[pair]
        where = f"node {source} -> node {target}"
        address = examination.machines[target].host.address
        if link.stalled:
            ends = [f"sudo ip link set {_interface(examination, node)} mtu 1400 on node {node}" for node in pair]
            yield Finding(
                where,
                "small messages arrive and large ones do not: part of the way takes only smaller packets",
                f"Lower the size of packets: {', '.join(ends)}",
            )
            continue
        back = "though the other way works" if (target, source) not in broken else "nor the other way"
        yield Finding(
            where,
            f"{link.error}, at a port of {address} that the system chose, {back}: ranks connect to each other on such"
            " ports",
            f"Let node {source} in on node {target}: sudo ufw allow from {examination.machines[source].address} (or"
            f" sudo iptables -I INPUT -s {examination.machines[source].address} -j ACCEPT)",
        )
    for source, target in sorted(pair for pair, link in examination.links.items() if link.datagrams_lost):
        yield Finding(
            f"node {source} -> node {target}",
            "datagrams (UDP) are not answered, though connections are: launchers would not hear each other, so that a"
            " lost node is noticed late, and an elastic run does not begin",
            f"Let them in on node {target}: sudo ufw allow from {examination.machines[source].address} proto udp to"
            " any",
            is_problem=False,
        )
    for node, link in sorted(examination.to_main_port.items()):
        if link.error is not None and (node, 0) not in broken:
            yield Finding(
                f"node {node} -> node 0",
                f"{link.error}, at port {examination.main_port} of {examination.machines[0].host.address}, where the"
                " machines meet; other ports answer",
                f"Let it in on node 0: sudo ufw allow from {examination.machines[node].address} to any port"
                f" {examination.main_port} proto tcp; or give all nodes another --main-port",
            )
    yield from _of_rates(examination.links, examination)


def _of_rates(links: Mapping[tuple[int, int], LinkFigures], examination: Examination) -> Iterator[Finding]:
    """Machines whose ways are much slower than those between the others."""
    # A machine's fastest way in each direction: a slow partner must not make it look slow.
    best: dict[tuple[int, str], float] = {}
    for (source, target), link in links.items():
        for place in ((source, "sends"), (target, "gets")):
            best[place] = max(link.bits_per_second or 0.0, best.get(place, 0.0))
    measured = {place: rate for place, rate in best.items() if rate}
    usual = statistics.median_high(measured.values()) if measured else 0.0
    for (node, does), rate in sorted(measured.items()):
        if rate < LEAST_RATE_SHARE * usual:
            interface = _interface(examination, node)
            yield Finding(
                name_of(examination, node),
                f"it {does} {rate / 1e6:.0f} Mb/s at most, where {usual / 1e6:.0f} are usual between these machines:"
                " all wait for the slowest",
                f"See what its link has agreed on: ethtool {interface} there; try another cable or port",
                is_problem=False,
            )


def _interface(examination: Examination, node: int) -> str:
    """The interface of a machine that the others reach."""
    machine = examination.machines[node]
    assert machine.facts is not None, "it has been asked, and has tried the network"
    return machine.host.interface or machine.facts.interface_of(machine.address or "") or "INTERFACE"
