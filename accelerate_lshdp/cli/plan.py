# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""``accelerate-lshdp plan``: finds the best batch sizes for a profile, proves them, and writes a plan and YAML files.

Needs neither torch nor a device: plans can be made on any computer that has the profile.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate_lshdp.cli.busy import busy_hint
from accelerate_lshdp.cli.byte_sizes import parse_bytes
from accelerate_lshdp.cli.config import Layout, add_layout_arguments, make_layout, render_node
from accelerate_lshdp.cli.plan_hosts import check_hosts_arguments, on_hosts
from accelerate_lshdp.cli.plan_placement import (
    add_placement_arguments,
    check_placement_arguments,
    describe_gap,
    placed_precision,
)
from accelerate_lshdp.documents.plan import Plan, Strategy


if TYPE_CHECKING:
    from accelerate_lshdp.cli.plan_prediction import Prediction
    from accelerate_lshdp.documents.profile import Profile
    from accelerate_lshdp.planning import BatchSizes

DEFAULT_OUTPUT = Path("lshdp_plan.json")
# Beyond these values exact planning with accumulation takes minutes, and more memory than usual machines have.
_LARGEST_TOTAL, _MOST_ACCUMULATION = 1_000_000, 256
_TRAINING_SCRIPT = "YOUR_TRAINING_SCRIPT.py ITS_ARGUMENTS"
_EPILOG = """\
examples:
  accelerate-lshdp plan lshdp_profile.json --total 256               the fastest cut of 256 samples
  accelerate-lshdp plan lshdp_profile.json --max-throughput          the total that trains most samples a second
  accelerate-lshdp plan lshdp_profile.json --total 256 --set rank.3.max=16 --set rank.0.memory=6GB
  accelerate-lshdp plan lshdp_profile.json --total 256 --placement auto --memory-limit 6GB
  accelerate-lshdp plan --verify lshdp_plan.json                     checks the proof that a plan carries
"""


