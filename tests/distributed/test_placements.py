# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Placements per unit (OSDP): exact whatever they are, and uniform ones do what the strategies do."""

from __future__ import annotations

import copy
import os
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from exactness import Setting, check, full, train
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from payload_counting import count_one_step, sent_by_nodes
from torch import nn
from torch.utils.data import DataLoader
from training_cases import CASES, collate, make_optimizer, relative_error

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator, Plan, Strategy
from accelerate_lshdp.documents.placement import ModelPlacement, UnitPlacement, UnitStore


LAYERS = 4
UNITS = {
    "vit": ("", "vit.embeddings", *(f"vit.layers.{layer}" for layer in range(LAYERS))),
    "gpt2": ("", *(f"transformer.h.{layer}" for layer in range(LAYERS))),
}
#: Units without a weight of as many rows as there may be slices and ranks.
WITHOUT_LARGE = {"vit": ("", "vit.embeddings"), "gpt2": ()}
NODES = ((2, 2), (1, 2), (1, 1, 1, 1))
ADAMW: tuple[tuple[tuple[str, bool], ...], ...] = ((), (("foreach", True),), (("fused", True),))


def stores_on(nodes: tuple[int, ...]) -> list[UnitStore]:
    """The stores that exist on some nodes."""
    return [store for store in UnitStore if not store.reshards_to_node or len(set(nodes)) == 1]


@st.composite
def random_settings(draw: Any) -> Setting:
    nodes = draw(st.sampled_from(NODES))
    model = draw(st.sampled_from(sorted(UNITS)))
    units = {}
    for name in UNITS[model]:
        recomputes = draw(st.booleans()) if name else False
        store = draw(st.sampled_from(stores_on(nodes)))
        slices = (
            draw(st.sampled_from((1, 2, 3))) if store.takes_slices(name) and name not in WITHOUT_LARGE[model] else 1
        )
        units[name] = UnitPlacement(store, recomputes, slices)
    steps = draw(st.sampled_from((1, 2)))
    sizes = tuple((draw(st.integers(1, 3)), steps) for _ in range(sum(nodes)))
    return Setting(
        "osdp",
        sizes,
        nodes,
        model=model,
        dtype=draw(st.sampled_from(("float64", "float64", "float32"))),
        own_accumulation=draw(st.sampled_from((1, 2))),
        steps=3,
        set_to_none=draw(st.booleans()),
        intra_node=draw(st.sampled_from(("auto", "collectives"))),
        placement=ModelPlacement(units),
        layers=LAYERS,
        optimizer=draw(st.sampled_from(ADAMW)),
    )


def run(workers, setting: Setting) -> None:
    check(workers(setting.world_size).run(train, setting, nodes=setting.nodes, timeout=90), setting.dtype)


def random_placements(examples: int) -> Any:
    """Runs a test with random placements, always the same ones."""
    suppressed = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    options = settings(
        max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=suppressed
    )
    return lambda test: options(given(setting=random_settings())(test))


@random_placements(5)
def test_random_placements_equal_one_process(workers, setting):
    run(workers, setting)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@random_placements(120)
def test_many_random_placements_equal_one_process(workers, setting):
    run(workers, setting)


#: One unit of each kind beside the others, and what needs care: tied and frozen parameters.
ALL_STORES = ModelPlacement(
    {
        "": UnitPlacement(UnitStore.WORLD_KEPT),
        "vit.embeddings": UnitPlacement(UnitStore.REPLICATE),
        "vit.layers.0": UnitPlacement(UnitStore.NODE, checkpoint=True),
        "vit.layers.1": UnitPlacement(UnitStore.WORLD, checkpoint=True),
        "vit.layers.2": UnitPlacement(UnitStore.WORLD_TO_NODE),
        "vit.layers.3": UnitPlacement(UnitStore.HOST),
    }
)
SPECIAL = [
    Setting("osdp", (3, 1, 2, 2), (2, 2), placement=ALL_STORES, layers=4, steps=20, dtype="float32"),
    Setting("osdp", (3, 1, 2, 2), (2, 2), placement=ALL_STORES, layers=4, frozen=("layers.1", "embeddings")),
    Setting("osdp", ((3, 2), (1, 2), (2, 2), (2, 2)), (2, 2), placement=ALL_STORES, layers=4, clip_value=0.01),
    Setting("osdp", (3, 1, 2, 2), (2, 2), placement=ALL_STORES, layers=4, intra_node="collectives", short_batch=1),
    Setting("osdp", (3,), (1,), placement=ALL_STORES, layers=4),
    Setting("osdp", (3, 2), (2,), placement=ALL_STORES, layers=4),
]


