# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""``accelerate-lshdp report``: writes tables, pictures and one HTML page from the results of ``bench``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


_EPILOG = """\
It reads DIR/results.json and writes beside it:
  results.md     tables: steps, limits, ranks and nodes; configuration and command
  *.png          throughput, scaling efficiency, memory, bytes, one step rank by rank, loss against time
  report.html    all of it in one file
Pictures need matplotlib, the page jinja2: pip install 'accelerate-lshdp[pictures]'."""


def register(subparsers: argparse._SubParsersAction) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "report",
        help="show what a benchmark measured: tables, pictures, an HTML page",
        description="Write the report of a benchmark again, from the results.json of accelerate-lshdp bench.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the --output-dir of accelerate-lshdp bench")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the tables of a benchmark and writes its report files.

    Returns:
        0.

    Raises:
        ResultsError: the folder has no results that can be read.
        OSError: a file cannot be written.
    """
    # Imported here, as `--help` of all commands loads this module.
    from accelerate_lshdp.comparing.report import load_results, missing_library, print_results, write_report

    results = load_results(arguments.folder)
    missing = missing_library()
    if missing is not None:
        print(f"accelerate-lshdp report: {missing}", file=sys.stderr)
    # Files first: a terminal that cannot show a character must not cost the report.
    written = write_report(results, arguments.folder)
    print_results(results)
    print(f"wrote {', '.join(map(str, written))}")
    return 0
