# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""One rank of `test_cuda`: trains a setting on the first GPU, and prints how it compares.

As a program: ``errors SETTING``, how far it is from one process on the CPU; ``same_bits SETTING``, whether it ends in
bf16 with the same parameters as with the offload of FSDP2.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

import torch
from accelerate.utils import InitProcessGroupKwargs
from exactness import Setting, full, plan_of, train
from torch.utils.data import DataLoader
from training_cases import CASES, collate, make_optimizer

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator


# NCCL refuses two ranks on one GPU.
HANDLERS = [InitProcessGroupKwargs(backend="gloo")] if int(os.environ["WORLD_SIZE"]) > 1 else []


def trained_in_bf16(setting: Setting) -> list[torch.Tensor]:
    case, plan = CASES[setting.model], plan_of(setting)
    plugin = LSDPPlugin(loss_weighting=case.weighting, token_counter=None)
    accelerator = LSHDPAccelerator(plan=plan, lsdp_plugin=plugin, mixed_precision="bf16", kwargs_handlers=HANDLERS)
    model = case.model(setting.layers)
    optimizer = make_optimizer(model, 1e-2, 0.05, fused=False, foreach=False)
    loader = DataLoader(case.dataset(5 * plan.total_batch_size, torch.float32), batch_size=2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(case.loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    return [full(parameter).cpu() for parameter in model.parameters()]


def same_bits(setting: Setting) -> bool:
    streamed, offloaded = trained_in_bf16(setting), trained_in_bf16(replace(setting, intra_node="collectives"))
    return all(torch.equal(one, other) for one, other in zip(streamed, offloaded, strict=True))


if __name__ == "__main__":
    task, described = sys.argv[1], json.loads(sys.argv[2])
    setting = Setting(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in described.items()}
    )
    if task == "errors":
        print(task, *train(setting, kwargs_handlers=HANDLERS))
    else:
        print(task, same_bits(setting))
