# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`measured_links`: the links between nodes and inside them that explain measured all-reduces."""

from __future__ import annotations

from collections.abc import Sequence

from accelerate_lshdp.documents.network import LinkCost
from accelerate_lshdp.documents.profile_sections import MessageTimes, Network
from accelerate_lshdp.planning.cuts.step_time import PlanningError


def measured_links(network: Network | None, nodes: Sequence[int]) -> tuple[LinkCost, LinkCost]:
    """The links between nodes and inside them; where there is nobody to send to, one that takes no time.

    Args:
        network: measured message times; None: a single rank has none.
        nodes: ranks on each node.

    Raises:
        PlanningError: nodes have several ranks, and messages inside them were not measured.
    """
    nobody = LinkCost(0.0, 0.0)
    if network is None:
        return nobody, nobody
    if len(nodes) == 1:
        return nobody, _ring(network.all_reduce, nodes[0])
    everyone = network.all_reduce
    link = LinkCost.from_all_reduce(everyone.latency_seconds, everyone.seconds_per_byte, nodes)
    if max(nodes) == 1:
        return link, nobody
    if network.inside is None:
        raise PlanningError(
            "found a profile without messages inside nodes, expected their times where a node has several ranks:"
            " profiles of earlier versions do not have them. Profile again with `accelerate-lshdp profile`"
        )
    return link, _ring(network.inside, max(nodes))


def _ring(measured: MessageTimes, ranks: int) -> LinkCost:
    """The link that explains an all-reduce of some ranks in a ring, in which each byte passes twice."""
    rounds = 2 * (ranks - 1)
    return LinkCost(measured.latency_seconds / rounds, measured.seconds_per_byte / (rounds / ranks))
