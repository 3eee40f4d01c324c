# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`Membership`: what one launcher knows of an elastic run, and how it and the others come to the next generation.

A generation changes when a member is silent, is told to leave or has lost its ranks, and when a launcher that is none
is ready to join. The first member that is there proposes the next generation; the others do if it does not. What a
quorum of the present one has accepted is decided (`Decree`). A launcher that hears of a newer generation takes it
over: if it is in there, it trains in it; if not, it was thought to be lost, and what it did since counts for nothing.

No sockets and no clock: the caller delivers messages and says what time it is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from accelerate_lshdp.documents.plan_sections import LARGEST_ELASTIC
from accelerate_lshdp.runtime.membership.decree import NO_BALLOT, Decree, Vote
from accelerate_lshdp.runtime.membership.generation import Generation, Member, at_port
from accelerate_lshdp.runtime.membership.hearing import BEAT_SECONDS, Hearing
from accelerate_lshdp.runtime.membership.message import Message, Status


#: Seconds between two messages while something changes.
QUICK_BEAT_SECONDS = 0.1
#: Seconds for which a launcher that has joined is waited for, so that several that come together come in one change.
TOGETHER_SECONDS = 1.0
#: Seconds for which launchers that leave are still members, since the last of them was told to.
GRACE_SECONDS = 2.0
#: Seconds for which a launcher listens before it founds a run, as there may be one that does not hear of it at once.
LISTENING_SECONDS = 2.0
#: Seconds until another member proposes, or the same one again.
PATIENCE_SECONDS = 1.0


@dataclass(frozen=True)
class Rules:
    """How a run may change.

    Args:
        min_nodes: fewer do not train.
        max_nodes: more do not.
        notice_seconds: in which the silence of a node is noticed.
        any_part: each part of a network that has split goes on, not only the one with a quorum.
    """

    min_nodes: int = 1
    max_nodes: int = LARGEST_ELASTIC
    notice_seconds: float = 2.0
    any_part: bool = False


