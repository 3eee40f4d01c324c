# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Parts of the engine: units, resolved policies, topology, clipping, scaling, options."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from exactness import full
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.data import DataLoader
from training_cases import CASES, collate, make_optimizer, tiny_gpt2, tiny_vit

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator, Plan, Strategy
from accelerate_lshdp.documents.wire_format import WIRE_FORMATS
from accelerate_lshdp.engine.clipping import clip_grad_norm
from accelerate_lshdp.engine.policies import Mechanism, resolve_policies
from accelerate_lshdp.engine.prepared import PreparedModel
from accelerate_lshdp.engine.scaler import ShardedGradScaler
from accelerate_lshdp.engine.stores.whole import WholeStore
from accelerate_lshdp.engine.units import UnitError, choose_units
from accelerate_lshdp.engine.wire import formats
from accelerate_lshdp.engine.wire.reduction import (
    ExactReduction,
    GradientReduction,
    OrderedReductions,
    PendingReduction,
)
from accelerate_lshdp.runtime.topology import Topology, TopologyError
from accelerate_lshdp.runtime.wait_clock import WaitClock


# Units


def names_of(model: nn.Module, units) -> list[list[str]]:
    names = {id(module): name for name, module in model.named_modules()}
    return [[names[id(module)] for module in unit] for unit in units]


def test_units_of_transformers_are_their_blocks():
    vit, gpt = tiny_vit(), tiny_gpt2()
    assert names_of(vit, choose_units(vit)) == [["vit.embeddings"], ["vit.layers.0"], ["vit.layers.1"]]
    assert names_of(gpt, choose_units(gpt)) == [["transformer.h.0"], ["transformer.h.1"]]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(2, 2)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(4)])
        self.blocks[3][0].weight = self.blocks[1][0].weight
        self.head = nn.Linear(2, 2)


def test_units_of_plain_modules_are_list_entries_and_tied_ones_share_a_unit():
    model = Plain()
    assert names_of(model, choose_units(model)) == [["blocks.0"], ["blocks.1", "blocks.3"], ["blocks.2"]]


def test_blocks_tied_to_the_rest_of_the_model_stay_with_the_root():
    model = Plain()
    model.head.weight = model.blocks[3][0].weight
    assert names_of(model, choose_units(model)) == [["blocks.0"], ["blocks.2"]]


def test_units_can_be_named_by_class_or_by_module():
    model = tiny_vit()
    assert names_of(model, choose_units(model, ["ViTLayer", "classifier"])) == [
        ["vit.layers.0"],
        ["vit.layers.1"],
        ["classifier"],
    ]
    with pytest.raises(UnitError, match="no module of the model is called, or is of class, Missing.*ViTLayer"):
        choose_units(model, ["Missing"])


def test_every_format_of_the_table_has_a_reduction():
    assert formats.REDUCTIONS.keys() == WIRE_FORMATS.keys()
    scattered = {name for name, reduction in formats.REDUCTIONS.items() if reduction.scatter_dtype is not None}
    assert scattered == {name for name, form in WIRE_FORMATS.items() if not form.between_nodes_only} - {"fp32"}


# Policies: what CUDA runs would use, without a GPU


