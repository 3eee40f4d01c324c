# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`ElasticCluster`: launchers of an elastic run on the nodes of an emulated cluster, and what they have told.

Each node has an emulated device that takes so many seconds for a sample, without work for the processor: a machine
with two cores can have four of them. What a run has trained is compared with one process that has none.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from laboratory.emulated_cluster import EmulatedCluster


#: Seconds that the devices of the nodes take for a sample.
SAMPLE_SECONDS = (0.004, 0.006, 0.008, 0.012)
COUNT = len(SAMPLE_SECONDS)
#: Samples of a rank's batch as the script has it; of a global batch, as many times as there are ranks.
BATCH_SIZE = 8
#: Of a run against one process, in fp64: sums are formed in another order.
TOLERANCE = 1e-9
ROOT, PORT = Path(__file__).parents[1], 29500
_CHANGE = re.compile(r"^.*: generation (\d+): node \d+ of \d+ \((.*)\)$", re.MULTILINE)
#: Arguments: steps, batch size, steps between two checkpoints (0: none).
TRAIN = """
import os, sys, time
import torch
from accelerate import Accelerator

class Device(torch.nn.Module):
    def forward(self, batch):
        time.sleep(float(os.environ.get("SAMPLE_SECONDS", "0")) * len(batch))
        return batch

steps, batch_size, save_every = map(int, sys.argv[1:])
folder = os.environ.get("CHECKPOINTS", "checkpoints")
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
layers = [torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2)]
model = torch.nn.Sequential(Device(), *layers).double()
data = torch.randn(416, 16, dtype=torch.float64)
loader = torch.utils.data.DataLoader(data, batch_size=batch_size, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 100))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.register_for_checkpointing(schedule)
continues = getattr(accelerator, "continues_run", False)
done = accelerator.load_state(folder).step if continues else 0
continues = done > 0
model.train()
while done < steps:
    source = accelerator.skip_first_batches(loader) if continues else loader
    continues = False
    for batch in source:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        done += 1
        if accelerator.is_local_main_process:
            print(f"step {done} at {time.time():.3f}", flush=True)
        if save_every and done % save_every == 0:
            print("saves", flush=True)
            accelerator.save_state(f"{folder}/step{done:06d}")
            print("has saved", flush=True)
        if done == steps:
            break
if accelerator.is_main_process:
    torch.save({"rate": schedule.get_last_lr()[0], **accelerator.get_state_dict(model)}, "trained.pt")
print("trained", flush=True)
"""


@dataclass(frozen=True)
class Change:
    """What a launcher has told of a change of members.

    Args:
        number: of the generation.
        names: of its members.
        pause: seconds between the last step of its ranks before, and the first one after; None: there is none.
        steps: the times of the steps after it, until the next change.
    """

    number: int
    names: frozenset[str]
    pause: float | None
    steps: tuple[float, ...]


