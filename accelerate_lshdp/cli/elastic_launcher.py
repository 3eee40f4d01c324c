# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The launcher of a node in an elastic run: it agrees with the others on who is there, and has its ranks train so.

Each generation of members has ranks of its own. When one follows, the ranks before it keep what they have trained in
memory and end; those that are forked then continue from the newest state that any node has.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from types import FrameType

from accelerate_lshdp.cli.elastic_meeting import new_member
from accelerate_lshdp.cli.elastic_notices import ElasticNotices
from accelerate_lshdp.cli.exit_codes import SIGNAL_BASE, shell_code
from accelerate_lshdp.cli.messages import say
from accelerate_lshdp.cli.node_ranks import NodeRanks
from accelerate_lshdp.cli.waiting_nodes import Meeting
from accelerate_lshdp.documents.plan import PLAN_VARIABLE, Plan
from accelerate_lshdp.runtime.elastic_rank import ELASTIC_VARIABLE, KEEP, KEPT, PAUSE, ElasticRank, NodeFolder
from accelerate_lshdp.runtime.failures import FOLLOWS_ANOTHER
from accelerate_lshdp.runtime.free_port import free_port
from accelerate_lshdp.runtime.membership.generation import Generation
from accelerate_lshdp.runtime.membership.link import MembershipLink, View
from accelerate_lshdp.runtime.membership.membership import GRACE_SECONDS
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


