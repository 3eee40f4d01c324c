# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`Attachments`: what this package has attached to objects of the user, and how it is taken off again."""

from __future__ import annotations

from collections.abc import Callable

from torch.utils.hooks import RemovableHandle


class Attachments:
    """Hooks and attributes on modules and parameters of the user, removed together, the newest first."""

    def __init__(self) -> None:
        self._removals: list[Callable[[], None]] = []

    def add(self, *handles: RemovableHandle) -> None:
        """Keeps handles of hooks; they do not keep the objects alive that the hooks are on."""
        self._removals += [handle.remove for handle in handles]

    def at_removal(self, undo: Callable[[], None]) -> None:
        """Calls ``undo`` when all this is removed."""
        self._removals.append(undo)

    def remove(self) -> None:
        """Takes everything off."""
        # The newest first: what was attached earlier may be what later hooks found.
        while self._removals:
            self._removals[-1]()
            self._removals.pop()  # not before: what has failed is tried again
