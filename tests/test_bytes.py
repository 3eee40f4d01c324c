"""Invariant 6: what travels in a step is what the strategies' table says, with and without accumulation."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from training_cases import CASES, collate, make_optimizer

from accelerate_lshdp import LSHDPAccelerator, Plan
from accelerate_lshdp.engine import collectives


TOLERANCE = 0.02  # the ranks also tell each other a few numbers in each step


class PayloadCounter:
    """Adds up the bytes of the tensors given to collectives, by kind; the step's small exchanges too."""

    #: (module, function) -> (kind, name and place of the argument that holds the whole payload)
    COUNTED = {
        (dist, "all_reduce"): ("all_reduce", "tensor", 0),
        (dist, "broadcast"): ("broadcast", "tensor", 0),
        (dist, "all_gather"): ("all_gather", "tensor", 1),
        (dist, "all_to_all_single"): ("all_to_all", "input", 1),
        (dist, "all_to_all"): ("all_to_all", "input_tensor_list", 1),
        (dist, "reduce_scatter"): ("reduce_scatter", "input_list", 1),
        (dist, "all_gather_into_tensor"): ("all_gather", "output_tensor", 0),
        (dist, "reduce_scatter_tensor"): ("reduce_scatter", "input", 1),
        (collectives, "_all_gather"): ("all_gather", "output_tensor", 0),
        (collectives, "_reduce_scatter"): ("reduce_scatter", "input", 1),
    }

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes: Counter[str] = Counter()
        for (module, name), counted in self.COUNTED.items():
            monkeypatch.setattr(module, name, self._counting(getattr(module, name), *counted))

    def _counting(self, original, kind: str, argument: str, place: int):
        def call(*args, **kwargs):
            payload = args[place] if len(args) > place else kwargs[argument]
            for tensor in payload if isinstance(payload, (list, tuple)) else [payload]:
                self.bytes[kind] += tensor.numel() * tensor.element_size()
            return original(*args, **kwargs)

        return call


def count_one_step(strategy: str, micro_batches: int, dtype: str, own_accumulation: int) -> dict:
    """Bytes of one optimizer step, parameters in bytes, and those of the root unit."""
    case = CASES["vit"]
    world = dist.get_world_size()
    plan = Plan.from_batch_sizes([(2, micro_batches)] * world, strategy=strategy, communication_dtype=dtype)
    accelerator = LSHDPAccelerator(plan=plan, gradient_accumulation_steps=own_accumulation)
    model = case.model(layers=3)
    total = sum(parameter.numel() * 4 for parameter in model.parameters())
    blocks = [block for block in model.modules() if type(block).__name__ in ("ViTLayer", "ViTEmbeddings")]
    root = total - sum(parameter.numel() * 4 for block in blocks for parameter in block.parameters())
    optimizer = make_optimizer(model, 1e-3, 0.0)
    dataset = case.dataset(plan.total_batch_size * own_accumulation, torch.float32)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(dataset, batch_size=2, collate_fn=collate)
    )
    model.train()
    with pytest.MonkeyPatch.context() as monkeypatch:
        counter = PayloadCounter(monkeypatch)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(case.loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
    return {"sent": dict(counter.bytes), "total": total, "root": root}


def expected(strategy: str, micro: int, total: int, root: int, local: int, width: float) -> dict[str, float]:
    """Payload of the collectives of one step: `total` bytes of parameters, `local` ranks a node."""
    gathers = {"fsdp": 2 * micro * (total - root) + micro * root, "zero2": total}
    gathers["fsdp_offload"] = gathers["fsdp"]
    if strategy == "ddp":
        return {"all_reduce": total * width}
    if strategy in gathers:
        return {"all_gather": gathers[strategy], "all_to_all": total * width}
    inside = {"all_gather": gathers["fsdp"], "all_to_all": micro * total} if local > 1 else {}
    return {"all_reduce": total / local * width, **inside}


@pytest.mark.parametrize(
    ("strategy", "nodes", "micro_batches", "dtype", "own"),
    [
        ("ddp", (1, 1), 1, "fp32", 1),
        ("ddp", (1, 1), 3, "fp32", 2),
        ("ddp", (1, 1), 1, "bf16", 1),
        ("lsdp", (1, 1), 1, "fp32", 1),
        ("lsdp", (1, 1), 2, "bf16", 2),
        ("lsdp", (2, 2), 1, "fp32", 1),
        ("lsdp", (2, 2), 3, "fp32", 1),
        ("group_sharding", (2, 2), 2, "bf16", 1),
        ("zero2", (1, 1), 1, "fp32", 1),
        ("zero2", (1, 1), 3, "bf16", 2),
        ("fsdp", (1, 1), 1, "fp32", 1),
        ("fsdp_offload", (1, 1), 2, "fp32", 1),
        ("fsdp", (2, 2), 1, "bf16", 1),
    ],
)
def test_bytes_of_a_step(workers, strategy, nodes, micro_batches, dtype, own):
    width = {"fp32": 1.0, "bf16": 0.5}[dtype]
    for counted in workers(sum(nodes)).run(count_one_step, strategy, micro_batches, dtype, own, nodes=nodes):
        formula = expected(strategy, micro_batches * own, counted["total"], counted["root"], nodes[0], width)
        allowed = TOLERANCE * sum(formula.values())
        for kind in formula.keys() | counted["sent"].keys():
            sent = counted["sent"].get(kind, 0)
            assert abs(sent - formula.get(kind, 0)) <= allowed, f"{kind}: sent {sent}, expected {formula.get(kind, 0)}"
