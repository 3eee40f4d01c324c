# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""``accelerate-lshdp config``: the accelerate YAML of each node, from a plan or from flags.

The files follow from how accelerate's launcher (its ``utils/launch.py``) interprets them:

* It starts ``num_processes // num_machines`` processes on a node. torch's static rendezvous then numbers the ranks by
  adding up what each node really started. So a node with r ranks gets ``num_processes = r * num_machines``, which is
  the total only where all nodes are alike; with the total, nodes of 1 and 2 ranks would start one process each.
* ``MULTI_CPU`` starts one process a node. ``FSDP`` is the one type that starts several on CPUs.
* Only the static rendezvous keeps ``machine_rank``, on which the order of ranks in a plan rests; ``c10d`` may number
  the nodes in another order.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from accelerate_lshdp.documents.cluster import Cluster, Node
from accelerate_lshdp.documents.plan import Plan, PlanError, Strategy
from accelerate_lshdp.runtime.temporary_files import vanishing_file


DEFAULT_PORT = 29500
DEVICES = ("cpu", "gpu")
#: Of a layout whose nodes differ, as only a plan can say.
_AS_PLANNED = "plan"
MIXED_PRECISIONS = ("no", "bf16", "fp16")
_LARGEST_PORT = 65535


@dataclass(frozen=True, slots=True)
class Layout:
    """The nodes of one run, with all that the launcher of each node has to know.

    Args:
        node_sizes: ranks on each node, in rank order.
        device: "cpu" or "gpu"; "plan": each node has that of ``node_devices``, as the plan says.
        main_ip: address of node 0 as the other nodes see it; not needed for one node.
        main_port: a port of node 0 that the others can reach; default: 29500, and any free one if there is one node.
        mixed_precision: "no", "bf16" or "fp16".
        node_devices: "cpu" or "gpu" for each node, where they differ.

    Raises:
        ValueError: a value is impossible or missing.
    """

    node_sizes: tuple[int, ...]
    device: str
    main_ip: str | None = None
    main_port: int | None = None
    mixed_precision: str = "no"
    node_devices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.node_sizes or min(self.node_sizes) < 1:
            raise ValueError(f"found ranks per node {list(self.node_sizes)}, expected at least one rank on every node")
        if self.device not in DEVICES and not self.node_devices:
            raise ValueError(f"found device {self.device!r}, expected one of {', '.join(DEVICES)}")
        if self.node_devices and self.mixed_precision == "fp16":
            raise ValueError(
                "found mixed precision fp16 and nodes with and without GPUs, expected bf16 or no: processors do not"
                " scale losses"
            )
        if self.mixed_precision not in MIXED_PRECISIONS:
            raise ValueError(
                f"found mixed precision {self.mixed_precision!r}, expected one of {', '.join(MIXED_PRECISIONS)}"
            )
        if self.main_port is not None and not 1 <= self.main_port <= _LARGEST_PORT:
            raise ValueError(f"found port {self.main_port}, expected one from 1 to {_LARGEST_PORT}")
        if self.num_nodes > 1 and not self.main_ip:
            raise ValueError(
                f"{self.num_nodes} nodes have to find node 0; give its address, as the other nodes see it, with"
                " --main-ip (or as the address of the first node in the plan's cluster)"
            )

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.node_sizes)

    @property
    def world_size(self) -> int:
        """Number of ranks on all nodes."""
        return sum(self.node_sizes)

    def device_of(self, node: int) -> str:
        """The device of a node: "cpu" or "gpu"."""
        return self.node_devices[node] if self.node_devices else self.device

    def backend_of(self, node: int) -> str:
        """The device of a node and the backend of its process groups, for a comment."""
        # NCCL would leave out the nodes without GPUs.
        over = "NCCL" if self.device == "gpu" else "gloo"
        return f"{self.device_of(node).upper()} ({over})"

    @property
    def port(self) -> int:
        """The port for accelerate's option; 0 lets accelerate choose a free port."""
        if self.main_port is not None:
            return self.main_port
        # On several nodes all have to know the port before node 0 listens, so it cannot be chosen freely.
        return DEFAULT_PORT if self.num_nodes > 1 else 0

    @property
    def flags(self) -> str:
        """The flags of ``accelerate-lshdp config`` that describe this layout."""
        flags = [f"--nodes {','.join(map(str, self.node_sizes))}"]
        flags.append("--plan PLAN" if self.node_devices else f"--{self.device}")
        if self.num_nodes > 1:
            flags.append(f"--main-ip {self.main_ip}")
        if self.main_port is not None:
            flags.append(f"--main-port {self.main_port}")
        if self.mixed_precision != "no":
            flags.append(f"--mixed-precision {self.mixed_precision}")
        return " ".join(flags)

    def file_name(self, node: int, name: str | None = None) -> str:
        """The file name of a node: ``node1.yaml``; with a name ``NAME_node1.yaml``, or ``NAME.yaml`` for one node."""
        if name is None:
            return f"node{node}.yaml"
        return f"{name}.yaml" if self.num_nodes == 1 else f"{name}_node{node}.yaml"


