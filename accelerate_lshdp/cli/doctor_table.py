# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The tables that ``accelerate-lshdp doctor`` prints: machines, the ways between them, and what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from accelerate_lshdp.cli.byte_sizes import format_bytes
from accelerate_lshdp.hosts.examination import Examination, Machine
from accelerate_lshdp.hosts.findings import Finding
from accelerate_lshdp.hosts.link_probe import LinkFigures


_WIDTH = 110


def print_examination(examination: Examination, findings: Sequence[Finding]) -> None:
    """Prints what is known of the machines, and each finding with what to do."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(width=_WIDTH, highlight=False)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("node", justify="right")
    for name in ("address", "interface", "Python", "torch", "devices"):
        table.add_column(name, overflow="fold")
    for name in ("memory", "/dev/shm", "free disk", "clock"):
        table.add_column(name, justify="right", no_wrap=True)
    for node, machine in enumerate(examination.machines):
        table.add_row(str(node), *_describe(machine))
    console.print(table)
    if examination.links:
        count = len(examination.machines)
        ways = Table(
            title="ways from (row) to (column): rate, one-way delay",
            title_justify="left",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        ways.add_column("node", justify="right")
        for node in range(count):
            ways.add_column(str(node), justify="right", no_wrap=True)
        for source in range(count):
            links = [examination.links.get((source, target)) for target in range(count)]
            ways.add_row(str(source), *map(_describe_link, links))
        console.print(ways)
    for finding in findings:
        kind = "problem" if finding.is_problem else "warning"
        # Printed as it is: brackets in paths and addresses are no markup.
        console.print(f"{kind}: {finding.where}: {finding.what}.", markup=False, soft_wrap=True)
        console.print(f"  {finding.fix}", markup=False, soft_wrap=True)
    counts = Counter(finding.is_problem for finding in findings)
    if not findings:
        console.print("found nothing wrong")
    else:
        verdict = "a run would fail" if counts[True] else "a run can be started"
        console.print(f"found {_count(counts[True], 'problem')} and {_count(counts[False], 'warning')}: {verdict}")


def _describe(machine: Machine) -> list[str]:
    """A machine's row, without its number."""
    facts = machine.facts
    if facts is None:
        return [machine.host.address, "cannot be asked", *[""] * 7]
    devices = Counter(device.name for device in facts.devices)
    named = [f"{count} x {name}" for name, count in devices.items()] or [f"{facts.cores} cores"]
    offset = machine.clock_offset
    return [
        machine.host.address,
        machine.host.interface or facts.interface_of(machine.address or "") or "none",
        facts.python,
        facts.packages["torch"] or "none",
        ", ".join(named),
        format_bytes(facts.memory_bytes),
        "none" if facts.shared_bytes is None else format_bytes(facts.shared_bytes),
        "none" if facts.free_bytes is None else format_bytes(facts.free_bytes),
        "" if offset is None else f"{offset:+.2f} s",
    ]


def _describe_link(link: LinkFigures | None) -> str:
    if link is None:
        return ""
    if link.bits_per_second is None or link.delay_seconds is None:
        return "fails"
    return f"{link.bits_per_second / 1e6:,.0f} Mb/s, {link.delay_seconds * 1e3:.2f} ms"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
