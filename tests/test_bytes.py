"""Invariant 6: what travels in a step is what the strategies' table says, with and without accumulation."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from training_cases import CASES, collate, make_optimizer

from accelerate_lshdp import LSHDPAccelerator, Plan


TOLERANCE = 0.02  # the ranks also tell each other a few numbers in each step


class PayloadCounter:
    """Adds up the bytes of the tensors given to collectives, by kind; the step's small exchanges too."""

    PAYLOAD = {
        "all_reduce": lambda tensor, *rest, **named: tensor,
        "all_gather_into_tensor": lambda output, *rest, **named: output,
        "all_to_all_single": lambda output, source, *rest, **named: source,
        "broadcast": lambda tensor, *rest, **named: tensor,
        "reduce_scatter_tensor": lambda output, source, *rest, **named: source,
    }

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes: Counter[str] = Counter()
        for name in self.PAYLOAD:
            monkeypatch.setattr(dist, name, self._counting(name, getattr(dist, name)))

    def _counting(self, name, original):
        def call(*args, **kwargs):
            tensor = self.PAYLOAD[name](*args, **kwargs) if args else next(iter(kwargs.values()))
            if name == "all_gather_into_tensor":
                tensor = args[0] if args else kwargs["output_tensor"]
            self.bytes[name] += tensor.numel() * tensor.element_size()
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
        return {"all_gather_into_tensor": gathers[strategy], "all_to_all_single": total * width}
    inside = {"all_gather_into_tensor": gathers["fsdp"], "all_to_all_single": micro * total} if local > 1 else {}
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