@pytest.mark.parametrize(
    ("strategy", "offloaded", "resharded", "shard_groups", "replica_groups"),
    [
        ("ddp", False, True, ((0,), (1,), (2,), (3,)), ((0, 2), (1, 3))),
        ("zero2", False, False, ((0, 1, 2, 3),), ((0,), (1,), (2,), (3,))),
        ("zero1", False, False, ((0, 1, 2, 3),), ((0,), (1,), (2,), (3,))),
        ("fsdp", False, True, ((0, 1, 2, 3),), ((0,), (1,), (2,), (3,))),
        ("fsdp_offload", True, True, ((0, 1, 2, 3),), ((0,), (1,), (2,), (3,))),
        ("group_sharding", False, True, ((0, 1), (2, 3)), ((0, 2), (1, 3))),
        ("lsdp", True, True, ((0, 1), (2, 3)), ((0, 2), (1, 3))),
    ],
)
def test_policies_of_two_nodes_with_two_gpus(strategy, offloaded, resharded, shard_groups, replica_groups):
    plugin = LSDPPlugin(strategy=strategy, mixed_precision="bf16")
    policies = plugin.policies(Topology(0, (2, 2)), device_type="cuda")
    assert isinstance(policies.offload, CPUOffloadPolicy) == offloaded
    if offloaded:
        assert policies.offload.pin_memory
        on_cpu = plugin.policies(Topology(0, (2, 2)), device_type="cpu")
        assert not on_cpu.offload.pin_memory
        assert (
            not LSDPPlugin(strategy=strategy, pin_memory=False)
            .policies(Topology(0, (2, 2)), device_type="cuda")
            .offload.pin_memory
        )
    assert policies.reshard_after_forward == resharded
    assert policies.shard_groups == shard_groups and policies.replica_groups == replica_groups
    assert policies.precision.param_dtype == torch.bfloat16 and policies.precision.reduce_dtype == torch.float32
    assert policies.output_dtype == torch.float32


def test_uneven_nodes_get_one_rank_a_shard_group_and_are_told():
    uneven = {"topology": Topology(0, (1, 2)), "device_type": "cuda"}
    policies = resolve_policies(Strategy.LSDP, **uneven, intra_node="collectives")
    assert policies.shard_groups == ((0,), (1,), (2,)) and policies.replica_groups == ((0, 1), (0, 2))
    assert "one full copy of the parameters for each rank" in policies.notice
    assert resolve_policies(Strategy.FSDP, **uneven).notice is None


def test_gpus_are_fed_from_one_copy_a_node_whatever_their_number():
    uneven = {"topology": Topology(0, (1, 2)), "device_type": "cuda"}
    policies = resolve_policies(Strategy.LSDP, **uneven)
    assert policies.mechanism is Mechanism.STREAMED and policies.notice is None
    assert policies.shard_groups == ((0,), (1, 2)) and policies.replica_groups == ((0, 1), (0, 2))
    # What is to stay on the devices cannot be in memory that they share.
    with pytest.raises(ValueError, match="the ranks train on cuda"):
        resolve_policies(Strategy.GROUP_SHARDING, **uneven, intra_node="shared_memory")


def test_zero1_says_that_it_is_carried_out_as_zero2():
    zero1, zero2 = (
        resolve_policies(strategy, Topology(0, (2, 2)), device_type="cpu")
        for strategy in (Strategy.ZERO1, Strategy.ZERO2)
    )
    assert "zero1 is carried out as zero2" in zero1.notice and "needs less memory" in zero1.notice
    assert replace(zero1, strategy=Strategy.ZERO2, notice=None) == zero2


def test_zero2_refuses_to_reshard():
    with pytest.raises(ValueError, match="use fsdp to reshard"):
        resolve_policies(Strategy.ZERO2, Topology(0, (2,)), device_type="cpu", reshard_after_forward=True)


# Options


def test_options_come_from_keyword_plan_environment_default_in_this_order(monkeypatch):
    monkeypatch.setenv("LSDP_STRATEGY", "fsdp")
    monkeypatch.setenv("LSDP_PREFETCH", "3")
    monkeypatch.setenv("LSDP_UNITS", "ViTLayer, classifier")
    monkeypatch.setenv("LSDP_PIN_MEMORY", "no")
    monkeypatch.setenv("LSDP_BUCKET_MEGABYTES", "1.5")
    resolved = LSDPPlugin(prefetch=2).resolve()
    assert (resolved.strategy, resolved.prefetch, resolved.units) == (Strategy.FSDP, 2, ("ViTLayer", "classifier"))
    assert (resolved.pin_memory, resolved.bucket_megabytes) == (False, 1.5)
    assert LSDPPlugin().resolve(Plan.equal(strategy="zero2")).strategy is Strategy.ZERO2
    monkeypatch.delenv("LSDP_STRATEGY")
    assert LSDPPlugin().resolve().strategy is Strategy.LSDP
    with pytest.raises(ValueError, match="strategy='ddp' was given as a keyword, but the plan says 'lsdp'"):
        LSDPPlugin(strategy="ddp").resolve(Plan.equal())


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("LSDP_STRATEGY", "magic", "strategy='magic'.*use one of ddp"),
        ("LSDP_PREFETCH", "many", "LSDP_PREFETCH"),
        ("LSDP_PREFETCH", "0", "prefetch=0"),
        ("LSDP_PIN_MEMORY", "perhaps", "LSDP_PIN_MEMORY.*expected true or false"),
        ("LSDP_LOSS_WEIGHTING", "rank", "loss_weighting='rank'.*sample, tokens, none"),
        ("LSDP_BUCKET_MEGABYTES", "-1", "bucket_megabytes"),
    ],
)
def test_impossible_options_in_the_environment_are_named(monkeypatch, variable, text, message):
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=message):
        LSDPPlugin().resolve()


