# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""``accelerate-lshdp launch``: runs a script on this node, through ``accelerate launch`` and ``accelerate_lshdp.run``.

In addition to these two: the number of processes comes from the plan, mistakes in the layout are found before any
process starts, the environment gets what CPU ranks and host optimizers need, and the exit code is the script's. With
``--auto`` there is no plan to write: the script's own batch size says how large a global batch is, and the run finds
how to divide it; with ``--placement auto`` it also finds where each block of its model is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate_lshdp.cli.accelerate_launch import accelerate_launch
from accelerate_lshdp.cli.config import (
    DEFAULT_PORT,
    add_layout_arguments,
    check_with_accelerate,
    make_layout,
    render_node,
)
from accelerate_lshdp.cli.elastic import add_elastic_arguments, run_elastic
from accelerate_lshdp.cli.elastic_launcher import ElasticJob
from accelerate_lshdp.cli.launch_config import read_launch_config
from accelerate_lshdp.cli.launch_hosts import (
    Job,
    add_hosts_arguments,
    check_hosts_arguments,
    plan_environment,
    run_job,
)
from accelerate_lshdp.cli.node_heartbeats import add_heartbeat_arguments, noticing_lost_nodes
from accelerate_lshdp.cli.seconds import positive_seconds
from accelerate_lshdp.cli.waiting_nodes import Meeting, has_started_ranks, report_waiting
from accelerate_lshdp.documents.plan import PLAN_VARIABLE, Elastic, Plan, PlanError
from accelerate_lshdp.documents.plan_sections import LARGEST_ELASTIC
from accelerate_lshdp.hosts.script_files import code_beside, from_here
from accelerate_lshdp.runtime.option_advice import variable_of
from accelerate_lshdp.runtime.temporary_files import vanishing_file


if TYPE_CHECKING:
    from accelerate.commands.config.config_args import ClusterConfig

_EPILOG = """\
examples:
  accelerate-lshdp launch --auto train.py --epochs 3                        no plan: the run finds the batch sizes, one
                                                                            rank a GPU
  accelerate-lshdp launch --auto --nodes 2 train.py                         the same with two ranks here
  accelerate-lshdp launch --plan plan.json train.py --epochs 3              all ranks of the plan on this machine
  accelerate-lshdp launch --auto --nodes 2 --placement auto train.py        and where each block of the model is kept
  accelerate-lshdp launch --nodes 2 train.py                                two ranks here, without a plan or with one
                                                                            that names no ranks ("automatic")
  accelerate-lshdp launch --nodes 1,2 --node-rank 0 --main-ip 10.0.0.1 --cpu --plan plan.json train.py    on node 0
  accelerate-lshdp launch --nodes 1,2 --node-rank 1 --main-ip 10.0.0.1 --cpu --plan plan.json train.py    on node 1
  accelerate-lshdp launch --config_file node0.yaml --plan plan.json -m package.module

Every node needs the plan file. On several nodes, gloo and NCCL connect through the interface that the host name
resolves to. Where that is the loopback (as on Debian and Ubuntu) or another network than the nodes share, name the
right one in the environment of each node: GLOO_SOCKET_IFNAME=eth0 for CPUs, also NCCL_SOCKET_IFNAME=eth0 for GPUs.
OMP_NUM_THREADS, where it is not set, becomes cores / ranks of this node, and CPU ranks get cores of their own.
"""


