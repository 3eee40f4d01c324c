# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Measurement of each rank's times and memory, and of the network, for the planner.

The public names are imported on first use, so that profiles can be read without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


_MODULE_OF = {
    "Profile": "accelerate_lshdp.documents.profile",
    "ProfileError": "accelerate_lshdp.documents.profile",
    "ProfilingOptions": "accelerate_lshdp.profiling.options",
    "Slowdown": "accelerate_lshdp.profiling.emulation",
    "Subject": "accelerate_lshdp.profiling.subject",
    "probe_sizes": "accelerate_lshdp.profiling.probing",
    "profile_ranks": "accelerate_lshdp.profiling.session",
    "read_profiles": "accelerate_lshdp.documents.profile",
    "write_profiles": "accelerate_lshdp.documents.profile",
}
__all__ = [
    "Profile",
    "ProfileError",
    "ProfilingOptions",
    "Slowdown",
    "Subject",
    "probe_sizes",
    "profile_ranks",
    "read_profiles",
    "write_profiles",
]

if TYPE_CHECKING:
    from accelerate_lshdp.documents.profile import Profile, ProfileError, read_profiles, write_profiles
    from accelerate_lshdp.profiling.emulation import Slowdown
    from accelerate_lshdp.profiling.options import ProfilingOptions
    from accelerate_lshdp.profiling.probing import probe_sizes
    from accelerate_lshdp.profiling.session import profile_ranks
    from accelerate_lshdp.profiling.subject import Subject


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
