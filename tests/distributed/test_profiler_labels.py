# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A profile of torch names the phases of a step (`lshdp::all_gather` ...), as docs/how_it_works.md lists them."""

from __future__ import annotations

import re
import threading

import pytest
import torch
from docs_pages import ROOT
from node_shared_cases import Points
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader
from training_cases import collate

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator, Plan
from accelerate_lshdp.runtime.profiler_labels import PREFIX, label


try:
    ALL_THREADS = _ExperimentalConfig(profile_all_threads=True)
except TypeError:  # torch before 2.7
    ALL_THREADS = None

OF_THREADS = {"node_reduce", "combine", "decompress"}


def recorded(profiler: profile) -> set[str]:
    return {event.key.removeprefix(PREFIX) for event in profiler.key_averages() if event.key.startswith(PREFIX)}


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs.square().mean()


def profile_a_step(strategy: str, dtype: str, folder: str) -> set[str]:
    """The labels of one training step and one save_state."""
    accelerator = LSHDPAccelerator(
        plan=Plan.equal(strategy=strategy, communication_dtype=dtype), lsdp_plugin=LSDPPlugin(loss_weighting="sample")
    )
    model = Blocks()
    loader = DataLoader(Points(), batch_size=2, collate_fn=collate)
    model.to(torch.float64 if dtype == "fp32" else torch.float32)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    batches = iter(loader)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=ALL_THREADS) as profiler:
        inputs = next(batches)["inputs"].to(next(model.parameters()).dtype)
        accelerator.backward(model(inputs))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        accelerator.save_state(folder)
    return recorded(profiler)


@pytest.mark.parametrize(
    ("strategy", "dtype", "nodes", "expected"),
    [
        ("lsdp", "fp32", (2,), {"node_reduce", "before_optimizer_step", "after_optimizer_step"}),
        ("ddp", "fp32", (1, 1), {"all_reduce"}),
        ("ddp", "int8", (1, 1), {"all_reduce", "compress", "combine", "decompress"}),
        ("fsdp", "fp32", (1, 1), {"all_gather", "reduce_scatter", "before_optimizer_step"}),
    ],
)
def test_a_profile_of_a_step_names_its_phases(workers, tmp_path, strategy, dtype, nodes, expected):
    expected = expected | {"wait", "clip_gradients", "checkpoint_write"}
    if ALL_THREADS is None:
        expected -= OF_THREADS
    for found in workers(2).run(profile_a_step, strategy, dtype, str(tmp_path), nodes=nodes):
        assert found == expected


def test_a_label_is_nothing_without_a_profile_and_may_be_used_in_any_thread():
    idle = label("wait")
    assert idle is label("all_gather")
    failed = []

    def enter() -> None:
        try:
            with label("wait"), label("wait"):
                pass
        except Exception as error:
            failed.append(error)

    with idle, profile(activities=[ProfilerActivity.CPU]) as profiler:
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        with label("all_gather"):
            pass
    assert not failed
    assert "all_gather" in recorded(profiler)


def test_the_documentation_lists_all_labels():
    sources = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "accelerate_lshdp").rglob("*.py")))
    used = set(re.findall(r'\blabel\("(\w+)"\)', sources))
    page = (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8")
    assert used == set(re.findall(r"`lshdp::(\w+)`", page))