class Membership:
    """One launcher among those of a run.

    Args:
        me: this launcher, which is ready to join.
        run: token of the run.
        peers: addresses at which others may be found.
        founders: launchers that the first generation consists of; 0: this one waits for it to be founded.
        origin: of a generation that this one founds: larger than those of foundings before.
        rules: how the run may change.
        now: the time, of a clock that only goes forward.

    Attributes:
        hearing: which launchers hear each other.
        status: what this launcher says that it is about to do.
        lost_ranks: the generation whose ranks it says to have lost.
        looked_at: when it has last looked at what it knows.
    """

    def __init__(
        self,
        me: Member,
        run: str,
        peers: Collection[tuple[str, int]],
        founders: int,
        origin: str,
        rules: Rules,
        now: float,
    ) -> None:
        self.rules = rules
        self.hearing = Hearing(me, rules.notice_seconds, now)
        self.status = Status.JOINS
        self.lost_ranks = 0
        self.code = 0
        self.ended_in = 0
        self._run = run
        self._peers = set(peers)
        self._founders = founders
        self._origin = origin
        self._leaving: dict[tuple[str, str], float] = {}
        self._left: set[tuple[str, str]] = set()
        self._gone: set[tuple[str, str]] = set()
        self._replaced: set[tuple[str, str]] = set()
        self._decree: Decree | None = None
        self._heard_of = NO_BALLOT  # the members' highest ballot, while this launcher is none of them
        self._began_at = now
        self._needed_since: float | None = None
        self._proposed_at = now
        self._beat_at = now
        self.looked_at = now

    @property
    def me(self) -> Member:
        """This launcher."""
        return self.hearing.me

    @property
    def generation(self) -> Generation:
        """The newest that this launcher knows."""
        return self.hearing.generation

    @property
    def node(self) -> int | None:
        """The node that this launcher is in the newest generation; None: it is not in there."""
        return self.generation.node_of(self.me)

    def start_anew(self, me: Member) -> None:
        """After it was left out: it has ended its ranks, and is ready to join as a new one."""
        self.hearing.me, self.status, self.lost_ranks = me, Status.JOINS, 0
        self._decree, self._heard_of = None, NO_BALLOT

    def say(self, status: Status, *, code: int = 0, ended_in: int = 0) -> None:
        """Says from now on, and at once, what this launcher is about to do: see `Message` for the arguments."""
        if (status, code, ended_in) != (self.status, self.code, self.ended_in):
            self.status, self.code, self.ended_in = status, code, ended_in
            self._beat_at = self.looked_at

    def choose_store_port(self, port: int) -> None:
        """The port for the store of the next generation whose first member this launcher is."""
        self.hearing.me = at_port(self.me, port)

    def all_have_ended(self, now: float) -> bool:
        """Whether the training has ended on all members that are there."""
        others = [each for each in self.hearing.others if self.hearing.is_present(each, now)]
        heard = [self.hearing.heard.get(each.identity) for each in others]
        return all(each is not None and each.message.status is Status.ENDED for each in heard)

    def failure(self) -> tuple[Member, int] | None:
        """A launcher on which the script has failed, and its exit code."""
        if self.status is Status.FAILED:
            return self.me, self.code
        failed = [h.message for h in self.hearing.of_members if h.message.status is Status.FAILED]
        return (failed[0].sender, failed[0].code) if failed else None

    @property
    def has_ended(self) -> bool:
        """Whether the ranks of some member have ended well: the training is over, and nothing changes any more."""
        own = self.status is Status.ENDED and self.node is not None
        return own or any(h.message.status is Status.ENDED for h in self.hearing.of_members)

    @property
    def ended_before(self) -> bool:
        """Whether the training has ended on a member before this generation began, and before it came here."""
        ended = [h.message.ended_in for h in self.hearing.of_members if h.message.status is Status.ENDED]
        return self.status is not Status.ENDED and any(number < self.generation.number for number in ended)

    # Time

    def tick(self, now: float) -> list[tuple[tuple[str, int], Message]]:
        """Looks at what is known; returns the messages that are due, each with the address it goes to."""
        stopped = now - self.looked_at
        if stopped > 2 * BEAT_SECONDS:
            self.hearing.forgive(stopped)  # this process was frozen, or had no processor
        self.looked_at = now
        if self.status is Status.LEFT:
            return self.farewell(now)
        self._found(now)
        if self.status is Status.LEAVES:
            self._leaving.setdefault(self.me.identity, now)
        wanted = self._wanted(now)
        self._change(wanted, now)
        self._take_decided(now)
        if not self.has_to_say(now):
            return []
        is_member = self.node is not None and self.has_quorum(now)
        quick = wanted is not None or self._own_vote != Vote() or not is_member
        self._beat_at = now + (QUICK_BEAT_SECONDS if quick else BEAT_SECONDS)
        return self.farewell(now)

    def has_to_say(self, now: float) -> bool:
        """Whether messages are due."""
        return now >= self._beat_at

    def farewell(self, now: float) -> list[tuple[tuple[str, int], Message]]:
        """The messages that say once more what this launcher is about to do, each with the address it goes to."""
        message = self._message(now)
        return [(address, message) for address in sorted(self._receivers(now))]

    def hear(self, message: Message, now: float) -> None:
        """Takes in a message."""
        if message.run != self._run:
            self.hearing.take_foreign(message, now)
            return
        if message.sender.identity == self.me.identity or self.status is Status.LEFT:
            return
        key = message.sender.identity
        # A machine has one launcher at this address: one that has started anew is proof that the one before has ended.
        # What the one before has sent may come after it: once a newer one was heard, the older one proves nothing.
        if message.status is Status.JOINS:
            if key not in self._replaced:
                self._gone |= self._of_machine(key) & self.generation.identities
            if key not in self.hearing.heard:
                self._replaced |= self._of_machine(key) & self.hearing.heard.keys()
        if message.status in (Status.LEAVES, Status.LEFT):
            self._leaving.setdefault(key, now)
        if message.status is Status.LEFT:
            self._left.add(key)
            self._gone.add(key)
        self.hearing.take(message, now)
        theirs = message.generation
        if self._is_newer(theirs):
            self._take(theirs, now)
        elif theirs == self.generation and message.vote != Vote():
            before = self._own_vote
            self._hear_vote(message.sender, message.vote)
            # Who proposes waits for this launcher's answer.
            self._beat_at = min(self._beat_at, now + (QUICK_BEAT_SECONDS if self._own_vote == before else 0.0))
            self._take_decided(now)

    def _of_machine(self, identity: tuple[str, str]) -> set[tuple[str, str]]:
        """Identities of the other launchers of the same machine that are known."""
        known = self.generation.identities | self.hearing.heard.keys()
        return {each for each in known if each[0] == identity[0] and each != identity}

    # What is wanted

    def _found(self, now: float) -> None:
        """Founds the first generation once all that it is to consist of are there, and no other one is left."""
        if not self._founders or self.status is not Status.JOINS:
            return
        if not self.generation.identities <= self._gone | self._of_machine(self.me.identity):
            return
        if now - self._began_at < LISTENING_SECONDS and self._founders > 1:
            return
        seekers = [h.message for h in self.hearing.heard.values() if self.hearing.is_fresh(h, now)]
        seekers = [message for message in seekers if message.status is Status.JOINS]
        if len(seekers) + 1 >= self._founders:
            first = [self.me, *sorted((m.sender for m in seekers), key=lambda member: member.name)]
            first = first[: self.rules.max_nodes]
            # Above that of a run that was lost also where this machine's clock was set back.
            origin = max(self._origin, f"{self.generation.origin}+")
            # Not number 1 where there was a run: it goes on, from its checkpoints.
            ranks = self.generation.ranks_at_start or sum(member.ranks for member in first)
            self._take(Generation(self.generation.number + 1, tuple(first), ranks, origin), now)

    def _wanted(self, now: float) -> Generation | None:
        """The generation that should follow; None: this one is as it should be, or none can follow now."""
        if self.node is None or self.has_ended or self.failure() is not None:
            return None
        present = [self._as_heard(member) for member in self._present(now)]
        staying = [member for member in present if not self._leaves(member, now)]
        coming = self._joiners(now)
        if all(member.identity in self._leaving for member in present):
            staying, coming = present, []  # they save together, and the run ends
        names = {member.name for member in coming}
        # Who comes back anew has lost what it was before.
        staying = [member for member in staying if member.name not in names]
        coming = coming[: max(0, self.rules.max_nodes - len(staying))]
        members = [*staying, *coming]
        is_other = {member.identity for member in members} != self.generation.identities
        if not is_other and not self._ranks_are_lost():
            return None
        if len(members) < self.rules.min_nodes or not self.has_quorum(now):
            return None
        return self.generation.next_with(members, after_lost=not self._is_quorum(now))

    def has_quorum(self, now: float) -> bool:
        """Whether the members that are there may decide."""
        present = {each.identity for each in self._present(now)}
        return self._is_quorum(now) or self.generation.are_all_left(present, self._gone)

    def _is_quorum(self, now: float) -> bool:
        """Whether the members that are there are a quorum; launchers that have ended count as missing."""
        present = {each.identity for each in self._present(now)}
        return self.generation.is_quorum(present, any_part=self.rules.any_part)

    def _present(self, now: float) -> list[Member]:
        """The members that are there and decide."""
        return [each for each in self.hearing.present(now) if each.identity not in self._left]

    def _joiners(self, now: float) -> list[Member]:
        """Launchers that are ready to join, once none has just come."""
        fresh = self.hearing.joiners(now)
        if any(now - h.since < TOGETHER_SECONDS for h in fresh):
            return []
        joiners: list[Message] = []
        for message in (heard.message for heard in sorted(fresh, key=lambda heard: heard.since)):
            # Those that come together have to hear each other, too; the others may come later.
            identity = message.sender.identity
            if all(identity in each.coming and each.sender.identity in message.coming for each in joiners):
                joiners.append(message)
        return [message.sender for message in joiners]

    def _ranks_are_lost(self) -> bool:
        number = self.generation.number
        return self.lost_ranks == number or any(h.message.lost_ranks == number for h in self.hearing.of_members)

    def _leaves(self, member: Member, now: float) -> bool:
        # Not at once: where all are told to end, one after the other, none is to be left out.
        told = [at for key, at in self._leaving.items() if key in self.generation.identities]
        return member.identity in self._leaving and now - max(told) > GRACE_SECONDS

    def _as_heard(self, member: Member) -> Member:
        """The member with the port that it has said last: that of an earlier generation may be in use still."""
        if member.identity == self.me.identity:
            return self.me
        heard = self.hearing.heard.get(member.identity)
        return member if heard is None else at_port(member, heard.message.sender.store_port)

    # Decisions

    def _change(self, wanted: Generation | None, now: float) -> None:
        """Proposes what is wanted, if it is this member's turn."""
        if wanted is None or self._decree is None:
            self._needed_since = None
            if self._decree is not None and self._decree.vote.proposed is not None:
                self._decree.withdraw()
            return
        if self._needed_since is None:
            self._needed_since, self._proposed_at = now, -1e9
        turn = [each.identity for each in self._present(now)].index(self.me.identity)
        is_due = now - self._needed_since >= turn * PATIENCE_SECONDS
        # Others that propose at the same time are given way to by waiting for longer, each for another time. What is
        # not wanted any more is not waited for: one of its members may be lost.
        asked = self._decree.wanted
        is_other = asked is not None and (asked.number, asked.identities) != (wanted.number, wanted.identities)
        if is_other or (is_due and now - self._proposed_at >= PATIENCE_SECONDS * (1 + turn / 2)):
            self._proposed_at = now
            self._decree.propose(wanted, after_lost=not self._is_quorum(now))
            self._beat_at = now

    @property
    def _own_vote(self) -> Vote:
        """What this launcher says of the decision; of one that is no member, only which ballot it has heard of."""
        return Vote(self._heard_of) if self._decree is None else self._decree.vote

    def _hear_vote(self, sender: Member, vote: Vote) -> None:
        node = self.generation.node_of(sender)
        if self._decree is None:
            if node is not None and vote.proposed is not None:
                self._heard_of = max(self._heard_of, vote.proposed[0])
        elif node is not None:
            self._decree.hear(node, vote)
        else:
            self._decree.hear_coming(sender.identity, vote.promised)

    def _take_decided(self, now: float) -> None:
        if self._decree is not None and self._decree.decided is not None:
            self._take(self._decree.decided, now)

    def _is_newer(self, other: Generation) -> bool:
        own = self.generation
        if other.order != own.order:
            return other.order > own.order
        # Only where each part of a split network goes on: one of them has to give way.
        key = (len(other.members), sorted(other.identities))
        return other.identities != own.identities and key > (len(own.members), sorted(own.identities))

    def _take(self, generation: Generation, now: float) -> None:
        """A newer generation is in force."""
        self.hearing.begin(generation, now)
        self._needed_since = None
        self._beat_at = now
        node = self.node
        self._decree, self._heard_of = None, NO_BALLOT
        if node is not None:
            if self.status is Status.JOINS:
                self.status = Status.RUNS
            identities = [member.identity for member in generation.members]

            def among(nodes: Collection[int]) -> set[tuple[str, str]]:
                return {identities[each] for each in nodes}

            any_part = self.rules.any_part
            self._decree = Decree(
                node,
                lambda nodes: generation.is_quorum(among(nodes), any_part=any_part),
                lambda nodes: generation.are_all_left(among(nodes), self._gone),
                lambda following, nodes, coming: following.is_quorum({*among(nodes), *coming}, any_part=any_part),
            )

    # Messages

    def _message(self, now: float) -> Message:
        return Message(
            self._run,
            self.me,
            self.status,
            self.generation,
            self._own_vote,
            self.hearing.unheard(now),
            tuple(self.hearing.coming(now)),
            self.lost_ranks,
            self.code,
            self.ended_in,
        )

    def _receivers(self, now: float) -> set[tuple[str, int]]:
        receivers = {member.address for member in self.generation.members}
        receivers |= self.hearing.addresses(now) | self._peers
        return receivers - {self.me.address}
