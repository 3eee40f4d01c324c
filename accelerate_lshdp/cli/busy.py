# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Hints from a profile that other programs disturbed its measurements."""

from __future__ import annotations

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from accelerate_lshdp.documents.profile import Profile

#: Relative spread of one size's measurements above which other programs are likely to have disturbed them.
BUSY_SPREAD = 0.10
BUSY_ADVICE = f"above {BUSY_SPREAD:.0%}: the machine was busy, measure again"
# Factor between emulated and measured slowdown above which something else must have slowed a rank.
_SAME_SLOWNESS = 1.33


def busy_hint(profile: Profile) -> str | None:
    """One sentence about the rank whose measured times varied most; None if they varied by at most `BUSY_SPREAD`."""
    worst = max(profile.ranks, key=lambda rank: max(rank.spread))
    if max(worst.spread) <= BUSY_SPREAD:
        return None
    return (
        f"The times of rank {worst.rank} varied by {max(worst.spread):.0%} while they were measured ({BUSY_ADVICE})."
    )


def unlike_emulation(profile: Profile, batch_sizes: list[int], slowed: int, slowdown: float) -> str | None:
    """The reason why a plan for two ranks does not show that one of them is slowed by emulation.

    Args:
        profile: the profile of both ranks.
        batch_sizes: the planned batch sizes.
        slowed: the rank that is slowed.
        slowdown: the factor by which it is slowed.

    Returns:
        None where the profile shows the emulation and the plan follows it.
    """
    if slowdown == 1:
        return None
    other = 1 - slowed
    slow, fast = profile.ranks[slowed], profile.ranks[other]
    # At the largest size that both have: there constant parts, which are not slowed, matter least.
    size = min(slow.max_micro_batch_size, fast.max_micro_batch_size)
    measured = slow.time(size) / fast.time(size)
    if not slowdown / _SAME_SLOWNESS <= measured <= slowdown * _SAME_SLOWNESS:
        return (
            f"Rank {slowed} is slowed {slowdown:g}x, but {size} samples took it {measured:.2g}x as long as rank"
            f" {other}: something else on this machine slowed one of them while they were measured, and the batch"
            " sizes follow what was measured. Close other programs and run it again."
        )
    if batch_sizes[slowed] < batch_sizes[other]:
        return None
    if batch_sizes[other] >= fast.max_micro_batch_size:
        return (
            f"Rank {slowed} is slowed {slowdown:g}x and has as many samples as rank {other}, because no more than"
            f" {fast.max_micro_batch_size} were measured on rank {other} (limited by {fast.limited_by}). Give a"
            " smaller --total-batch-size, or close other programs and run it again."
        )
    return (
        f"Rank {slowed} is slowed {slowdown:g}x and has as many samples as rank {other}: with {sum(batch_sizes)} in a"
        " global batch no other cut has a shorter step for these measurements. Give a larger --total-batch-size."
    )
