# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The nodes' network: a namespace for each node, one for the switch (a bridge), and a cable (veth pair) between.

    node 0            switch            node 1
    eth0 ------------ node0
                      bridge
                      node1 ----------- eth0

A node's sending is limited where it leaves eth0, its receiving where it leaves the switch's port. Nothing of this is
seen in the machine's own network, and nothing in the cluster reaches beyond it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from accelerate_lshdp.documents.cluster import Link
from laboratory.emulated_cluster.system import PREFIX, ClusterError, call, is_leftover, unique_name


INTERFACE = "eth0"
_NAMESPACES = Path("/run/netns")
# Addresses are the same in every emulated cluster: no cluster sees another one.
_ADDRESS = "10.203.0.{}"


class Traffic(NamedTuple):
    """What a node's interface has carried since the cluster was built, in bytes, with protocol headers.

    Large segments that the kernel cuts late (see `_tbf`) count with one header, so this is close to the payload.
    """

    sent_bytes: int
    received_bytes: int


class ClusterNetwork:
    """Builds the network; `remove` takes it away again.

    Args:
        count: number of nodes.
        link: of every node.

    Raises:
        ClusterError: what failed. Nothing is left behind.
    """

    def __init__(self, count: int, link: Link) -> None:
        if count > 254:
            raise ClusterError(f"found {count} nodes, expected at most 254, the addresses of a /24 network")
        remove_leftover_namespaces()
        self.namespaces = [unique_name(f"node{node}") for node in range(count)]
        self.addresses = [_ADDRESS.format(node + 1) for node in range(count)]
        self._switch = unique_name("switch")
        self._made: list[str] = []
        try:
            self._build()
            for node in range(count):
                self.shape(node, link)
        except BaseException:
            self.remove()
            raise

    def _build(self) -> None:
        for namespace in [self._switch, *self.namespaces]:
            self._made.append(namespace)
            call("ip", "netns", "add", namespace)
        # Without multicast snooping and IPv6 nothing but the nodes' own traffic is on the links. Two lines for each
        # interface: in one, the kernel would bring it up first, give it an IPv6 address and announce that.
        lines = ["link add bridge type bridge mcast_snooping 0", "link set bridge addrgenmode none"]
        lines += ["link set bridge up"]
        for node, namespace in enumerate(self.namespaces):
            lines += [
                f"link add {_port(node)} type veth peer name {INTERFACE} netns {namespace}",
                f"link set {_port(node)} master bridge addrgenmode none",
                f"link set {_port(node)} up",
            ]
        call("ip", "-n", self._switch, "-batch", "-", lines=lines)
        for namespace, address in zip(self.namespaces, self.addresses, strict=True):
            lines = [
                "link set lo up",
                f"address add {address}/24 dev {INTERFACE}",
                f"link set {INTERFACE} addrgenmode none",
                f"link set {INTERFACE} up",
            ]
            call("ip", "-n", namespace, "-batch", "-", lines=lines)

    def shape(self, node: int, link: Link) -> None:
        """Sets the rate and the delay of a node's link, at once."""
        sending = [f"qdisc replace dev {INTERFACE} root handle 1: {_tbf(link)}"]
        if link.latency_seconds:
            # The whole delay of the way to another node is here. The limit counts segments: enough for the rate.
            waiting = round(link.bandwidth_bits_per_second * link.latency_seconds / 8 / 1500) + 10_000
            delay = f"delay {link.latency_seconds * 1e6:.0f}us limit {waiting}"
            sending.append(f"qdisc replace dev {INTERFACE} parent 1:1 handle 10: netem {delay}")
        elif "netem" in call("tc", "-n", self.namespaces[node], "qdisc", "show", "dev", INTERFACE):
            sending.append(f"qdisc delete dev {INTERFACE} parent 1:1 handle 10:")
        _shape(self.namespaces[node], sending)
        _shape(self._switch, [f"qdisc replace dev {_port(node)} root handle 1: {_tbf(link)}"])

    def set_connected(self, node: int, connected: bool) -> None:
        """Pulls a node's cable out of the switch, or puts it back."""
        call("ip", "-n", self._switch, "link", "set", _port(node), "up" if connected else "down")

    def traffic(self) -> list[Traffic]:
        """Of each node, from the other ends of the cables."""
        ports = {
            link["ifname"]: link["stats64"] for link in json.loads(call("ip", "-n", self._switch, "-j", "-s", "link"))
        }
        seen = [ports[_port(node)] for node in range(len(self.namespaces))]
        return [Traffic(port["rx"]["bytes"], port["tx"]["bytes"]) for port in seen]

    def remove(self) -> None:
        """Takes the network away. Its processes must have ended. Safe to call again."""
        # The switch first: with it go the cables, so that no namespace keeps another one alive.
        _remove_namespaces([name for name in self._made if (_NAMESPACES / name).exists()])
        self._made = []


def remove_leftover_namespaces() -> None:
    """Removes the namespaces of this project whose creator is gone; processes in them have been ended before."""
    _remove_namespaces([path.name for path in _NAMESPACES.glob(f"{PREFIX}*") if is_leftover(path.name)])


def _remove_namespaces(names: Sequence[str]) -> None:
    for name in names:
        try:
            call("ip", "netns", "delete", name)
        except ClusterError:
            if (_NAMESPACES / name).exists():  # else somebody was faster, and it is gone
                raise


def _shape(namespace: str, lines: Sequence[str]) -> None:
    try:
        call("tc", "-n", namespace, "-batch", "-", lines=lines)
    except ClusterError as error:
        if "qdisc kind is unknown" not in str(error):
            raise
        module, way_out = ("sch_netem", ", or leave the delay out") if "netem" in lines[-1] else ("sch_tbf", "")
        raise ClusterError(f"this kernel has no {module}: use one that has{way_out} ({error})") from None


def _port(node: int) -> str:
    return f"node{node}"


def _tbf(link: Link) -> str:
    """A token bucket filter for one direction of a link, in tc's words.

    TCP hands segments of up to 64 KiB to the interface and the kernel cuts them into packets as late as it can
    (segmentation offload, as real network cards do it). Here nobody ever needs the cut, so we let it be: at 250 Mb/s
    it costs the receiver ten times the CPU time, which the nodes lack. A bucket smaller than such a segment with the
    headers of its packets, 68.4 kB, would force the cut, so it holds at least one; at high rates it holds what passes
    in 4 ms, lest the timer's resolution limit the rate. The rate counts the headers that the packets would have had.

    The queue holds four times as much, some milliseconds' worth, as the port of a switch does. It fills when several
    nodes send to one: a much longer one would delay all else on the link, with a much shorter one TCP loses segments
    and waits for its timers.
    """
    burst = max(72_000, round(link.bandwidth_bits_per_second / 8 * 4e-3))
    limit = 4 * burst
    return f"tbf rate {link.bandwidth_bits_per_second:.0f}bit burst {burst} limit {limit}"