def register(subparsers: argparse._SubParsersAction) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "config",
        help="write the accelerate configuration of each node",
        description="Write one commented accelerate YAML per node, from a plan with a cluster or from flags.",
        allow_abbrev=False,
    )
    parser.add_argument("--plan", metavar="PLAN", help="a plan file, for its cluster and number of ranks")
    add_layout_arguments(parser)
    parser.add_argument("--output-dir", type=Path, default=Path("."), help="where to write (default: here)")
    parser.add_argument("--name", help="files are NAME_node0.yaml, ... instead of node0.yaml, ...")
    parser.add_argument("--force", action="store_true", help="replace files that exist")
    parser.set_defaults(run=run)


def add_layout_arguments(parser: argparse.ArgumentParser, *, with_precision: bool = True) -> None:
    """Adds the flags from which `make_layout` reads; `launch` shares them.

    Args:
        parser: or a group of one.
        with_precision: whether the command has a choice of mixed precision.
    """
    parser.add_argument(
        "--nodes",
        type=parse_node_sizes,
        metavar="RANKS,...",
        help="ranks on each node, such as 1,2 (default: the plan's)",
    )
    # Neither is a default: without a flag the plan's nodes decide, and `launch` asks torch.
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--cpu", dest="device", action="store_const", const="cpu", help="train on CPUs (gloo)")
    device.add_argument("--gpu", dest="device", action="store_const", const="gpu", help="train on GPUs (NCCL)")
    # Second spellings are those of `accelerate launch`.
    parser.add_argument(
        "--main-ip", "--main_process_ip", metavar="IP", help="address of node 0, as the other nodes see it"
    )
    parser.add_argument(
        "--main-port",
        "--main_process_port",
        type=int,
        metavar="PORT",
        help=f"port on node 0 (default: {DEFAULT_PORT})",
    )
    if with_precision:
        parser.add_argument("--mixed-precision", "--mixed_precision", choices=MIXED_PRECISIONS, help="default: no")


