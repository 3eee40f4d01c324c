# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The provenance of a benchmark as text: machine, versions, models, time and command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from accelerate_lshdp.comparing.report.comparison import group_cases
from accelerate_lshdp.comparing.report.results import Results


def describe_provenance(results: Results) -> list[tuple[str, str]]:
    """(name, value) rows of the provenance: machine, versions, models, time and command."""
    machine = results.machine
    rows = [
        ("machine", f"{machine.cpu}, {machine.cores} cores, {machine.memory_bytes / 1e9:.1f} GB of memory"),
        ("kernel", machine.kernel),
        ("versions", ", ".join(f"{name} {version}" for name, version in results.versions.items())),
    ]
    for group in group_cases(results):
        case = group.cases[0]
        nodes = " + ".join(map(str, case.nodes))
        totals = ", ".join(map(str, sorted({case.total_batch_size for case in group.cases})))
        # The largest: a case that failed before its model was built has 0.
        parameters = f"{max(case.parameters for case in group.cases) / 1e6:,.1f} M parameters"
        rows.append((group.title, f"{parameters}, {nodes} ranks by node, global batch {totals}"))
    if results.config.get("in_process"):
        rows.append(("emulation", "in one machine's processes, which sleep to be slow; the network is NOT emulated"))
    return [
        *rows,
        ("measured", f"{results.created}, in {results.wall_seconds / 60:.1f} minutes"),
        ("command", results.command),
    ]


def format_config(config: Mapping[str, Any]) -> str:
    """The configuration as YAML, in its own order."""
    return yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True, width=100)
