# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The launcher of a node in an elastic run: it agrees with the others on who is there, and has its ranks train so.

Each generation of members has ranks of its own. When one follows, the ranks before it keep what they have trained in
memory and end; those that are forked then continue from the newest state that any node has.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import FrameType

from accelerate_lshdp.cli.elastic_meeting import bound_socket, new_member, port_of
from accelerate_lshdp.cli.elastic_notices import ElasticNotices
from accelerate_lshdp.cli.exit_codes import SIGNAL_BASE, shell_code
from accelerate_lshdp.cli.messages import say
from accelerate_lshdp.cli.node_memory import folder_in_memory
from accelerate_lshdp.cli.node_ranks import NodeRanks
from accelerate_lshdp.cli.waiting_nodes import Meeting
from accelerate_lshdp.documents.plan import PLAN_VARIABLE, Plan
from accelerate_lshdp.runtime.elastic_rank import ELASTIC_VARIABLE, KEEP, KEPT, PAUSE, ElasticRank, NodeFolder
from accelerate_lshdp.runtime.failures import FOLLOWS_ANOTHER
from accelerate_lshdp.runtime.free_port import free_port
from accelerate_lshdp.runtime.membership.generation import Generation
from accelerate_lshdp.runtime.membership.link import MembershipLink, View
from accelerate_lshdp.runtime.membership.membership import Membership, Rules
from accelerate_lshdp.runtime.membership.message import Status


#: How often ranks and membership are looked at; a new generation is seen at once.
_LOOK_SECONDS = 0.1
#: Seconds that ranks have to come to the end of a step, and of what follows it, where all nodes are there.
PAUSE_SECONDS = 600.0
#: Seconds that they have to write what they keep.
KEEP_SECONDS = 60.0
#: Seconds that they have to save when all nodes are told to end.
SAVE_SECONDS = 30.0
#: Seconds for which a launcher whose ranks have ended well is there for those of others.
END_SECONDS = 300.0
#: Seconds until ranks that were lost, though all launchers are there, are started again.
_REST_SECONDS = 0.5
#: A node whose ranks are killed so often in so many seconds has a fault of its own.
_DEATHS, _DEATHS_SECONDS = 3, 600.0
#: So many generations in a row that end without a step are no chance.
_UNTRAINED = 4


@dataclass(frozen=True)
class ElasticJob:
    """What a node runs.

    Args:
        meeting: where launchers find each other at first.
        ranks: of this node.
        plan: of the run, with the section ``elastic``.
        arguments: of the shim: the script and its arguments.
        script: a file into which the process that forks ranks looks, "" for a module; None: they are not forked.
        environment: of all ranks.
        notice_seconds: in which the loss of a node is noticed.
    """

    meeting: Meeting
    ranks: int
    plan: Plan
    arguments: Sequence[str]
    script: str | None
    environment: dict[str, str]
    notice_seconds: float


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
        launcher = _Launcher(job, memory, link, ranks, notices)
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


