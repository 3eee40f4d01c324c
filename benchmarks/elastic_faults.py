# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Elastic runs on an emulated cluster of four nodes whose nodes are lost at random moments, and return.

    python benchmarks/elastic_faults.py
    python benchmarks/elastic_faults.py --runs 2 --faults 3 --seed 7

Nodes are killed, switched off (the link is cut before), frozen, cut off from each other in two halves, told to leave;
ranks are killed; two nodes are lost at once. Each run has to end with the parameters and the learning rate of one
process that trains the same steps. For each fault it prints after how many seconds the first of the others had noticed
it, and after how many they trained on. It needs root.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from laboratory.emulated_cluster import Cluster, EmulatedCluster, Link, Node


COUNT = 4
STEPS, PACE_SECONDS = 700, 0.08
#: Of a run against one process, in fp64: sums are formed in another order.
TOLERANCE = 1e-9
ROOT = Path(__file__).parents[1]
TRAIN = """
import os, sys, time
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2)).double()
data = torch.randn(208, 16, dtype=torch.float64)
loader = torch.utils.data.DataLoader(data, batch_size=int(sys.argv[2]), shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 100))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.register_for_checkpointing(schedule)
continues = getattr(accelerator, "continues_run", False)
done = accelerator.load_state("checkpoints").step if continues else 0
continues = done > 0
model.train()
while done < int(sys.argv[1]):
    source = accelerator.skip_first_batches(loader) if continues else loader
    continues = False
    for batch in source:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        done += 1
        time.sleep(float(sys.argv[3]))
        print(f"step {done} at {time.time():.3f}", flush=True)
        if done == int(sys.argv[1]):
            break
if accelerator.is_main_process:
    torch.save({"rate": schedule.get_last_lr()[0], **accelerator.get_state_dict(model)}, "trained.pt")
print("trained", flush=True)
"""