# Topology


def test_topology_of_uneven_nodes():
    topology = Topology(2, (1, 2))
    assert (topology.node, topology.local_rank, topology.world_size, topology.is_uneven) == (1, 1, 3, True)
    assert topology.node_groups == ((0,), (1, 2))


def discover(told: dict[int, dict[str, str]]) -> tuple:
    rank = dist.get_rank()
    return Topology.discover(rank, dist.get_world_size(), told[rank]).node_sizes


def test_topology_that_does_not_add_up_is_an_error_on_every_rank(workers):
    def node(group: int, local: int, size: int) -> dict[str, str]:
        return {"GROUP_RANK": str(group), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(size)}

    good = {0: node(0, 0, 1), 1: node(1, 0, 2), 2: node(1, 1, 2)}
    assert workers(3).run(discover, good) == [(1, 2)] * 3
    assert workers(3).run(discover, {rank: {"ACCELERATE_LSHDP_NODES": "2,1"} for rank in range(3)}) == [(2, 1)] * 3
    errors = workers(3).run(discover, {**good, 1: node(0, 0, 2)}, expect_failure=True)
    assert all(error.type == TopologyError.__name__ and "whole nodes" in error.message for error in errors)


# Order of reductions


class Recorded:
    def __init__(self) -> None:
        self.order: list[int] = []

    def start(self, buffer: torch.Tensor, index: int, shapes: list[torch.Size]) -> PendingReduction:
        assert int(buffer) == index and shapes == [torch.Size([index])]
        self.order.append(index)
        return self

    def wait(self) -> None:
        pass


