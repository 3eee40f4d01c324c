# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Makes the ranks of an emulated cluster unequally fast: by CPU quotas, or by sleeping where there are none."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from laboratory.emulated_cluster.cgroups import ControlGroup

from accelerate_lshdp.comparing.rank_processes import RankProcesses


CALL_SECONDS = 60.0


class EmulatedSpeeds:
    """Gives each rank its share of a core, and takes it back; a context manager that leaves no quota behind.

    Args:
        ranks: the processes, which have imported and built what they need.
        refusal: why quotas cannot be used, None if they can. Then the ranks sleep after each piece of their own
            forward and backward (`Slowdown`), so that these take as long as on such a share of a core. Everything else
            (optimizer, collectives) keeps its speed.
        period_seconds: of the quotas. Short ones are smoother.
    """

    def __init__(self, ranks: RankProcesses, refusal: str | None, period_seconds: float) -> None:
        self._ranks = ranks
        self._quotas: list[ControlGroup] = []
        self._all_cores = float(os.cpu_count() or 1)
        self._period_seconds = period_seconds
        self.by_quota = refusal is None
        self.description = f"CPU quotas (cgroups), periods of {period_seconds * 1000:g} ms"
        if refusal is not None:
            self.description = f"EMULATED by sleeping after forward and backward, without CPU quotas: {refusal}"

    def __enter__(self) -> EmulatedSpeeds:
        with contextlib.ExitStack() as made:
            if self.by_quota:
                for rank, pid in enumerate(self._ranks.pids):
                    quota = made.enter_context(
                        ControlGroup(f"rank{rank}", self._all_cores, period_seconds=self._period_seconds)
                    )
                    quota.add(pid)
                    self._quotas.append(quota)
            self._made = made.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._made.close()

    def apply(self, shares: Sequence[float]) -> None:
        """From now on the ranks have these shares of a core."""
        if not self.by_quota:
            self._ranks.call("set_emulated_share", timeout=CALL_SECONDS, shares=list(shares))
        for quota, share in zip(self._quotas, shares, strict=self.by_quota):
            quota.set_cores(share)

    def lift(self) -> None:
        """From now on they have what the machine gives them: for building and for steps that are not measured."""
        self.apply([self._all_cores if self.by_quota else 1.0] * len(self._ranks.pids))