def special_cells() -> list:
    """All of them with `-m slow`, two by default."""
    marks = [() if index in (1, 3) else (pytest.mark.slow,) for index in range(len(SPECIAL))]
    ids = [f"{setting}_{index}" for index, setting in enumerate(SPECIAL)]
    return [pytest.param(*cell, id=name, marks=mark) for *cell, name, mark in zip(SPECIAL, ids, marks, strict=True)]


@pytest.mark.parametrize("setting", special_cells())
def test_special_placements_equal_one_process(workers, setting):
    run(workers, setting)


@pytest.mark.parametrize("store", [UnitStore.NODE, UnitStore.REPLICATE], ids=str)
def test_units_of_one_store_may_all_be_frozen(workers, store):
    """As where adapters are trained (LoRA): nothing of embeddings and heads has a gradient."""
    names = ("", "transformer.h.0")
    placement = ModelPlacement({name: UnitPlacement(store) for name in names}, UnitPlacement(UnitStore.WORLD))
    frozen = ("wte", "wpe", "ln_f", "h.0.")
    run(workers, Setting("osdp", (3, 1), (2,), model="gpt2", placement=placement, layers=LAYERS, frozen=frozen))


def trained_in_two_backwards(plan: Plan, parts: tuple[float, ...]) -> dict[str, torch.Tensor]:
    """The gradients of a step whose loss is the sum of parts with a forward and a synchronised backward each."""
    case = CASES["vit"]
    accelerator = LSHDPAccelerator(plan=plan, lsdp_plugin=LSDPPlugin(loss_weighting="sample"))
    model = case.model(LAYERS).double()
    loader = DataLoader(case.dataset(plan.total_batch_size, torch.float64), batch_size=2, collate_fn=collate)
    model, loader, _ = accelerator.prepare(model, loader, make_optimizer(model, 1e-2, 0.0))
    model.train()
    for batch in loader:
        for part in parts:
            accelerator.backward(part * case.loss(model, batch))
    return {name: full(parameter.grad) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("intra_node", ["auto", "collectives"])
def test_gradients_that_are_final_are_not_summed_again(workers, intra_node):
    plan = Plan.from_batch_sizes([3, 1, 2, 2], strategy="osdp", placement=ALL_STORES, intra_node=intra_node)
    pool = workers(4)
    once = pool.run(trained_in_two_backwards, plan, (1.0,), nodes=(2, 2))
    twice = pool.run(trained_in_two_backwards, plan, (0.25, 0.5, 0.25), nodes=(2, 2))
    for expected, found in zip(once, twice, strict=True):
        assert relative_error(found, expected) <= 1e-12


class Scores(nn.Module):
    """A second model, without blocks: all of it has the placement of what is in no unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer = nn.Linear(10, 3)

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return self.layer(logits).square().mean()


def trained_with_another(plan: Plan, scores_first: bool) -> dict[str, torch.Tensor]:
    """The gradients of a step of two models whose losses are added."""
    case = CASES["vit"]
    accelerator = LSHDPAccelerator(plan=plan, lsdp_plugin=LSDPPlugin(loss_weighting="sample"))
    model, scores = case.model(LAYERS).double(), Scores().double()
    loader = DataLoader(case.dataset(plan.total_batch_size, torch.float64), batch_size=2, collate_fn=collate)
    optimizer = make_optimizer(nn.ModuleList([model, scores]), 1e-2, 0.0)
    if scores_first:
        scores, model, loader, _ = accelerator.prepare(scores, model, loader, optimizer)
    else:
        model, scores, loader, _ = accelerator.prepare(model, scores, loader, optimizer)
    model.train()
    for batch in loader:
        accelerator.backward(case.loss(model, batch) + scores(model(batch["pixel_values"]).logits))
    both = [*model.named_parameters(), *scores.named_parameters()]
    return {name: full(parameter.grad) for name, parameter in both}


@pytest.mark.parametrize("scores_first", [False, True])
def test_models_of_one_loss_have_gradients_of_one_scale(workers, scores_first):
    placement = ModelPlacement({"": UnitPlacement(UnitStore.REPLICATE)}, UnitPlacement(UnitStore.WORLD))
    plan = Plan.from_batch_sizes([3, 1, 2, 2], strategy="ddp")
    placed = replace(plan, strategy=Strategy.OSDP, placement=placement)
    pool = workers(4)
    whole = pool.run(trained_with_another, plan, scores_first, nodes=(2, 2))
    found = pool.run(trained_with_another, placed, scores_first, nodes=(2, 2))
    for expected, gradients in zip(whole, found, strict=True):
        assert relative_error(gradients, expected) <= 1e-12


def leaves_the_sharded_model_out(plan: Plan) -> str:
    """What all ranks are told where one of them has a loss of the whole model only, and the others of both."""
    case = CASES["vit"]
    accelerator = LSHDPAccelerator(plan=plan, lsdp_plugin=LSDPPlugin(loss_weighting="sample"))
    model, scores = case.model(LAYERS).double(), Scores().double()
    loader = DataLoader(case.dataset(plan.total_batch_size, torch.float64), batch_size=2, collate_fn=collate)
    optimizer = make_optimizer(nn.ModuleList([model, scores]), 1e-2, 0.0)
    model, scores, loader, _ = accelerator.prepare(model, scores, loader, optimizer)
    model.train()
    batch = next(iter(loader))
    # All ranks call the same forwards: those of the sharded model gather.
    of_model, of_scores = case.loss(model, batch), scores(torch.ones(1, 10, dtype=torch.float64))
    loss = of_scores if accelerator.process_index == 1 else of_model + of_scores
    with pytest.raises(RuntimeError) as caught:
        accelerator.backward(loss)
    return str(caught.value)


def test_a_rank_that_leaves_a_sharded_model_out_is_an_error_on_all(workers):
    placement = ModelPlacement({"": UnitPlacement(UnitStore.REPLICATE)}, UnitPlacement(UnitStore.WORLD))
    plan = Plan.from_batch_sizes([3, 1], strategy="osdp", placement=placement)
    said = workers(2).run(leaves_the_sharded_model_out, plan, nodes=(1, 1), timeout=40)
    assert len(set(said)) == 1, said


class Failing(torch.optim.AdamW):
    """Fails in its first step, after it has looked at its groups."""

    fails = True

    def step(self, closure: Any = None) -> None:
        if self.fails:
            self.fails = False
            raise KeyboardInterrupt
        super().step(closure)


def groups_after_a_failed_step(plan: Plan) -> list[int]:
    """Numbers of parameters in the optimizer's groups before a step that fails, after it, and after the next."""
    case = CASES["vit"]
    accelerator = LSHDPAccelerator(plan=plan)
    model = case.model(LAYERS)
    optimizer = Failing(model.parameters())
    loader = DataLoader(case.dataset(plan.total_batch_size, torch.float32), batch_size=2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    found = [[len(group["params"]) for group in optimizer.param_groups]]
    for batch in loader:
        accelerator.backward(case.loss(model, batch))
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        found.append([len(group["params"]) for group in optimizer.param_groups])
        optimizer.step()
        found.append([len(group["params"]) for group in optimizer.param_groups])
    return found


def test_an_optimizer_has_its_own_groups_after_a_step_that_failed(workers):
    plan = Plan.from_batch_sizes([3, 1, 2, 2], strategy="osdp", placement=ALL_STORES)
    for before, failed, stepped in workers(4).run(groups_after_a_failed_step, plan, nodes=(2, 2)):
        assert before == failed == stepped and len(before) == 1


# Uniform placements


def trained(plan: Plan) -> dict[str, torch.Tensor]:
    """The parameters of a small ViT after three steps."""
    case = CASES["vit"]
    accelerator = LSHDPAccelerator(plan=plan)
    model = case.model(LAYERS)
    optimizer = make_optimizer(model, 1e-2, 0.01)
    dataset = case.dataset(plan.total_batch_size * 3, torch.float32)
    loader = DataLoader(dataset, batch_size=2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for batch in loader:
        accelerator.backward(case.loss(model, batch))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: full(parameter) for name, parameter in model.named_parameters()}


#: The others with `-m slow`.
UNIFORM_BY_DEFAULT = [(UnitStore.NODE, (2, 2)), (UnitStore.WORLD_KEPT, (1, 2))]
UNIFORM = [
    pytest.param(store, nodes, marks=() if (store, nodes) in UNIFORM_BY_DEFAULT else (pytest.mark.slow,))
    for store in UnitStore
    if not store.reshards_to_node
    for nodes in ((2, 2), (1, 2))
]


@pytest.mark.parametrize(("store", "nodes"), UNIFORM)
def test_uniform_placements_give_the_bits_of_their_strategy(workers, store, nodes):
    plan = Plan.from_batch_sizes([2, 1, 3, 2][: sum(nodes)], strategy=store.strategy)
    uniform = replace(plan, strategy=Strategy.OSDP, placement=ModelPlacement(default=UnitPlacement(store)))
    pool = workers(sum(nodes))
    for expected, found in zip(
        pool.run(trained, plan, nodes=nodes), pool.run(trained, uniform, nodes=nodes), strict=True
    ):
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)


# Bytes

#: Bytes that a node of two sends to the other one for each byte of a unit's parameters, of one micro-batch. A gather
#: or a reduce-scatter in two stages sends (N-1)/N of them, an all-reduce 2 (N-1)/N.
SENT = {
    UnitStore.NODE: 1.0,
    UnitStore.HOST: 1.0,
    UnitStore.WORLD: 1.5,
    UnitStore.WORLD_KEPT: 1.0,
    UnitStore.WORLD_TO_NODE: 1.0,
}


def test_the_bytes_between_nodes_are_the_sum_of_those_of_the_units(workers):
    units = dict(zip(["vit.embeddings", *(f"vit.layers.{layer}" for layer in range(3))], SENT, strict=False))
    placement = ModelPlacement({name: UnitPlacement(store) for name, store in units.items()}, UnitPlacement())
    placed = replace(placement, units=(*placement.units, ("", UnitPlacement(UnitStore.WORLD_TO_NODE))))
    counted = workers(4).run(count_one_step, "osdp", 1, "fp32", 1, (2, 2), "auto", placed, nodes=(2, 2))
    sizes = counted[0]["units"]
    formula = sum(SENT[store] * sizes[name] for name, store in units.items()) + counted[0]["root"]
    assert sent_by_nodes(counted, (2, 2)) == pytest.approx([formula] * 2, rel=0.02)


# Keywords


def placed_by_keyword(placement: dict[str, Any], **keywords: Any) -> tuple[str, str]:
    accelerator = LSHDPAccelerator(placement=placement, **keywords)
    return accelerator.strategy.value, str(accelerator.plan.placement)


def test_a_placement_may_be_a_keyword(workers):
    placement = {"units": {"vit.layers.0": {"store": "world"}}}
    for strategy, said in workers(2).run(placed_by_keyword, placement, nodes=(1, 1)):
        assert (strategy, said) == ("osdp", "world: vit.layers.0; others: node")


def contradicted() -> list[str]:
    found = []
    for keywords in (
        {"plan": Plan.from_batch_sizes([1, 1], strategy="osdp", placement=ALL_STORES)},
        {"plan": Plan.from_batch_sizes([1, 1], strategy="lsdp")},
        {"lsdp_plugin": LSDPPlugin(strategy="fsdp")},
    ):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            LSHDPAccelerator(placement={"default": {"store": "world"}}, **keywords)
        found.append(str(caught.value))
    return found


def test_a_placement_against_the_plan_is_refused(workers):
    for other, strategy, option in workers(2).run(contradicted, nodes=(1, 1)):
        assert "but the plan says" in other
        assert 'found a placement with strategy "lsdp"' in strategy
        assert 'found a placement with strategy "fsdp"' in option


# Refusals


class Tied(nn.Module):
    """Two blocks that share a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(3))
        self.blocks[2][0].weight = self.blocks[0][0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def refused(plan: Plan, model: str) -> str:
    """What ``prepare`` says of a placement."""
    accelerator = LSHDPAccelerator(plan=plan)
    prepared = Tied() if model == "tied" else CASES["vit"].model(LAYERS)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        accelerator.prepare(prepared)
    return str(caught.value)


REFUSED = [
    ("vit", {"vit.layer.0": UnitPlacement(UnitStore.WORLD)}, 'Did you mean "vit.layers.0"?'),
    ("tied", {"blocks.0": UnitPlacement(UnitStore.WORLD)}, "units with tied parameters in different placements"),
    ("vit", {"vit.embeddings": UnitPlacement(UnitStore.WORLD, slices=2)}, "without a weight that can be in slices"),
    ("vit", {"": UnitPlacement(checkpoint=True)}, "Name the units whose activations are to be recomputed"),
]


@pytest.mark.parametrize(("model", "units", "message"), REFUSED, ids=["unknown", "tied", "slices", "root"])
def test_placements_that_cannot_be_are_refused_on_all_ranks(workers, model, units, message):
    plan = replace(Plan.from_batch_sizes([1, 1], strategy="osdp"), placement=ModelPlacement(units))
    for said in workers(2).run(refused, plan, model, nodes=(1, 1)):
        assert message in said


def refused_at_start(plan: Plan) -> str:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        LSHDPAccelerator(plan=plan)
    return str(caught.value)


def refused_resharding() -> str:
    placement = ModelPlacement(default=UnitPlacement(UnitStore.WORLD_TO_NODE))
    plan = Plan.from_batch_sizes([1, 1, 1, 1], strategy="osdp", placement=placement)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        LSHDPAccelerator(plan=plan, lsdp_plugin=LSDPPlugin(reshard_after_forward=False))
    return str(caught.value)


def test_shards_of_nodes_after_the_forward_are_refused_where_nothing_is_to_be_resharded(workers):
    for said in workers(4).run(refused_resharding, nodes=(2, 2)):
        assert 'found reshard_after_forward=False with a unit in store "world_to_node"' in said
        assert "LSDP_RESHARD_AFTER_FORWARD" in said


def test_shards_of_nodes_after_the_forward_need_even_nodes(workers):
    placement = ModelPlacement(default=UnitPlacement(UnitStore.WORLD_TO_NODE))
    plan = replace(Plan.from_batch_sizes([1, 1, 1], strategy="osdp"), placement=placement)
    for said in workers(3).run(refused_at_start, plan, nodes=(1, 2)):
        assert "expected as many ranks on every node" in said


def clipped_after_another_forward(plan: Plan, between: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """The norm before clipping and the clipped gradients, if a metric is computed in between; whose list is given."""
    case = CASES["vit"]
    accelerator = LSHDPAccelerator(plan=plan)
    model = case.model(LAYERS).double()
    loader = DataLoader(case.dataset(plan.total_batch_size, torch.float64), batch_size=2, collate_fn=collate)
    model, loader, _ = accelerator.prepare(model, loader, make_optimizer(model, 1e-2, 0.0))
    batch = next(iter(loader))
    accelerator.backward(case.loss(model.train(), batch))
    if between:
        case.loss(model, batch)
    norm = float(accelerator.clip_grad_norm_(model.parameters(), 0.01))
    if between:
        case.loss(model, batch)
    accelerator.clip_grad_value_(model.parameters(), 0.001)
    model.eval()
    with torch.no_grad():
        case.loss(model, batch)  # drops what the forwards have gathered
    return norm, {name: full(parameter.grad) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("strategy", ["osdp", "zero2"])
def test_clipping_after_another_forward_reaches_all_gradients(workers, strategy):
    placement = ModelPlacement({"": UnitPlacement(UnitStore.WORLD)}, UnitPlacement(UnitStore.WORLD_KEPT))
    placement = replace(placement, units=(*placement.units, ("vit.layers.1", UnitPlacement(UnitStore.NODE))))
    plan = Plan.from_batch_sizes([1, 2], strategy=strategy, placement=placement if strategy == "osdp" else None)
    usual, after = (workers(2).run(clipped_after_another_forward, plan, between, nodes=(1, 1)) for between in (0, 1))
    for (norm, gradients), (other_norm, others) in zip(usual, after, strict=True):
        assert norm == other_norm > 0.01
        assert all(torch.equal(gradients[name], others[name]) for name in gradients)


def recomputed_in_spite_of(plan: Plan) -> tuple[list[int], list[int], list[bool]]:
    """How often each layer computes in a step after gradient_checkpointing_disable(), and copies of the model."""
    case = CASES["vit"]
    accelerator = LSHDPAccelerator(plan=plan)
    model = case.model(LAYERS)
    loader = DataLoader(case.dataset(4, torch.float32), batch_size=2, collate_fn=collate)
    model, loader, _ = accelerator.prepare(model, loader, make_optimizer(model, 1e-2, 0.0))
    model.train().gradient_checkpointing_disable()
    batch = next(iter(loader))

    def computed(of: nn.Module, step: Any) -> list[int]:
        counts = [0] * LAYERS
        for number, layer in enumerate(of.vit.layers):
            part = layer.layernorm_before
            part.register_forward_hook(lambda *_, number=number: counts.__setitem__(number, counts[number] + 1))
        step(case.loss(of, batch))
        return counts

    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    own = computed(model, accelerator.backward)
    of_copies = [computed(each, torch.Tensor.backward) for each in copies]
    marked = [any("lshdp" in name for part in each.modules() for name in vars(part)) for each in copies]
    return own, [count for counts in of_copies for count in counts], marked


def test_a_placement_s_recomputing_is_its_own(workers):
    placement = ModelPlacement(
        {"vit.layers.0": UnitPlacement(checkpoint=True), "vit.layers.2": UnitPlacement(checkpoint=True)}
    )
    plan = Plan.from_batch_sizes([2, 2], strategy="osdp", placement=placement)
    for own, of_copies, marked in workers(2).run(recomputed_in_spite_of, plan, nodes=(2,)):
        assert own == [2, 1, 2, 1]
        assert of_copies == [1] * (2 * LAYERS) and marked == [False, False]


def disagreeing() -> str:
    plan = Plan.from_batch_sizes([1, 1], strategy="osdp")
    rank = int(os.environ["RANK"])
    store = [UnitStore.WORLD, UnitStore.NODE][rank]
    return refused_at_start(replace(plan, placement=ModelPlacement(default=UnitPlacement(store))))


def test_ranks_that_disagree_on_a_placement_say_so(workers):
    for said in workers(2).run(disagreeing, nodes=(1, 1)):
        assert "the ranks do not agree on the plan" in said