@dataclass
class _Launcher:
    """Follows the membership of a run, and has this node's ranks train as it says."""

    job: ElasticJob
    memory: NodeFolder
    link: MembershipLink
    ranks: NodeRanks
    notices: ElasticNotices
    training: Generation | None = None
    signalled: int = 0
    lost_at: float | None = None
    deaths: list[float] = field(default_factory=list)
    leaving_since: float = 0.0
    has_trained: bool = False
    began_at: float = field(default_factory=time.time)
    untrained: int = 0

    def note_signal(self, number: int, frame: FrameType | None) -> None:
        """Leaves the run in order; at once if it comes again."""
        if self.signalled:
            self.ranks.kill()
            sys.exit(SIGNAL_BASE + number)
        self.signalled = number

    def run(self) -> int:
        while True:
            view = self.link.view()
            self.notices.tell(view, trains=self.training is not None)
            code = self._step(view)
            if code is not None:
                return code
            self.link.wait(_LOOK_SECONDS)

    def _step(self, view: View) -> int | None:
        """Does what is due; returns the exit code once this launcher is to end."""
        if view.failure is not None:
            self.ranks.kill()
            who, code = view.failure
            say(f"the script has failed on {who.name} with code {code}; the run ends")
            return code
        if self.signalled:
            return self._leave(view)
        # Before this generation, or before this launcher was let in: nobody is any more.
        if view.ended_before or (view.node is None and view.has_ended):
            say("the training has ended on the other nodes")
            self.ranks.kill()
            return 0
        if view.generation.number and view.generation != self.training:
            self._follow(view)
            return self._has_ended() if self.has_trained else None
        if self.training is None or self.ranks.has_any and not self.ranks.codes:
            return None
        return self._look_at_ranks(view)

    # Generations

    def _follow(self, view: View) -> None:
        """A newer generation is in force."""
        before, generation = self.training, view.generation
        if before is not None:
            # Where all of the generation before are there, or leave because they were told to, nothing is lost.
            there = generation.identities | view.leaving
            if view.node is None:
                self.ranks.kill()  # what they have is of no use: the others have gone on
            else:
                self._end_ranks(in_order=before.identities <= there and self.lost_at is None)
            if self.ranks.codes and not any(self.ranks.codes):
                self.has_trained = True  # to its end, while others came or went
                return
        self.lost_at = None
        if view.node is None:
            if before is not None:
                say("this node was taken for lost, and the others went on; it joins them again")
                shutil.rmtree(self.memory.state, ignore_errors=True)
                self.training = None
                with self.link.changing() as membership:
                    membership.start_anew(new_member(membership.me.address, self.job.ranks))
            return
        self.training = generation
        names = ", ".join(member.name for member in generation.members)
        say(f"generation {generation.number}: node {view.node} of {len(generation.members)} ({names})")
        self.ranks.start([self._environment(generation, view.node, rank) for rank in range(self.job.ranks)])
        with self.link.changing() as membership:
            # The port of this generation's store may be in use when the next one begins.
            membership.choose_store_port(free_port())

    def _end_ranks(self, *, in_order: bool) -> None:
        """Ends the ranks, which keep what they have."""
        if in_order and self.ranks.listen:
            self.ranks.tell(PAUSE)
            deadline = time.monotonic() + PAUSE_SECONDS
            while self._all_are_there() and not self.ranks.wait(0.1) and time.monotonic() < deadline:
                pass
        self.ranks.tell(KEEP)
        self.ranks.wait(KEEP_SECONDS if self.ranks.listen else 0.0)
        self.ranks.kill()

    def _all_are_there(self) -> bool:
        """Whether no node is lost whose ranks train with those of this one: without them a step does not end."""
        view = self.link.view()
        with self.link.changing() as membership:
            own = membership.me.identity
        # A member that is lost may be out, and silent no more, before this launcher has looked.
        there = view.generation.identities | view.leaving | {own}
        lost = self.training is not None and not self.training.identities <= there
        return not (lost or view.silent or view.deaf)

    def _environment(self, generation: Generation, node: int, local_rank: int) -> dict[str, str]:
        sizes, first = generation.node_sizes, generation.members[0]
        machines = tuple(member.name for member in generation.members for _ in range(member.ranks))
        plan = self.job.plan.for_ranks(sum(sizes), as_planned=generation.number == 1)
        told = ElasticRank(
            str(self.memory.path),
            generation.number,
            f"{generation.origin} {generation.branch}",
            generation.ranks_at_start,
            machines,
            self.began_at,
        )
        return {
            **self.job.environment,
            "RANK": str(sum(sizes[:node]) + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(sum(sizes)),
            "LOCAL_WORLD_SIZE": str(sizes[node]),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(len(sizes)),
            "MASTER_ADDR": first.address[0],
            "MASTER_PORT": str(first.store_port),
            PLAN_VARIABLE: json.dumps(plan.to_dict()),
            ELASTIC_VARIABLE: told.to_text(),
        }

    # Ranks

    def _look_at_ranks(self, view: View) -> int | None:
        """Some ranks have ended."""
        codes = self.ranks.codes
        own = [code for code in codes if code not in (0, KEPT, FOLLOWS_ANOTHER) and code > 0]
        if own:
            return self._fail(own[0])
        if not any(codes):
            if self.ranks.has_any:
                return None  # others of this node will end as well
            return self._has_ended()
        # Killed, or the ranks of another node were lost: what they have is kept, and they are started again.
        if view.has_ended:  # nothing changes any more, and others need not be waited for
            self.ranks.kill()
            return shell_code(next((code for code in self.ranks.codes if code < 0), FOLLOWS_ANOTHER))
        if self.lost_at is None:
            self.lost_at = time.monotonic()
            killed = [code for code in codes if code < 0]
            # One that has left the training before the others has a fault of its own, too, if it does so each time.
            self.deaths += [self.lost_at] if killed or 0 in codes else []
            # A generation in which no step was made may have lost a node; several have not.
            self.untrained = 0 if self.memory.stepped(self.training.number).exists() else self.untrained + 1
            if self.untrained >= _UNTRAINED:
                say("the ranks do not reach each other: check with accelerate-lshdp doctor")
                return self._fail(FOLLOWS_ANOTHER)
            if len([at for at in self.deaths if self.lost_at - at < _DEATHS_SECONDS]) >= _DEATHS:
                return self._fail(shell_code(killed[0]) if killed else FOLLOWS_ANOTHER)
            self._end_ranks(in_order=False)
        # A node whose ranks are lost with it has to be noticed before; one that has lost its own ranks says so.
        rest = _REST_SECONDS if any(code < 0 for code in codes) else self.job.notice_seconds + _REST_SECONDS
        if time.monotonic() - self.lost_at > rest:
            with self.link.changing() as membership:
                membership.lost_ranks = self.training.number
        return None

    def _fail(self, code: int) -> int:
        """Ends the run for all."""
        say(f"the script has failed with code {code}; the run ends")
        with self.link.changing() as membership:
            membership.status, membership.code = Status.FAILED, code
        self.ranks.kill()
        return code

    def _has_ended(self) -> int:
        """The training has ended on this node: it is there for the others until they have ended, too."""
        with self.link.changing() as membership:
            membership.status, membership.ended_in = Status.ENDED, self.training.number
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline and not self.signalled:
            with self.link.changing() as membership:
                if membership.all_have_ended(time.monotonic()):
                    break
            time.sleep(_LOOK_SECONDS)
        return 0

    def _leave(self, view: View) -> int | None:
        """This launcher was told to end: the others go on without it."""
        with self.link.changing() as membership:
            first = membership.status is not Status.LEAVES
            membership.status = Status.LEAVES
        if first:
            self.leaving_since = time.monotonic()
            say("this node leaves the run")
        own = None if view.node is None else view.generation.members[view.node].identity
        if own is not None and view.generation.identities - {own} <= view.leaving:
            # All were told to end: a Trainer saves upon SIGTERM, all of its ranks the same step.
            self.ranks.signal(self.signalled)
            self.ranks.wait(SAVE_SECONDS)
            self.ranks.kill()
            return SIGNAL_BASE + self.signalled if any(self.ranks.codes) or not self.ranks.count else 0
        if own is not None and time.monotonic() - self.leaving_since < PAUSE_SECONDS:
            return None
        self._end_ranks(in_order=own is None and self.lost_at is None)
        return SIGNAL_BASE + self.signalled


def _bounds(text: str) -> tuple[int, int | None]:
    low, _, high = text.partition("-")
    if not low.isdecimal() or (high and not high.isdecimal()):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number of nodes, or two as 1-4")
    return int(low), int(high) if high else None
