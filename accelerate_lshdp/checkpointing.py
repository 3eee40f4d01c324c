"""Saving and loading the state of a run, and models for use elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from accelerate import Accelerator

    _Base = Accelerator
else:
    _Base = object


class Checkpointing(_Base):
    """The part of ``LSHDPAccelerator`` that saves and loads."""
