# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""``accelerate-lshdp profile``: measures times and memory of all ranks, and the network, for the planner.

The ranks are started as ``accelerate-lshdp launch`` starts them; each of them runs `profile_worker`, which also runs
under ``accelerate launch`` itself.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from accelerate_lshdp.cli import launch
from accelerate_lshdp.cli.byte_sizes import parse_bytes
from accelerate_lshdp.cli.config import add_layout_arguments
from accelerate_lshdp.cli.launch_hosts import Job, add_hosts_arguments, check_hosts_arguments, run_job
from accelerate_lshdp.cli.node_heartbeats import LOST_SECONDS, NOTICE_SECONDS
from accelerate_lshdp.cli.seconds import positive_seconds
from accelerate_lshdp.documents.placement import ModelPlacement
from accelerate_lshdp.documents.plan import PLAN_VARIABLE, Strategy
from accelerate_lshdp.hosts.script_files import code_beside, from_here
from accelerate_lshdp.runtime.temporary_files import vanishing_file


DEFAULT_OUTPUT = Path("lshdp_profile.json")
DEFAULT_SECONDS = 60.0
_WORKER = "accelerate_lshdp.cli.profile_worker"
_FAILURE = 1
#: What a script has to define; part of the help and of the error of a script that does not.
SUBJECT_ADVICE = """\
    from accelerate_lshdp.profiling import Subject

    def profiling_subject(argv):
        args = parse_args(argv)                       # the arguments that follow the script
        model, train_dataloader, optimizer = ...      # as for training, but not prepared; no accelerator is needed
        return Subject(model, train_dataloader, optimizer)    # where the loss is not model(**batch).loss, one more
                                                              # argument: loss=lambda model, batch: ...

The script is imported, so its training has to stand under `if __name__ == "__main__":`."""
_EPILOG = f"""\
SCRIPT defines what is measured:

{SUBJECT_ADVICE}

examples:
  accelerate-lshdp profile --nodes 2 --cpu recipes/vit_image_classification.py --output_dir outputs/vit
  accelerate-lshdp profile --config_file node0.yaml train.py --epochs 3      the same on the other nodes, each with
                                                                             its own file: every node gets the profile
  accelerate launch --config_file node0.yaml -m {_WORKER} train.py --epochs 3

Then: accelerate-lshdp plan {DEFAULT_OUTPUT} --total 256
"""


def register(subparsers: argparse._SubParsersAction) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "profile",
        help="measure the ranks and the network for a script's model and data",
        description="Measure how long every rank takes for micro-batches of a script's model and data, how much memory"
        " they need, and the network; in about a minute. Nothing is trained.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_measuring_arguments(parser)
    ranks = parser.add_argument_group("ranks", "as for accelerate-lshdp launch")
    ranks.add_argument(
        "--config-file",
        "--config_file",
        type=Path,
        metavar="YAML",
        help="this node's file from accelerate-lshdp config",
    )
    add_layout_arguments(ranks)
    ranks.add_argument(
        "--node-rank", "--machine_rank", type=int, metavar="I", help="which of the nodes this is (needed for several)"
    )
    add_hosts_arguments(parser.add_argument_group("all machines from this one"))
    add_script_arguments(parser)
    parser.set_defaults(run=run)


def add_measuring_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that the command and its worker share."""
    parser.add_argument(
        "--output", type=Path, default=DEFAULT_OUTPUT, metavar="FILE", help=f"the profile (default: {DEFAULT_OUTPUT})"
    )
    parser.add_argument(
        "--seconds",
        type=positive_seconds,
        default=DEFAULT_SECONDS,
        metavar="S",
        help=f"how long to measure, in all (default: {DEFAULT_SECONDS:g})",
    )
    parser.add_argument(
        "--strategy",
        choices=[strategy.value for strategy in Strategy],
        default=Strategy.LSDP.value,
        help="for which placement: it decides memory and what travels (default: lsdp)",
    )
    parser.add_argument(
        "--memory-limit",
        type=_memory_limit,
        action="append",
        default=[],
        metavar="[rank.N=]SIZE",
        help="memory of every rank, such as 8GB, or of one, such as rank.2=6GB; may be repeated",
    )
    parser.add_argument(
        "--node-memory-limit",
        type=parse_bytes,
        metavar="SIZE",
        help="memory of this node, divided by its ranks",
    )
    parser.add_argument("--max-batch", type=_count, metavar="N", help="measure no larger micro-batches")
    parser.add_argument(
        "--total-batch-size",
        type=_count,
        metavar="B",
        help="the global batch that you will plan: its plan is rehearsed, and micro-batches that no cut of it "
        "can have are left out",
    )


def add_script_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the script and its own arguments."""
    parser.add_argument("-m", dest="module", action="store_true", help="the script is a module, as in python -m")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file with a function profiling_subject(argv)")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")