@dataclass
class ElasticLauncher:
    """Follows the membership of a run, and has this node's ranks train as it says.

    Args:
        job: what this node runs.
        memory: in which its ranks keep what they have trained.
        link: to the other launchers.
        ranks: of this node.
        notices: says what happens to other nodes.

    Attributes:
        training: the generation that the ranks are of, or were of if they have ended.
        signalled: the number of the signal that has told this launcher to end; 0: none has.
    """

    job: ElasticJob
    memory: NodeFolder
    link: MembershipLink
    ranks: NodeRanks
    notices: ElasticNotices
    training: Generation | None = None
    signalled: int = 0
    _began_at: float = field(default_factory=time.time)
    _lost_at: float | None = None
    _deaths: list[float] = field(default_factory=list)
    _untrained: int = 0
    _leaving_since: float | None = None  # or since another one was told to end as well
    _others_leaving: frozenset[tuple[str, str]] = frozenset()
    _ending_since: float | None = None

    def note_signal(self, number: int, frame: FrameType | None) -> None:
        """Leaves the run in order; at once if it comes again."""
        if self.signalled:
            self.ranks.kill()
            sys.exit(SIGNAL_BASE + number)
        self.signalled = number

    def run(self) -> int:
        """Follows the run until it ends, has failed, or this node has left it; returns the exit code."""
        while True:
            view = self.link.view()
            self.notices.tell(view, trains=self.training is not None)
            code = self.step(view)
            if code is not None:
                return code
            self.link.wait(_LOOK_SECONDS)

    def step(self, view: View) -> int | None:
        """Does what is due; returns the exit code once this launcher is to end."""
        if view.failure is not None:
            self.ranks.kill()
            who, code = view.failure
            say(f"the script has failed on {who.name} with code {code}; the run ends")
            return code
        if self.signalled:
            self._say_that_it_leaves()
        if self._has_ended_elsewhere(view):
            return self._look_at_ranks(view)  # they may save what they have trained still
        # Before this generation, or before this launcher was let in: nobody is any more.
        if view.ended_before or (view.node is None and view.has_ended):
            say("the training has ended on the other nodes")
            self.ranks.kill()
            return 0
        if self.signalled:
            return self._leave(view)
        if view.generation.number and view.generation != self.training:
            return self._follow(view)
        return None if self.training is None else self._look_at_ranks(view)

    # Generations

    def _follow(self, view: View) -> int | None:
        """A newer generation is in force; returns the exit code if the ranks before have ended by themselves."""
        if self.training is not None:
            if view.node is None:
                self.ranks.kill()  # what they have is of no use: the others have gone on
            else:
                self._end_ranks(in_order=self._all_are_there(view) and self._lost_at is None)
            now = self.link.view()
            has_failed = view.node is not None and self._own_failure is not None
            # They may have trained to the end while others came or went.
            if self._has_trained or has_failed or self._has_ended_elsewhere(now):
                return self._look_at_ranks(now)
        self._lost_at = None
        if view.node is None:
            if self.training is not None:
                say("this node was taken for lost, and the others went on; it joins them again")
                shutil.rmtree(self.memory.state, ignore_errors=True)
                self.training = None
                with self.link.changing() as membership:
                    membership.start_anew(new_member(membership.me.address, self.job.ranks))
            return None
        self.training = generation = view.generation
        names = ", ".join(member.name for member in generation.members)
        say(f"generation {generation.number}: node {view.node} of {len(generation.members)} ({names})")
        self.ranks.start([self._environment(generation, view.node, rank) for rank in range(self.job.ranks)])
        with self.link.changing() as membership:
            # The port of this generation's store may be in use when the next one begins.
            membership.choose_store_port(free_port())
        return None

    def _end_ranks(self, *, in_order: bool) -> None:
        """Ends the ranks, which keep what they have.

        Args:
            in_order: at the end of a step and of what follows it, which all nodes are there for.
        """
        if in_order and self.ranks.listen:
            self.ranks.tell(PAUSE)
            deadline = time.monotonic() + PAUSE_SECONDS
            while not self.ranks.wait(_LOOK_SECONDS):
                view = self.link.view()
                self.notices.tell(view, trains=True)
                if self.signalled:
                    self._say_that_it_leaves()  # others may be told to end, too
                if view.failure is not None:
                    break
                if self._has_ended_elsewhere(view):
                    continue  # these end as well, and may save what they have trained still
                if not self._all_are_there(view) or time.monotonic() > deadline:
                    break
        self.ranks.tell(KEEP)
        self.ranks.wait(KEEP_SECONDS if self.ranks.listen else 0.0)
        self.ranks.kill()

    def _all_are_there(self, view: View) -> bool:
        """Whether no node is lost whose ranks train with those of this one: without them a step does not end."""
        members = self.training.identities
        # Of those that leave, the ranks take part until they have ended at the same step as all others.
        leaving = (view.leaving & view.there) - view.left
        leaving |= {key for key in view.left if view.last[key].ended_in == self.training.number}
        # A member that is lost may be out, and silent no more, before this launcher has looked.
        lost = members - view.generation.identities - leaving - {view.me.identity}
        unheard = [*view.silent, *(view.deaf if view.node is not None else ())]
        # Of ranks that were killed the launcher says so: one of this node that trains with them may hang all the same.
        killed = {key for key in members if key in view.last and view.last[key].lost_ranks == self.training.number}
        return not lost and not killed and not members & {member.identity for member in unheard}

    def _has_ended_elsewhere(self, view: View) -> bool:
        """Whether this node's ranks have made the last step, as those of another one have ended well after it."""
        if self.training is None:
            return False
        said = [view.last[key] for key in self.training.identities if key in view.last]
        return any(each.status is Status.ENDED and each.ended_in == self.training.number for each in said)

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
            self._began_at,
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

    @property
    def _has_trained(self) -> bool:
        """Whether all ranks have ended well."""
        return bool(self.ranks.codes) and not self.ranks.has_any and not any(self.ranks.codes)

    @property
    def _own_failure(self) -> int | None:
        """The exit code of a rank whose script has failed by itself; None: none has."""
        ended = (code for code in self.ranks.codes if code > 0 and code not in (KEPT, FOLLOWS_ANOTHER))
        return next(ended, None)

    def _look_at_ranks(self, view: View) -> int | None:
        """Looks for ranks that have ended; returns the exit code if that ends this launcher."""
        codes = self.ranks.codes
        if self._own_failure is not None:
            return self._fail(self._own_failure)
        if self._has_trained:
            return self._end()
        if not any(codes):
            return None  # others of this node will end as well
        # Killed, or the ranks of another node were lost: what they have is kept, and they are started again.
        if view.has_ended or self._has_ended_elsewhere(view):  # nothing changes, and others need not be waited for
            self.ranks.kill()
            return shell_code(next((code for code in self.ranks.codes if code < 0), FOLLOWS_ANOTHER))
        if self._lost_at is None:
            self._lost_at = time.monotonic()
            killed = [code for code in codes if code < 0]
            # One that has left the training before the others has a fault of its own, too, if it does so each time.
            self._deaths += [self._lost_at] if killed or 0 in codes else []
            # A generation in which no step was made may have lost a node; several have not.
            self._untrained = 0 if self._has_stepped else self._untrained + 1
            if self._untrained >= _UNTRAINED:
                say("the ranks do not reach each other: check with accelerate-lshdp doctor")
                return self._fail(FOLLOWS_ANOTHER)
            if len([at for at in self._deaths if self._lost_at - at < _DEATHS_SECONDS]) >= _DEATHS:
                return self._fail(shell_code(killed[0]) if killed else FOLLOWS_ANOTHER)
            self._end_ranks(in_order=False)
        # A node whose ranks are lost with it has to be noticed before; one that has lost its own ranks says so.
        rest = _REST_SECONDS if any(code < 0 for code in codes) else self.job.notice_seconds + _REST_SECONDS
        if time.monotonic() - self._lost_at > rest:
            with self.link.changing() as membership:
                membership.lost_ranks = self.training.number
        return None

    @property
    def _has_stepped(self) -> bool:
        """Whether a rank of this node has made a step since they were started."""
        return self.memory.stepped(self.training.number).exists()

    # The end

    def _fail(self, code: int) -> int:
        """Ends the run for all."""
        say(f"the script has failed with code {code}; the run ends")
        with self.link.changing() as membership:
            membership.say(Status.FAILED, code=code)
        self.ranks.kill()
        return code

    def _end(self) -> int:
        """The training has ended on this node: it is there for the others until they have ended, too."""
        with self.link.changing() as membership:
            membership.say(Status.ENDED, ended_in=self.training.number)
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline and not self.signalled:
            with self.link.changing() as membership:
                if membership.all_have_ended(time.monotonic()):
                    break
            time.sleep(_LOOK_SECONDS)
        return 0

    def _say_that_it_leaves(self) -> None:
        with self.link.changing() as membership:
            membership.say(Status.LEAVES)
        if self._leaving_since is None:
            self._leaving_since = time.monotonic()
            say("this node leaves the run")

    def _leave(self, view: View) -> int | None:
        """This launcher was told to end: the others go on without it, or end as well if they were told so, too."""
        if self.training is None and (view.node is None or view.generation.number == 1):
            return SIGNAL_BASE + self.signalled  # there is nothing to lose
        if self._has_trained:
            return self._end()
        if view.node is not None and view.generation.identities - {view.me.identity} <= view.leaving:
            return self._end_with_all(view)
        self._ending_since = None
        if self._own_failure is not None:
            return self._fail(self._own_failure)
        others = view.leaving & view.generation.identities
        if others != self._others_leaving:
            self._leaving_since, self._others_leaving = time.monotonic(), others
        if view.node is not None and time.monotonic() - self._leaving_since < self._patience(view):
            return None
        if self.training is not None:
            self._end_ranks(in_order=view.node is None and self._lost_at is None and not any(self.ranks.codes))
            if self._has_trained:
                return self._end()
            if self._own_failure is not None:
                return self._fail(self._own_failure)
            with self.link.changing() as membership:
                membership.say(Status.LEFT, ended_in=self.training.number)
        return SIGNAL_BASE + self.signalled

    def _patience(self, view: View) -> float:
        """Seconds for which a launcher that leaves waits until the others have decided to go on without it."""
        staying = self._heard(view) - view.leaving - {view.me.identity}
        # They may be about to be told to end, too.
        return PAUSE_SECONDS if self._can_go_on(view, staying) else GRACE_SECONDS + 1.0

    def _heard(self, view: View) -> frozenset[tuple[str, str]]:
        """Identities of the members that are there."""
        return view.generation.identities - {member.identity for member in [*view.silent, *view.deaf]} - view.left

    def _can_go_on(self, view: View, members: Collection[tuple[str, str]]) -> bool:
        """Whether those that are there may decide that these members train."""
        return view.has_quorum and len(members) >= self.job.plan.elastic.min_nodes

    def _end_with_all(self, view: View) -> int | None:
        """All nodes were told to end: a Trainer saves upon SIGTERM, all of its ranks the same step.

        What was kept for a generation that has just begun, or is about to, is in no checkpoint before it trains.
        """
        if view.generation != self.training:
            code, self._ending_since = self._follow(view), None
            return code
        if self._ending_since is None:
            self._ending_since = time.monotonic()
        are_all_there = view.generation.identities <= self._heard(view)
        if time.monotonic() - self._ending_since < PAUSE_SECONDS:
            if any(self.ranks.codes):
                if self._can_go_on(view, self._heard(view)):
                    return self._look_at_ranks(view)
            # Before their first step ranks may not know what to do upon a signal.
            elif view.generation.number > 1 and not self._has_stepped:
                if are_all_there or self._can_go_on(view, self._heard(view)):
                    return None
        self.ranks.signal(self.signalled)
        deadline = time.monotonic() + SAVE_SECONDS
        while not self.ranks.wait(_LOOK_SECONDS) and time.monotonic() < deadline:
            now = self.link.view()
            if now.node is not None and now.generation != self.training and not self._all_are_there(now):
                return None  # ranks hang, as those of another node were lost: who is left saves
        self.ranks.kill()
        with self.link.changing() as membership:
            membership.say(Status.LEFT, ended_in=self.training.number)
        if self._own_failure is not None:
            return self._own_failure
        return SIGNAL_BASE + self.signalled if any(self.ranks.codes) or not self.ranks.count else 0
