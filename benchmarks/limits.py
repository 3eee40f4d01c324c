# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What a benchmark has to reach, beside what it reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Limit:
    """One figure that must not exceed a limit."""

    what: str
    found: float
    limit: float

    @property
    def holds(self) -> bool:
        return self.found <= self.limit

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}


def limits_table(limits: Sequence[Limit]) -> Any:
    """A rich table of them."""
    from rich.table import Table

    table = Table(title="Limits", title_justify="left")
    for heading, side in (("what", "left"), ("found", "right"), ("limit", "right"), ("", "left")):
        table.add_column(heading, justify=side)
    for limit in limits:
        verdict = "holds" if limit.holds else "BROKEN"
        table.add_row(limit.what, f"{limit.found:.5g}", f"at most {limit.limit:.4g}", verdict)
    return table