def run(arguments: argparse.Namespace) -> int:
    """Measures with this node's ranks, prints a summary and leaves the profile on this node.

    Returns:
        0; 1 if a rank failed and said why; else the exit code of the process that failed first.

    Raises:
        ValueError: arguments that cannot be right.
    """
    check_hosts_arguments(arguments)
    if arguments.hosts is not None:
        return run_job(arguments, _job(arguments))
    # `launch` takes the number of ranks from a plan, which does not exist before profiling.
    if arguments.config_file is None and arguments.nodes is None:
        raise ValueError("say which ranks to measure: --nodes, such as --nodes 2, or --config_file")
    if not arguments.module and not os.path.isfile(arguments.script):
        raise ValueError(f"there is no script {arguments.script!r}; name a Python file, or a module after -m")
    if Strategy(arguments.strategy).traits.is_per_unit:
        print(
            f"accelerate-lshdp profile: units are placed after profiling, so --strategy {arguments.strategy} measures "
            f'memory and steps with all of them in store "{ModelPlacement().default.store}"',
            file=sys.stderr,
        )
    os.environ.pop(PLAN_VARIABLE, None)  # a plan in the shell is not for this run
    with vanishing_file("error") as error_file:
        # The namespace of `launch`, whose script is the worker; it needs all attributes that `launch` reads.
        ranks = argparse.Namespace(**vars(arguments))
        ranks.notice_after, ranks.lost_after = NOTICE_SECONDS, LOST_SECONDS
        ranks.plan, ranks.auto, ranks.keep_plan_total, ranks.placement = None, False, False, None
        ranks.elastic = ranks.watch = None
        ranks.module, ranks.script = True, _WORKER
        ranks.script_args = ["--error-file", str(error_file), *_worker_arguments(arguments)]
        code = launch.run(ranks)
        error = error_file.read_text(encoding="utf-8") or None
    if code != 0:
        # A process that wrote no error, such as one that the system ended when memory was short. Errors of the other
        # ranks only follow from its end.
        error = f"a process ended with exit code {code} (137: often out of memory); its output is above"
    if error is not None:
        print(f"accelerate-lshdp profile: {error}\nNo profile was written.", file=sys.stderr)
        return code or _FAILURE
    from accelerate_lshdp.cli.profile_table import print_profile
    from accelerate_lshdp.documents.profile import Profile

    print_profile(Profile.load(arguments.output))
    print(f"wrote {arguments.output}")
    print(f"next: accelerate-lshdp plan {arguments.output} --total {arguments.total_batch_size or 'B'}")
    return 0


def _job(arguments: argparse.Namespace) -> Job:
    """What all machines of ``--hosts`` are to run: this command."""
    if not arguments.module:
        arguments.script = from_here(arguments.script)
    words = _worker_arguments(arguments)
    script = len(words) - 1 - len(arguments.script_args)
    options = words[:script]
    if arguments.mixed_precision:
        options = ["--mixed-precision", arguments.mixed_precision, *options]
    files = code_beside(None if arguments.module else arguments.script)
    return Job("profile", options, words[script:], files, output=arguments.output)


def _worker_arguments(arguments: argparse.Namespace) -> list[str]:
    """The arguments of `profile_worker` that say the same as those of the command."""
    words = ["--output", str(arguments.output), "--seconds", str(arguments.seconds), "--strategy", arguments.strategy]
    for rank, limit in arguments.memory_limit:
        # In bytes: a rounded unit would be another limit.
        words += ["--memory-limit", f"{limit}B" if rank is None else f"rank.{rank}={limit}B"]
    if arguments.node_memory_limit is not None:
        words += ["--node-memory-limit", f"{arguments.node_memory_limit}B"]
    for flag in ("max_batch", "total_batch_size"):
        if getattr(arguments, flag) is not None:
            words += [f"--{flag.replace('_', '-')}", str(getattr(arguments, flag))]
    return [*words, *(["-m"] if arguments.module else []), arguments.script, *arguments.script_args]


def _memory_limit(text: str) -> tuple[int | None, int]:
    """(rank, bytes) from a text such as ``rank.2=6GB``; (None, bytes) from ``6GB`` (argparse ``type``)."""
    which, given, size = text.rpartition("=")
    if not given:
        return None, parse_bytes(text)
    prefix, _, number = which.partition(".")
    if prefix != "rank" or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"found {text!r}, expected an amount of memory such as 8GB or rank.2=6GB")
    return int(number), parse_bytes(size)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number of samples, at least 1")
    return int(text)