class ElasticCluster:
    """Launchers on the nodes of a cluster.

    Args:
        cluster: that has been built.
        folder: in which they run.
        steps: of the training.
        save_every: steps between two checkpoints; 0: none.
        elastic: whether nodes may come and go.
        ranks: of each node.
    """

    def __init__(
        self,
        cluster: EmulatedCluster,
        folder: Path,
        steps: int,
        *,
        save_every: int = 0,
        elastic: bool = True,
        ranks: int = 1,
    ) -> None:
        self.cluster = cluster
        self.folder = folder
        self.nodes = len(cluster.nodes)
        self._ranks = ranks
        self._options = ["--auto", "--cpu", *(["--elastic", "1"] if elastic else [])]
        self._script = ["train.py", str(steps), str(BATCH_SIZE), str(save_every)]
        (folder / "train.py").write_text(TRAIN)
        self.launchers: dict[int, subprocess.Popen[bytes]] = {}
        self._started_at: dict[int, float] = {}
        self._seen, self._newest = [0] * self.nodes, (0, "")
        for node in range(self.nodes):
            self.start(node)

    def start(self, node: int) -> None:
        """Starts the launcher of a node."""
        main = self.cluster.nodes[0].address
        command = [sys.executable, "-m", "accelerate_lshdp.cli.main", "launch", *self._options]
        command += ["--nodes", ",".join([str(self._ranks)] * self.nodes), "--node-rank", str(node), "--main-ip", main]
        command += ["--main-port", str(PORT), *self._script]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "SAMPLE_SECONDS": str(SAMPLE_SECONDS[node]),
            "CHECKPOINTS": str(self.folder / f"checkpoints{node}"),
        }
        self._started_at[node] = time.time()
        with (self.folder / f"output{node}").open("a") as file:
            self.launchers[node] = self.cluster.popen(
                node, command, cwd=self.folder, env=environment, stdout=file, stderr=file
            )

    # What they have told

    def output(self, node: int, since: int = 0) -> str:
        """What a node has told, from a byte on."""
        with (self.folder / f"output{node}").open("rb") as file:
            file.seek(since)
            return file.read().decode(errors="replace")

    def told_bytes(self, node: int) -> int:
        """Bytes that a node has told so far."""
        return (self.folder / f"output{node}").stat().st_size

    def last_step(self, node: int) -> tuple[int, float]:
        """The last step that a node has made, and when; 0: it has made none lately."""
        text = self.output(node, max(0, self.told_bytes(node) - 2000))
        found = re.findall(r"^step (\d+) at ([\d.]+)$", text, re.MULTILINE)
        return (int(found[-1][0]), float(found[-1][1])) if found else (0, 0.0)

    def newest_state_is_lost_with(self, lost: Collection[int]) -> bool:
        """Whether these are all nodes that have made the newest step, or that before it, since they were started."""
        made = {node: self.last_step(node) for node in range(self.nodes)}
        made = {node: (step, at) for node, (step, at) in made.items() if at > self._started_at[node]}
        newest, _ = max(made.values(), key=lambda each: each[1], default=(0, 0.0))
        having = {node for node, (step, _) in made.items() if step >= newest - 1}
        return bool(having) and having <= set(lost)  # that nobody has it means that it was lost before

    def steps(self, node: int) -> list[tuple[int, float]]:
        """The steps that a node has made, and when."""
        found = re.findall(r"^step (\d+) at ([\d.]+)$", self.output(node), re.MULTILINE)
        return [(int(step), float(at)) for step, at in found]

    def steps_lost(self) -> int:
        """Steps that were lost beside those under way: how far nodes have gone back behind their last step."""
        # A node's last step, made once more, was under way: those that are left had not made it.
        return sum(
            max(0, before - after)
            for node in range(self.nodes)
            for (before, _), (after, _) in itertools.pairwise(self.steps(node))
        )

    @property
    def has_trained(self) -> bool:
        tails = [self.output(node, max(0, self.told_bytes(node) - 2000)) for node in range(self.nodes)]
        return any("\ntrained\n" in tail for tail in tails)

    def newest(self) -> tuple[int, frozenset[int]]:
        """The newest generation that a launcher has told of: its number, and its nodes."""
        for node in range(self.nodes):
            text = self.output(node, self._seen[node])
            self._seen[node] += len(text[: text.rfind("\n") + 1].encode())
            for number, names in _CHANGE.findall(text):
                self._newest = max(self._newest, (int(number), names))
        return self._newest[0], self.nodes_of(self._newest[1].split(", "))

    def may_go_on_without(self, lost: Collection[int]) -> bool:
        """Whether enough members of the newest generation are left to go on while these nodes are lost."""
        _, members = self.newest()
        left = members - set(lost)
        # Half of them may if the first-listed one is among them.
        first = self.nodes_of(self._newest[1].split(", ")[:1])
        return 2 * len(left) > len(members) or (2 * len(left) == len(members) and first <= left)

    def nodes_of(self, names: Collection[str]) -> frozenset[int]:
        """The nodes whose launchers have these names."""
        return frozenset(node.index for node in self.cluster.nodes if f"{node.address}:{PORT}" in names)

    def changes(self, node: int) -> list[Change]:
        """The generations that the launcher of a node has told of."""
        _, *parts = _CHANGE.split(self.output(node))
        found: list[Change] = []
        for number, names, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            steps = tuple(float(at) for at in re.findall(r"^step \d+ at ([\d.]+)$", text, re.MULTILINE))
            before = found[-1].steps[-1:] if found else ()
            pause = steps[0] - before[0] if steps and before else None
            found.append(Change(int(number), frozenset(names.split(", ")), pause, steps))
        return found

    def wait(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Waits until something holds; False: it does not after so many seconds, or when all launchers have ended."""
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline or all(each.poll() is not None for each in self.launchers.values()):
                return False
            time.sleep(0.02)
        return True

    def end(self, seconds: float) -> list[int | None]:
        """Waits for the end of the training and of the launchers; their codes, None for one that waits still."""
        self.wait(lambda: self.has_trained, seconds)
        # Who came back too late waits for a run that is over.
        self.wait(lambda: all(each.poll() is not None for each in self.launchers.values()), 20)
        return [self.launchers[node].poll() for node in range(self.nodes)]

    # What happens to them

    def signal(self, node: int, number: int) -> None:
        """Sends a signal to all processes of a node."""
        for pid in self.cluster.pids(node):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill_rank(self, node: int) -> None:
        """Kills the rank of a node, or its launcher if it has none just now."""
        pids = [pid for pid in self.cluster.pids(node) if pid != self.launchers[node].pid]
        with suppress(ProcessLookupError):
            os.kill(max(pids, default=0) or self.launchers[node].pid, signal.SIGKILL)

    def split(self, part: set[int]) -> None:
        """Cuts a part of the nodes off from the others; none: heals."""
        for node in self.cluster.nodes:
            for other in self.cluster.nodes:
                way = ["ip", "netns", "exec", node.namespace, "ip", "route"]
                apart = (node.index in part) != (other.index in part)
                action = "add" if apart else "del"
                subprocess.run([*way, action, "blackhole", f"{other.address}/32"], capture_output=True, check=False)


def train_alone(folder: Path, steps: int, ranks: int = 1) -> dict[str, torch.Tensor]:
    """What one process trains, of global batches as large as those of nodes with so many ranks."""
    (folder / "train.py").write_text(TRAIN)
    # With the order of samples that a run of several has.
    command = [sys.executable, "-m", "accelerate_lshdp.run", "train.py", str(steps)]
    command += [str(BATCH_SIZE * COUNT * ranks), "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    return torch.load(folder / "trained.pt")


def difference(folder: Path, expected: Mapping[str, torch.Tensor]) -> float:
    """By how much the parameters that a run has left differ, relative to their norm.

    Returns:
        Infinite if there are none, or learning rates differ.
    """
    if not (folder / "trained.pt").exists():
        return float("inf")
    found = torch.load(folder / "trained.pt")
    if found.pop("rate") != expected["rate"]:
        return float("inf")
    apart = sum((each - expected[name]).square().sum() for name, each in found.items())
    return float((apart / sum(expected[name].square().sum() for name in found)).sqrt())


def best_step_seconds(nodes: Sequence[int]) -> float:
    """Seconds of a step of these nodes' devices with the best batch sizes."""
    # The smallest time in which they get through all samples; times at which one of them ends a sample are enough.
    total = BATCH_SIZE * COUNT
    times = sorted(SAMPLE_SECONDS[node] * count for node in nodes for count in range(1, total + 1))
    return next(t for t in times if sum(int(t / SAMPLE_SECONDS[node] + 1e-9) for node in nodes) >= total)
