# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What ``accelerate-lshdp bench`` prints and writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


RESULTS_FILE = "results.json"
#: The exit code if a limit is broken or every case has failed.
_FAILED = 1


def prepare_report(folder: Path) -> None:
    """Makes the output folder, and says what pictures and page need while it can still be installed."""
    from accelerate_lshdp.comparing.report import missing_library

    folder.mkdir(parents=True, exist_ok=True)
    missing = missing_library()
    if missing is not None:
        say(missing)


def write(results: dict[str, Any], folder: Path) -> int:
    """Writes results and report, and prints the tables; returns the exit code."""
    from accelerate_lshdp.comparing.report import print_results, write_report
    from accelerate_lshdp.documents.atomic_files import write_atomically

    # Results first: a report can be written again from them.
    path = folder / RESULTS_FILE
    write_atomically(path, json.dumps(results, indent=2, allow_nan=False) + "\n")
    written = [path, *write_report(results, folder)]
    print_results(results)
    print(f"wrote {', '.join(map(str, written))}")
    measured = any(case["error"] is None for case in results["cases"])
    if not measured:
        say("every case has failed; the exit code is 1")
    return 0 if measured and all(limit["holds"] for limit in results["limits"]) else _FAILED


def say(what: str) -> None:
    """Prints a status line on stderr."""
    print(f"... {what}", file=sys.stderr, flush=True)
