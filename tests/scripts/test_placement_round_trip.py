# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""From a profile to a training with every block in its place: the commands in the order in which users call them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from launching import launch

from accelerate_lshdp import Plan
from accelerate_lshdp.cli.main import main
from accelerate_lshdp.documents.profile import Profile


SCRIPT = """\
import json

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

WIDTH, BLOCKS, STEPS, TOTAL = 64, 3, 4, 4


def make_model():
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS))
    return nn.Sequential(nn.Linear(8, WIDTH), *blocks, nn.Linear(WIDTH, 1)).double()


def data():
    made = torch.Generator().manual_seed(1)
    values = torch.randn(STEPS * TOTAL, 9, generator=made, dtype=torch.double)
    return [{"x": row[:8], "y": row[8:]} for row in values]


def loss_of(model, batch):
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def profiling_subject(argv):
    from accelerate_lshdp.profiling import Subject

    model = make_model()
    return Subject(model, DataLoader(data(), batch_size=4), torch.optim.AdamW(model.parameters()), loss_of)


def train(model, optimizer, loader, backward):
    for batch in loader:
        backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()


def main():
    accelerator = Accelerator()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data(), batch_size=TOTAL // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    train(model, optimizer, loader, accelerator.backward)
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        torch.save(state, "trained.pt")


if __name__ == "__main__":
    main()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    Path("blocks.py").write_text(SCRIPT)
    return tmp_path


def command(folder: Path, *words: str):
    return launch(["-m", "accelerate_lshdp.cli.main", *words], 0, cwd=folder, env={"ACCELERATE_USE_CPU": None})


@pytest.mark.slow
def test_a_profiled_model_is_placed_verified_and_trained_exactly(folder: Path) -> None:
    done = command(folder, "profile", "--nodes", "2", "--cpu", "--seconds", "6", "--max-batch", "4", "blocks.py")
    assert done.returncode == 0, done.stderr
    profile = Profile.load("lshdp_profile.json")
    linear = 64 * 64 + 64
    assert [unit.name for unit in profile.units.units] == ["0", "1", "2", "3", "4"]
    block = profile.units.units[2]
    assert block.parameters == 2 * linear
    # In fp64: a block keeps its input and the output of its ReLU; its two products have 2 operations a weight.
    assert block.input_bytes == 8 * 64 and block.activation_bytes == 2 * 8 * 64
    assert block.flops == 2 * 2 * 64 * 64
    assert profile.network.inside is not None  # of the two ranks of the one node
    assert all(rank.process_bytes > 0 for rank in profile.ranks)

    # Blocks in several stores and recomputed ones: what the planner chooses here depends on the noise of measurements.
    flags = ["--placement", "auto", "--memory-limit", "20GB", "--no-accumulation"]
    assert main(["plan", "lshdp_profile.json", "--total", "4", *flags]) == 0
    assert main(["plan", "--verify", "lshdp_plan.json"]) == 0
    assert Path("lshdp_plan.png").exists()
    plan = Plan.load("lshdp_plan.json")
    assert str(plan.strategy) == "osdp" and plan.total_batch_size == 4
    assert max(plan.predicted["memory_bytes"]) <= 20e9

    done = command(folder, "launch", "--nodes", "2", "--cpu", "--plan", "lshdp_plan.json", "blocks.py")
    assert done.returncode == 0, done.stderr
    import blocks

    expected = blocks.make_model()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2)
    blocks.train(
        expected, optimizer, torch.utils.data.DataLoader(blocks.data(), batch_size=4), lambda loss: loss.backward()
    )
    trained = torch.load("trained.pt", weights_only=True)
    for name, parameter in expected.named_parameters():
        assert torch.linalg.norm(trained[name] - parameter) <= 1e-12 * torch.linalg.norm(parameter)
    assert json.loads(Path("lshdp_plan.json").read_text())["certificate"]["kind"] == "placement"
