# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The summary that ``accelerate-lshdp profile`` prints."""

from __future__ import annotations

from accelerate_lshdp.cli.busy import BUSY_ADVICE
from accelerate_lshdp.cli.byte_sizes import format_bytes, format_speed
from accelerate_lshdp.documents.profile import Profile


_WIDTH, _DEVICE_WIDTH = 100, 24
_REASONS = {
    "memory": "its memory is full",
    "time": "time was over",
    "request": "as asked",
    "data": "all of the data",
}


def print_profile(profile: Profile) -> None:
    """Prints the measurements of every rank and of the network, at most 100 columns wide."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    title = f"{profile.subject.parameters:,} parameters, strategy {profile.strategy}, measured in"
    table = Table(
        title=f"{title} {profile.measured_seconds:.0f} s", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("rank", justify="right")
    table.add_column("device", overflow="ellipsis", no_wrap=True, max_width=_DEVICE_WIDTH)
    for name in ("largest micro-batch", "samples/s", "spread", "memory", "optimizer", "sending"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank in profile.ranks:
        largest = rank.max_micro_batch_size
        table.add_row(
            str(rank.rank),
            rank.device,
            f"{largest} ({_REASONS[rank.limited_by]})",
            format_speed(largest / rank.time(largest)),
            f"{max(rank.spread):.1%}",
            "not measured" if rank.memory is None else format_bytes(rank.memory(largest)),
            f"{rank.optimizer_seconds:.3g} s",
            f"{rank.communication_load_seconds:.3g} s",
        )
    console = Console(width=_WIDTH)
    console.print(table)
    console.print(
        f"samples/s and memory: at the largest micro-batch; spread: of the size that varied most ({BUSY_ADVICE});"
        " sending: what sending gradients takes from computing",
        style="dim",
    )
    if profile.network is not None:
        one_way, all_reduce = profile.network.ping_pong, profile.network.all_reduce
        # A fitted slope of 0: the time of the largest message does not differ from that of the smallest.
        rate = f"{8 / one_way.seconds_per_byte / 1e9:.3g} Gb/s" if one_way.seconds_per_byte > 0 else "too fast to tell"
        seconds = sum(all_reduce.seconds(size) for size in profile.bucket_bytes)
        console.print(
            f"network: {rate}, {one_way.latency_seconds * 1e6:.0f} us latency; the gradients of a step travel"
            f" {seconds:.3g} s",
            highlight=False,
        )
