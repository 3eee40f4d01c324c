# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`ProfilingOptions`: the time limit and the limits of micro-batches of a profiling run."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate_lshdp.documents.plan import Strategy


@dataclass(frozen=True)
class ProfilingOptions:
    """The time limit and the limits of micro-batches of a profiling run.

    Args:
        seconds: seconds that the run may take in all, the building of the model included; ``needed_batch`` may take
            longer.
        strategy: the strategy to measure for.
        max_batch: the largest micro-batch to measure, in samples; None: the largest that is possible.
        needed_batch: a micro-batch in samples to measure whatever time that takes, if memory, data and ``max_batch``
            allow it.
        total_batch_size: the global batch in samples that will be planned, if it is known: ranks rehearse its plan.
        memory_limit_bytes: memory that this rank may use. None: what is free on its device, or its share of what is
            free on the host.
        units: as for ``LSDPPlugin``; None: those of the accelerator.
        bucket_megabytes: as for ``LSDPPlugin``; None: those of the accelerator.

    Raises:
        ValueError: an impossible value; it says which.
    """

    seconds: float = 60.0
    strategy: Strategy | str = Strategy.LSDP
    max_batch: int | None = None
    needed_batch: int = 1
    total_batch_size: int | None = None
    memory_limit_bytes: int | None = None
    units: tuple[str, ...] | None = None
    bucket_megabytes: float | None = None

    def __post_init__(self) -> None:
        known = [member.value for member in Strategy]
        if str(self.strategy) not in known:
            raise ValueError(f"found strategy {self.strategy!r}, expected one of {', '.join(known)}")
        object.__setattr__(self, "strategy", Strategy(str(self.strategy)))
        for name in (
            "seconds",
            "max_batch",
            "needed_batch",
            "total_batch_size",
            "memory_limit_bytes",
            "bucket_megabytes",
        ):
            value = getattr(self, name)
            # `not >` instead of `<=`: NaN fails, too.
            if value is not None and not value > 0:
                raise ValueError(f"found {name}={value}, expected more than 0")
        if isinstance(self.units, str):
            raise ValueError(f"found the units {self.units!r}, expected a tuple of names, such as ({self.units!r},)")
