# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""``accelerate-lshdp quickstart``: measures, plans and trains on one machine, and shows the time that a plan saves.

Two CPU processes train a small ViT on real images. One of them is slowed, by an emulation that the output names. The
work is done by `quickstart_worker`, in ranks that ``accelerate-lshdp launch`` starts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate_lshdp.cli.exit_codes import shell_code
from accelerate_lshdp.runtime.parent_death import LAUNCHER_VARIABLE


RANKS, SLOWED_RANK = 2, 1
DEFAULT_OUTPUT = Path("outputs", "quickstart")
RESULT_FILES = ("lshdp_plan.json", "results.json", "quickstart.png")
_TRAIN_IMAGES = 1500
_WIDTH = 100
# Environment variables of other runs in the same shell, which would change this one.
_FOREIGN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_FOREIGN_PREFIXES = ("ACCELERATE_", "FSDP_", "GROUP_", "LSDP_", "PARALLELISM_CONFIG_", "ROLE_", "TORCHELASTIC_")
_NEEDED = {"matplotlib": "matplotlib", "sklearn": "scikit-learn"}


def register(subparsers: argparse._SubParsersAction) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "quickstart",
        help="see what unequal batches gain (one machine, a minute)",
        description="Measure two CPU processes of different speed (one is slowed by an emulation), plan batch sizes,"
        " and train a small ViT on handwritten digits with DDP and equal batches and with LSHDP and the plan.",
        epilog=f"It writes {', '.join(RESULT_FILES)} into the output folder and needs no download.",
        allow_abbrev=False,
    )
    parser.add_argument("--output-dir", type=Path, default=DEFAULT_OUTPUT, help=f"default: {DEFAULT_OUTPUT}")
    parser.add_argument(
        "--slowdown", type=float, default=2.0, metavar="K", help="rank 1 works K times as long per sample (default: 2)"
    )
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of each training (default: 60)")
    parser.add_argument(
        "--total-batch-size", type=int, default=500, metavar="B", help="samples in a global batch (default: 500)"
    )
    parser.add_argument(
        "--seconds", type=float, default=24.0, metavar="T", help="how long both ranks are measured (default: 24)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and order of samples (default: 0)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the quickstart: starts its ranks, prints its table and draws its picture.

    Returns:
        0, or the exit code of the first process that failed.

    Raises:
        ValueError: impossible arguments, or a package is missing.
        OSError: the output folder cannot be written.
    """
    _check(arguments)
    folder: Path = arguments.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    for name in RESULT_FILES:
        (folder / name).unlink(missing_ok=True)  # files of an earlier run would look like results of a failed one
    print(
        "Two processes train a small ViT on handwritten digits, once with DDP and equal batches, once\n"
        "with LSHDP and batch sizes planned from measurements.\n" + describe_emulation(arguments.slowdown),
        flush=True,
    )
    started = time.monotonic()
    code = _launch(arguments)
    if code != 0:
        print(
            f"accelerate-lshdp quickstart: training ended with exit code {code}; the error of the process that failed"
            " first is above",
            file=sys.stderr,
        )
        return code
    from accelerate_lshdp.cli.quickstart_report import draw_picture, print_table

    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    draw_picture(results, folder / "quickstart.png")
    print_table(results)
    for note in _notes(folder / "lshdp_plan.json", arguments.slowdown):
        print(textwrap.fill(note, _WIDTH))
    print(f"All of it took {time.monotonic() - started:.0f} s. {', '.join(RESULT_FILES)} are in\n{folder}")
    return 0


def _notes(plan_file: Path, slowdown: float) -> list[str]:
    """Sentences about reasons to doubt the results: a busy machine, or a profile that does not show the emulation."""
    from accelerate_lshdp.cli.busy import busy_hint, unlike_emulation
    from accelerate_lshdp.documents.plan import Plan
    from accelerate_lshdp.documents.profile import Profile

    plan = Plan.load(plan_file)
    profile = Profile.from_dict(plan.profile)
    found = (busy_hint(profile), unlike_emulation(profile, plan.batch_sizes, SLOWED_RANK, slowdown))
    return [note for note in found if note is not None]


def describe_emulation(slowdown: float) -> str:
    """One sentence that says what is emulated."""
    if slowdown == 1:
        return "Both have the speed of this machine: nothing is emulated."
    return (
        f"Rank 1 is slowed {slowdown:g}x by emulation: after each piece of its own work it sleeps {slowdown - 1:g}x as"
        " long as\nthat took, whether it is measured or trains. All else is real."
    )


def _check(arguments: argparse.Namespace) -> None:
    missing = [package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ValueError(
            f"{' and '.join(missing)} cannot be imported; install the extra: pip install 'accelerate-lshdp[recipes]'"
        )
    total = arguments.total_batch_size
    if total < RANKS or total % RANKS or total > _TRAIN_IMAGES:
        raise ValueError(
            f"found --total-batch-size {total}, expected an even number from {RANKS} to {_TRAIN_IMAGES}: equal"
            f" batches on {RANKS} ranks are what the plan is compared with"
        )
    if arguments.steps < 1:
        raise ValueError(f"found --steps {arguments.steps}, expected at least 1")
    if not 0 < arguments.seconds < math.inf:  # NaN fails as well
        raise ValueError(f"found --seconds {arguments.seconds:g}, expected a number of seconds above 0")
    if not 1 <= arguments.slowdown <= 100:
        raise ValueError(f"found --slowdown {arguments.slowdown:g}, expected 1 (none) to 100")
    if not 0 <= arguments.seed < 2**32:
        raise ValueError(f"found --seed {arguments.seed}, expected 0 to 2^32 - 1")


def _launch(arguments: argparse.Namespace) -> int:
    """Starts the ranks and waits for them; their output is this process's."""
    command = [sys.executable, "-m", "accelerate_lshdp.cli.main", "launch", "--nodes", str(RANKS), "--cpu"]
    command += ["-m", "accelerate_lshdp.cli.quickstart_worker"]
    for option in ("output_dir", "slowdown", "steps", "total_batch_size", "seconds", "seed"):
        command += [f"--{option.replace('_', '-')}", str(getattr(arguments, option))]
    # A process of its own: the launcher sets environment variables and ends with the exit code of the ranks.
    with _termination_as_exit(), subprocess.Popen(command, env=_environment()) as process:
        try:
            return shell_code(process.wait())
        except BaseException:
            # The launcher ends its ranks. An interrupt of the terminal has reached it already, as it is in the same
            # process group.
            process.terminate()
            raise


@contextmanager
def _termination_as_exit() -> Iterator[None]:
    """Turns SIGTERM into an exception inside the block, so that ranks are ended with this process."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(shell_code(-number))

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _environment() -> dict[str, str]:
    """This process's environment without other runs' settings, with one thread a rank, all on the loopback."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _FOREIGN_NAMES and not name.startswith(_FOREIGN_PREFIXES)
    }
    # With several threads the time of so small a model hardly depends on the number of samples.
    environment.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", LAUNCHER_VARIABLE: str(os.getpid())})
    # The host name may resolve to an interface that is down; on one machine the loopback always works.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    return environment
