# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Entry point of the command ``accelerate-lshdp``.

Each subcommand is a module of this package with a function ``register(subparsers)`` that adds its parser and sets
``run``, a function of the parsed arguments that returns the exit code. Modules import torch and accelerate inside
``run``, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from accelerate_lshdp import __version__
from accelerate_lshdp.documents.plan import PlanError


SUBCOMMANDS = ("quickstart", "profile", "plan", "config", "launch", "bench", "report", "estimate", "doctor")
_USAGE_ERROR = 2
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: the arguments after ``accelerate-lshdp``; default: ``sys.argv[1:]``.

    Returns:
        The exit code: 2 if the arguments or files are wrong, which one line on stderr explains; `launch` returns the
        script's.
    """
    arguments = make_parser().parse_args(argv)
    try:
        return int(arguments.run(arguments) or 0)
    except (PlanError, ValueError, OSError) as error:
        # On one line: errors of user input need no traceback, and scripts can read them.
        print(f"accelerate-lshdp {arguments.subcommand}: {' '.join(str(error).split())}", file=sys.stderr)
        return _USAGE_ERROR
    except KeyboardInterrupt:  # 128 + SIGINT, as shells have it
        return _INTERRUPTED


def make_parser() -> argparse.ArgumentParser:
    """The parser with all subcommands."""
    parser = argparse.ArgumentParser(
        prog="accelerate-lshdp",
        description="Train one model on machines of different speed and memory behind a slow network.",
        allow_abbrev=False,
    )
    # No abbreviated flags, here and in every subcommand: they would change their meaning when a flag is added.
    parser.add_argument("--version", action="version", version=f"accelerate-lshdp {__version__}")
    subparsers = parser.add_subparsers(dest="subcommand", metavar="COMMAND", required=True)
    for name in SUBCOMMANDS:
        # By name, so that one more subcommand is one more file and one more word above.
        importlib.import_module(f"accelerate_lshdp.cli.{name}").register(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
