# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Scripts that ask for torchdata's loaders skip nothing after `load_state`: the next pass goes on by itself.

And models that accelerate's own hooks keep on the disk can be saved.
"""

from __future__ import annotations

import pytest
import torch
from accelerate import DataLoaderConfiguration, load_checkpoint_and_dispatch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from accelerate_lshdp import LSHDPAccelerator, Plan


def training(plan: Plan, dispatch: bool, workers: int):
    configuration = DataLoaderConfiguration(
        use_stateful_dataloader=True, dispatch_batches=dispatch, use_seedable_sampler=True, data_seed=5
    )
    accelerator = LSHDPAccelerator(plan=plan, dataloader_config=configuration, cpu=True)
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader = DataLoader(torch.arange(40.0)[:, None], batch_size=2, shuffle=True, num_workers=workers)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    return accelerator, model, optimizer, loader


def run(accelerator, model, optimizer, loader, *, save_at: int | None = None, folder: str = "") -> list[list[float]]:
    """The samples of each step of one pass."""
    seen = []
    for step, batch in enumerate(loader, 1):
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        seen.append(sorted(accelerator.gather(batch).flatten().tolist()))
        if step == save_at:
            accelerator.save_state(folder)
    return seen


def save_and_go_on(sizes: list[int], dispatch: bool, workers: int, save_at: int, folder: str) -> tuple:
    plan = Plan.equal() if dispatch else Plan.from_batch_sizes(sizes)
    first = run(*(parts := training(plan, dispatch, workers)), save_at=save_at, folder=folder)
    second = run(*parts)
    parts = training(plan, dispatch, workers)
    parts[0].load_state(folder)
    return first, second, run(*parts), run(*parts)


@pytest.mark.parametrize(("workers_of_loader", "save_at"), [(0, 4), (1, 4), (0, 10)])
def test_the_pass_after_load_state_goes_on(workers, tmp_path, workers_of_loader, save_at):
    told = workers(2).run(save_and_go_on, [3, 1], False, workers_of_loader, save_at, str(tmp_path / "state"))
    for first, second, resumed, following in told:
        assert sorted(sum(first, [])) == list(range(40)) and first != second
        if save_at == 10:  # the end of the epoch
            assert resumed == second
        else:
            assert resumed == first[save_at:] and following == second


def test_a_loader_that_dispatches_goes_on_too(tmp_path):
    first, _, resumed, _ = save_and_go_on([2], True, 0, 4, str(tmp_path / "state"))
    assert len(first) == 20 and len(resumed) == 16
    assert sorted(sum(first[:4] + resumed, [])) == list(range(40))


def test_a_model_that_is_kept_on_the_disk_is_saved(tmp_path):
    accelerator = LSHDPAccelerator(cpu=True)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator.save_model(model, tmp_path / "whole")
    offloaded = {"0": "cpu", "1": "disk"}
    load_checkpoint_and_dispatch(model, tmp_path / "whole", device_map=offloaded, offload_folder=tmp_path / "disk")
    accelerator.save_model(model, tmp_path / "again")
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], value) for name, value in expected.items())
