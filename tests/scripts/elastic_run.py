# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`ElasticRun`: launchers of an elastic run on this machine, one a node, and what happens to them."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from launching import LOOPBACK, base_environment, free_port


#: A Trainer that knows nothing of elastic runs; the first rank saves the parameters in the end.
TRAINER = """
import os, sys, time
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

torch.manual_seed(0)
rows = [{"input_ids": (torch.arange(8) * (i % 7 + 1)) % 32} for i in range(48)]
rows = [{**row, "labels": row["input_ids"]} for row in rows]

class Slow(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        # While a node is missed, so that it can return before the training ends.
        time.sleep(float(sys.argv[1]) * (4 if os.environ.get("WORLD_SIZE") == "2" else 1))
        print(f"step {state.global_step} of {os.environ.get('WORLD_SIZE', '1')} ranks", flush=True)

no_dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
tiny = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**tiny, **no_dropout, bos_token_id=0, eos_token_id=0)).double()
options = {"output_dir": "out", "num_train_epochs": int(sys.argv[2]), "save_strategy": "no", "logging_steps": 10**6}
size = int(sys.argv[3])
args = TrainingArguments(**options, per_device_train_batch_size=size, use_cpu=True, report_to=[], disable_tqdm=True)
trainer = Trainer(model, args, train_dataset=rows, callbacks=[Slow()])
found = trainer.train()
if args.process_index == 0:
    torch.save({name: each.detach() for name, each in model.named_parameters()}, "trained.pt")
print(f"trained {trainer.state.global_step} steps, epoch {trainer.state.epoch:g}", flush=True)
"""

#: A loop of the script's own, which writes down what it trains on; a buffer counts forwards.
LOOP = """
import json, os, sys, time
import torch
from accelerate import Accelerator

def tell(line):
    # In one piece: ranks of a node write to the same file, and may be told not to buffer (PYTHONUNBUFFERED).
    print(line + "\\n", end="", flush=True)

class Counted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, inputs):
        self.forwards += 1
        return inputs

accelerator = Accelerator(cpu=True)
# accelerate steps a schedule once a rank. By the ranks that there are, or by those of the start: scripts do either.
per_step = accelerator.num_processes if sys.argv[4] == "now" else int(sys.argv[4])
torch.manual_seed(0)
model = torch.nn.Sequential(Counted(), torch.nn.Linear(4, 2)).double()
data = [(torch.randn(4, dtype=torch.float64), index) for index in range(48)]
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / per_step / 10))
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
done, continues = 0, sys.argv[3] == "loads" and getattr(accelerator, "continues_run", False)
if continues:
    done = accelerator.load_state("checkpoints").step
    continues = done > 0
steps = int(sys.argv[2])
model.train()
while done < steps:
    source = accelerator.skip_first_batches(loader) if continues else loader
    continues = False
    for inputs, numbers in source:
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        done += 1
        # While some of four are missed, so that they can return before the training ends.
        time.sleep(float(sys.argv[1]) * (6 if int(os.environ.get("WORLD_SIZE", "4")) < 4 else 1))
        place = getattr(accelerator, "batch_place", None)
        if accelerator.is_main_process and place is not None:
            tell(json.dumps({"step": done, "first": place.first_sample, "total": place.total_samples}))
        if done == steps:
            break
if accelerator.is_main_process:
    torch.save({"rate": schedule.get_last_lr(), **accelerator.get_state_dict(model)}, "trained.pt")
tell(f"trained {done} steps")
"""


class ElasticRun:
    """Launchers on this machine.

    Args:
        folder: in which they run; output of node n goes to ``output{n}``.
        nodes: how many, with a rank each; or the numbers of their ranks.
        script: what they train.
        arguments: of the script.
        options: of the command.
        environment: variables beside those that all launches have.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int | Sequence[int],
        script: str,
        *arguments: object,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        sizes = [1] * nodes if isinstance(nodes, int) else nodes
        self.folder = folder
        self.count = len(sizes)
        self._environment = environment or {}
        (folder / "train.py").write_text(script)
        place = ["--nodes", ",".join(map(str, sizes)), "--cpu", "--main-ip", "127.0.0.1"]
        place += ["--main-port", str(free_port())]
        self._options = ["--auto", "--elastic", "1", *place, *options]
        self._script = ["train.py", *map(str, arguments)]
        self.launchers: dict[int, subprocess.Popen] = {}
        for node in range(self.count):
            self.start(node)

    def __enter__(self) -> ElasticRun:
        return self

    def __exit__(self, *_: object) -> None:
        for node, launcher in self.launchers.items():
            if launcher.poll() is None:
                self.kill(node)

    def start(self, node: int) -> None:
        """Starts the launcher of a node, or starts it again."""
        command = [sys.executable, "-m", "accelerate_lshdp.cli.main", "launch", *self._options]
        environment = {**base_environment(), "GLOO_SOCKET_IFNAME": LOOPBACK, "OMP_NUM_THREADS": "1"}
        environment |= self._environment
        with (self.folder / f"output{node}").open("a") as file:
            self.launchers[node] = subprocess.Popen(
                [*command, "--node-rank", str(node), *self._script],
                cwd=self.folder,
                env=environment,
                stdout=file,
                stderr=file,
            )

    def output(self, node: int) -> str:
        return (self.folder / f"output{node}").read_text()

    @property
    def outputs(self) -> str:
        return "\n".join(f"--- node {node}\n{self.output(node)}" for node in range(self.count))

    def wait_for(self, pattern: str, *nodes: int, seconds: float = 90.0) -> None:
        """Waits until a pattern is in the output of these nodes."""
        deadline = time.monotonic() + seconds
        while not all(re.search(pattern, self.output(node)) for node in nodes):
            assert time.monotonic() < deadline, f"no {pattern!r}\n{self.outputs}"
            assert any(launcher.poll() is None for launcher in self.launchers.values()), self.outputs
            time.sleep(0.05)

    def send(self, node: int, number: int) -> None:
        """Sends a signal to all processes of a node at once, as if its machine stood still or were switched off."""
        process = psutil.Process(self.launchers[node].pid)
        for each in [process, *process.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(number)

    def kill(self, node: int) -> None:
        """Ends all processes of a node."""
        self.send(node, signal.SIGKILL)
        self.launchers[node].wait()

    def memory(self, node: int) -> Path:
        """The folder in memory of a node."""
        files = [Path(each.path) for each in psutil.Process(self.launchers[node].pid).open_files()]
        return next(path.parent for path in files if path.name == "in_use")

    def ranks(self, node: int) -> list[psutil.Process]:
        """The ranks of a node: children of the process that forks them."""
        return [rank for child in psutil.Process(self.launchers[node].pid).children() for rank in child.children()]

    def end(self, seconds: float = 120.0) -> list[int]:
        """Waits for the launchers; their exit codes."""
        deadline = time.monotonic() + seconds
        while any(launcher.poll() is None for launcher in self.launchers.values()):
            assert time.monotonic() < deadline, self.outputs
            time.sleep(0.1)
        return [self.launchers[node].returncode for node in range(self.count)]
