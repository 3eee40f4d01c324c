# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`accelerate-lshdp estimate`: from a configuration and a cluster file to a table, figures and a choice."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import ViTConfig

from accelerate_lshdp.cli.main import main
from accelerate_lshdp.cli.placement_text import describe_placement, name_blocks
from accelerate_lshdp.documents.cluster_file import read_cluster
from accelerate_lshdp.documents.network import LinkCost
from accelerate_lshdp.documents.placement import ModelPlacement, UnitPlacement, UnitStore
from accelerate_lshdp.documents.strategy import SharedBy, strategy_traits
from accelerate_lshdp.documents.unit_sizes import MeasuredUnit, ModelUnits
from accelerate_lshdp.documents.wire_format import WIRE_FORMATS
from accelerate_lshdp.estimation.advice import advise
from accelerate_lshdp.estimation.devices import CORE_FLOPS, DEVICES, find_device
from accelerate_lshdp.estimation.estimates import FORMATS, STRATEGIES, Estimate, estimate_all, powersgd_bytes
from accelerate_lshdp.estimation.hardware import Hardware
from accelerate_lshdp.estimation.model_measurement import MeasuredModel
from accelerate_lshdp.planning import (
    ModelSizes,
    PlacementCluster,
    RankProfile,
    TimeCurve,
    plan_placement,
    verify_placement,
)
from accelerate_lshdp.planning.cost.cluster_model import ClusterModel
from accelerate_lshdp.planning.cost.cluster_model import ModelSize as CostedModel
from accelerate_lshdp.planning.cost.strategy_time import predict_step
from accelerate_lshdp.planning.placement.sent_bytes import bytes_between_nodes


UNEVEN = """\
nodes: [{cpu: 0.8, memory: 2 GiB}, {cpu: 0.5}, {cpu: 0.4}, {cpu: 0.3}]
network: {rate: 1 Gb/s, delay: 0.1 ms}
"""
NETWORK = {"rate": "1 Gb/s"}


def model(parameters: int = 100_000_000, activations: float = 50e6) -> MeasuredModel:
    """A described model: 10 units of 9 % each."""
    side, each = int((parameters / 10) ** 0.5), parameters * 9 // 100
    flops = 2.0 * parameters * 100
    units = tuple(
        MeasuredUnit((f"h.{place}",), each, each, activations / 10, activations / 100, flops / 10, each)
        for place in range(10)
    )
    rest = parameters - 10 * each
    root = MeasuredUnit(("",), rest, rest, 0, 0, 0, rest)
    return MeasuredModel("a model", ModelUnits(units, root, 0), ((side, side),) * 10, 3 * flops)


def cluster(*nodes: dict, rate: str = "1 Gb/s") -> Hardware:
    return Hardware.of(read_cluster({"nodes": list(nodes), "network": {"rate": rate}}))


def by_label(estimates: list[Estimate]) -> dict[str, Estimate]:
    return {estimate.label: estimate for estimate in estimates}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    config = ViTConfig(
        hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=4
    )
    config.to_json_file(tmp_path / "config.json")
    (tmp_path / "cluster.yaml").write_text(UNEVEN)
    return tmp_path / "config.json", tmp_path / "cluster.yaml"