def parse_node_sizes(text: str) -> tuple[int, ...]:
    """The number of ranks on each node from a text such as ``1,2`` (argparse ``type``)."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected the number of ranks on each node, such as 1,2")
    return sizes


def make_layout(arguments: argparse.Namespace, plan: Plan | None, default_device: str | None = None) -> Layout:
    """The layout that flags and plan describe together.

    Args:
        arguments: parsed arguments with those of `add_layout_arguments`.
        plan: the plan, whose cluster replaces flags that were not given.
        default_device: the device where neither flag nor plan names one.

    Raises:
        PlanError: flags contradict the plan.
        ValueError: a value is missing; the message names the flag.
    """
    cluster = None if plan is None else plan.cluster
    planned_sizes = None if cluster is None else tuple(cluster.node_sizes)
    # Flags may repeat what the plan says, but not contradict it: the plan's batch sizes are in rank order.
    node_sizes = arguments.nodes or planned_sizes
    if node_sizes is None:
        ranks = "" if plan is None or plan.world_size is None else f" (the plan has {plan.world_size} ranks)"
        raise ValueError(f"say how many ranks each node has, such as --nodes 1,2{ranks}")
    if plan is not None and planned_sizes not in (None, node_sizes):
        raise PlanError(
            f"found nodes of {list(planned_sizes)} ranks, but --nodes says {list(node_sizes)}. Leave --nodes out, or"
            " correct the plan's cluster.",
            path="cluster.nodes",
            source=plan.source,
        )
    if plan is not None and plan.world_size not in (None, sum(node_sizes)):
        raise PlanError(
            f"found {plan.world_size} ranks, but the nodes {list(node_sizes)} have {sum(node_sizes)}. Correct --nodes,"
            " or make a plan for these nodes.",
            path="batch.ranks",
            source=plan.source,
        )
    device = arguments.device or _planned_device(cluster) or default_device
    if device is None:
        raise ValueError("say what the nodes compute on: --cpu or --gpu")
    planned = tuple(map(_kind, cluster.nodes)) if device == _AS_PLANNED else ()
    if planned and plan.strategy is not Strategy.LSDP:
        raise PlanError(
            f"found strategy {plan.strategy} and nodes with and without GPUs, expected lsdp: they exchange gradients"
            " over their hosts.",
            path="strategy",
            source=plan.source,
        )
    return Layout(
        node_sizes,
        device,
        main_ip=arguments.main_ip or (None if cluster is None else cluster.nodes[0].address),
        main_port=arguments.main_port,
        mixed_precision=getattr(arguments, "mixed_precision", None) or "no",
        node_devices=planned,
    )


def _planned_device(cluster: Cluster | None) -> str | None:
    """ "cpu" or "gpu" if the plan's nodes say so; "plan" if they differ; None if they do not say."""
    named = [] if cluster is None else [node for node in cluster.nodes if node.device is not None]
    devices = set(map(_kind, named))
    if len(devices) < 2:
        return devices.pop() if devices else None
    if len(named) < len(cluster.nodes):
        raise PlanError(
            f"found devices {[node.device for node in cluster.nodes]}, expected one for each node where they differ",
            path="cluster.nodes",
        )
    return _AS_PLANNED


def _kind(node: Node) -> str:
    # A plan names products ("NVIDIA A100") where it comes from a profile; everything but "cpu" is a GPU.
    return "cpu" if node.trains_on_cpu else "gpu"


def render_node(layout: Layout, node: int, name: str | None = None) -> str:
    """The commented YAML of one node.

    Args:
        layout: the whole run.
        node: which of its nodes.
        name: as in `Layout.file_name`, for the comment with the command that wrote the file.
    """
    # The header tells the ranks of this node, so that a file copied to a wrong node can be recognised.
    first = sum(layout.node_sizes[:node])
    ranks = layout.node_sizes[node]
    numbers = f"rank {first}" if ranks == 1 else f"ranks {first} to {first + ranks - 1}"
    where = "one machine" if layout.num_nodes == 1 else f"node {node} of {layout.num_nodes}"
    file_name = layout.file_name(node, name)
    lines = [f"# {where.capitalize()}: {numbers} of a world of {layout.world_size}, {layout.backend_of(node)}."]
    if layout.num_nodes > 1:
        lines.append(
            "# Use it on this node only; every node has its own file. Start them in any order, within 10 minutes."
        )
    lines += [
        f"#   accelerate launch --config_file {file_name} -m accelerate_lshdp.run --plan PLAN script.py ARGS",
        f"# Written by: accelerate-lshdp config {layout.flags}{'' if name is None else f' --name {name}'}",
        "",
        "compute_environment: LOCAL_MACHINE",
        *_type_lines(layout, layout.device_of(node)),
        "",
        "# Number of nodes, and which of them this is. machine_rank orders the ranks, as a plan counts them.",
        f"num_machines: {layout.num_nodes}",
        f"machine_rank: {node}",
        f"# accelerate starts num_processes / num_machines processes here: {ranks * layout.num_nodes} /"
        f" {layout.num_nodes} = {ranks}.",
    ]
    if len(set(layout.node_sizes)) > 1:
        lines.append(
            "# It is not the total: nodes of unequal size need a number of their own for this division to be right."
        )
    lines.append(f"num_processes: {ranks * layout.num_nodes}")
    lines += _rendezvous_lines(layout)
    lines += [
        "",
        "# no, bf16 or fp16. bf16 computes in bf16; LSHDP still adds gradients up in fp32.",
        f'mixed_precision: "{layout.mixed_precision}"',
    ]
    return "\n".join(lines) + "\n"


