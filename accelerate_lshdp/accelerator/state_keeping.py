# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`StateKeeping`: what a session tells the keeper of an elastic run's state, which is made of the session's parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from accelerate_lshdp.runtime.object_exchange import NodeLayout


class StateKeeping(Protocol):
    """What a session tells the keeper of an elastic run's state; see ``state_keeper``."""

    pause_wanted: bool
    pause_agreed: bool
    is_loaded: bool

    @property
    def continues_run(self) -> bool:
        """Whether ranks have trained before these."""

    def bring(self, layout: NodeLayout) -> Path | None:
        """The newest state that any node has kept, now on this one (collective)."""

    def follow(self, accelerator: Any) -> None:
        """From now on the state is that of this accelerator's training (collective)."""

    def forward_begins(self) -> None:
        """A forward of a model in training begins."""

    def step_begins(self) -> None:
        """An optimizer is about to change parameters."""

    def step_ends(self) -> None:
        """The optimizer has changed them."""