def test_the_command_end_to_end(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    config, nodes = files
    arguments = ["estimate", "--model", str(config), "--cluster", str(nodes), "--total-batch-size", "32"]
    assert main([*arguments, "--json", str(tmp_path / "out.json")]) == 0
    printed = capsys.readouterr().out
    assert all(strategy in printed for strategy in STRATEGIES)
    assert "choose: " in printed
    assert max(map(len, printed.splitlines())) <= 100
    document = json.loads((tmp_path / "out.json").read_text())
    estimates = {(entry["strategy"], entry["communication_dtype"]): entry for entry in document["estimates"]}
    # Formats that only reductions between nodes know are not offered where all ranks share a copy.
    everywhere = [name for name in FORMATS if not WIRE_FORMATS[name].between_nodes_only]
    shared_by_all = [strategy_traits(name).shared_by is SharedBy.WORLD for name in STRATEGIES]
    one_of_each_block = 1  # osdp, in fp32
    assert len(estimates) == one_of_each_block + sum(len(everywhere if s else FORMATS) for s in shared_by_all)
    batches = [size * steps for size, steps in estimates["lshdp", "fp32"]["micro_batches"]]
    assert sum(batches) == 32 and batches == sorted(batches, reverse=True) and batches[0] > batches[-1]
    parameters = document["model"]["parameters"]
    sent = estimates["lshdp", "fp32"]["prediction"]["bytes_between_nodes"]
    assert sent == pytest.approx([1.5 * 4 * parameters] * 4)
    assert estimates["ddp", "bf16"]["prediction"]["bytes_between_nodes"] == pytest.approx([0.75 * 4 * parameters] * 4)
    assert document["choose"] in {f"{strategy} fp32" for strategy in ("hdp", "lshdp")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--formats": "fp8"}, "--formats fp8"),
        ({"--total-batch-size": "3"}, "at least 4, one sample a rank"),
        ({"--sequence-length": "0"}, "--sequence-length 0"),
        ({"--cluster": "nowhere.yaml"}, "found no such file, expected a cluster"),
        ({"--model": "nowhere.json"}, "no file or folder nowhere.json"),
        ({"--profile": "nowhere.json"}, "nowhere.json: found nothing that can be read"),
    ],
)
def test_mistakes_are_one_line(
    files: tuple[Path, Path], change: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = {"--model": str(files[0]), "--cluster": str(files[1])} | change
    assert main(["estimate", *(word for pair in arguments.items() for word in pair)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_cluster_files_describe_real_and_emulated_nodes() -> None:
    read = cluster(
        {"device": "NVIDIA GeForce RTX 3090", "ranks": 2, "memory": "64 GiB"},
        {"device": "mine", "tflops": 12, "device_memory": "16 GiB"},
        {"cpu": 8, "ranks": 2},
    )
    assert read.node_sizes == (2, 1, 2)
    assert read.nodes[0].device == DEVICES["RTX 3090"]
    assert read.nodes[0].memory_bytes == 64 * 2**30
    assert (read.nodes[1].device.memory_bytes, read.nodes[1].rank_flops("bf16")) == (16 * 2**30, 12e12)
    assert read.nodes[2].rank_flops("no") == 4 * CORE_FLOPS
    assert not read.has_devices
    assert cluster({"cpu": 2, "ranks": 2, "tflops": 0.2}).nodes[0].rank_flops("no") == pytest.approx(0.2e12)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"device": "Abacus"}, "unknown device 'Abacus' without tflops"),
        ({"device": 3}, "the name of a product"),
        ({"device": "T4", "tflops": -1}, "more than 0"),
        ({"device": "T4", "device_memory": "16"}, 'device_memory: found "16"'),
        ({"cpu": 1, "device_memory": "16 GiB"}, "without a device"),
        ({"ranks": 1}, "cpu"),
        ({"cpu": 1, "gpu": "T4"}, "unknown key"),
    ],
)
def test_mistakes_in_cluster_files_say_where(node: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        cluster({"cpu": 1}, node)
    assert "nodes[1]" in str(caught.value)


def test_devices_are_found_by_what_people_call_them() -> None:
    assert find_device("nvidia-a100 80gb PCIe") == DEVICES["A100 80GB"]
    assert find_device("T4", memory_bytes=5).memory_bytes == 5


def test_memory_limits_batches_and_strategies() -> None:
    # 1.6 GB of states a copy, 50 MB a sample, cards of 2 GiB: a copy fits with a few samples at once.
    card = {"device": "card", "tflops": 10, "device_memory": "2.7 GiB", "ranks": 2}
    estimates = by_label(estimate_all(model(), cluster(card, card), 64))
    ddp = estimates["ddp fp32"]
    assert ddp.fits and max(steps for _, steps in ddp.micro_batches) > 1
    assert max(ddp.device_bytes) <= 0.95 * 2.7 * 2**30
    # Half of it is on each of a node's devices, so there is room for more samples at once.
    assert max(size for size, _ in estimates["group_sharding fp32"].micro_batches) > max(
        s for s, _ in ddp.micro_batches
    )
    for estimate in estimates.values():
        assert sum(estimate.batch_sizes) == (64 if estimate.fits else 0)
    # A host without room for what is offloaded.
    small = by_label(estimate_all(model(), cluster({**card, "memory": "2 GiB"}, card), 64))
    assert not small["lsdp fp32"].fits and "host memory" in small["lsdp fp32"].problem
    assert small["ddp fp32"].fits
    # Cards that hold no copy, and no copy's share.
    tiny = {**card, "device_memory": "1.4 GiB"}
    estimates = estimate_all(model(), cluster(tiny, tiny), 64)
    fitting = {estimate.strategy for estimate in estimates if estimate.fits}
    assert "ddp" not in fitting and {"lsdp", "lshdp", "fsdp_offload"} <= fitting
    advice = advise(model(), cluster(tiny, tiny), estimates)
    assert advice.exact.strategy in fitting
    assert "does not fit" in advice.reasons[0]
    none = {**card, "device_memory": "0.2 GiB"}
    advice = advise(model(), cluster(none, none), estimate_all(model(), cluster(none, none), 64))
    assert (advice.exact, advice.lossy) == (None, None)
    assert "Nothing fits" in advice.reasons[-1]


def test_choices_follow_bandwidth_and_speeds() -> None:
    fast, slow = {"device": "RTX 3090"}, {"device": "RTX 2080"}
    uneven = cluster(fast, slow, rate="100 Gb/s")
    estimates = estimate_all(model(1_000_000, 1e5), uneven, 64)
    advice = advise(model(), uneven, estimates)
    assert advice.exact.strategy in ("hdp", "lshdp")
    assert advice.exact.batch_sizes[0] > 2 * advice.exact.batch_sizes[1]
    assert "save" in advice.reasons[-1] and "%" in advice.reasons[-1]
    # The same speeds everywhere: equal batches are simpler. A slow network: fewer bytes win by far.
    even = cluster(fast, fast, rate="100 Mb/s")
    advice = advise(model(), even, estimate_all(model(), even, 64))
    assert advice.exact.strategy == "ddp"
    assert advice.lossy.communication_dtype == "powersgd"
    assert "the network sets the pace" in " ".join(advice.reasons)
    seconds = {
        name: estimate.prediction.seconds for name, estimate in by_label(estimate_all(model(), even, 64)).items()
    }
    assert seconds["ddp fp32"] > seconds["ddp bf16"] > seconds["ddp int8"] > seconds["ddp powersgd"]
    assert seconds["fsdp fp32"] > seconds["zero2 fp32"] >= seconds["ddp fp32"] * 0.99
    assert seconds["zero1 fp32"] == seconds["zero2 fp32"]


def test_measured_speeds_take_the_place_of_estimated_ones() -> None:
    nodes = cluster({"cpu": 1}, {"cpu": 1})
    curve = TimeCurve([1, 16], [3.0, 48.0])
    profiles = [RankProfile(curve, 16, fixed_seconds=0.5)] * 2
    estimates = by_label(estimate_all(model(), nodes, 8, profiles=profiles))
    assert estimates["ddp fp32"].prediction.ranks[0].compute_seconds == pytest.approx(12.0)
    assert estimates["ddp fp32"].prediction.ranks[0].optimizer_seconds == pytest.approx(0.5)
    assert estimates["fsdp fp32"].prediction.ranks[0].optimizer_seconds == pytest.approx(0.25)
    with pytest.raises(ValueError, match="a profile of 1 ranks"):
        estimate_all(model(), nodes, 8, profiles=profiles[:1])


def test_powersgd_sends_thin_matrices_and_small_ones_as_they_are() -> None:
    assert powersgd_bytes([(100, 50), (30, 1), (4, 4)], rank=4) == 4 * (4 * 150 + 30 + 16)


def test_the_row_of_osdp_is_the_optimum_of_the_planner_within_the_files_memory() -> None:
    card = {"device": "card", "tflops": 10, "device_memory": "2 GiB", "ranks": 2}
    nodes, size = cluster(card, card), model(activations=20e6)
    row = by_label(estimate_all(size, nodes, 64))["osdp fp32"]
    # By hand, from the file and the data sheet: 1e13 operations a second, of which forward and backward take three
    # forwards; AdamW moves 28 bytes a parameter at the 500e9 bytes a second of an unknown card, and takes 1.5e-9 s on
    # one of eight cores of the host; a process has 600 MiB; 5 % of the memory are spared.
    sample = 6.0 * 100_000_000 * 100 / 1e13
    profile = RankProfile(TimeCurve([1, 64], [sample, 64 * sample]), 64, fixed_seconds=100_000_000 * 28 / 500e9)
    link = LinkCost(20e-6, 1 / 12e9)
    expected = plan_placement(
        ModelSizes.of(size.units),
        PlacementCluster(
            (2, 2),
            [profile] * 4,
            (int(0.95 * 2 * 2**30),) * 4,
            nodes.link,
            link,
            link,
            host_optimizer_seconds=(100_000_000 * 1.5e-9 / 8,) * 2,
            process_bytes=600 * 2**20,
        ),
        total_batch_size=64,
        most_steps=8,
    )
    assert row.placement.placement == expected.placement
    assert row.prediction.seconds == pytest.approx(expected.predicted.step_seconds)
    assert list(row.micro_batches) == list(expected.micro_batches)
    assert max(row.device_bytes) == max(expected.predicted.memory_bytes) <= 0.95 * 2 * 2**30
    verify_placement(row.placement.problem, row.placement.certificate)
    # Nothing fits: the reason names what would.
    none = {**card, "device_memory": "0.7 GiB"}
    row = by_label(estimate_all(size, cluster(none, none), 64))["osdp fp32"]
    assert not row.fits and "The nearest that one keeps" in row.problem


@pytest.mark.parametrize("nodes", [(1, 1, 1), (2, 2), (1, 2)])
@pytest.mark.parametrize("steps", [1, 3])
def test_units_that_are_kept_alike_send_what_their_strategy_sends(nodes: tuple[int, ...], steps: int) -> None:
    size = ModelSizes.of(model(10**7).units)
    bytes_of = 4.0 * 10**7
    whole = CostedModel(bytes_of, bytes_of, tuple(4.0 * unit.parameters for unit in size.units))
    profiles = [RankProfile(TimeCurve([1], [1.0]), 1)] * sum(nodes)
    for store in (UnitStore.REPLICATE, UnitStore.NODE, UnitStore.WORLD, UnitStore.WORLD_KEPT):
        simulated = predict_step(
            str(store.strategy),
            profiles,
            [(1, steps)] * sum(nodes),
            whole,
            ClusterModel(nodes, LinkCost(0.0, 1e-9)),
        )
        sent = bytes_between_nodes(size, ModelPlacement(default=UnitPlacement(store=store)), nodes, steps)
        assert sent == pytest.approx(simulated.bytes_between_nodes)


def test_blocks_are_named_in_short() -> None:
    assert name_blocks(["h.0", "h.1", "h.2", "h.7", "encoder"]) == "h.0-2, 7; encoder"
    assert name_blocks([f"h.{place}" for place in range(0, 40, 2)]) == "h.0, 2, 4, 6, 8, 10, ..."


def test_lines_say_which_block_goes_where_and_why() -> None:
    card = {"device": "card", "tflops": 10, "device_memory": "2 GiB", "ranks": 2}
    row = by_label(estimate_all(model(activations=200e6), cluster(card, card), 64))["osdp fp32"]
    lines = describe_placement(row.placement)
    counted = [int(found[1]) for line in lines if (found := re.match(r"(\d+) of 10 blocks \(h\.", line))]
    assert sum(counted) == 10
    recomputed = [line for line in lines if ", recomputed" in line]
    assert recomputed and all("recomputing frees" in line and "of activations" in line for line in recomputed)
    assert any(line.startswith("memory: ") and "of 2.04 GB" in line for line in lines)
    assert re.search(r"forward: .* s of sending, which hide .* s of computing", lines[-1])
