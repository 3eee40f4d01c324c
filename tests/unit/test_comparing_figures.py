# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Figures of a comparison that are computed: formula bytes, and what stands in results.json."""

from __future__ import annotations

from typing import Any

import pytest

from accelerate_lshdp.comparing.cases import Case
from accelerate_lshdp.comparing.formula_bytes import formula_bytes
from accelerate_lshdp.comparing.measurement import Measurement
from accelerate_lshdp.comparing.results import all_machines
from accelerate_lshdp.documents.placement import UnitPlacement, UnitStore
from accelerate_lshdp.planning.cost.cluster_model import ModelSize


# 800 bytes of parameters: two blocks of 300 and a root of 200.
SIZE = ModelSize(800, 800, (300, 300))


@pytest.mark.parametrize(
    ("strategy", "four_nodes", "two_by_two"),
    [
        # Ring all-reduce over all ranks: 2 (W-1)/W.
        ("torch_ddp", 1200, 1200),
        # Over one rank a node, of shards or of what the node has summed: 2 (N-1)/N.
        ("torch_hsdp", 1200, 800),
        ("ddp", 1200, 800),
        ("lsdp", 1200, 800),
        ("group_sharding", 1200, 800),
        # Blocks gathered twice and the root once, (600 * 2 + 200) * 3/4; gloo reduces and scatters by an all-reduce.
        ("torch_fsdp", 1050 + 1200, 1050 + 1200),
        # By all-to-all (N x 1), and in two stages: (N-1)/N.
        ("fsdp", 1050 + 600, 700 + 400),
        ("fsdp_offload", 1050 + 600, 700 + 400),
        ("zero2", 600 + 600, 400 + 400),
        ("zero1", 600 + 600, 400 + 400),
    ],
)
def test_bytes_of_each_strategy(strategy: str, four_nodes: float, two_by_two: float) -> None:
    assert formula_bytes(Case(strategy), [1, 1, 1, 1], SIZE) == pytest.approx([four_nodes] * 4)
    assert formula_bytes(Case(strategy), [2, 2], SIZE) == pytest.approx([two_by_two] * 2)
    assert formula_bytes(Case(strategy), [2], SIZE) == [0.0]


def test_bytes_of_units_of_several_stores_are_the_sum_of_what_each_sends() -> None:
    to_node, whole = UnitPlacement(store=UnitStore.WORLD_TO_NODE), UnitPlacement(store=UnitStore.REPLICATE)
    sent = formula_bytes(Case("osdp"), [2, 2], SIZE, micro_batches=2, placements=([to_node, whole], UnitPlacement()))
    # Gathered between nodes in each forward alone, and reduced: (2 + 1) * 300 / 2; the others are summed.
    assert sent == pytest.approx([450 + 300 + 200] * 2)
    recomputed = ([UnitPlacement(store=UnitStore.WORLD, checkpoint=True)] * 2, UnitPlacement(store=UnitStore.WORLD))
    assert formula_bytes(Case("fsdp", checkpoint=True), [2, 2], SIZE, placements=recomputed) == pytest.approx(
        formula_bytes(Case("fsdp"), [2, 2], SIZE)
    )


def test_bytes_of_nodes_with_different_numbers_of_ranks() -> None:
    by_nodes = [formula_bytes(Case(strategy), [1, 2], SIZE) for strategy in ("ddp", "hdp", "lsdp", "group_sharding")]
    assert by_nodes == [pytest.approx([800, 800])] * 4
    by_ranks = [formula_bytes(Case(strategy), [1, 2], SIZE) for strategy in ("torch_ddp", "torch_hsdp")]
    assert by_ranks == [pytest.approx([4 / 3 * 800] * 2)] * 2
    # As int8, with its scales.
    assert formula_bytes(Case("ddp", "int8"), [1, 2], SIZE) == pytest.approx([200 * (1 + 4 / 1024)] * 2)


def test_bytes_of_formats_and_of_several_micro_batches() -> None:
    assert formula_bytes(Case("lsdp", "bf16"), [1, 1], SIZE) == pytest.approx([400, 400])
    assert formula_bytes(Case("lsdp", "powersgd"), [1, 1], SIZE, wire_bytes=80) == pytest.approx([80, 80])
    assert formula_bytes(Case("lsdp"), [1, 1], SIZE, micro_batches=3) == pytest.approx([800, 800])
    # Three times the gathers, one reduction.
    assert formula_bytes(Case("fsdp"), [1, 1], SIZE, micro_batches=3) == pytest.approx([3 * 700 + 400] * 2)
    with pytest.raises(ValueError, match="found format powersgd without wire_bytes"):
        formula_bytes(Case("lsdp", "powersgd"), [1, 1], SIZE)


def measured(**identity: Any) -> Measurement:
    given = {"cluster": "c", "model": "m", "network": "n", "bits_per_second": 1e9, "nodes": [1, 1]}
    measurement = Measurement(**{**given, "total_batch_size": 8, "case": Case("lshdp"), **identity})
    measurement.micro_batches = [(6, 1), (2, 1)]
    return measurement


def test_a_case_has_medians_weighted_losses_and_bytes_a_step() -> None:
    measurement = measured()
    measurement.trained([[(9.0, 4.0, 6)], [(9.0, 8.0, 2)]])  # does not count, but its loss and time do
    measurement.add_turn([[(1.0, 3.0, 6), (2.0, 2.0, 6)], [(3.0, 3.0, 2), (2.0, 2.0, 2)]], [100, 200], None)
    measurement.add_turn([[(4.0, 1.0, 6)], [(4.0, 1.0, 2)]], [60, 60], None)
    result = measurement.to_dict()
    assert result["step_seconds"] == 2.0 and result["round_seconds"] == [2.0, 4.0]
    assert result["samples_per_second"] == 4.0 and result["spread"] == 0.0
    assert result["losses"] == [[9.0, 1, 5.0], [11.0, 2, 3.0], [13.0, 3, 2.0], [17.0, 4, 1.0]]
    assert result["bytes_between_nodes"] == [55.0, 80.0] and result["bytes_inside_nodes"] is None
    assert result["label"] == "lshdp fp32" and result["batch_sizes"] == [6, 2] and result["error"] is None


def test_a_case_that_failed_has_no_figures() -> None:
    measurement = measured()
    measurement.add_turn([[(1.0, 3.0, 6)], [(1.0, 3.0, 2)]], None, None)
    measurement.error = "out of memory"
    result = measurement.to_dict()
    assert result["error"] == "out of memory" and result["losses"] == []
    assert result["step_seconds"] is None and result["batch_sizes"] is None
    assert result["nodes"] == [1, 1] and result["strategy"] == "lshdp"


def test_machines_of_several_nodes_are_added_up() -> None:
    machines = [
        {"cpu": "A", "cores": 2, "memory_bytes": 10, "kernel": "6"},
        {"cpu": "B", "cores": 4, "memory_bytes": 30, "kernel": "6"},
    ]
    assert all_machines(machines) == {"cpu": "A + B", "cores": 6, "memory_bytes": 40, "kernel": "6"}
    assert all_machines(machines[:1]) == machines[0]
