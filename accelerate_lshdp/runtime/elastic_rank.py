# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What the launcher of an elastic run tells its ranks: `ElasticRank`, in the environment, and words on a socket."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path


ELASTIC_VARIABLE = "LSDP_ELASTIC"
#: Exit code of a rank that has kept its state because its launcher asked for it.
KEPT = 77
#: What launchers say: leave after the step that all are in, or at once.
PAUSE, KEEP = b"pause", b"keep"


@dataclass(frozen=True)
class NodeFolder:
    """What the launcher of a node and its ranks have in a folder in memory.

    Args:
        path: of the folder.
    """

    path: Path

    @property
    def state(self) -> Path:
        """The state of the run, as ranks have kept it last."""
        return self.path / "state"

    def stepped(self, generation: int) -> Path:
        """A file that is there once a rank of this node has made a step in a generation."""
        return self.path / f"stepped{generation}"

    def gate(self, generation: int) -> Path:
        """The file of the `StepGate` of a generation's ranks on this node."""
        return self.path / f"gate{generation}"

    def control(self, local_rank: int) -> Path:
        """The socket on which a rank hears what it is to do."""
        return self.path / f"rank{local_rank}.control"

    def clear_ranks(self) -> None:
        """Removes what ranks that have ended have left beside the state.

        They may be of a generation with the number of the next one: a run that all have lost begins with 1 again.
        """
        for pattern in ("stepped*", "gate*", "rank*.control"):
            for left in self.path.glob(pattern):
                left.unlink(missing_ok=True)


@dataclass(frozen=True)
class ElasticRank:
    """This rank's generation.

    Args:
        folder: the path of its node's `NodeFolder`.
        generation: its number, from 1.
        origin: text of the run's founding, and of what it went on from if members had ended.
        ranks_at_start: of the first generation, for which the script's batches and steps are meant.
        machines: name of the machine of each rank.
        since: seconds since the epoch when this launcher began; checkpoints here that are older are of another run.
    """

    folder: str
    generation: int
    origin: str
    ranks_at_start: int
    machines: tuple[str, ...]
    since: float

    @property
    def memory(self) -> NodeFolder:
        return NodeFolder(Path(self.folder))

    def to_text(self) -> str:
        """For the environment."""
        return json.dumps(asdict(self))


@cache
def elastic_rank() -> ElasticRank | None:
    """What this process was told; None: it is no rank of an elastic run."""
    text = os.environ.get(ELASTIC_VARIABLE)
    if text is None:
        return None
    document = json.loads(text)
    return ElasticRank(**{**document, "machines": tuple(document["machines"])})


def ranks_at_start(world_size: int) -> int:
    """The ranks for which a script's batches and steps are meant: not those of now, if nodes have come or gone."""
    told = elastic_rank()
    return world_size if told is None else told.ranks_at_start


def say(path: Path, word: bytes) -> None:
    """Sends a word to whoever listens to a socket; nobody may any more, or not yet."""
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as talks:
        talks.setblocking(False)
        talks.sendto(word, str(path))


def listen(path: Path, hear: Callable[[bytes], None]) -> None:
    """Calls ``hear`` with each word that comes to a socket, in another thread."""
    with suppress(FileNotFoundError):  # of a rank of the generation before
        path.unlink()
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    bound.bind(str(path))

    def run() -> None:
        while True:
            hear(bound.recv(64))

    threading.Thread(target=run, name="control", daemon=True).start()