def register(subparsers: argparse._SubParsersAction) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "plan",
        help="find the best batch sizes for a profile, and prove it",
        description="Find the batch sizes with the shortest step (or the highest throughput) for a profile of"
        " accelerate-lshdp profile. Writes a plan, a picture and each node's accelerate YAML.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("profile", nargs="?", metavar="PROFILE", help="what accelerate-lshdp profile wrote")
    goal = parser.add_mutually_exclusive_group()
    goal.add_argument("--total", type=int, metavar="B", help="samples in a global batch")
    goal.add_argument(
        "--max-throughput",
        action="store_true",
        help="choose the total with the most samples a second, a multiple of the ranks, as a script's batch size makes"
        " it (with --max-accumulation: any)",
    )
    goal.add_argument("--verify", metavar="PLAN", help="check the certificate of a plan instead of making one")
    parser.add_argument("--no-accumulation", action="store_true", help="with --total: one micro-batch a rank")
    parser.add_argument(
        "--max-accumulation",
        type=int,
        metavar="N",
        help="with --max-throughput: up to N micro-batches a rank (default: one)",
    )
    parser.add_argument(
        "--strategy", choices=[strategy.value for strategy in Strategy], help="default: the one that was profiled"
    )
    parser.add_argument(
        "--no-overlap", action="store_true", help="plan as if gradients travelled only after the backward"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="rank.N.max=M",
        help="let rank N have micro-batches of at most M samples, or rank.N.memory=8GB of memory; may be repeated",
    )
    add_placement_arguments(parser)
    parser.add_argument(
        "--output", type=Path, default=DEFAULT_OUTPUT, metavar="FILE", help=f"the plan (default: {DEFAULT_OUTPUT})"
    )
    picture = parser.add_mutually_exclusive_group()
    picture.add_argument(
        "--picture", type=Path, metavar="PNG", help="the picture (default: PLAN.png, beside the plan)"
    )
    picture.add_argument("--no-picture", action="store_true", help="draw none")
    parser.add_argument(
        "--hosts",
        metavar="YAML",
        help="the machines that were profiled, as for launch --hosts, which needs no YAML files of accelerate",
    )
    files = parser.add_argument_group("YAML files", "as accelerate-lshdp config writes them")
    add_layout_arguments(files)
    where = files.add_mutually_exclusive_group()
    where.add_argument("--yaml-dir", type=Path, metavar="DIR", help="where to write them (default: beside the plan)")
    where.add_argument("--no-yaml", action="store_true", help="write none")
    files.add_argument("--force", action="store_true", help="replace YAML files that have been changed")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Makes a plan, or verifies one, and prints it.

    Returns:
        0.

    Raises:
        ValueError: impossible arguments or files, a total that cannot be cut, or a certificate that does not hold.
    """
    if arguments.verify is not None:
        return _verify(arguments)
    if arguments.profile is None:
        raise ValueError("name a profile; accelerate-lshdp profile writes one (or --verify a plan)")
    if arguments.total is None and not arguments.max_throughput:
        raise ValueError("say what to plan: --total B, the samples in a global batch, or --max-throughput")
    if arguments.max_accumulation is not None and (arguments.no_accumulation or not arguments.max_throughput):
        raise ValueError("--max-accumulation goes with --max-throughput, and not with --no-accumulation; leave it out")
    if arguments.max_accumulation is not None and arguments.max_accumulation < 1:
        raise ValueError(f"found --max-accumulation {arguments.max_accumulation}, expected at least 1")
    check_placement_arguments(arguments)
    check_hosts_arguments(arguments)
    # Without accumulation planning is linear in the ranks' curves, so no total is too large.
    for flag, value, most in (
        ("--total", None if arguments.no_accumulation else arguments.total, _LARGEST_TOTAL),
        ("--max-accumulation", arguments.max_accumulation, _MOST_ACCUMULATION),
    ):
        if value is not None and value > most:
            raise ValueError(f"found {flag} {value}, expected at most {most}, which can be planned with accumulation")
    from accelerate_lshdp.planning.proofs.plan import verify_plan

    # Cheap checks of paths and flags before the planning, which may take seconds.
    picture = _picture_path(arguments)
    profile, told_hosts = _profile(arguments), []
    if arguments.hosts is not None:
        arguments.no_yaml = True
        profile, told_hosts = on_hosts(profile, arguments.hosts)
    if arguments.placement is not None:
        arguments.mixed_precision = placed_precision(profile, arguments)
    layout = None if arguments.no_yaml else make_layout(arguments, Plan(cluster=profile.cluster))
    plan, draw, show = (_plan_sizes if arguments.placement is None else _plan_placement)(profile, arguments)
    verify_plan(plan)  # by code that shares nothing with the planner: a wrong plan is never written

    plan.save(arguments.output)
    written = [arguments.output]
    if picture is not None:
        draw(picture)
        written.append(picture)
    if layout is not None:
        written += _write_yamls(layout, arguments.yaml_dir or arguments.output.parent, arguments.force)
    show()
    print(_fitting_script(plan))
    print(f"wrote {', '.join(map(str, written))}")
    if (hint := busy_hint(profile)) is not None:
        print(hint)
    if (hint := profile.time_hint(plan.micro_batches)) is not None:
        print(f"{hint} (accelerate-lshdp profile --seconds)")
    print(f"next: {_launch_command(profile, arguments, told_hosts)}")
    return 0


def _plan_sizes(
    profile: Profile, arguments: argparse.Namespace
) -> tuple[Plan, Callable[[Path], None], Callable[[], None]]:
    """A plan of batch sizes, what draws its picture, and what prints it."""
    from accelerate_lshdp.cli.plan_table import print_plan

    sizes, planned, equal = _choose(profile, arguments)

    def draw(path: Path) -> None:
        from accelerate_lshdp.cli.plan_picture import draw_picture

        draw_picture(profile, planned, equal, path)

    return _make_plan(profile, sizes, planned), draw, lambda: print_plan(profile, planned, equal)


def _plan_placement(
    profile: Profile, arguments: argparse.Namespace
) -> tuple[Plan, Callable[[Path], None], Callable[[], None]]:
    """The same for batch sizes together with the place of every block."""
    from accelerate_lshdp.cli.plan_placement import place_blocks, print_placement

    plan, result = place_blocks(profile, arguments)

    def draw(path: Path) -> None:
        from accelerate_lshdp.cli.placement_picture import draw_placement

        draw_placement(profile, result, path)

    return plan, draw, lambda: print_placement(profile, result)


def _fitting_script(plan: Plan) -> str:
    """One line about the scripts that can train with the plan, and the batch size that they need."""
    total, ranks = plan.total_batch_size, plan.world_size
    if plan.has_accumulation or total % ranks:
        return (
            "for scripts:   a Trainer, or a loop that names LSHDPAccelerator; an unmodified loop needs a multiple of"
            f" {ranks}, the ranks, and --no-accumulation"
        )
    own = f"batch size {total // ranks} (x {ranks} ranks = {total})"
    return f"for scripts:   {own} in an unmodified loop; any in a Trainer"


def _launch_command(profile: Profile, arguments: argparse.Namespace, told_hosts: Sequence[str]) -> str:
    """The command that trains with the plan; its script is a placeholder, as the profiled one need not train.

    Args:
        profile: of the plan.
        arguments: of this command.
        told_hosts: flags for the machines of ``--hosts``.
    """
    # On several nodes the launcher has to know which node it is: from its YAML, or from a flag.
    words = ["accelerate-lshdp", "launch"]
    if arguments.hosts is not None:
        words += ["--hosts", arguments.hosts, *told_hosts]
    several_nodes = len(profile.cluster.node_sizes) > 1 and arguments.hosts is None
    if several_nodes and arguments.no_yaml:
        words += ["--node-rank", "N"]
    elif several_nodes:
        words += ["--config_file", str((arguments.yaml_dir or arguments.output.parent) / "nodeN.yaml")]
    if arguments.no_yaml and arguments.mixed_precision not in (None, "no"):
        words += ["--mixed-precision", arguments.mixed_precision]
    words += ["--plan", str(arguments.output)]
    return ("on every node N, " if several_nodes else "") + f"{shlex.join(words)} {_TRAINING_SCRIPT}"


def _picture_path(arguments: argparse.Namespace) -> Path | None:
    """The path of the picture; None: no picture is drawn."""
    if arguments.no_picture:
        return None
    if find_spec("matplotlib") is None:
        missing = "matplotlib is not installed; pip install 'accelerate-lshdp[recipes]'"
        if arguments.picture is not None:
            raise ValueError(f"--picture {arguments.picture} cannot be drawn: {missing}")
        _print_note(f"no picture: {missing}")
        return None
    # `--output plan.png` would make the picture's default name that of the plan.
    picture = arguments.picture or arguments.output.with_suffix(".png")
    if picture.absolute() == arguments.output.absolute():
        raise ValueError(f"the picture would replace the plan {arguments.output}; give --picture another name")
    if arguments.picture is not None and not picture.absolute().parent.is_dir():
        raise ValueError(f"found --picture {picture}, expected a file in a folder that exists")
    return picture


def _profile(arguments: argparse.Namespace) -> Profile:
    """The profile in the file, with the overrides of the arguments."""
    from accelerate_lshdp.documents.profile import Profile

    profile = Profile.load(arguments.profile)
    # Overrides may be given in one --set with commas or in several.
    for text in ",".join(arguments.set).split(",") if arguments.set else []:
        profile = _override(profile, text.strip())
    # A placement is planned from what all strategies have in common.
    if arguments.placement is None and arguments.strategy not in (None, str(profile.strategy)):
        _print_note(
            f"memory and communication were measured for {profile.strategy}, not for {arguments.strategy}; to have"
            f" them right: accelerate-lshdp profile --strategy {arguments.strategy}"
        )
        profile = replace(profile, strategy=Strategy(arguments.strategy))
    return profile


def _override(profile: Profile, text: str) -> Profile:
    """The profile with one limit changed, as ``rank.3.max=16`` or ``rank.3.memory=8GB`` says."""
    match = re.fullmatch(r"rank\.(\d+)\.(max|memory)=(.+)", text)
    if match is None:
        raise ValueError(f"found --set {text}, expected rank.N.max=M (samples) or rank.N.memory=8GB")
    number, value = int(match[1]), match[3]
    if number >= len(profile.ranks):
        raise ValueError(f"found --set {text}, but the profile has the ranks 0 to {len(profile.ranks) - 1}")
    rank = profile.ranks[number]
    if match[2] == "max":
        measured = rank.time.batch_sizes[-1]
        if not value.isdecimal() or not 1 <= int(value) <= measured:
            raise ValueError(
                f"found --set {text}, expected 1 to {measured} samples, as many as were measured on rank {number};"
                " to use more, profile again"
            )
        rank = replace(rank, max_micro_batch_size=int(value), limited_by="request")
    elif rank.memory is None:
        raise ValueError(f"found --set {text}, but memory was not measured on rank {number}; limit it with .max")
    else:
        try:
            limit = parse_bytes(value)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"--set {text}: {error}") from error
        if rank.limited_by == "memory" and limit > (rank.memory_limit_bytes or 0):
            _print_note(
                f"rank {number} was measured up to {rank.max_micro_batch_size} samples, when its memory was full; to"
                " use more, profile again with the higher limit"
            )
        rank = replace(rank, memory_limit_bytes=limit)
    return replace(profile, ranks=(*profile.ranks[:number], rank, *profile.ranks[number + 1 :]))


def _choose(profile: Profile, arguments: argparse.Namespace) -> tuple[BatchSizes, Prediction, Prediction | None]:
    """The best sizes, their prediction, and that of an equal split of the same total (None: it does not fit)."""
    from accelerate_lshdp.cli.plan_prediction import predict, split_equally
    from accelerate_lshdp.planning import plan_fixed_total, plan_max_throughput

    ranks = profile.rank_profiles()
    # With --total as many micro-batches as it needs; with --max-throughput as many as are allowed.
    most = arguments.max_accumulation if arguments.max_throughput else None
    allow_accumulation = not arguments.no_accumulation and (not arguments.max_throughput or most is not None)
    bucket_seconds = None if arguments.no_overlap else profile.bucket_seconds()
    # Gradients that overlap are in the planner's finish times already.
    communication_seconds = 0.0 if bucket_seconds else profile.communication_seconds()
    options = {
        "allow_accumulation": allow_accumulation,
        "bucket_seconds": bucket_seconds,
        "shard_groups": profile.shard_groups(),
    }
    if arguments.max_throughput:
        # An unmodified script trains its own batch size times the number of ranks.
        options["multiple_of"] = 1 if allow_accumulation else len(ranks)
        sizes = plan_max_throughput(ranks, communication_seconds, **options, max_accumulation_steps=most)
    else:
        sizes = plan_fixed_total(ranks, arguments.total, **options)
    split = split_equally(ranks, sizes.total_batch_size, allow_accumulation=allow_accumulation)
    planned, equal = (
        None if chosen is None else predict(ranks, chosen, bucket_seconds, communication_seconds)
        for chosen in (sizes.micro_batches, split)
    )
    return sizes, planned, equal


def _make_plan(profile: Profile, sizes: BatchSizes, planned: Prediction) -> Plan:
    # Allowed only where it is needed: a plan with equal numbers also runs where loops must have equal lengths.
    counts = {steps for _, steps in sizes.micro_batches}
    return Plan.from_batch_sizes(
        sizes.micro_batches,
        strategy=profile.strategy,
        allow_unequal_accumulation=len(counts) > 1,
        cluster=profile.cluster,
        profile=profile.to_dict(),
        predicted={
            "step_seconds": planned.step_seconds,
            "compute_seconds": planned.compute_seconds,
            "idle_fraction": planned.idle_fraction,
            "memory_bytes": planned.memory_bytes,
        },
        certificate=sizes.certificate,
    )


def _write_yamls(layout: Layout, folder: Path, force: bool) -> list[Path]:
    """Writes the YAML of each node; a file with other content is kept unless `force` is set."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for node in range(layout.num_nodes):
        path, text = folder / layout.file_name(node), render_node(layout, node)
        # Users add network interfaces and the like by hand; the plan itself is always written.
        if path.exists() and path.read_text(encoding="utf-8") != text and not force:
            _print_note(f"{path} is kept, as it was changed (--force replaces it)")
            continue
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def _verify(arguments: argparse.Namespace) -> int:
    from accelerate_lshdp.documents.profile import Profile
    from accelerate_lshdp.planning import CertificateError
    from accelerate_lshdp.planning.proofs.plan import verify_plan

    plan = Plan.load(arguments.verify)
    try:
        verify_plan(plan)
    except CertificateError as error:
        raise CertificateError(f"{arguments.verify}: {error}") from error
    if plan.certificate["kind"] == "placement":
        gap = 1 - plan.certificate["bound_nanoseconds"] / plan.certificate["step_nanoseconds"]
        holds = f"for its batch sizes {describe_gap(gap, Profile.from_dict(plan.profile).units.mixed_precision)}"
    else:
        holds = "for the curves in it, no plan of its kind is better"
    print(f"{arguments.verify}: the certificate holds: {holds}.")
    return 0


def _print_note(text: str) -> None:
    print(f"accelerate-lshdp plan: {text}", file=sys.stderr)
