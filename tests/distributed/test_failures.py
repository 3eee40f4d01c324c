# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""All ranks agree or all ranks stop: when one is killed or raises, wherever it is, the others end soon and say so."""

from __future__ import annotations

import time

import pytest
from launching import launch


LONGEST_SECONDS = 60.0

# One rank fails in its third step: between two steps, in the forward, or in the backward when gradients of the later
# layers travel already.
_SCRIPT = """\
import os, signal, sys, time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator, Plan

strategy, victim, where, how = sys.argv[1:]
step = 0

def reach(place):
    if (step, place, accelerator.process_index) != (2, where, int(victim)):
        return
    with open("failed", "w") as file:
        file.write(str(time.time()))
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("a mistake of the script")

class Watch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        reach("forward")
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        reach("backward")
        return gradient

class Watched(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, value):
        for layer in self.layers:
            value = torch.tanh(layer(value))
            if layer is self.layers[1]:
                value = Watch.apply(value)
        return value

plugin = LSDPPlugin(bucket_megabytes=0.001)
accelerator = LSHDPAccelerator(plan=Plan.from_batch_sizes([3, 1], strategy=strategy), lsdp_plugin=plugin)
model = Watched()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(400, 16), torch.randint(16, (400,)))
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))
model.train()
for inputs, labels in loader:
    reach("between")
    accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
    optimizer.step()
    optimizer.zero_grad()
    step += 1
"""

CASES = [
    ("ddp", 1, "backward", "kill", "environment"),
    pytest.param("lsdp", 0, "between", "kill", "environment", marks=pytest.mark.slow),
    ("fsdp", 1, "forward", "kill", "accelerate"),
    pytest.param("lsdp", 1, "backward", "raise", "environment", marks=pytest.mark.slow),
    pytest.param("fsdp", 0, "forward", "raise", "accelerate", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("strategy", "victim", "where", "how", "launcher"), CASES, ids=str)
def test_others_end_soon(tmp_path, strategy, victim, where, how, launcher):
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    # Two nodes where the launcher is accelerate, so that nothing but the ranks themselves ends the other rank.
    nodes = (1, 1)
    arguments = [script, strategy, str(victim), where, how]
    result = launch(arguments, 2, nodes=nodes, launcher=launcher, timeout=110, cwd=tmp_path)
    ended = time.time()
    failed = float((tmp_path / "failed").read_text())
    codes = [process.returncode for process in result.processes]
    assert 0 not in codes, result.stderr[-4000:]
    assert ended - failed < LONGEST_SECONDS
    if how == "raise":
        assert "a mistake of the script" in result.processes[victim].stderr
    survivor = result.processes[1 - victim].stderr
    assert "Traceback" in survivor and "a mistake" not in survivor
