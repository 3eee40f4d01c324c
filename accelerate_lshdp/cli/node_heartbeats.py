# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What ``accelerate-lshdp launch`` says of nodes that are lost while it trains, and when it ends because of one."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate_lshdp.cli.messages import say
from accelerate_lshdp.cli.seconds import seconds
from accelerate_lshdp.cli.waiting_nodes import Meeting, has_started_ranks


NOTICE_SECONDS, LOST_SECONDS = 2.0, 60.0


def add_heartbeat_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `noticing_lost_nodes` reads."""
    parser.add_argument(
        "--notice-after",
        type=seconds,
        default=NOTICE_SECONDS,
        metavar="S",
        help=f"seconds in which a node that is off, frozen or cut off is noticed by all (default: {NOTICE_SECONDS:g})",
    )
    parser.add_argument(
        "--lost-after",
        type=seconds,
        default=LOST_SECONDS,
        metavar="S",
        help=f"seconds of silence of a node after which the run ends, 0: never (default: {LOST_SECONDS:g})",
    )


@contextmanager
def noticing_lost_nodes(arguments: argparse.Namespace, meeting: Meeting) -> Iterator[None]:
    """Says while the block runs which nodes are silent, and ends this node's ranks when one is silent for long."""
    from accelerate_lshdp.runtime.heartbeats import Launcher, heartbeats
    from accelerate_lshdp.runtime.passed_signals import kill_ranks

    launcher = Launcher(meeting.node, len(meeting.addresses), meeting.address, meeting.port)
    with heartbeats(
        launcher,
        has_started_ranks,
        say,
        kill_ranks,
        notice_seconds=arguments.notice_after,
        lost_seconds=arguments.lost_after,
    ):
        yield
