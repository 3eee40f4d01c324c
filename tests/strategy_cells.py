# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Where patterns that could go wrong in silence run: all nodes and strategies with `-m slow`, some by default."""

from __future__ import annotations

from typing import Any

import pytest


Cell = tuple[str, tuple[int, ...]]

NODES = ((1, 1), (2,), (1, 2), (2, 2))
#: "collectives" is lsdp as on GPUs.
STRATEGIES = ("ddp", "lsdp", "collectives", "fsdp")
CELLS: list[Cell] = [(strategy, nodes) for nodes in NODES for strategy in STRATEGIES]
#: Batch sizes of a global batch of 4, by number of ranks.
SIZES_OF_4 = {2: [3, 1], 3: [2, 1, 1], 4: [1, 1, 1, 1]}


def cell_id(strategy: str, nodes: tuple[int, ...]) -> str:
    return f"{strategy}-{'+'.join(map(str, nodes))}"


def cells(*default: Cell, among: list[Cell] | None = None) -> Any:
    """A mark that runs a test of `strategy` and `nodes` in all cells, those that are not named in slow runs only."""
    others = [cell for cell in (CELLS if among is None else among) if cell not in default]
    parameters = [pytest.param(*cell, id=cell_id(*cell)) for cell in default]
    parameters += [pytest.param(*cell, id=cell_id(*cell), marks=pytest.mark.slow) for cell in others]
    return pytest.mark.parametrize(("strategy", "nodes"), parameters)


def gathers(strategy: str, nodes: tuple[int, ...]) -> bool:
    """Whether the ranks have shards, so that they meet in every forward."""
    return strategy == "fsdp" or strategy == "collectives" and len(set(nodes)) == 1 and nodes[0] > 1
