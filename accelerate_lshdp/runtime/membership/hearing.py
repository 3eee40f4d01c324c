# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`Hearing`: which launchers of an elastic run one of them hears, and which of them hear it and each other."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate_lshdp.runtime.membership.generation import NOBODY, Generation, Member
from accelerate_lshdp.runtime.membership.message import Message, Status


#: Seconds between two messages while nothing changes.
BEAT_SECONDS = 0.5
#: Seconds of silence after which a launcher that is heard again counts as one that has just come.
_PAUSE_SECONDS = 5.0
#: Seconds for which a launcher that is silent is still told what has happened.
_REMEMBERED_SECONDS = 600.0


@dataclass
class Heard:
    """The last message of a launcher, when it came, and since when it comes without a pause.

    Args:
        deaf_since: when the launcher has said, and has said ever since, that it does not hear this one.
    """

    message: Message
    at: float
    since: float
    deaf_since: float | None = None


class Hearing:
    """What one launcher hears.

    Args:
        me: this launcher.
        notice_seconds: in which the silence of a node is noticed.
        now: the time, of a clock that only goes forward.

    Attributes:
        generation: the newest that this launcher knows.
        heard: of the other launchers of the run, by identity.
        left_silent: members that a generation has not any more, of which nothing had come for long when it began, and
            for how many seconds.
        left_deaf: such members that this launcher heard, and that did not hear it.
    """

    def __init__(self, me: Member, notice_seconds: float, now: float) -> None:
        self.me = me
        self.generation = NOBODY
        self.heard: dict[tuple[str, str], Heard] = {}
        self.left_silent: dict[Member, float] = {}
        self.left_deaf: list[Member] = []
        # The last message was sent up to one beat ago, and this launcher looks once a beat.
        self._allowed = max(BEAT_SECONDS, notice_seconds - BEAT_SECONDS)
        self._foreign: dict[str, float] = {}
        self._since = now

    # What happens

    def take(self, message: Message, now: float) -> None:
        """Takes in a message of another launcher of the run."""
        key = message.sender.identity
        before = self.heard.get(key)
        since = now if before is None or now - before.at > _PAUSE_SECONDS else before.since
        is_deaf = message.generation == self.generation and self.me.identity in message.silent
        was_deaf = now if before is None or before.deaf_since is None else before.deaf_since
        self.heard[key] = Heard(message, now, since, was_deaf if is_deaf else None)

    def take_foreign(self, message: Message, now: float) -> None:
        """Takes in a message of a launcher of another run."""
        self._foreign[message.sender.name] = now

    def forgive(self, seconds: float) -> None:
        """This process did not run for so long: what it did not hear meanwhile says nothing of others."""
        for heard in self.heard.values():
            heard.at += seconds
            heard.deaf_since = None
        self._since += seconds

    def begin(self, generation: Generation, now: float) -> None:
        """A newer generation is in force."""
        left = [each for each in self.others if each.identity not in generation.identities]
        deaf = [each for each in left if self._is_heard(each, now) and self._deaf_since(each) is not None]
        quiet = {each: now - self._heard_at(each) for each in left if each not in deaf}
        # Others may have noticed it up to a beat before this launcher would have.
        enough = max(BEAT_SECONDS, self._allowed - BEAT_SECONDS)
        # New objects, as a `View` that another thread looks at may have the former ones.
        self.left_silent = {**self.left_silent, **{each: long for each, long in quiet.items() if long > enough}}
        self.left_deaf = [*self.left_deaf, *deaf]
        self.generation, self._since = generation, now
        for heard in self.heard.values():
            heard.deaf_since = None  # said of the generation before

    # Members

    @property
    def others(self) -> list[Member]:
        """The members beside this launcher, which may be none itself."""
        return [each for each in self.generation.members if each.identity != self.me.identity]

    @property
    def of_members(self) -> list[Heard]:
        """What members have said last, as far as they were heard."""
        return [self.heard[key] for key in self.generation.identities if key in self.heard]

    def is_present(self, member: Member, now: float) -> bool:
        """Whether a member and this launcher hear each other."""
        if member.identity == self.me.identity:
            return True
        return self._is_heard(member, now) and not self._is_deaf(member, now)

    def present(self, now: float) -> list[Member]:
        """The members that are there, this launcher among them if it is one."""
        return [each for each in self.generation.members if self.is_present(each, now)]

    def silent(self, now: float) -> dict[Member, float]:
        """The members that have not been heard of, and for how many seconds."""
        # Without the launcher that this machine had before, which has ended.
        others = [each for each in self.others if each.name != self.me.name]
        return {each: now - self._heard_at(each) for each in others if not self._is_heard(each, now)}

    def deaf(self, now: float) -> list[Member]:
        """The members that are heard, and say that they do not hear this launcher."""
        if self._is_member:
            return [each for each in self.generation.members if self._is_heard(each, now) and self._is_deaf(each, now)]
        known = [(each, self.heard.get(each.identity)) for each in self.generation.members]
        heard = [(each, its.message) for each, its in known if its is not None and self.is_fresh(its, now)]
        return [each for each, message in heard if self.me.identity not in message.coming]

    def unheard(self, now: float) -> tuple[tuple[str, str], ...]:
        """Identities of the members that this launcher does not hear, as it tells the others."""
        if self._is_member:
            return tuple(each.identity for each in self.others if not self._is_heard(each, now))
        # Who is none yet has no reason to believe that it will hear them.
        heard = [self.heard.get(each.identity) for each in self.others]
        pairs = zip(self.others, heard, strict=True)
        return tuple(each.identity for each, its in pairs if its is None or not self.is_fresh(its, now))

    # Launchers that are no members

    def is_fresh(self, heard: Heard, now: float) -> bool:
        """Whether a launcher has been heard lately."""
        return now - heard.at <= self._allowed

    def foreign(self, now: float) -> list[str]:
        """The machines whose launchers are of another run: with another script, other arguments or another plan."""
        return sorted(name for name, at in self._foreign.items() if now - at <= self._allowed)

    def coming(self, now: float) -> list[tuple[str, str]]:
        """Identities of the launchers that this one hears say that they are ready to join."""
        return [
            key
            for key, heard in self.heard.items()
            if self.is_fresh(heard, now)
            and heard.message.status is Status.JOINS
            and key not in self.generation.identities
        ]

    def joiners(self, now: float) -> list[Heard]:
        """The launchers that are ready to join, and that hear all members, which hear them."""
        found = [self.heard[key] for key in self.coming(now)]
        return [heard for heard in found if self._hears_and_is_heard(heard.message, now)]

    def addresses(self, now: float) -> set[tuple[str, int]]:
        """Where the launchers are that are to be told what has happened, beside members."""
        return {h.message.sender.address for h in self.heard.values() if now - h.at < _REMEMBERED_SECONDS}

    def _hears_and_is_heard(self, joiner: Message, now: float) -> bool:
        """Whether a launcher and all members hear each other: it could not train with them otherwise.

        Each change ends the ranks of all, so one that is in and out again costs more than it gives.
        """
        if joiner.generation != self.generation:
            return False
        for member in self.generation.members:
            if member.identity == self.me.identity:
                if member.identity in joiner.silent:
                    return False
            elif self.is_present(member, now):
                heard = self.heard.get(member.identity)
                if member.identity in joiner.silent or heard is None:
                    return False
                if joiner.sender.identity not in heard.message.coming:
                    return False
        return True

    # Silence

    @property
    def _is_member(self) -> bool:
        return self.generation.node_of(self.me) is not None

    def _is_heard(self, member: Member, now: float) -> bool:
        return now - self._heard_at(member) <= self._allowed

    def _heard_at(self, member: Member) -> float:
        heard = self.heard.get(member.identity)
        # Since this generation began: nobody has to be heard of before. Who still tells of another one does not hear.
        if heard is None or heard.message.generation.order < self.generation.order:
            return self._since
        return max(heard.at, self._since)

    def _is_deaf(self, member: Member, now: float) -> bool:
        since = self._deaf_since(member)
        # Not at once: it may be this one that was frozen, and is heard again with its next message.
        return since is not None and now - since > BEAT_SECONDS

    def _deaf_since(self, member: Member) -> float | None:
        heard = self.heard.get(member.identity)
        return None if heard is None else heard.deaf_since
