# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Memory that strategies really take on CPUs, in processes of their own: a pool's have what they have freed before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launching import base_environment, free_port, rank_environment


#: Trains 36 M parameters in 12 blocks, and prints its proportional set size in bytes: before the model is made, and
#: the largest during steps.
TRAIN = """
import json, sys, threading
import torch
from torch import nn
from accelerate_lshdp import LSHDPAccelerator, Plan

def pss():
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(512, 3072), nn.Linear(3072, 512)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

accelerator = LSHDPAccelerator(plan=Plan.from_batch_sizes([1] * 4, strategy=sys.argv[1]), cpu=True)
before, largest, stop = pss(), [0], threading.Event()
model = nn.Sequential(*[Block() for _ in range(12)])
parameters = sum(p.numel() * 4 for p in model.parameters())
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(24, 512)), batch_size=1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

def watch():
    while not stop.wait(0.02):
        largest[0] = max(largest[0], pss())

for step, (x,) in enumerate(loader):
    if step == 2:
        threading.Thread(target=watch, daemon=True).start()
    accelerator.backward(model(x).square().mean())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
stop.set()
print(json.dumps({"parameters": parameters, "taken": largest[0] - before}))
accelerator.end_training()
"""


def taken_by_node(strategy: str, folder: Path) -> list[float]:
    """Bytes above those of the process for each byte of the parameters, of each of two nodes of two ranks."""
    script, port = folder / "train.py", free_port()
    script.write_text(TRAIN)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), strategy],
            env={**base_environment(), **rank_environment(rank, (2, 2), port)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        outputs = [rank.communicate(timeout=150)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    parts = [rank["taken"] / rank["parameters"] for rank in found]
    return [parts[0] + parts[1], parts[2] + parts[3]]


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs the proportional set size of Linux")
@pytest.mark.parametrize(("strategy", "most"), [("fsdp", 4.0), ("lsdp", 6.0)])
def test_what_a_node_takes_is_little_above_its_states(tmp_path, strategy, most):
    """With AdamW in fp32 the states of a whole copy are 4 bytes for each byte of parameters."""
    assert max(taken_by_node(strategy, tmp_path)) <= most
