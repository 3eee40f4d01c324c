# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""``accelerate-lshdp bench`` on real nodes: they meet, node 0 measures with all of them and writes the results."""

from __future__ import annotations

import argparse
import json
import shlex
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256

from accelerate_lshdp.cli.bench_output import prepare_report, say, write
from accelerate_lshdp.cli.config import DEFAULT_PORT, make_layout
from accelerate_lshdp.cli.launch import local_device, local_ranks, node_cores
from accelerate_lshdp.cli.launch_config import read_launch_config
from accelerate_lshdp.cli.waiting_nodes import Meeting, report_waiting
from accelerate_lshdp.comparing.checks import check_data, check_models
from accelerate_lshdp.comparing.config import ComparisonConfig, config_errors
from accelerate_lshdp.comparing.node_agent import NodeAgent, NodePlace, serve_node_0
from accelerate_lshdp.comparing.on_nodes import compare_on_nodes, name_nodes
from accelerate_lshdp.runtime.node_links import Hello, NodeLink, join_node_0, wait_for_nodes
from accelerate_lshdp.runtime.temporary_files import vanishing_file


_LOOPBACK = "127.0.0.1"


def run_on_nodes(arguments: argparse.Namespace) -> int:
    """Runs this node's part of a comparison.

    Returns:
        The exit code, the same on all nodes.

    Raises:
        ConfigError: the file cannot be read, is malformed or does not fit the nodes.
        ValueError: arguments that cannot be right, or nodes that did not meet or have gone.
    """
    config = ComparisonConfig.load(arguments.config)
    hello, address, port, device = _own_node(arguments, config)
    _check_device(device, hello.ranks)
    check_data(config.models)
    if hello.node == 0:
        check_models(arguments.config, config.models)
        prepare_report(arguments.output_dir)
    with ExitStack() as stack:
        links: list[NodeLink] = []
        node_sizes: Sequence[int] = [hello.ranks]
        if hello.nodes > 1:
            with _waiting(hello, address, port):
                if hello.node == 0:
                    links, node_sizes = wait_for_nodes(hello, address, port, say)
                else:
                    link, node_sizes = join_node_0(hello, address, port)
                    links = [link]
        for link in links:
            stack.callback(link.close)
        # On all nodes: each of them says what is wrong.
        with config_errors(str(arguments.config)):
            config.check_nodes(node_sizes, name_nodes(node_sizes))
        place = NodePlace(hello.node, tuple(node_sizes), address, port, device == "gpu", node_cores())
        agent = NodeAgent(place)
        say(f"node {hello.node} of {name_nodes(node_sizes)}, {device.upper()}")
        if hello.node > 0:
            code = serve_node_0(links[0], agent)
            say("finished; node 0 has the results")
            return code
        results = compare_on_nodes(config, agent, links, command=_command(arguments), say=say)
        code = write(results, arguments.output_dir)
        for link in links:
            with suppress(OSError):  # of a node that has gone: its cases say so in the results
                link.send({"finished": code})
    return code


def _own_node(arguments: argparse.Namespace, config: ComparisonConfig) -> tuple[Hello, str, int, str]:
    """This node's introduction, address and port of node 0, and the device, from the arguments.

    Raises:
        ValueError: they are incomplete or contradict one another.
    """
    digest = sha256(json.dumps(config.document, sort_keys=True).encode()).hexdigest()
    if arguments.config_file is None:
        if arguments.nodes is None:
            raise ValueError("say which ranks to compare on: --nodes, such as --nodes 2, or --config_file")
        layout = make_layout(arguments, None, default_device=None if arguments.device else local_device())
        node = arguments.node_rank
        if node is None and layout.num_nodes > 1:
            raise ValueError(f"say with --node-rank which of the {layout.num_nodes} nodes this is, counted from 0")
        node = node or 0
        if not 0 <= node < layout.num_nodes:
            raise ValueError(f"found --node-rank {node}, expected one from 0 to {layout.num_nodes - 1}")
        hello = Hello(node, layout.node_sizes[node], layout.num_nodes, digest, list(layout.node_sizes))
        return hello, layout.main_ip or _LOOPBACK, layout.port, layout.device
    fixed = {"--nodes": arguments.nodes, "--node-rank": arguments.node_rank, "--cpu/--gpu": arguments.device}
    given = [flag for flag, value in fixed.items() if value is not None]
    if given:
        raise ValueError(
            f"{', '.join(given)} cannot be combined with --config_file, which says it already; leave one out"
        )
    with ExitStack() as stack:
        file, _ = read_launch_config(
            arguments.config_file, lambda text: stack.enter_context(vanishing_file("as_meant.yaml", text))
        )
    address = arguments.main_ip or file.main_process_ip
    if file.num_machines > 1 and not address:
        raise ValueError(f"found no main_process_ip in {arguments.config_file}, expected node 0's. Give --main-ip")
    # A file knows this node's ranks only.
    hello = Hello(file.machine_rank, local_ranks(file), file.num_machines, digest)
    port = arguments.main_port or file.main_process_port or DEFAULT_PORT
    return hello, address or _LOOPBACK, int(port), "cpu" if file.use_cpu else "gpu"


def _command(arguments: argparse.Namespace) -> str:
    """The command of this node, for the results."""
    words = ["accelerate-lshdp", "bench", str(arguments.config), "--output-dir", str(arguments.output_dir)]
    if arguments.nodes is not None:
        words += ["--nodes", ",".join(map(str, arguments.nodes))]
    words += [] if arguments.device is None else [f"--{arguments.device}"]
    for name in ("config_file", "node_rank", "main_ip", "main_port"):
        value = getattr(arguments, name)
        words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def _check_device(device: str, ranks: int) -> None:
    """Checks that this node has a GPU for each of its ranks, if they are to compute on GPUs. Raises ValueError."""
    if device == "cpu":
        return
    import torch

    found = torch.cuda.device_count()
    if found < ranks:
        raise ValueError(
            f"found {found} CUDA devices on this machine, expected {ranks}, one a rank; correct the number of ranks,"
            " or use --cpu (use_cpu: true in a config file)"
        )


@contextmanager
def _waiting(hello: Hello, address: str, port: int) -> Iterator[None]:
    """Says every ten seconds which nodes are still missing, while its block waits for them."""
    met = threading.Event()
    meeting = Meeting(hello.node, (address, *[None] * (hello.nodes - 1)), address, port)
    with report_waiting(meeting, met.is_set, command="bench"):
        try:
            yield
        finally:
            met.set()
