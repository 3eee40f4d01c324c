# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A rank of a small training on an emulated cluster; run by test_cluster_faults.py.

    python cluster_fault_worker.py STRATEGY FORMAT TIMEOUT_SECONDS STEPS

Prints a line a step, and the time at which an error ended it.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
from accelerate import InitProcessGroupKwargs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator, Plan


WIDTH = 128


def main(strategy: str, communication: str, timeout: float, steps: int) -> None:
    accelerator = LSHDPAccelerator(
        plan=Plan.equal(strategy=strategy, communication_dtype=communication),
        # Small buckets, so that several reductions are under way when the fault comes.
        lsdp_plugin=LSDPPlugin(bucket_megabytes=0.05),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=timeout))],
    )
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    samples = 4 * accelerator.num_processes * steps
    data = TensorDataset(torch.randn(samples, WIDTH), torch.randn(samples, WIDTH))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
    model.train()
    for step, (inputs, targets) in enumerate(loader):
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} ends at {time.time()}", flush=True)


if __name__ == "__main__":
    strategy, communication, *numbers = sys.argv[1:]
    try:
        main(strategy, communication, *map(int, numbers))
    except BaseException:
        print(f"failed at {time.time()}", flush=True)
        raise
