# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Trains on nodes of a Ray cluster, one launcher a node:

    ray job submit --working-dir . -- python ray_launch.py --ranks 1,2 --gpus train.py --epochs 3

Every node needs this package, and what the script needs. The exit code is that of the node that failed first.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


PORT = 29500


@ray.remote
class Launcher:
    """Runs ``accelerate-lshdp launch`` on one node."""

    def address(self) -> str:
        return ray.util.get_node_ip_address()

    def launch(self, arguments: list[str]) -> int:
        command = [sys.executable, "-m", "accelerate_lshdp.cli.main", "launch", *arguments]
        # The launcher ends with this process, however Ray ends it.
        return subprocess.run(command, env={**os.environ, "LSDP_LAUNCHER_PID": str(os.getpid())}).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,1", help="ranks on each node, such as 1,2")
    parser.add_argument("--gpus", action="store_true", help="each rank has a GPU")
    parser.add_argument("--cpus-per-node", type=int, default=1)
    parser.add_argument("script")
    parser.add_argument("script_args", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.ranks.split(",")]
    ray.init()
    # On different nodes: two launchers on one would both take its first GPUs, and its port.
    bundles = [{"CPU": arguments.cpus_per_node, "GPU": size if arguments.gpus else 0} for size in sizes]
    group = placement_group(bundles, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    launchers = [
        Launcher.options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle["GPU"],
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        ).remote()
        for index, bundle in enumerate(bundles)
    ]
    main_ip = ray.get(launchers[0].address.remote())
    flags = ["--nodes", arguments.ranks, "--main-ip", main_ip, "--main-port", str(PORT)]
    flags.append("--gpu" if arguments.gpus else "--cpu")
    running = [
        launcher.launch.remote([*flags, "--node-rank", str(node), "--auto", arguments.script, *arguments.script_args])
        for node, launcher in enumerate(launchers)
    ]
    while running:
        ended, running = ray.wait(running)
        code = ray.get(ended[0])
        if code:
            for launcher in launchers:
                ray.kill(launcher)
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