@pytest.mark.parametrize("arrival", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_reductions_start_in_one_order(arrival):
    recorded = Recorded()
    reductions = OrderedReductions(recorded, WaitClock(), 4)
    for index in arrival:
        reductions.ready(index, torch.tensor(index), [torch.Size([index])])
    reductions.finish()
    assert recorded.order == [0, 1, 2, 3]


def test_a_buffer_that_never_came_or_came_twice_is_an_error():
    reductions = OrderedReductions(Recorded(), WaitClock(), 2)
    reductions.ready(1, torch.tensor(1), [])
    assert reductions.missing() == [0]
    with pytest.raises(RuntimeError, match="never delivered"):
        reductions.finish()
    with pytest.raises(RuntimeError, match="twice in one backward"):
        reductions.ready(1, torch.tensor(1), [])


class Slow(GradientReduction):
    """A reduction of two equal ranks that is carried out as late as possible, in the order in which it was started."""

    def __init__(self) -> None:
        super().__init__(self)
        self.waiting: list[torch.Tensor] = []

    def size(self) -> int:
        return 2

    def start(self, buffer: torch.Tensor, index: int, shapes: list[torch.Size]) -> PendingReduction:
        self.waiting.append(buffer)
        return self

    def wait(self) -> None:
        for buffer in self.waiting:
            buffer.mul_(2)
        self.waiting.clear()


def test_a_backward_that_was_given_up_does_not_write_into_the_next_one():
    model = nn.Linear(3, 2)
    prepared = PreparedModel(model, WaitClock())
    prepared.add(WholeStore(prepared.context, Slow(), bucket_bytes=None, reducing_ranks=2))
    prepared.begin_backward(True)
    model(torch.ones(1, 3)).sum().backward()
    prepared.abandon_backward()
    model.zero_grad()
    prepared.begin_backward(True)
    model(torch.ones(1, 3)).sum().backward()
    prepared.deliver_backward()
    prepared.finish_backward()
    torch.testing.assert_close(model.weight.grad, torch.ones(2, 3), rtol=0, atol=0)


# Clipping and scaling of gradients in different places


def norms(norm_type: float) -> tuple:
    case = CASES["vit"]
    accelerator = LSHDPAccelerator(plan=Plan.equal(strategy="lsdp", intra_node="collectives"))
    model = case.model().double()
    model = accelerator.prepare(model)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        whole = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = torch.distributed.tensor.distribute_tensor(
            whole, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    loose = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    loose.grad = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    parameters = [*model.parameters(), loose]
    flat = torch.cat([full(p.grad).flatten() for p in parameters])
    expected = torch.linalg.vector_norm(flat, norm_type)
    found = clip_grad_norm(parameters, 0.5, norm_type)
    clipped = torch.cat([full(p.grad).flatten() for p in parameters])
    wanted = flat * min(1.0, 0.5 / (expected.item() + 1e-6))
    return found.item(), expected.item(), (clipped - wanted).abs().max().item()


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_norm_over_shards_and_whole_tensors(workers, norm_type):
    for found, expected, difference in workers(4).run(norms, norm_type, nodes=(2, 2)):
        assert found == pytest.approx(expected, rel=1e-12) and difference < 1e-12


@pytest.mark.parametrize("order", [1, -1])
def test_norm_of_gradients_of_several_dtypes(order):
    dtypes = [torch.complex64, torch.float32, torch.bfloat16, torch.float64][::order]
    parameters = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in dtypes]
    for parameter in parameters:
        parameter.grad = 2 * parameter.detach()
    norm = clip_grad_norm(parameters, 1.0)
    assert norm.item() == pytest.approx(math.sqrt(4 * 3 * 2**2), rel=1e-12)
    for parameter in parameters:
        torch.testing.assert_close(parameter.grad, torch.full_like(parameter, 1 / math.sqrt(12)))


def overflow_on_one_rank(strategy: str) -> tuple:
    """A scaler as on CUDA, but for the CPU; rank 1 overflows in the second step only."""
    case = CASES["vit"]
    plan = Plan.from_batch_sizes([2, 2], strategy=strategy, intra_node="collectives")
    accelerator = LSHDPAccelerator(plan=plan)
    accelerator.scaler = ShardedGradScaler("cpu", init_scale=256.0)
    model, data = case.model(), case.dataset(12, torch.float32)
    optimizer = make_optimizer(model, 1e-2, 0.0)
    loader = DataLoader(data, batch_size=2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    skipped, weights = [], []
    for step, batch in enumerate(loader):
        loss = case.loss(model, batch)
        if step == 1 and accelerator.process_index == 1:
            loss = loss * torch.tensor(float("inf"))
        accelerator.backward(loss)
        optimizer.step()
        skipped.append(accelerator.optimizer_step_was_skipped)
        optimizer.zero_grad()
        weights.append(full(next(iter(model.parameters()))).sum().item())
    return skipped, weights, accelerator.scaler.get_scale()


@pytest.mark.parametrize(("strategy", "nodes"), [("ddp", (1, 1)), ("lsdp", (1, 1)), ("lsdp", (2,)), ("fsdp", (2,))])
def test_an_overflow_skips_the_step_on_all_ranks(workers, strategy, nodes):
    for skipped, weights, scale in workers(2).run(overflow_on_one_rank, strategy, nodes=nodes):
        assert skipped == [False, True, False] and scale == 128.0
        assert weights[0] == weights[1] != weights[2]


# bf16 compute and bf16 communication


def train_rounded(strategy: str, mixed_precision: str, communication: str) -> tuple:
    case = CASES["vit"]
    plan = Plan.from_batch_sizes([3, 1], strategy=strategy, communication_dtype=communication)
    accelerator = LSHDPAccelerator(plan=plan, lsdp_plugin=LSDPPlugin(mixed_precision=mixed_precision))
    model = case.model()
    optimizer = make_optimizer(model, 1e-3, 0.0)
    loader = DataLoader(case.dataset(40, torch.float32), batch_size=2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for batch in loader:
        output = model(pixel_values=batch["pixel_values"]).logits
        accelerator.backward(nn.functional.cross_entropy(output, batch["labels"]))
        optimizer.step()
        optimizer.zero_grad()
    dtypes = {output.dtype, *(parameter.dtype for parameter in model.parameters())}
    return {name: full(parameter) for name, parameter in model.named_parameters()}, sorted(map(str, dtypes))


@pytest.mark.parametrize("strategy", ["ddp", "lsdp", "fsdp"])
@pytest.mark.parametrize(("mixed_precision", "communication"), [("bf16", "fp32"), ("no", "bf16")])
def test_bf16_keeps_fp32_parameters_and_stays_close(workers, strategy, mixed_precision, communication):
    exact = workers(2).run(train_rounded, strategy, "no", "fp32", nodes=(1, 1))[0][0]
    results = workers(2).run(train_rounded, strategy, mixed_precision, communication, nodes=(1, 1))
    first, second = (parameters for parameters, _ in results)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(dtypes == ["torch.float32"] for _, dtypes in results)
    moved = math.sqrt(sum(float((exact[n] - p.detach()).square().sum()) for n, p in tiny_vit().named_parameters()))
    error = math.sqrt(sum(float((exact[n] - first[n]).square().sum()) for n in first))
    assert 0 < error < 0.3 * moved  # rounded, but the same training


def told(plan: str) -> str:
    return LSHDPAccelerator().plan.digest()


def test_the_plan_comes_from_the_environment_inline_or_by_path(workers, tmp_path):
    plan = Plan.from_batch_sizes([3, 1], strategy="ddp")
    plan.save(tmp_path / "plan.json")
    for value in (json.dumps(plan.to_dict()), str(tmp_path / "plan.json")):
        assert workers(2).run(told, value, env={"ACCELERATE_LSHDP_PLAN": value}) == [plan.digest()] * 2


# Overlap of the reduction with the backward


def order_of_events(strategy: str, intra_node: str) -> list[str]:
    """When reductions between nodes start, and when the backward reaches each block (the last one first)."""
    case = CASES["vit"]
    plan = Plan.from_batch_sizes([2] * dist.get_world_size(), strategy=strategy, intra_node=intra_node)
    accelerator = LSHDPAccelerator(plan=plan, lsdp_plugin=LSDPPlugin(bucket_megabytes=0.02))
    model = case.model(layers=4)
    optimizer = make_optimizer(model, 1e-3, 0.0)
    loader = DataLoader(case.dataset(plan.total_batch_size, torch.float32), batch_size=2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    events: list[str] = []

    def reached(index: int) -> None:
        # Reductions of a node's ranks are started by a thread: it gets the time that a larger model would take.
        deadline = time.monotonic() + (10.0 if index == 0 else 0.0)
        while events.count("reduction") < 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        events.append(f"block {index}")

    for index, block in enumerate(model.vit.layers):
        block.register_full_backward_pre_hook(lambda *_, index=index: reached(index))
    start = ExactReduction.start

    def recorded(self, buffer: torch.Tensor, *place: object) -> PendingReduction:
        events.append("reduction")
        return start(self, buffer, *place)

    model.train()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExactReduction, "start", recorded)
        for batch in loader:
            accelerator.backward(case.loss(model, batch))
    return events


@pytest.mark.parametrize(
    ("strategy", "nodes", "intra_node"),
    [
        ("ddp", (1, 1), "auto"),
        ("lsdp", (1, 1), "collectives"),
        ("lsdp", (2, 2), "auto"),
        ("group_sharding", (2, 2), "collectives"),
    ],
)
def test_gradients_travel_while_the_backward_goes_on(workers, strategy, nodes, intra_node):
    for events in workers(sum(nodes)).run(order_of_events, strategy, intra_node, nodes=nodes):
        before_the_last_block = events[: events.index("block 0")]
        assert [e for e in before_the_last_block if e != "reduction"] == ["block 3", "block 2", "block 1"]
        assert before_the_last_block.count("reduction") >= 2, events