def register(subparsers: argparse._SubParsersAction) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "launch",
        help="run a training script with a plan on this node",
        description="Run an unmodified script; its Accelerator follows the plan. The exit code is the script's.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--plan", metavar="PLAN", help=f"a plan file (default: the environment variable {PLAN_VARIABLE})"
    )
    sizes.add_argument(
        "--auto",
        action="store_true",
        help="no plan: global batches are those of the script, its batch size x ranks, and the run finds how to divide"
        " them",
    )
    parser.add_argument(
        "--placement",
        choices=["auto"],
        help="auto: the run measures its model and the machines when it starts, and keeps each block of the model"
        " where it is best (strategy osdp)",
    )
    parser.add_argument(
        "--keep-plan-total",
        action="store_true",
        help="let an unmodified loop train with the plan's global batches, although its batch size x ranks is another"
        " number of samples: its steps and its schedule are meant for the plan",
    )
    parser.add_argument(
        "--config-file",
        "--config_file",
        type=Path,
        metavar="YAML",
        help="this node's file from accelerate-lshdp config",
    )
    add_layout_arguments(parser)
    parser.add_argument(
        "--node-rank", "--machine_rank", type=int, metavar="I", help="which of the nodes this is (needed for several)"
    )
    parser.add_argument(
        "--watch",
        type=positive_seconds,
        metavar="S",
        help="say every S seconds, and at the end, how long steps take and what each rank does meanwhile",
    )
    add_heartbeat_arguments(parser)
    add_elastic_arguments(parser)
    add_hosts_arguments(parser.add_argument_group("all machines from this one"))
    parser.add_argument("-m", dest="module", action="store_true", help="the script is a module, as in python -m")
    parser.add_argument("script", help="the Python file (or module) to run")
    # The remainder belongs to the script, also flags that have the names of ours.
    parser.add_argument("script_args", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Launches this node's processes and waits for them.

    Returns:
        The exit code of the script on this node: of the process whose failure is the cause of the others', 128 + n if
        signal n ended it; `FOLLOWS_ANOTHER` if the cause is on another node.
    """
    check_hosts_arguments(arguments)
    plan = _plan(arguments)
    # Each rank would say this in a traceback of its own.
    if not arguments.module and not os.path.isfile(arguments.script):
        raise ValueError(f"there is no script {arguments.script!r}; name a Python file, or a module after -m")
    if arguments.hosts is not None:
        if plan is not None and plan.elastic is not None:
            raise ValueError(
                "found --hosts and an elastic run, whose launchers must not depend on one command: start one on each"
                " machine"
            )
        return run_job(arguments, _job(arguments, plan), plan)
    # Temporary files have to stay until all ranks have ended.
    with ExitStack() as stack:
        if arguments.config_file is None:
            # Even on one machine: without a file, accelerate would use the user's default configuration.
            file = stack.enter_context(vanishing_file("node.yaml", _configuration(arguments, plan)))
            given, overrides = "the command line", []
        else:
            file = arguments.config_file
            given, overrides = str(file), _overrides(arguments)

        def write_normalised(text: str) -> Path:
            return stack.enter_context(vanishing_file("as_meant.yaml", text))

        # Mistakes in the layout are found here: processes that have started would wait for each other until a timeout.
        config, config_file = read_launch_config(file, write_normalised)
        if not config.use_cpu and local_device() == "cpu":
            asking = file if arguments.config_file else "--gpu" if arguments.device else "the plan's section cluster"
            raise ValueError(
                f"{asking} asks for GPUs, but torch finds none on this machine; "
                "install the driver and a CUDA build of torch, or use --cpu (use_cpu: true in a config file)"
            )
        _check_plan(plan, config, given)
        _set_environment(arguments, plan, config)
        _print_launch(config, arguments)
        if plan is not None and plan.elastic is not None:
            return run_elastic(_elastic_job(arguments, plan, config))
        if config.num_machines > 1:
            meeting = _meeting(plan, config, arguments)
            stack.enter_context(report_waiting(meeting, has_started_ranks))
            stack.enter_context(noticing_lost_nodes(arguments, meeting))
        # accelerate starts the shim as a module, which runs the script with its Accelerator replaced by ours.
        shim = ["-m", "accelerate_lshdp.run", *(["-m"] if arguments.module else [])]
        return accelerate_launch(
            ["--config_file", str(config_file), *overrides, *shim, arguments.script, *arguments.script_args]
        )


def _elastic_job(arguments: argparse.Namespace, plan: Plan, config: ClusterConfig) -> ElasticJob:
    """What this node runs in an elastic run."""
    environment = {"ACCELERATE_MIXED_PRECISION": str(config.mixed_precision or "no")}
    # Libraries of devices do not survive a fork.
    script = None if not config.use_cpu else "" if arguments.module else arguments.script
    words = [*(["-m"] if arguments.module else []), arguments.script, *arguments.script_args]
    meeting = _meeting(plan, config, arguments)
    return ElasticJob(meeting, local_ranks(config), plan, words, script, environment, arguments.notice_after)


def _job(arguments: argparse.Namespace, plan: Plan | None) -> Job:
    """What all machines of ``--hosts`` are to run: this command, with the plan in the environment."""
    options = [
        *(["--auto"] if arguments.auto else []),
        *(["--placement", arguments.placement] if arguments.placement else []),
        *(["--keep-plan-total"] if arguments.keep_plan_total else []),
        *(["--mixed-precision", arguments.mixed_precision] if arguments.mixed_precision else []),
        *(["--watch", str(arguments.watch)] if arguments.watch is not None else []),
        *("--notice-after", str(arguments.notice_after), "--lost-after", str(arguments.lost_after)),
        *(["-m"] if arguments.module else []),
    ]
    script = arguments.script if arguments.module else from_here(arguments.script)
    files = code_beside(None if arguments.module else script)
    environment = {} if arguments.auto else plan_environment(plan)
    return Job("launch", options, [script, *arguments.script_args], files, environment)


def _plan(arguments: argparse.Namespace) -> Plan | None:
    """The plan of the run; None: every loader keeps its own batch size on every rank."""
    if arguments.auto:
        return _made_elastic(_automatic_plan(arguments), arguments)
    plan = Plan.load(arguments.plan) if arguments.plan is not None else Plan.from_environment()
    plan = _made_elastic(plan, arguments)
    if arguments.placement is not None and plan is not None and not plan.leaves_placement_open:
        found = f'strategy "{plan.strategy}"' if plan.placement is None else "a placement of its own"
        raise PlanError(
            f'found {found} together with --placement auto, expected strategy "osdp" without a placement; leave'
            " --placement out, or make such a plan",
            path="strategy" if plan.placement is None else "placement",
            source=plan.source,
        )
    return plan


def _made_elastic(plan: Plan | None, arguments: argparse.Namespace) -> Plan | None:
    """The plan with the bounds of --elastic, if they were given."""
    if arguments.elastic is None:
        return plan
    if plan is None:
        raise ValueError("found --elastic without a plan, expected --auto, or a plan with automatic batch sizes")
    low, high = arguments.elastic
    return replace(plan, elastic=Elastic(low, LARGEST_ELASTIC if high is None else high))


def _automatic_plan(arguments: argparse.Namespace) -> Plan:
    """The plan of a run that finds its batch sizes itself."""
    if os.environ.get(PLAN_VARIABLE) is not None:
        raise ValueError(
            f"found --auto together with a plan in {PLAN_VARIABLE}, expected one of them; unset the variable"
        )
    if arguments.keep_plan_total:
        raise ValueError("found --keep-plan-total together with --auto, which has no total of its own; leave one out")
    from accelerate_lshdp.accelerator.plan_resolution import BatchKeywords, resolve_plan
    from accelerate_lshdp.accelerator.plugin import LSDPPlugin

    # Strategy and format may come from the environment, which the plugin reads.
    plan, options = resolve_plan(None, BatchKeywords(), LSDPPlugin(placement=arguments.placement))
    return replace(Plan.auto(strategy=plan.strategy), communication=options.communication)


def _configuration(arguments: argparse.Namespace, plan: Plan | None) -> str:
    """The text of this node's configuration file for accelerate, from the arguments and the plan."""
    if arguments.nodes is None and (plan is None or plan.cluster is None):
        ranks = _local_devices(arguments) if arguments.auto else None if plan is None else plan.world_size
        if ranks is None:
            raise ValueError(
                "the number of processes is not known: give --plan with batch sizes, --nodes (such as --nodes 2), or"
                " --config_file"
            )
        arguments.nodes = (ranks,)
    # Each node has a launcher of its own, and all of them must come to the same layout.
    layout = make_layout(arguments, plan, default_device=local_device())
    node = arguments.node_rank
    if node is None and layout.num_nodes > 1:
        raise ValueError(f"say with --node-rank which of the {layout.num_nodes} nodes this is, counted from 0")
    node = node or 0
    if not 0 <= node < layout.num_nodes:
        raise ValueError(f"found --node-rank {node}, expected one from 0 to {layout.num_nodes - 1}")
    # The installed accelerate may refuse what another version accepts.
    text = render_node(layout, node)
    check_with_accelerate(text)
    return text


def _overrides(arguments: argparse.Namespace) -> list[str]:
    """accelerate's arguments for flags that may be combined with a configuration file.

    Raises:
        ValueError: a flag contradicts what all nodes' files say together.
    """
    fixed = {"--nodes": arguments.nodes, "--node-rank": arguments.node_rank, "--cpu/--gpu": arguments.device}
    given = [flag for flag, value in fixed.items() if value is not None]
    if given:
        raise ValueError(
            f"{', '.join(given)} cannot be combined with --config_file, which says it already; leave one out"
        )
    return [
        part
        for flag, value in (
            ("--main_process_ip", arguments.main_ip),
            ("--main_process_port", arguments.main_port),
            ("--mixed_precision", arguments.mixed_precision),
        )
        if value is not None
        for part in (flag, str(value))
    ]


def local_ranks(config: ClusterConfig) -> int:
    """The number of processes that accelerate starts on this node."""
    return config.num_processes // config.num_machines


def _check_plan(plan: Plan | None, config: ClusterConfig, given: str) -> None:
    """Checks the plan against the layout, which every rank would do only after it has connected.

    Args:
        given: the source of the configuration, for the message.

    Raises:
        PlanError: the plan needs other numbers of ranks than this node's configuration starts.
    """
    if plan is None:
        return
    here = local_ranks(config)
    node, nodes = config.machine_rank, config.num_machines
    # A configuration file knows this node's ranks only, so the world is compared where there is one node.
    if plan.cluster is not None:
        sizes = plan.cluster.node_sizes
        if len(sizes) != nodes or sizes[node] != here:
            raise PlanError(
                f"found nodes of {sizes} ranks, but {given} starts {here} on node {node} of {nodes}. Write the"
                " configuration from this plan: accelerate-lshdp config --plan",
                path="cluster.nodes",
                source=plan.source,
            )
    if plan.world_size is not None and nodes == 1 and plan.world_size != here:
        raise PlanError(
            f"found {plan.world_size} ranks, but {given} starts {here} processes on one machine. Correct"
            " num_processes, or leave --config_file out.",
            path="batch.ranks",
            source=plan.source,
        )


def _set_environment(arguments: argparse.Namespace, plan: Plan | None, config: ClusterConfig) -> None:
    """Sets the environment variables that this node's ranks inherit."""
    if arguments.plan is not None:
        # Absolute: the script may change its working directory before it makes an accelerator.
        os.environ[PLAN_VARIABLE] = os.path.abspath(arguments.plan)
    elif arguments.auto:
        os.environ[PLAN_VARIABLE] = json.dumps(plan.to_dict())
    if arguments.keep_plan_total:
        os.environ["LSDP_KEEP_PLAN_TOTAL"] = "1"
    if arguments.watch is not None:
        os.environ["LSDP_WATCH"] = str(arguments.watch)
    if arguments.placement is not None:
        os.environ[variable_of("placement")] = arguments.placement
    if config.use_cpu:
        # accelerate sets it for a single process only; several processes would use the GPU of a machine that has one.
        os.environ["ACCELERATE_USE_CPU"] = "true"
    # accelerate's own choice is one thread a rank on GPU nodes, where a host optimizer needs more, and it fails where
    # the number of physical cores is not known.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, node_cores() // local_ranks(config))))


def node_cores() -> int:
    """The number of physical cores that this process may use, within its affinity and CPU quota."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    from accelerate_lshdp.runtime.cpu_cores import allowed_cores, cpu_quota, usable_cores

    return usable_cores(allowed_cores(os.sched_getaffinity(0)), cpu_quota())


def local_device() -> str:
    """The kind of device of this machine's ranks: "gpu" or "cpu"."""
    from accelerate_lshdp.runtime.backend import has_accelerator

    return "gpu" if has_accelerator(several_ranks=True) else "cpu"


def _local_devices(arguments: argparse.Namespace) -> int:
    """The number of ranks for this machine: one a GPU, or one rank with all CPUs."""
    if arguments.device == "cpu" or local_device() == "cpu":
        return 1
    import torch

    return torch.cuda.device_count() if torch.backends.cuda.is_built() else torch.accelerator.device_count()


def _print_launch(config: ClusterConfig, arguments: argparse.Namespace) -> None:
    place = f"node {config.machine_rank} of {config.num_machines}: " if config.num_machines > 1 else ""
    count = local_ranks(config)
    device = "CPU" if config.use_cpu else "GPU"
    print(
        f"accelerate-lshdp launch: {place}{count} {device} {'process' if count == 1 else 'processes'},"
        f" OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}, running {arguments.script}",
        file=sys.stderr,
        flush=True,
    )


def _meeting(plan: Plan | None, config: ClusterConfig, arguments: argparse.Namespace) -> Meeting:
    """The rendezvous of the nodes: address and port from the flags, else from the configuration."""
    # The same precedence as accelerate's own.
    address = arguments.main_ip or config.main_process_ip or "127.0.0.1"
    port = arguments.main_port or config.main_process_port or DEFAULT_PORT
    addresses: list[str | None] = [None] * config.num_machines
    if plan is not None and plan.cluster is not None:
        addresses = [node.address for node in plan.cluster.nodes]
    return Meeting(config.machine_rank, (address, *addresses[1:]), address, int(port))