def _type_lines(layout: Layout, device: str) -> list[str]:
    if device == "gpu":
        lines = ["# Only how processes are started. How the model is placed is the plan's strategy, not set here."]
        # Quoted: YAML reads a bare NO as false.
        kind = "MULTI_GPU" if layout.world_size > 1 else '"NO"'
        lines.append(f"distributed_type: {kind}")
        return [
            *lines,
            '# all: the ranks take the first GPUs of this node. Or name them, as in "0,2".',
            "gpu_ids: all",
            "use_cpu: false",
            "# lsdp and fsdp_offload step the optimizer on the CPU, where accelerate allows each rank one thread: set",
            "# OMP_NUM_THREADS to cores / ranks in the environment (accelerate-lshdp launch does).",
        ]
    lines = ["use_cpu: true"]
    if layout.world_size == 1:
        return ['distributed_type: "NO"', *lines]
    return [
        "# Not FSDP training, only the one type that starts several CPU processes on a node (MULTI_CPU starts one).",
        "# How the model is placed is the plan's strategy.",
        "distributed_type: FSDP",
        "fsdp_config:",
        "  fsdp_version: 2",
        "  # Without this, transformers would leave the weights of all ranks but the first empty in from_pretrained.",
        "  fsdp_cpu_ram_efficient_loading: false",
        "# Where there is a GPU, also set ACCELERATE_USE_CPU=true in the environment (accelerate-lshdp launch does).",
        *lines,
    ]


def _rendezvous_lines(layout: Layout) -> list[str]:
    if layout.world_size == 1:
        return []
    if layout.num_nodes == 1:
        # Two runs on one machine must not meet at the default port.
        return ["# 0 is any free port.", f"main_process_port: {layout.port}"]
    interface = "GLOO_SOCKET_IFNAME=eth0" + (", NCCL_SOCKET_IFNAME=eth0" if layout.device == "gpu" else "")
    return [
        "",
        "# Node 0, as the other nodes reach it. Both can be given on the command line instead: --main_process_ip,",
        "# --main_process_port. Ranks also connect to each other on ports that the system chooses.",
        f"main_process_ip: {json.dumps(layout.main_ip)}",
        f"main_process_port: {layout.port}",
        "# Static keeps machine_rank; c10d may number the nodes in another order.",
        "rdzv_backend: static",
        "same_network: true",
        f"# If ranks cannot connect, name the network interface in the environment: {interface}.",
    ]


def check_with_accelerate(text: str) -> None:
    """Checks a YAML by reading it as accelerate's launcher does.

    Raises:
        ValueError: if the installed accelerate does not accept it.
    """
    from accelerate.commands.config.config_args import load_config_from_file

    # accelerate reads files only.
    with vanishing_file("config.yaml", text) as file:
        load_config_from_file(str(file))


def run(arguments: argparse.Namespace) -> int:
    """Writes the YAML of each node: all files, or none if one exists with other content.

    Returns:
        0.

    Raises:
        ValueError: impossible arguments, or a file would be replaced.
    """
    plan = None if arguments.plan is None else Plan.load(arguments.plan)
    layout = make_layout(arguments, plan)
    # All texts before the first file: an error leaves the folder as it was.
    texts = {}
    for node in range(layout.num_nodes):
        text = render_node(layout, node, arguments.name)
        check_with_accelerate(text)
        texts[arguments.output_dir / layout.file_name(node, arguments.name)] = text
    # A file with the same content may be written again: the command can be repeated.
    taken = [str(path) for path, text in texts.items() if path.exists() and path.read_text(encoding="utf-8") != text]
    if taken and not arguments.force:
        raise ValueError(f"{', '.join(taken)} would be replaced; give --force, or another --output-dir or --name")
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")
    if layout.num_nodes > 1:
        print("Copy each file to its node, and run there the command in its first lines.", file=sys.stderr)
    return 0
