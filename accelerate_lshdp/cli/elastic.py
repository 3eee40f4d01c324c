# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Starts the launcher of a node in an elastic run: what it needs, and the flag that makes a run elastic."""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets
import signal
import time
from contextlib import ExitStack

from accelerate_lshdp.cli.elastic_launcher import ElasticJob, ElasticLauncher
from accelerate_lshdp.cli.elastic_meeting import bound_socket, new_member, port_of
from accelerate_lshdp.cli.elastic_notices import ElasticNotices
from accelerate_lshdp.cli.messages import say
from accelerate_lshdp.cli.node_memory import folder_in_memory
from accelerate_lshdp.cli.node_ranks import NodeRanks
from accelerate_lshdp.runtime.membership.link import MembershipLink
from accelerate_lshdp.runtime.membership.membership import Membership, Rules


def add_elastic_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flag that makes a run elastic."""
    parser.add_argument(
        "--elastic",
        type=_bounds,
        metavar="MIN[-MAX]",
        help="nodes may be lost and come while the run trains, which goes on with those that are there: from MIN to"
        " MAX of them",
    )


def run_elastic(job: ElasticJob) -> int:
    """Runs this node's part of an elastic run until it ends, or has failed.

    Returns:
        0, the exit code of the script where it has failed first, or 128 + n after signal n.
    """
    with ExitStack() as stack:
        bound, address = bound_socket(job.meeting, say)  # first: while it waits for a network, nothing is to be left
        memory = stack.enter_context(folder_in_memory())
        ranks = stack.enter_context(NodeRanks(job.script, job.arguments, memory))
        # Before the others hear of this node: they stop for it when they do.
        ranks.wait_until_ready()
        link = stack.enter_context(MembershipLink(_membership(job, address), bound))
        notices = ElasticNotices(len(job.meeting.addresses), job.plan.elastic.min_nodes, say)
        launcher = ElasticLauncher(job, memory, link, ranks, notices)
        for name in ("SIGTERM", "SIGINT", "SIGHUP"):
            if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN:
                number = getattr(signal, name)
                stack.callback(signal.signal, number, signal.signal(number, launcher.note_signal))
        return launcher.run()


def _membership(job: ElasticJob, address: tuple[str, int]) -> Membership:
    meeting, elastic = job.meeting, job.plan.elastic
    # What runs, so that launchers of another run that is still there are not taken for ones of this.
    text = json.dumps([list(job.arguments), job.plan.digest()])
    peers = [(each, port_of(meeting, node)) for node, each in enumerate(meeting.addresses) if each is not None]
    return Membership(
        new_member(address, job.ranks),
        hashlib.sha256(text.encode()).hexdigest()[:32],
        [peer for peer in peers if peer != address],
        len(meeting.addresses) if meeting.node == 0 else 0,
        f"{time.time():020.6f} {secrets.token_hex(4)}",
        Rules(elastic.min_nodes, elastic.max_nodes, job.notice_seconds, elastic.on_partition == "continue"),
        time.monotonic(),
    )


def _bounds(text: str) -> tuple[int, int | None]:
    low, _, high = text.partition("-")
    if not low.isdecimal() or (high and not high.isdecimal()):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number of nodes, or two as 1-4")
    return int(low), int(high) if high else None
