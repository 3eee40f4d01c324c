# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`Launch`: the processes of all ranks, as the driver of a comparison sees them.

Plain PyTorch has processes of its own: this package binds its processes to cores and tunes their allocator, which the
scripts that it is compared with do not. And DDP has others than FSDP2, which leaves the allocator in a state in which
DDP is faster than alone, as its users start it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol


#: Whose processes: those that use the engine, and those of plain PyTorch.
ENGINE, PLAIN_DDP, PLAIN_FSDP2 = "engine", "plain DDP", "plain FSDP2"
#: Of a call, unless the driver gives it more.
CALL_SECONDS = 60.0


class PeakMemory(Protocol):
    """A measurement of memory that runs while its block does.

    Attributes:
        peak_bytes: the most memory of each node's processes; None: not measured yet.
    """

    peak_bytes: list[int] | None


class Launch(ABC):
    """The processes of all ranks; a context manager that starts and ends them.

    Args:
        node_sizes: ranks of each node.
        kinds: of `ENGINE`, `PLAIN_DDP` and `PLAIN_FSDP2`; each has a process for every rank.
    """

    def __init__(self, node_sizes: Sequence[int], kinds: Sequence[str] = (ENGINE,)) -> None:
        self.node_sizes = list(node_sizes)
        self.kinds = tuple(kinds)

    @abstractmethod
    def __enter__(self) -> Launch:
        """Starts the processes."""

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the processes."""

    @abstractmethod
    def call(self, method: str, *, kind: str = ENGINE, timeout: float = CALL_SECONDS, **arguments: Any) -> list[Any]:
        """What a rank's method returned in the processes of a kind, in rank order. Raises RankError.

        Processes that have been called are stopped while those of another kind run a call, which may be measured.
        """

    @abstractmethod
    def sent_between_nodes(self) -> list[int] | None:
        """Bytes that each node has sent to others so far; None where that is not known."""

    @abstractmethod
    def sent_inside_nodes(self) -> list[int] | None:
        """Bytes that went over each node's own loopback so far; None where that is not known."""

    @abstractmethod
    def memory_meter(self) -> AbstractContextManager[PeakMemory]:
        """Measures the proportional set size of all processes of each node while its block runs."""

    @property
    def several_clocks(self) -> bool:
        """Whether the ranks are on several machines."""
        return False
