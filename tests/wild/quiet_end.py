# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Ends a process of plain accelerate without taking gloo's groups apart.

gloo's threads can block or abort a process that drops its groups: seen as a rank that never returns from the function
that had the model, long after its last step. That is the reference's weakness and not what is compared, so models of
torch's DDP are kept, and the process ends when its exit handlers have run.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any

# By its full name: torch may be in the middle of its own import, and has no attributes yet.
from torch.nn.parallel import DistributedDataParallel


_kept: list[Any] = []


def install() -> None:
    """Keeps every DDP model of this process from now on, and ends it quickly; exit codes stay."""
    initialise = DistributedDataParallel.__init__

    def initialise_and_keep(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        _kept.append(self)

    DistributedDataParallel.__init__ = initialise_and_keep
    atexit.register(_end)


def _end() -> None:
    if _kept and getattr(sys, "last_value", None) is None:  # no exception has ended the script
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
