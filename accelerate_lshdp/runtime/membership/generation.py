# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`Generation`: the nodes that train together until one is lost or comes, and who may decide on the next one."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any


#: More generations than launchers decide on before they hear of one that was decided without them.
_BEYOND = 1000


@dataclass(frozen=True)
class Member:
    """A launcher of an elastic run.

    Args:
        name: of its machine, the same when it returns.
        incarnation: text that differs from that of every other start of a launcher: one that was started anew has
            forgotten what it has agreed to.
        address: IP address and port at which it gets datagrams.
        ranks: processes that it starts.
        store_port: a free port on it, for the store in which ranks meet if it is the first of a generation.
    """

    name: str
    incarnation: str
    address: tuple[str, int]
    ranks: int = 1
    store_port: int = 0

    @property
    def identity(self) -> tuple[str, str]:
        return self.name, self.incarnation

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "incarnation": self.incarnation,
            "address": list(self.address),
            "ranks": self.ranks,
            "store_port": self.store_port,
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Member:
        """Raises KeyError, TypeError or ValueError for what `to_dict` has not made."""
        host, port = document["address"]
        return cls(
            str(document["name"]),
            str(document["incarnation"]),
            (str(host), int(port)),
            int(document["ranks"]),
            int(document["store_port"]),
        )


@dataclass(frozen=True)
class Generation:
    """The members of a run, from one change to the next.

    Args:
        number: 0 before the first one, which has no members.
        members: in the order of their nodes. Who stays keeps its place before those that come.
        ranks_at_start: of the first generation, for which scripts have computed their batches and steps.
        origin: text of the founding; that of a later one is larger. A run is founded again when all have lost it.
        branch: text of the last decision of members that were left after others had ended (`after_lost`). What those
            had decided may live on where they had let in others, and may take such a decision, too.
    """

    number: int
    members: tuple[Member, ...]
    ranks_at_start: int = 0
    origin: str = ""
    branch: str = ""

    @cached_property
    def identities(self) -> frozenset[tuple[str, str]]:
        return frozenset(member.identity for member in self.members)

    @property
    def order(self) -> tuple[str, int, str]:
        """Larger than that of the generations before it."""
        return self.origin, self.number, self.branch

    @property
    def node_sizes(self) -> tuple[int, ...]:
        """Ranks of each node."""
        return tuple(member.ranks for member in self.members)

    def node_of(self, member: Member) -> int | None:
        """The node that a member is; None: it is not in this generation."""
        for node, each in enumerate(self.members):
            if each.identity == member.identity:
                return node
        return None

    def is_quorum(self, present: Collection[tuple[str, str]], *, any_part: bool = False) -> bool:
        """Whether some of these members may decide for all: any two sets that may have a member in common.

        Args:
            present: identities; those of others do not count.
            any_part: any member may, which splits a run in two if the network does.
        """
        here = self.identities & set(present)
        if any_part:
            return bool(here)
        if here and 2 * len(here) == len(self.members):
            return self.members[0].identity in here
        return 2 * len(here) > len(self.members)

    def are_all_left(self, present: Collection[tuple[str, str]], gone: Collection[tuple[str, str]]) -> bool:
        """Whether no other member is left than these: they may decide, however few, on a generation `after_lost`.

        Args:
            present: identities; those of others do not count.
            gone: identities of launchers that have ended for certain.
        """
        here = self.identities & set(present)
        return bool(here) and self.identities - set(gone) <= here

    def next_with(self, members: Collection[Member], *, after_lost: bool = False) -> Generation:
        """The next generation: those of this one that stay in their order, then the others by name.

        Args:
            members: of it.
            after_lost: whether it follows one that might have been decided on by launchers that have all ended since.
        """
        by_identity = {member.identity: member for member in members}
        staying = [by_identity.pop(each.identity) for each in self.members if each.identity in by_identity]
        coming = sorted(by_identity.values(), key=lambda member: (member.name, member.incarnation))
        # Beyond all that may have followed there: who had come into one of those gives way to this one.
        number = self.number + (_BEYOND if after_lost else 1)
        branch = hashlib.sha256(repr(self.order).encode()).hexdigest()[:8] if after_lost else self.branch
        return Generation(number, (*staying, *coming), self.ranks_at_start, self.origin, branch)

    def to_dict(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "members": [member.to_dict() for member in self.members],
            "ranks_at_start": self.ranks_at_start,
            "origin": self.origin,
            "branch": self.branch,
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Generation:
        """Raises KeyError, TypeError or ValueError for what `to_dict` has not made."""
        members = tuple(Member.from_dict(each) for each in document["members"])
        texts = str(document["origin"]), str(document["branch"])
        return cls(int(document["number"]), members, int(document["ranks_at_start"]), *texts)


#: Before the first one.
NOBODY = Generation(0, ())


def at_port(member: Member, store_port: int) -> Member:
    """The member with another port for its store."""
    return member if member.store_port == store_port else replace(member, store_port=store_port)
