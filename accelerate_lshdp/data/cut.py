# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""How a global batch is cut over ranks and micro-batches: integers only, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from accelerate_lshdp.documents.plan import RankBatch


def largest_remainder(total: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Cut `total` in whole parts proportional to `weights`; of equal remainders the lower index comes first.

    The parts sum to `total`, and no part exceeds its weight as long as `total <= sum(weights)`.
    """
    whole = sum(weights)
    parts = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: (-(total * weights[i] % whole), i))
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return tuple(parts)


def count_batches(samples: int, total: int, drop_last: bool) -> int:
    """The number of batches of `total` samples; a short last one counts as one unless it is dropped."""
    return samples // total if drop_last else -(-samples // total)


@dataclass(frozen=True, slots=True)
class GlobalBatchCut:
    """The sizes of one global batch, in rank order. A shorter one, the last of an epoch, is cut in proportion."""

    sizes: tuple[int, ...]
    """Samples of each rank in a full global batch."""
    steps: tuple[int, ...]
    """Micro-batches of each rank; the same number for a short global batch."""

    @classmethod
    def from_plan(cls, rank_batches: Sequence[RankBatch]) -> GlobalBatchCut:
        return cls(tuple(b.batch_size for b in rank_batches), tuple(b.accumulation_steps for b in rank_batches))

    @classmethod
    def equal(cls, batch_size: int, world_size: int) -> GlobalBatchCut:
        return cls((batch_size,) * world_size, (1,) * world_size)

    @property
    def total(self) -> int:
        """Samples of a full global batch, over all ranks."""
        return sum(self.sizes)

    def scaled(self, total: int) -> GlobalBatchCut:
        """A global batch of another total in the same proportions."""
        return self if total == self.total else replace(self, sizes=largest_remainder(total, self.sizes))

    def micro_batches(self, rank: int, total_samples: int) -> tuple[range, ...]:
        """Offsets in a global batch of `total_samples` samples that `rank` reads, one range a micro-batch.

        A range is empty where there is no sample left; ranks hold contiguous slices in rank order.
        """
        shares = largest_remainder(total_samples, self.sizes)
        start = sum(shares[:rank])
        ranges = []
        for size in largest_remainder(shares[rank], (1,) * self.steps[rank]):
            ranges.append(range(start, start + size))
            start += size
        return tuple(ranges)

    def __str__(self) -> str:
        parts = (
            f"{size}" if steps == 1 else f"{size} in {steps}"
            for size, steps in zip(self.sizes, self.steps, strict=True)
        )
        return f"{self.total} = {' + '.join(parts)}"
