# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Invariant 7: no process of an ordinary script ends with SIGABRT, whatever it leaves behind in its globals.

The abort is a race of gloo's threads with the interpreter's end. Many ends are cheap only if the imports are not
repeated: the runs of the default suite are forked from one process that has made them; what runs and how it ends is
that of any script. The slow test starts 100 launches from nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import TESTS, launch


STRATEGIES = ("ddp", "lsdp", "fsdp")
ENDS = ("", "destroys the group", "ends training")

# Model, optimizer and accelerator stay in globals, and the last thing that it does is a collective. A thread that
# waits for the interpreter gets it only where Python gives it away: the abort is then far more likely.
_SCRIPT = """\
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate_lshdp import LSHDPAccelerator, Plan

sys.setswitchinterval(100)
accelerator = LSHDPAccelerator(plan=Plan.from_batch_sizes([3, 1], strategy=sys.argv[1]))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(12, 8), torch.randint(2, (12,)))
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))
model.train()
for inputs, labels in loader:
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
everyone = accelerator.gather(loss)
if sys.argv[2] == "destroys the group":
    accelerator.state.destroy_process_group()
if sys.argv[2] == "ends training":
    accelerator.end_training()
"""

# Forks both ranks of each run, and says how every one of them ended.
_FORKING = """\
import gc, json, os, sys

import torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor

import accelerate_lshdp.accelerator.accelerator
from accelerate_lshdp import LSHDPAccelerator, Plan

sys.path.insert(0, sys.argv[1])
from launching import free_port, rank_environment

runs = json.loads(sys.argv[2])
gc.collect()
gc.freeze()
codes, in_child = [], False
for run in runs:
    port, children = free_port(), []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            in_child = True
            break
        children.append(child)
    if in_child:
        break
    codes.append([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
if in_child:
    os.environ.update(rank_environment(rank, (2,), port))
    sys.argv = run
    exec(compile(open(run[0]).read(), run[0], "exec"), globals())
else:
    print("codes " + json.dumps(codes))
"""


def write_script(folder: Path) -> Path:
    script = folder / "train.py"
    script.write_text(_SCRIPT)
    return script


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_two_processes_end_with_code_zero_again_and_again(tmp_path):
    script = write_script(tmp_path)
    forking = tmp_path / "forking.py"
    forking.write_text(_FORKING)
    runs = [[str(script), STRATEGIES[i % 3], ENDS[i // 3 % 3]] for i in range(21)]
    result = launch([forking, TESTS, json.dumps(runs)], 0, timeout=180, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    codes = json.loads(result.stdout.rpartition("codes ")[2])
    assert len(codes) == len(runs)
    bad = [(run[1:], pair) for run, pair in zip(runs, codes, strict=True) if pair != [0, 0]]
    assert not bad, f"{len(bad)} of {len(runs)} runs ended with {bad}\n{result.stderr[-3000:]}"


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_hundred_launches_end_with_code_zero(tmp_path):
    script = write_script(tmp_path)
    bad = []
    for index in range(100):
        result = launch([script, STRATEGIES[index % 3], ENDS[index // 3 % 3]], 2, cwd=tmp_path)
        codes = [process.returncode for process in result.processes]
        if codes != [0, 0]:
            bad.append((index, codes, result.stderr[-1500:]))
    assert not bad, f"{len(bad)} of 100 launches did not end with code 0: {bad}"


def test_one_process_ends_with_code_zero(tmp_path):
    script = tmp_path / "alone.py"
    script.write_text(_SCRIPT.replace("[3, 1]", "[4]"))
    result = launch([script, "lsdp", ""], 0, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
