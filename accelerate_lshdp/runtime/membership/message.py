# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`Message`: what launchers of an elastic run tell each other again and again, as a datagram."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum

from accelerate_lshdp.runtime.membership.decree import Vote
from accelerate_lshdp.runtime.membership.generation import Generation, Member


#: Of a datagram: more than the messages of `LARGEST_ELASTIC` members take, and less than UDP carries.
MESSAGE_BYTES = 60_000


class Status(str, Enum):
    """What a launcher is about to do."""

    JOINS = "joins"  # it is ready to be a member
    RUNS = "runs"  # it is a member; or was one, and has its ranks still
    LEAVES = "leaves"  # it was told to end
    LEFT = "left"  # it has ended its ranks, decides on nothing more, and ends
    ENDED = "ended"  # its ranks have ended well
    FAILED = "failed"  # the script has failed on it


@dataclass(frozen=True)
class Message:
    """What one launcher says of itself.

    Args:
        run: token of the run; messages of others are not heard.
        sender: as it is now.
        status: what it is about to do.
        generation: the newest that it knows.
        vote: on the one after that; of a launcher that is no member, only the ballot that it has heard of.
        silent: identities of members that it does not hear.
        coming: identities of launchers that it hears say that they are ready to join.
        lost_ranks: the number of the generation whose ranks it has lost or had to end; 0: none.
        code: the exit code of a script that has failed.
        ended_in: the number of the generation whose ranks have ended on it, well or because it has left; 0: of none.
    """

    run: str
    sender: Member
    status: Status
    generation: Generation
    vote: Vote = Vote()
    silent: tuple[tuple[str, str], ...] = ()
    coming: tuple[tuple[str, str], ...] = ()
    lost_ranks: int = 0
    code: int = 0
    ended_in: int = 0

    def to_bytes(self) -> bytes:
        document = {
            "run": self.run,
            "sender": self.sender.to_dict(),
            "status": self.status.value,
            "generation": self.generation.to_dict(),
            "vote": self.vote.to_dict(),
            "silent": self.silent,
            "coming": self.coming,
            "lost_ranks": self.lost_ranks,
            "code": self.code,
            "ended_in": self.ended_in,
        }
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Message | None:
        """The message; None: it is none."""
        try:
            document = json.loads(data)
            return cls(
                str(document["run"]),
                Member.from_dict(document["sender"]),
                Status(document["status"]),
                Generation.from_dict(document["generation"]),
                Vote.from_dict(document["vote"]),
                tuple((str(name), str(start)) for name, start in document["silent"]),
                tuple((str(name), str(start)) for name, start in document["coming"]),
                int(document["lost_ranks"]),
                int(document["code"]),
                int(document["ended_in"]),
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
