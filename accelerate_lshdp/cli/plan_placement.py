# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""``accelerate-lshdp plan --placement auto``: batch sizes together with the place of every block (OSDP)."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accelerate_lshdp.cli.byte_sizes import format_bytes, format_speed, parse_bytes
from accelerate_lshdp.documents.plan import Plan, Strategy


if TYPE_CHECKING:
    from accelerate_lshdp.documents.profile import Profile
    from accelerate_lshdp.planning import PlacementResult


_WIDTH, _DEVICE_WIDTH = 100, 24


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """What ``--memory-limit`` says: one limit for all ranks, or one a rank, in bytes."""

    sizes: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> MemoryLimits:
        """The limits in ``6GB`` or ``8GB,6GB,6GB`` (argparse ``type``)."""
        return cls(tuple(parse_bytes(part) for part in text.split(",")))

    def of_ranks(self, world: int) -> tuple[int, ...]:
        """One limit a rank.

        Raises:
            ValueError: there are several, but not one a rank.
        """
        if len(self.sizes) not in (1, world):
            raise ValueError(
                f"found {len(self.sizes)} sizes in --memory-limit, expected one, or one for each of {world} ranks"
            )
        return self.sizes * world if len(self.sizes) == 1 else self.sizes


def add_placement_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of placements to the command's."""
    parser.add_argument(
        "--placement",
        choices=("auto",),
        help="auto: choose for every block of the model where it is kept and whether it is recomputed, too (OSDP)",
    )
    parser.add_argument(
        "--memory-limit",
        type=MemoryLimits.parse,
        metavar="SIZE[,SIZE...]",
        help="with --placement: memory that each rank may use, such as 6GB, or one size a rank (default: the"
        " profile's limits)",
    )


def check_placement_arguments(arguments: argparse.Namespace) -> None:
    """Checks that the options go together.

    Raises:
        ValueError: they do not; it says which to leave out.
    """
    if arguments.placement is None:
        if arguments.memory_limit is not None:
            raise ValueError(
                "--memory-limit goes with --placement auto; without it limit single ranks: --set rank.0.memory=6GB"
            )
        return
    if arguments.strategy not in (None, str(Strategy.OSDP)):
        raise ValueError(
            f"found --strategy {arguments.strategy} with --placement auto, expected {Strategy.OSDP}, whose blocks"
            " differ; leave --strategy out"
        )
    if arguments.no_overlap:
        raise ValueError("--no-overlap is about plans without --placement; leave it out")
    limited = [text for text in arguments.set or () if ".memory=" in text]
    if limited and arguments.memory_limit is not None:
        raise ValueError(
            f"found --set {limited[0]} beside --memory-limit, which limits the same ranks: name them all in"
            " --memory-limit"
        )


def placed_precision(profile: Profile, arguments: argparse.Namespace) -> str | None:
    """The precision in which the blocks were measured, and so are to be trained.

    Without measured blocks it is that of the arguments; planning then refuses the profile, and says what is missing.

    Raises:
        ValueError: the arguments name another precision.
    """
    if profile.units is None:
        return arguments.mixed_precision
    measured, asked = profile.units.mixed_precision, arguments.mixed_precision
    if asked is not None and asked != measured:
        raise ValueError(
            f"found --mixed-precision {asked}, expected {measured}, in which the model of this profile was measured:"
            " leave the option out, or profile again"
        )
    return measured


def describe_gap(gap: float, mixed_precision: str) -> str:
    """What a certificate says of other placements.

    Args:
        gap: by which part of the step the fastest one may be faster.
        mixed_precision: of the model. In half precision whole and sharded units round differently, and only placements
            that round as this one are compared.
    """
    alike = "" if mixed_precision == "no" else " with the same rounding"
    # Rounded up: what is said is proven.
    return f"no placement within the limits{alike} makes the step more than {math.ceil(1e4 * gap) / 100:.2f} % shorter"


def place_blocks(profile: Profile, arguments: argparse.Namespace) -> tuple[Plan, PlacementResult]:
    """The best batch sizes and placement, as a plan and as the planner gave them.

    Raises:
        ValueError: the profile lacks something, or nothing fits the limits.
    """
    from accelerate_lshdp.planning.placement.from_profile import profiled_cluster, profiled_model
    from accelerate_lshdp.planning.placement.totals import plan_trainable

    world = len(profile.ranks)
    limits = None if arguments.memory_limit is None else arguments.memory_limit.of_ranks(world)
    cluster = profiled_cluster(profile, limits)
    # As without a placement: a total in as many micro-batches as it needs, else as many as are allowed.
    most = 1 if arguments.no_accumulation else arguments.max_accumulation
    if arguments.max_throughput and most is None:
        most = 1
    result = plan_trainable(
        profiled_model(profile),
        cluster,
        total_batch_size=arguments.total,
        most_steps=most,
        # An unmodified script trains its own batch size times the number of ranks.
        multiple_of=world if most == 1 else 1,
    )
    plan = Plan.from_batch_sizes(
        result.micro_batches,
        strategy=Strategy.OSDP,
        cluster=profile.cluster,
        profile=profile.to_dict(),
        predicted=result.predicted.to_dict(),
        certificate=result.certificate,
        placement=profile.units.with_all_modules(result.placement),
    )
    return plan, result


def print_placement(profile: Profile, result: PlacementResult) -> None:
    """Prints a row for each rank, the whole step, and which block goes where; at most 100 columns wide."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from accelerate_lshdp.cli.placement_text import describe_placement

    predicted = result.predicted
    title = f"{result.total_batch_size} samples over {len(profile.ranks)} ranks, strategy {Strategy.OSDP}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("rank", "node"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("device", overflow="ellipsis", no_wrap=True, max_width=_DEVICE_WIDTH)
    for name in ("batch", "micro-batches", "memory", "limit"):
        table.add_column(name, justify="right", no_wrap=True)
    nodes = [str(node) for node, size in enumerate(profile.cluster.node_sizes) for _ in range(size)]
    for rank, (size, steps) in zip(profile.ranks, result.micro_batches, strict=True):
        used, limit = predicted.memory_bytes[rank.rank], predicted.memory_limit_bytes[rank.rank]
        table.add_row(
            str(rank.rank),
            nodes[rank.rank],
            rank.device,
            str(size * steps),
            f"{steps} x {size}",
            f"{format_bytes(used)} ({1 - used / limit:.0%} free)",
            format_bytes(limit),
        )
    console = Console(width=_WIDTH)
    console.print(table)
    console.print(
        f"plan: {predicted.step_seconds:.3g} s a step (predicted), {format_speed(predicted.samples_per_second)}"
        f" samples/s; proven: for these batch sizes {describe_gap(predicted.gap, profile.units.mixed_precision)}",
        highlight=False,
    )
    for line in describe_placement(result):
        console.print(f"- {line}", highlight=False)
