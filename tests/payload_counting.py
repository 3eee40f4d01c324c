# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Counts what collectives are given while a model trains, and what of it leaves the node."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from training_cases import CASES, collate, make_optimizer

from accelerate_lshdp import LSHDPAccelerator, Plan
from accelerate_lshdp.documents.placement import ModelPlacement
from accelerate_lshdp.documents.strategy import Gathered, Strategy
from accelerate_lshdp.engine.wire import reduction as collectives
from accelerate_lshdp.runtime.topology import Topology


#: What gloo sends to the next rank of a ring, as a multiple of (n-1)/n of the payload; the others go straight.
RING_PASSES = {"all_reduce": 2, "all_gather": 1}


class PayloadCounter:
    """Adds up the bytes of the tensors given to collectives, by kind; the step's small exchanges too.

    Args:
        monkeypatch: undoes the counting.
        node_sizes: ranks of each node, for `sent`.

    Attributes:
        bytes: payload by kind of collective.
        sent: bytes that this rank sends to ranks of other nodes, by kind (broadcasts left out). A test that needs no
            network; that gloo sends as much was seen at the interfaces of two network namespaces.
    """

    #: (module, function) -> (kind, name of the argument that holds the whole payload)
    COUNTED = {
        (dist, "all_reduce"): ("all_reduce", "tensor"),
        (dist, "broadcast"): ("broadcast", "tensor"),
        (dist, "reduce"): ("reduce", "tensor"),
        (dist, "all_gather"): ("all_gather", "tensor"),
        (dist, "all_to_all_single"): ("all_to_all", "input"),
        (dist, "all_to_all"): ("all_to_all", "input_tensor_list"),
        (collectives, "exchange_in_pairs"): ("all_to_all", "sent"),
        (dist, "reduce_scatter"): ("reduce_scatter", "input_list"),
        (dist, "all_gather_into_tensor"): ("all_gather", "output_tensor"),
        (dist, "reduce_scatter_tensor"): ("reduce_scatter", "input"),
        (collectives, "_all_gather"): ("all_gather", "output_tensor"),
        (collectives, "gather_in_ring"): ("all_gather", "parts"),
        (collectives, "_reduce_scatter"): ("reduce_scatter", "input"),
    }

    def __init__(self, monkeypatch: pytest.MonkeyPatch, node_sizes: Sequence[int]) -> None:
        self.bytes: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self._node_of = [node for node, size in enumerate(node_sizes) for _ in range(size)]
        for (module, name), counted in self.COUNTED.items():
            monkeypatch.setattr(module, name, self._counting(getattr(module, name), *counted))

    def _counting(self, original, kind: str, argument: str):
        signature = inspect.signature(original)

        def call(*args, **kwargs):
            given = signature.bind(*args, **kwargs).arguments
            payload = given[argument]
            for tensor in payload if isinstance(payload, (list, tuple)) else [payload]:
                size = tensor.numel() * tensor.element_size()
                self.bytes[kind] += size
                self.sent[kind] += self._share_sent(kind, given.get("group")) * size
            return original(*args, **kwargs)

        return call

    def _share_sent(self, kind: str, group: dist.ProcessGroup | None) -> float:
        """The part of a payload that leaves this rank's node."""
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        mine = dist.get_rank()
        away = [rank for rank in ranks if self._node_of[rank] != self._node_of[mine]]
        if kind in RING_PASSES:
            follower = ranks[(ranks.index(mine) + 1) % len(ranks)]
            return RING_PASSES[kind] * (len(ranks) - 1) / len(ranks) if follower in away else 0.0
        if kind == "all_to_all":
            return len(away) / len(ranks)
        if kind == "reduce" and away:
            raise AssertionError("sums to one rank are for the ranks of a node")
        if kind == "reduce_scatter" and away:
            raise AssertionError("gloo's reduce-scatter sends what an all-reduce does; use all-to-all")
        return 0.0


def count_one_step(
    strategy: str,
    micro_batches: int,
    dtype: str,
    own_accumulation: int,
    node_sizes: Sequence[int] | None = None,
    intra_node: str = "auto",
    placement: ModelPlacement | None = None,
) -> dict:
    """Trains a small ViT for one optimizer step.

    Args:
        strategy, micro_batches, dtype, intra_node, placement: of the plan.
        own_accumulation: the script's.
        node_sizes: nodes for the bytes between them; None: those of the run.

    Returns:
        Of this rank: `payload` and `sent` (see PayloadCounter). Parameters in bytes: of the model (`total`) and of its
        root unit (`root`), of each unit by name (`units`).
    """
    case = CASES["vit"]
    world = dist.get_world_size()
    plan = Plan.from_batch_sizes(
        [(2, micro_batches)] * world,
        strategy=strategy,
        communication_dtype=dtype,
        intra_node=intra_node,
        placement=placement,
    )
    accelerator = LSHDPAccelerator(plan=plan, gradient_accumulation_steps=own_accumulation)
    model = case.model(layers=3, hidden=64)  # large beside what the ranks tell each other in a step
    total = sum(parameter.numel() * 4 for parameter in model.parameters())
    blocks = [block for block in model.modules() if type(block).__name__ in ("ViTLayer", "ViTEmbeddings")]
    sizes = {
        name: sum(parameter.numel() * 4 for parameter in module.parameters())
        for name, module in model.named_modules()
        if any(module is block for block in blocks)
    }
    root = total - sum(sizes.values())
    optimizer = make_optimizer(model, 1e-3, 0.0)
    dataset = case.dataset(plan.total_batch_size * own_accumulation, torch.float32)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(dataset, batch_size=2, collate_fn=collate)
    )
    model.train()
    with pytest.MonkeyPatch.context() as monkeypatch:
        counter = PayloadCounter(monkeypatch, node_sizes or accelerator.topology.node_sizes)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(case.loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
    parameters = {"total": total, "root": root, "units": sizes}
    return {"payload": dict(counter.bytes), "sent": dict(counter.sent), **parameters}


def sent_by_nodes(counted: Sequence[dict], node_sizes: Sequence[int]) -> list[float]:
    """Bytes that each node sends to the others, from what `count_one_step` returned on every rank."""
    groups = Topology(0, tuple(node_sizes)).node_groups
    return [sum(sum(counted[rank]["sent"].values()) for rank in ranks) for ranks in groups]


def gathered_parameters(strategy: str, micro: int, total: int, root: int) -> int:
    """Bytes that the all-gathers of one step of a strategy with sharded parameters make (the root stays gathered)."""
    gathered = Strategy(strategy).traits.gathered
    if gathered is Gathered.EACH_STEP:
        return total
    return micro * total if gathered is Gathered.EACH_MICRO_BATCH else 2 * micro * (total - root) + micro * root
