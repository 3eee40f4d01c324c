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
from accelerate_lshdp.runtime.membership.decree import Decree, Vote
from accelerate_lshdp.runtime.membership.generation import NOBODY, Generation, Member, at_port
from accelerate_lshdp.runtime.membership.message import Message, Status


#: Seconds between two messages while nothing changes, and while something does.
BEAT_SECONDS, QUICK_BEAT_SECONDS = 0.5, 0.1
#: Seconds for which a launcher that has joined is waited for, so that several that come together come in one change.
TOGETHER_SECONDS = 1.0
#: Seconds for which a launcher that leaves is still a member.
GRACE_SECONDS = 2.0
#: Seconds for which a launcher listens before it founds a run, as there may be one that does not hear of it at once.
LISTENING_SECONDS = 2.0
#: Seconds until another member proposes, or the same one again.
PATIENCE_SECONDS = 1.0
#: Seconds for which a launcher that is silent is still told what has happened.
REMEMBERED_SECONDS = 600.0


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


@dataclass
class _Heard:
    """The last message of a launcher, when it came, and since when it comes without a pause.

    Args:
        deaf_since: when the launcher has said, and has said ever since, that it does not hear this one.
    """

    message: Message
    at: float
    since: float
    deaf_since: float | None = None


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
        generation: the newest that this launcher knows.
        status: what this launcher says that it is about to do.
        lost_ranks: the generation whose ranks it says to have lost.
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
        self.me = me
        self.rules = rules
        self.generation = NOBODY
        self.status = Status.JOINS
        self.lost_ranks = 0
        self.code = 0
        self.ended_in = 0
        self._run = run
        self._peers = set(peers)
        self._founders = founders
        self._origin = origin
        self._heard: dict[tuple[str, str], _Heard] = {}
        self._leaving: dict[tuple[str, str], float] = {}
        self._foreign: dict[str, float] = {}
        self._gone: set[tuple[str, str]] = set()
        self._decree: Decree | None = None
        self._taken_at = self._began_at = now
        self._needed_since: float | None = None
        self._proposed_at = now
        self._beat_at = now
        self._looked_at = now

    @property
    def node(self) -> int | None:
        """The node that this launcher is in the newest generation; None: it is not in there."""
        return self.generation.node_of(self.me)

    def start_anew(self, me: Member) -> None:
        """After it was left out: it has ended its ranks, and is ready to join as a new one."""
        self.me, self.status, self.lost_ranks = me, Status.JOINS, 0
        self._decree = None

    def choose_store_port(self, port: int) -> None:
        """The port for the store of the next generation whose first member this launcher is."""
        self.me = at_port(self.me, port)

    def all_have_ended(self, now: float) -> bool:
        """Whether the training has ended on all members that are there."""
        others = [each for each in self.generation.members if each.identity != self.me.identity]
        heard = [self._heard.get(each.identity) for each in others if self._is_present(each, now)]
        return all(each is not None and each.message.status is Status.ENDED for each in heard)

    def silent(self, now: float) -> dict[Member, float]:
        """The members that have not been heard of, and for how many seconds."""
        others = [each for each in self.generation.members if each.identity != self.me.identity]
        return {each: now - self._heard_at(each) for each in others if not self._is_heard(each, now)}

    def deaf(self, now: float) -> list[Member]:
        """The members that are heard, and say that they do not hear this launcher."""
        if self.node is not None:
            return [each for each in self.generation.members if self._is_heard(each, now) and self._is_deaf(each, now)]
        known = [(each, self._heard.get(each.identity)) for each in self.generation.members]
        heard = [(each, its.message) for each, its in known if its is not None and self._is_fresh(its, now)]
        return [each for each, message in heard if self.me.identity not in message.coming]

    def failure(self) -> tuple[Member, int] | None:
        """A launcher on which the script has failed, and its exit code."""
        if self.status is Status.FAILED:
            return self.me, self.code
        members = self.generation.identities
        failed = [h.message for key, h in self._heard.items() if key in members and h.message.status is Status.FAILED]
        return (failed[0].sender, failed[0].code) if failed else None

    @property
    def has_ended(self) -> bool:
        """Whether the ranks of some member have ended well: the training is over, and nothing changes any more."""
        own = self.status is Status.ENDED and self.node is not None
        return own or any(h.message.status is Status.ENDED for h in self._of_members())

    @property
    def ended_before(self) -> bool:
        """Whether the training has ended on a member before this generation began, and before it came here."""
        ended = [h.message.ended_in for h in self._of_members() if h.message.status is Status.ENDED]
        return self.status is not Status.ENDED and any(number < self.generation.number for number in ended)

    # Time

    def tick(self, now: float) -> list[tuple[tuple[str, int], Message]]:
        """Looks at what is known; returns the messages that are due, each with the address it goes to."""
        stopped = now - self._looked_at
        if stopped > 2 * BEAT_SECONDS:
            # This process was frozen, or had no processor: what it did not hear meanwhile says nothing of others.
            for heard in self._heard.values():
                heard.at += stopped
                heard.deaf_since = None
            self._taken_at += stopped
        self._looked_at = now
        self._found(now)
        wanted = self._wanted(now)
        self._change(wanted, now)
        self._take_decided(now)
        quick = wanted is not None or (self._decree is not None and self._decree.vote != Vote()) or self.node is None
        if now < self._beat_at:
            return []
        self._beat_at = now + (QUICK_BEAT_SECONDS if quick else BEAT_SECONDS)
        return self.farewell(now)

    def farewell(self, now: float) -> list[tuple[tuple[str, int], Message]]:
        """The messages that say once more what this launcher is about to do, each with the address it goes to."""
        message = self._message(now)
        return [(address, message) for address in sorted(self._receivers(now))]

    def hear(self, message: Message, now: float) -> None:
        """Takes in a message."""
        if message.run != self._run:
            self._foreign[message.sender.name] = now
            return
        if message.sender.identity == self.me.identity:
            return
        key = message.sender.identity
        before = self._heard.get(key)
        # A machine has one launcher at this address: one that has started anew is proof that the one before has ended.
        # What one of before has sent may come after it; but that one was a member, and says so.
        if message.status is Status.JOINS:
            self._gone |= {each for each in self.generation.identities if each[0] == key[0] and each != key}
        if message.status is Status.LEAVES:
            self._leaving.setdefault(key, now)
        since = now if before is None or now - before.at > 5 else before.since
        is_deaf = message.generation == self.generation and self.me.identity in message.silent
        was_deaf = now if before is None or before.deaf_since is None else before.deaf_since
        self._heard[key] = _Heard(message, now, since, was_deaf if is_deaf else None)
        theirs = message.generation
        if self._is_newer(theirs):
            self._take(theirs, now)
        elif theirs == self.generation and self._decree is not None:
            node = theirs.node_of(message.sender)
            if node is not None and message.vote != Vote():
                self._decree.hear(node, message.vote)
                self._beat_at = min(self._beat_at, now + QUICK_BEAT_SECONDS)
                self._take_decided(now)

    # What is wanted

    def _found(self, now: float) -> None:
        """Founds the first generation once all that it is to consist of are there, and know of no other one."""
        if self.generation is not NOBODY or not self._founders or self.status is not Status.JOINS:
            return
        if now - self._began_at < LISTENING_SECONDS and self._founders > 1:
            return
        seekers = [h.message for h in self._heard.values() if self._is_fresh(h, now)]
        seekers = [m for m in seekers if m.status is Status.JOINS and m.generation.number == 0]
        if len(seekers) + 1 >= self._founders:
            first = [self.me, *sorted((m.sender for m in seekers), key=lambda member: member.name)]
            first = first[: self.rules.max_nodes]
            self._take(Generation(1, tuple(first), sum(member.ranks for member in first), self._origin), now)

    def _wanted(self, now: float) -> Generation | None:
        """The generation that should follow; None: this one is as it should be, or none can follow now."""
        if self.node is None or self.has_ended or self.failure() is not None:
            return None
        staying = [member for member in map(self._as_heard, self.generation.members) if self._stays(member, now)]
        coming = self._joiners(now)
        names = {member.name for member in coming}
        # Who comes back anew has lost what it was before.
        staying = [member for member in staying if member.name not in names]
        coming = coming[: max(0, self.rules.max_nodes - len(staying))]
        present = {each.identity for each in self.generation.members if self._is_present(each, now)}
        wanted = self.generation.next_with([*staying, *coming], after_lost=not self._normally_may(present))
        is_other = wanted.identities != self.generation.identities
        if not is_other and not self._ranks_are_lost():
            return None
        if len(wanted.members) < self.rules.min_nodes:
            return None
        return wanted

    @property
    def leaving(self) -> frozenset[tuple[str, str]]:
        """Identities of the launchers that were told to end."""
        return frozenset(key for key, heard in self._heard.items() if heard.message.status is Status.LEAVES)

    def foreign(self, now: float) -> list[str]:
        """The machines whose launchers are of another run: with another script, other arguments or another plan."""
        return sorted(name for name, at in self._foreign.items() if now - at <= self._allowed)

    def launchers_heard(self, now: float) -> int:
        """How many other launchers of this run are there."""
        return sum(self._is_fresh(heard, now) for heard in self._heard.values())

    def has_quorum(self, now: float) -> bool:
        """Whether the members that are there may decide."""
        present = {each.identity for each in self.generation.members if self._is_present(each, now)}
        return self._may_decide(self.generation, present)

    def _may_decide(self, generation: Generation, present: Collection[tuple[str, str]]) -> bool:
        return generation.is_quorum(present, gone=self._gone, any_part=self.rules.any_part)

    def _normally_may(self, present: Collection[tuple[str, str]]) -> bool:
        """Whether members may decide without counting launchers that have ended."""
        return self.generation.is_quorum(present, any_part=self.rules.any_part)

    def _joiners(self, now: float) -> list[Member]:
        """Launchers that are ready to join, once none has just come."""
        fresh = [self._heard[key] for key in self._coming(now)]
        fresh = [heard for heard in fresh if self._hear_each_other(heard.message, now)]
        if any(now - h.since < TOGETHER_SECONDS for h in fresh):
            return []
        joiners: list[Message] = []
        for message in (heard.message for heard in sorted(fresh, key=lambda heard: heard.since)):
            # Those that come together have to hear each other, too; the others may come later.
            identity = message.sender.identity
            if all(identity in each.coming and each.sender.identity in message.coming for each in joiners):
                joiners.append(message)
        return [message.sender for message in joiners]

    def _coming(self, now: float) -> list[tuple[str, str]]:
        """Identities of the launchers that this one hears say that they are ready to join."""
        return [
            key
            for key, heard in self._heard.items()
            if self._is_fresh(heard, now)
            and heard.message.status is Status.JOINS
            and key not in self.generation.identities
        ]

    def _hear_each_other(self, joiner: Message, now: float) -> bool:
        """Whether a launcher and all members hear each other: it could not train with them otherwise.

        Each change ends the ranks of all, so one that is in and out again costs more than it gives.
        """
        if joiner.generation != self.generation:
            return False
        for member in self.generation.members:
            if member.identity == self.me.identity:
                if member.identity in joiner.silent:
                    return False
            elif self._is_present(member, now):
                heard = self._heard.get(member.identity)
                if member.identity in joiner.silent or heard is None:
                    return False
                if joiner.sender.identity not in heard.message.coming:
                    return False
        return True

    def _ranks_are_lost(self) -> bool:
        number = self.generation.number
        return self.lost_ranks == number or any(h.message.lost_ranks == number for h in self._of_members())

    def _stays(self, member: Member, now: float) -> bool:
        if member.identity == self.me.identity and self.status is Status.LEAVES:
            self._leaving.setdefault(member.identity, now)
        # After a while: where all are told to end, none is to be left out before the others have heard of it.
        leaves = member.identity in self._leaving and now - self._leaving[member.identity] > GRACE_SECONDS
        return not leaves and self._is_present(member, now)

    def _is_present(self, member: Member, now: float) -> bool:
        if member.identity == self.me.identity:
            return True
        return self._is_heard(member, now) and not self._is_deaf(member, now)

    def _is_deaf(self, member: Member, now: float) -> bool:
        heard = self._heard.get(member.identity)
        # Not at once: it may be this one that was frozen, and is heard again with its next message.
        return heard is not None and heard.deaf_since is not None and now - heard.deaf_since > BEAT_SECONDS

    def _is_heard(self, member: Member, now: float) -> bool:
        return now - self._heard_at(member) <= self._allowed

    def _silent(self, now: float) -> tuple[tuple[str, str], ...]:
        """Identities of the members that this launcher does not hear, itself one of them or not."""
        others = [each for each in self.generation.members if each.identity != self.me.identity]
        if self.node is not None:
            return tuple(each.identity for each in others if not self._is_heard(each, now))
        # Who is none yet has no reason to believe that it will hear them.
        heard = [self._heard.get(each.identity) for each in others]
        pairs = zip(others, heard, strict=True)
        return tuple(each.identity for each, its in pairs if its is None or not self._is_fresh(its, now))

    def _heard_at(self, member: Member) -> float:
        heard = self._heard.get(member.identity)
        # Since this generation began: nobody has to be heard of before. Who still tells of another one does not hear.
        if heard is None or self._is_older(heard.message.generation):
            return self._taken_at
        return max(heard.at, self._taken_at)

    @property
    def _allowed(self) -> float:
        # The last message was sent up to one beat ago, and this launcher looks once a beat.
        return max(BEAT_SECONDS, self.rules.notice_seconds - BEAT_SECONDS)

    def _is_fresh(self, heard: _Heard, now: float) -> bool:
        return now - heard.at <= self._allowed

    def _of_members(self) -> list[_Heard]:
        return [self._heard[key] for key in self.generation.identities if key in self._heard]

    def _as_heard(self, member: Member) -> Member:
        """The member with the port that it has said last: that of an earlier generation may be in use still."""
        if member.identity == self.me.identity:
            return self.me
        heard = self._heard.get(member.identity)
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
        present = [each for each in self.generation.members if self._is_present(each, now)]
        turn = [each.identity for each in present].index(self.me.identity)
        is_due = now - self._needed_since >= turn * PATIENCE_SECONDS
        # Others that propose at the same time are given way to by waiting for longer, each for another time.
        if is_due and now - self._proposed_at >= PATIENCE_SECONDS * (1 + turn / 2):
            self._proposed_at = now
            self._decree.propose(wanted)
            self._beat_at = now

    def _take_decided(self, now: float) -> None:
        if self._decree is not None and self._decree.decided is not None:
            self._take(self._decree.decided, now)

    def _is_newer(self, other: Generation) -> bool:
        own = self.generation
        if (other.origin, other.number) != (own.origin, own.number):
            return (other.origin, other.number) > (own.origin, own.number)
        # Only where each part of a split network goes on: one of them has to give way.
        key = (len(other.members), sorted(other.identities))
        return other.identities != own.identities and key > (len(own.members), sorted(own.identities))

    def _is_older(self, other: Generation) -> bool:
        return (other.origin, other.number) < (self.generation.origin, self.generation.number)

    def _take(self, generation: Generation, now: float) -> None:
        """A newer generation is in force."""
        self.generation = generation
        self._taken_at = now
        for heard in self._heard.values():
            heard.deaf_since = None  # said of the generation before
        self._needed_since = None
        self._beat_at = now
        node = self.node
        self._decree = None
        if node is not None:
            if self.status is Status.JOINS:
                self.status = Status.RUNS
            identities = [member.identity for member in generation.members]

            def is_quorum(nodes: Collection[int]) -> bool:
                return self._may_decide(generation, [identities[each] for each in nodes])

            self._decree = Decree(node, is_quorum)

    # Messages

    def _message(self, now: float) -> Message:
        return Message(
            self._run,
            self.me,
            self.status,
            self.generation,
            Vote() if self._decree is None else self._decree.vote,
            self._silent(now),
            tuple(self._coming(now)),
            self.lost_ranks,
            self.code,
            self.ended_in,
        )

    def _receivers(self, now: float) -> set[tuple[str, int]]:
        receivers = {member.address for member in self.generation.members}
        receivers |= {h.message.sender.address for h in self._heard.values() if now - h.at < REMEMBERED_SECONDS}
        receivers |= self._peers
        return receivers - {self.me.address}
