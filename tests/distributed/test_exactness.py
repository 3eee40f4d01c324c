# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Invariant 1: every strategy, mesh, split and accumulation gives the gradient and parameters of one process.

The default suite runs a pairwise selection (every pair of values of two factors occurs); ``-m slow`` runs all.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from exactness import Setting, check, train

from accelerate_lshdp.documents.strategy import Strategy


STRATEGIES = tuple(strategy.value for strategy in Strategy)
NODES = ((1,), (2,), (1, 1), (1, 2), (4,), (1, 1, 1, 1), (2, 2))
#: Kinds of splits: what a rank with index i gets, as (micro-batch size, accumulation steps).
SPLITS = {
    "equal": lambda rank, world: (2, 1),
    "unequal": lambda rank, world: (1 + (world - rank) % 4, 1),
    "accumulated": lambda rank, world: (1 + rank % 3, 2),
}
MODELS = ("vit", "gpt2")
DTYPES = ("float64", "float32")
ACCUMULATION = (1, 2)


def setting_of(strategy: str, nodes: tuple, split: str, model: str, dtype: str, own: int) -> Setting:
    world = sum(nodes)
    sizes = tuple(SPLITS[split](rank, world) for rank in range(world))
    # lsdp and group_sharding differ by where FSDP2 keeps parameters: one of the two shows what it does, on CPUs too.
    intra_node = "collectives" if strategy == "group_sharding" else "auto"
    options = {"model": model, "dtype": dtype, "own_accumulation": own, "steps": 8 // own}
    return Setting(strategy, sizes, nodes, intra_node=intra_node, **options)


def everything() -> list[Setting]:
    return [setting_of(*cell) for cell in itertools.product(STRATEGIES, NODES, SPLITS, MODELS, DTYPES, ACCUMULATION)]


def pairwise() -> Iterator[Setting]:
    """A small set of cells in which every pair of values of any two factors occurs (greedy, fixed seed)."""
    factors = [STRATEGIES, NODES, tuple(SPLITS), MODELS, DTYPES, ACCUMULATION]
    wanted = {
        (i, a, j, b)
        for (i, first), (j, second) in itertools.combinations(enumerate(factors), 2)
        for a, b in itertools.product(first, second)
    }
    chooser = random.Random(0)
    while wanted:
        candidates = [tuple(chooser.choice(values) for values in factors) for _ in range(60)]
        i, a, j, b = min(wanted, key=repr)
        candidates = [tuple(a if k == i else b if k == j else v for k, v in enumerate(cell)) for cell in candidates]
        best = max(candidates, key=lambda cell: len(wanted & pairs_of(cell)))
        wanted -= pairs_of(best)
        yield setting_of(*best)


def pairs_of(cell: tuple) -> set:
    return {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(enumerate(cell), 2)}


def run(workers, setting: Setting) -> None:
    check(workers(setting.world_size).run(train, setting, nodes=setting.nodes, timeout=90), setting.dtype)


@pytest.mark.parametrize("setting", sorted(pairwise(), key=lambda s: s.world_size), ids=str)
def test_equals_one_process(workers, setting):
    run(workers, setting)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", sorted({sum(nodes) for nodes in NODES}))
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.timeout(1200)
def test_equals_one_process_everywhere(workers, strategy, world_size):
    for setting in everything():
        if setting.strategy == strategy and setting.world_size == world_size:
            run(workers, setting)


SPECIAL = [
    Setting("ddp", (3, 2), (1, 1), frozen=("embeddings",)),
    Setting("lsdp", (3, 1, 2), (1, 2), frozen=("layers.0",), model="vit"),
    Setting("fsdp", (3, 2), (2,), frozen=("h.0",), model="gpt2"),
    Setting("lsdp", (1, 2, 2, 3), (2, 2), frozen=("wte",), model="gpt2", intra_node="collectives"),
    Setting("ddp", (3, 2), (1, 1), gradient_checkpointing=True, model="gpt2"),
    Setting("lsdp", (3, 2), (1, 1), gradient_checkpointing=True, model="vit", intra_node="collectives"),
    Setting("lsdp", (1, 2, 2, 3), (2, 2), gradient_checkpointing=True, model="gpt2"),
    Setting("zero2", (3, 2), (2,), gradient_checkpointing=True, model="vit"),
    Setting("fsdp", (3, 2), (2,), gradient_checkpointing=True, model="gpt2", num_workers=2),
    # Gradients that stay as zeros between steps, instead of None.
    Setting("ddp", ((2, 2), (1, 2)), (1, 1), set_to_none=False),
    Setting("lsdp", ((2, 2), (1, 2)), (1, 1), set_to_none=False, intra_node="collectives"),
    Setting("lsdp", ((2, 2), (1, 2), (1, 2), (1, 2)), (2, 2), set_to_none=False),
    Setting("fsdp", ((2, 2), (1, 2)), (2,), set_to_none=False),
    # Ranks with different numbers of micro-batches.
    Setting("ddp", ((2, 3), (1, 1)), (1, 1), unequal_accumulation=True),
    Setting(
        "lsdp",
        ((2, 1), (1, 3)),
        (1, 1),
        unequal_accumulation=True,
        model="gpt2",
        own_accumulation=2,
        intra_node="collectives",
    ),
    Setting("lsdp", ((2, 1), (1, 1), (1, 3), (2, 3)), (2, 2), unequal_accumulation=True),
    # As many steps as the tolerance of parameters is for.
    Setting("ddp", (3, 2), (1, 1), dtype="float32", steps=20),
    Setting("lsdp", (1, 2, 2, 3), (2, 2), dtype="float32", steps=20, model="gpt2"),
    Setting("fsdp", ((2, 2), (1, 2)), (2,), dtype="float32", steps=20),
    # Clipping by value too; several epochs; a last batch of one sample; fewer samples than ranks.
    Setting("lsdp", (3, 2), (2,), clip_value=0.01),
    Setting("fsdp", (3, 2), (2,), clip_value=0.01, epochs=2),
    Setting("lsdp", (1, 2, 2, 3), (2, 2), short_batch=1, epochs=2),
    Setting("ddp", ((1, 2), (2, 2)), (1, 1), short_batch=1, model="gpt2"),
    Setting("fsdp", (1, 1, 2), (1, 2), short_batch=1, epochs=3, steps=1, model="gpt2"),
    # Whole copies that are summed inside the node first: in memory, or by collectives as on GPUs.
    Setting("ddp", (1, 2, 2, 3), (2, 2), model="gpt2"),
    Setting("ddp", ((2, 2), (1, 2), (1, 2), (1, 2)), (2, 2), set_to_none=False, clip_value=0.01),
    Setting("ddp", ((2, 1), (1, 3), (1, 1)), (1, 2), unequal_accumulation=True),
    Setting("ddp", (3, 1, 2), (1, 2), dtype="float32", steps=20),
    Setting("ddp", (1, 2, 2, 3), (2, 2), model="gpt2", intra_node="collectives"),
    Setting("ddp", ((2, 1), (1, 3), (1, 1)), (1, 2), unequal_accumulation=True, intra_node="collectives"),
    Setting("ddp", (3, 2), (2,), intra_node="collectives"),
    Setting("lsdp", (3, 1, 2), (1, 2), model="gpt2", intra_node="collectives"),
]


#: Special cases whose mechanism another one has with other sizes or nodes.
ALSO_ELSEWHERE = (3, 5, 7, 10, 13, 16, 18, 19, 22, 24, 26, 29, 30)


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(setting, id=f"{setting}_{place}", marks=pytest.mark.slow if place in ALSO_ELSEWHERE else [])
        for place, setting in enumerate(SPECIAL)
    ],
)
def test_special_cases_equal_one_process(workers, setting):
    run(workers, setting)
