# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Random trainings of small transformers: models, layouts of nodes, strategies, placements, batch sizes."""

from __future__ import annotations

import math
import random
from typing import Any

from memory_runs.prediction import cluster_of, placed, uniform

from accelerate_lshdp import Plan, Strategy
from accelerate_lshdp.documents.placement import ModelPlacement, UnitPlacement
from accelerate_lshdp.planning.placement.traffic import offered_stores


LAYOUTS = ((2, 2), (1, 2), (1, 1, 1, 1), (2,))
STEPS = 3


def random_job(seed: int, nodes: tuple[int, ...], blocks: int = 12) -> dict[str, Any]:
    """A job of `memory_runs.launch.train` whose nodes may take what is predicted for them, and no more.

    Args:
        seed: the same one gives the same job.
        nodes: ranks on each node.
        blocks: the most that the model may have.
    """
    rng = random.Random(seed)
    model = {
        "blocks": rng.randint(2, blocks),
        "width": rng.choice((256, 384, 512, 640)),
        "vocabulary": rng.choice((512, 2048, 4096)),
        "tokens": rng.choice((16, 32, 64)),
    }
    steps = rng.choice((1, 1, 2))
    return _job(rng, nodes, model, [(rng.randint(1, 6), steps) for _ in range(sum(nodes))])


def large_job(seed: int, nodes: tuple[int, ...]) -> dict[str, Any]:
    """A job as of `random_job` with more blocks and more samples: there is more that leaves holes in the heap."""
    rng = random.Random(seed)
    model = {
        "blocks": rng.choice((16, 24, 32)),
        "width": rng.choice((256, 384, 512)),
        "vocabulary": rng.choice((512, 2048)),
        "tokens": rng.choice((32, 64)),
    }
    return _job(rng, nodes, model, [(rng.choice((2, 8, 16)), rng.choice((1, 2)))] * sum(nodes))


def _job(
    rng: random.Random, nodes: tuple[int, ...], model: dict[str, int], sizes: list[tuple[int, int]]
) -> dict[str, Any]:
    """A job with some strategy, or placements of single blocks."""
    if rng.random() < 0.5:
        strategy = rng.choice([own for own in Strategy if own is not Strategy.OSDP])
        plan = Plan.from_batch_sizes(sizes, strategy=strategy)
        ranks = [math.ceil(rank.total_bytes) for rank in uniform(model, plan, nodes)]
    else:
        plan = Plan.from_batch_sizes(sizes, strategy="osdp", placement=_placement(rng, model["blocks"], nodes))
        ranks = placed(model, plan, nodes)
    allowed = [sum(ranks[sum(nodes[:node]) :][:size]) for node, size in enumerate(nodes)]
    return {"plan": plan.to_dict(), "model": model, "steps": STEPS, "allowed": allowed}


def _placement(rng: random.Random, blocks: int, nodes: tuple[int, ...]) -> ModelPlacement:
    """Runs of blocks that are kept alike, and the root in some other way."""
    cluster = cluster_of(nodes)
    stores = offered_stores(cluster, is_root=False)
    units = {"": UnitPlacement(store=rng.choice(offered_stores(cluster, is_root=True)))}
    for block in range(blocks):
        if block == 0 or rng.random() < 0.3:
            own = UnitPlacement(store=rng.choice(stores), checkpoint=rng.random() < 0.3)
        units[f"blocks.{block}"] = own
    return ModelPlacement(units=tuple(units.items()))
