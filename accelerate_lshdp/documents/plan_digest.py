# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The digest by which ranks compare plans."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any


def digest_of(sections: Mapping[str, Any], left_out: Collection[str]) -> str:
    """SHA-256, in hex, of what a plan's sections change in the training.

    Args:
        sections: of the plan, as plain values; None: the plan does not have it.
        left_out: sections that change nothing in the training.
    """
    # Automatic sizes change the speed only. Plans written before a section existed keep their digest.
    left_out = {*left_out, "automatic" if sections["automatic"] is None else "batch"}
    left_out |= {name for name in ("placement", "elastic") if sections[name] is None}
    document = {name: section for name, section in sections.items() if name not in left_out}
    # Sorted keys and no blanks: equal plans have equal bytes, whatever order their files have.
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()
