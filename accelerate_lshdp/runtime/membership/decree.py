# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`Decree`: one decision of the members of a generation, that on the next one, by Paxos.

The single-decree algorithm of Lamport ("Paxos Made Simple", 2001). Each member accepts proposals and may make some;
what a quorum has accepted under one ballot is decided, and no other value ever is: a proposer first asks a quorum for
what was accepted before, and proposes that. Members tell each other their state again and again instead of sending
single requests, so a message that is lost or comes twice changes nothing. No clock and no network: the caller has
both.

Before a member proposes a new generation, a quorum of that generation has to have answered its ballot, too, also
launchers that are only about to join. Otherwise one of two members that may decide alone could let in two launchers
when the network has just split: it would be one of four members, and the others would not know that they are members.

Ballots after members have ended for certain are a kind of their own, above all others. They need all members that are
left, who may be fewer than a quorum and not know what those that have ended had decided. They need not know it: what
they decide on has a number beyond all that may have followed there, and a branch of its own (`Generation.next_with`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate_lshdp.runtime.membership.generation import Generation


#: Whether it is one after members have ended (0 or 1), round and proposer: no two members make the same one.
Ballot = tuple[int, int, int]
NO_BALLOT: Ballot = (0, 0, -1)


@dataclass(frozen=True)
class Vote:
    """What a member says of a decision.

    Args:
        promised: it accepts nothing under a lower ballot any more; of a launcher that is about to join: the highest
            ballot that it has heard of.
        accepted: the ballot under which it has accepted a value last, and the value.
        proposed: the ballot for which it asks others, and the value once enough of them have answered; itself as a
            proposer.
    """

    promised: Ballot = NO_BALLOT
    accepted: tuple[Ballot, Generation] | None = None
    proposed: tuple[Ballot, Generation | None] | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "promised": list(self.promised),
            "accepted": None if self.accepted is None else [list(self.accepted[0]), self.accepted[1].to_dict()],
            "proposed": None
            if self.proposed is None
            else [list(self.proposed[0]), None if self.proposed[1] is None else self.proposed[1].to_dict()],
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Vote:
        """Raises KeyError, TypeError or ValueError for what `to_dict` has not made."""
        accepted, proposed = document["accepted"], document["proposed"]
        return cls(
            _ballot(document["promised"]),
            None if accepted is None else (_ballot(accepted[0]), Generation.from_dict(accepted[1])),
            None
            if proposed is None
            else (_ballot(proposed[0]), None if proposed[1] is None else Generation.from_dict(proposed[1])),
        )


@dataclass
class Decree:
    """A member's part in the decision on the generation that follows its own.

    Args:
        node: of this member among those that decide.
        is_quorum: whether members, by node, may decide for all.
        are_all_left: whether no other members are left than these, by node: others have ended for certain.
        is_quorum_of_next: whether members, by node, and launchers that are about to join, by identity, may decide for
            all of the generation that would follow.

    Attributes:
        decided: the next generation, once it is decided.
        vote: what this member says.
        wanted: the generation that it proposes.
    """

    node: int
    is_quorum: Callable[[Collection[int]], bool]
    are_all_left: Callable[[Collection[int]], bool]
    is_quorum_of_next: Callable[[Generation, Collection[int], Collection[tuple[str, str]]], bool]
    decided: Generation | None = None
    vote: Vote = Vote()
    wanted: Generation | None = None
    _round: int = 0
    _votes: dict[int, Vote] = field(default_factory=dict)
    _coming: dict[tuple[str, str], Ballot] = field(default_factory=dict)

    def propose(self, wanted: Generation, *, after_lost: bool = False) -> None:
        """Begins a ballot above all that this member has heard of, for a value unless another may be decided.

        Args:
            wanted: the value.
            after_lost: for a value that comes after what members that have ended may have decided.
        """
        promised = [self.vote.promised, *(vote.promised for vote in self._votes.values()), *self._coming.values()]
        self.wanted = wanted
        self._round = 1 + max(self._round, *(each[1] for each in promised))
        ballot = (int(after_lost), self._round, self.node)
        self._change(Vote(self.vote.promised, self.vote.accepted, (ballot, None)))

    def withdraw(self) -> None:
        """Stops asking; what was accepted stays so."""
        self.wanted = None
        self._change(Vote(self.vote.promised, self.vote.accepted, None))

    def hear(self, node: int, vote: Vote) -> None:
        """Takes in what another member says."""
        self._votes[node] = vote
        self._answer(vote)
        self._advance()

    def hear_coming(self, identity: tuple[str, str], ballot: Ballot) -> None:
        """Takes in the highest ballot that a launcher that is about to join has heard of."""
        self._coming[identity] = ballot
        self._advance()

    def _change(self, vote: Vote) -> None:
        """This member's vote has changed: it is one of those that vote upon it, too."""
        self.vote = vote
        self._answer(vote)
        self._advance()

    def _answer(self, vote: Vote) -> None:
        """Promises and accepts what another one, or this one, has proposed."""
        if vote.proposed is None:
            return
        ballot, value = vote.proposed
        now = self.vote
        if ballot < now.promised:
            return
        accepted = now.accepted
        if value is not None and (accepted is None or accepted[0] < ballot):
            accepted = (ballot, value)
        if (ballot, accepted) != (now.promised, now.accepted):
            self.vote = Vote(ballot, accepted, now.proposed)

    def _advance(self) -> None:
        """Goes on with this member's own ballot, and sees whether anything is decided."""
        votes = {**self._votes, self.node: self.vote}
        if self.vote.proposed is not None and self.vote.proposed[1] is None:
            ballot = self.vote.proposed[0]
            promised = {node: vote for node, vote in votes.items() if vote.promised == ballot}
            coming = {identity for identity, heard in self._coming.items() if heard == ballot}
            accepted = [vote.accepted for vote in promised.values() if vote.accepted is not None]
            accepted = [each for each in accepted if each[0][0] == ballot[0]]
            # What has the highest ballot may be decided already, whoever is there; nothing with a lower one is.
            value = max(accepted, key=lambda each: each[0])[1] if accepted else self.wanted
            if self._may_decide(ballot, promised) and (accepted or self.is_quorum_of_next(value, promised, coming)):
                self._change(Vote(self.vote.promised, self.vote.accepted, (ballot, value)))
                return
        by_ballot: dict[Ballot, set[int]] = {}
        for node, vote in votes.items():
            if vote.accepted is not None:
                by_ballot.setdefault(vote.accepted[0], set()).add(node)
        for ballot, nodes in by_ballot.items():
            if self.decided is None and self._may_decide(ballot, nodes):
                self.decided = next(v.accepted[1] for v in votes.values() if v.accepted and v.accepted[0] == ballot)

    def _may_decide(self, ballot: Ballot, nodes: Collection[int]) -> bool:
        return self.are_all_left(nodes) if ballot[0] else self.is_quorum(nodes)


def _ballot(document: Any) -> Ballot:
    kind, number, node = document
    return int(kind), int(number), int(node)