class Run:
    """Launchers on the nodes of a cluster.

    Args:
        cluster: that has been built.
        folder: in which they run.
    """

    def __init__(self, cluster: EmulatedCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        (folder / "train.py").write_text(TRAIN)
        self.launchers: dict[int, subprocess.Popen] = {}
        for node in range(COUNT):
            self.start(node)

    def start(self, node: int) -> None:
        """Starts the launcher of a node."""
        main = self.cluster.nodes[0].address
        command = [sys.executable, "-m", "accelerate_lshdp.cli.main", "launch", "--auto", "--elastic", "1", "--cpu"]
        command += ["--nodes", ",".join("1" * COUNT), "--node-rank", str(node), "--main-ip", main]
        command += ["--main-port", "29500", "train.py", str(STEPS), "4", str(PACE_SECONDS)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with (self.folder / f"output{node}").open("a") as file:
            self.launchers[node] = self.cluster.popen(
                node, command, cwd=self.folder, env=environment, stdout=file, stderr=file
            )

    def output(self, node: int) -> str:
        return (self.folder / f"output{node}").read_text()

    def steps(self, node: int) -> list[tuple[int, float]]:
        """The steps that a node has made, and when."""
        found = re.findall(r"^step (\d+) at ([\d.]+)$", self.output(node), re.MULTILINE)
        return [(int(step), float(at)) for step, at in found]

    @property
    def has_trained(self) -> bool:
        return any(self.output(node).endswith("trained\n") for node in range(COUNT))

    def generation(self) -> tuple[int, int]:
        """The newest that a launcher has told of: its number, and how many nodes it has."""
        found = [re.findall(r"generation (\d+): node \d+ of (\d+)", self.output(node)) for node in range(COUNT)]
        return max(((int(number), int(count)) for each in found for number, count in each), default=(0, 0))

    def wait(self, holds: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline or all(each.poll() is not None for each in self.launchers.values()):
                return False
            time.sleep(0.02)
        return True

    def signal(self, node: int, number: int) -> None:
        """Sends a signal to all processes of a node."""
        for pid in self.cluster.pids(node):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def split(self, part: set[int]) -> None:
        """Cuts a part of the nodes off from the others; none: heals."""
        for node in self.cluster.nodes:
            for other in self.cluster.nodes:
                way = ["ip", "netns", "exec", node.namespace, "ip", "route"]
                apart = (node.index in part) != (other.index in part)
                action = "add" if apart else "del"
                subprocess.run([*way, action, "blackhole", f"{other.address}/32"], capture_output=True, check=False)

    def fault(self, kind: str, draw: random.Random) -> tuple[float | None, float | None]:
        """Lets something happen, and what was lost return; seconds until it was noticed, and until steps went on."""
        node = draw.randrange(COUNT)
        lost = {node}
        before, marks = self.generation()[0], [len(self.output(each)) for each in range(COUNT)]
        began = time.time()
        if kind in ("kill", "two"):
            lost |= {(node + draw.randrange(1, COUNT)) % COUNT} if kind == "two" else set()
            for each in lost:
                self.cluster.kill_node(each)
        elif kind == "power":
            self.cluster.cut_link(node)
            time.sleep(0.3)
            self.cluster.kill_node(node)
        elif kind == "freeze":
            self.signal(node, signal.SIGSTOP)
        elif kind == "partition":
            self.split({node, (node + draw.randrange(1, COUNT)) % COUNT})
            lost = set()  # one of the halves goes on
        elif kind == "rank":
            pids = [pid for pid in self.cluster.pids(node) if pid != self.launchers[node].pid]
            with suppress(ProcessLookupError):  # it may have none just now
                os.kill(max(pids, default=0) or self.launchers[node].pid, signal.SIGKILL)
            lost = set()
        else:
            self.launchers[node].send_signal(signal.SIGTERM)
        others = [each for each in range(COUNT) if each not in lost]

        def changed() -> bool:
            return self.generation()[0] > before

        def news() -> bool:
            return changed() or any("nothing is heard" in self.output(each)[marks[each] :] for each in others)

        noticed = time.time() - began if self.wait(news, 30) else None
        if kind == "two":
            time.sleep(draw.uniform(0, 3))
            for each in sorted(lost):
                self.start(each)
        changed_at = time.time() if self.wait(changed, 40) else float("inf")

        def goes_on() -> bool:
            return any(at > changed_at for each in range(COUNT) for _, at in self.steps(each)[-1:])

        went_on = None
        if changed_at < float("inf") and self.wait(goes_on, 60):
            went_on = time.time() - began
        if kind == "freeze":
            time.sleep(max(0.0, 20 - (time.time() - began)))
            self.signal(node, signal.SIGCONT)
        elif kind == "partition":
            time.sleep(draw.uniform(0, 4))
            self.split(set())
        elif kind in ("kill", "power", "leave"):
            self.cluster.restore_link(node)
            with suppress(subprocess.TimeoutExpired):
                self.launchers[node].wait(90)
            time.sleep(draw.uniform(0, 3))
            if any(self.launchers[each].poll() is None for each in others):
                self.start(node)
        return noticed, went_on


def train_alone(folder: Path) -> dict[str, torch.Tensor]:
    """What one process trains, of global batches as large."""
    (folder / "train.py").write_text(TRAIN)
    # With the order of samples that a run of several has.
    command = [sys.executable, "-m", "accelerate_lshdp.run", "train.py", str(STEPS), str(4 * COUNT), "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    return torch.load(folder / "trained.pt")


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """By how much parameters differ, relative to their norm; infinite if learning rates do."""
    if found.pop("rate") != expected["rate"]:
        return float("inf")
    apart = sum((each - expected[name]).square().sum() for name, each in found.items())
    return float((apart / sum(expected[name].square().sum() for name in found)).sqrt())


def main() -> int:
    """Runs and prints what the docstring of this module says; 1 if a run was not exact."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--faults", type=int, default=5, help="in each run")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    kinds = ["kill", "power", "freeze", "partition", "rank", "leave", "two"]
    bad, noticed, went_on = 0, [], []
    with tempfile.TemporaryDirectory() as alone:
        expected = train_alone(Path(alone))
    for number in range(arguments.runs):
        description = Cluster((Node(1, cores=2.0),) * COUNT, Link(1e9))
        with tempfile.TemporaryDirectory() as folder, EmulatedCluster(description) as cluster:
            run = Run(cluster, Path(folder))
            told = []
            run.wait(lambda run=run: bool(run.steps(0)), 120)
            for _ in range(arguments.faults):
                time.sleep(draw.uniform(0.2, 3))
                if run.has_trained:
                    break
                kind = draw.choice(kinds)
                found = run.fault(kind, draw)
                told.append(f"{kind} " + "/".join("-" if each is None else f"{each:.1f}" for each in found))
                if kind in ("kill", "power", "freeze", "partition") and found[0] is not None:
                    noticed.append(found[0])
                if kind in ("kill", "power", "freeze", "partition", "rank") and found[1] is not None:
                    went_on.append(found[1])
            run.wait(lambda run=run: run.has_trained, 180)
            # Who came back too late waits for a run that is over.
            run.wait(lambda run=run: all(each.poll() is not None for each in run.launchers.values()), 20)
            codes = [run.launchers[node].poll() for node in range(COUNT)]
            file = Path(folder, "trained.pt")
            apart = difference(torch.load(file), expected) if file.exists() else float("inf")
            exact = apart < TOLERANCE
            bad += not exact
            print(
                f"run {number}: {'exact' if exact else 'WRONG'} ({apart:.1e}), codes {codes}: {', '.join(told)}",
                flush=True,
            )
            if not exact:
                for node in range(COUNT):
                    print(f"--- node {node}\n{run.output(node)[-3000:]}", flush=True)
    for what, seconds in (("noticed", noticed), ("trained on", went_on)):
        if seconds:
            middle, most = statistics.median(seconds), max(seconds)
            print(f"{what} after {middle:.1f} s in the median, {most:.1f} s at most ({len(seconds)} faults)")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
