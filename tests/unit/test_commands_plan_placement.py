# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""``accelerate-lshdp plan --placement auto``: a plan with the place of every block, its proof, its picture."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_commands_plan import a_profile

from accelerate_lshdp import Plan
from accelerate_lshdp.cli.main import main
from accelerate_lshdp.documents.placement import UnitStore
from accelerate_lshdp.documents.profile import Profile
from accelerate_lshdp.planning import CertificateError, plan_placement
from accelerate_lshdp.planning.placement.from_profile import profiled_cluster, profiled_model
from accelerate_lshdp.planning.proofs.plan import verify_plan


BLOCKS = 6


def unit(*modules: str, parameters: int = 7_000_000, activations: float = 40e6) -> dict[str, Any]:
    sizes = {
        "activation_bytes": activations,
        "input_bytes": activations / 10,
        "flops": 3e9,
        "largest_parameter": parameters // 3,
    }
    return {"modules": list(modules), "parameters": parameters, "trainable": parameters, **sizes}


def with_units(**changes: Any) -> dict[str, Any]:
    """The profile of two nodes of two ranks, with the sizes of blocks of which two are tied, and links of 1 GB/s."""
    document = a_profile()
    blocks = [unit("h.0", "h.1"), *(unit(f"h.{place}") for place in range(2, BLOCKS + 1))]
    document["units"] = {"units": blocks, "root": unit("", activations=20e6), "working_bytes": 5e6}
    line = {"latency_seconds": 1e-4, "seconds_per_byte": 1e-9, "points": []}
    document["network"] |= {"all_reduce": line, "inside": line}
    for rank in document["ranks"]:
        rank |= {"process_bytes": 300_000_000, "memory": None, "memory_limit_bytes": None}
    return document | changes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("profile.json").write_text(json.dumps(with_units()))
    return tmp_path


def plan(*words: str, code: int = 0) -> Plan | None:
    assert main(["plan", "profile.json", "--placement", "auto", "--no-yaml", *words]) == code
    return Plan.load("lshdp_plan.json") if code == 0 else None


def test_the_plan_is_the_planners_with_limits_prediction_and_proof(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = plan("--total", "16", "--memory-limit", "1.4GB", "--no-accumulation")
    profile = Profile.load("profile.json")
    expected = plan_placement(
        profiled_model(profile), profiled_cluster(profile, [1_400_000_000] * 4), total_batch_size=16
    )
    assert str(made.strategy) == "osdp" and made.micro_batches == list(expected.micro_batches)
    assert made.total_batch_size == 16
    placements = dict(made.placement.units)
    # Blocks that share a parameter are one unit of the planner, and both are named in the plan.
    assert placements["h.0"] == placements["h.1"]
    assert placements == dict(expected.placement.units) | {"h.1": placements["h.0"]}
    assert made.placement.memory_limit_bytes == (1_400_000_000,) * 4
    assert made.predicted == expected.predicted.to_dict()
    assert max(made.predicted["memory_bytes"]) <= 1_400_000_000
    assert (folder / "lshdp_plan.png").stat().st_size > 10_000
    printed = " ".join(capsys.readouterr().out.split())
    assert f"of {BLOCKS} blocks" in printed and "no placement within the limits makes the step more than" in printed
    assert main(["plan", "--verify", "lshdp_plan.json"]) == 0
    assert "the certificate holds: for its batch sizes" in capsys.readouterr().out


def test_a_smaller_limit_of_one_rank_is_kept_by_that_rank(folder: Path) -> None:
    made = plan("--total", "16", "--memory-limit", "4GB,1.1GB,4GB,4GB", "--no-picture")
    assert made.placement.memory_limit_bytes == (4_000_000_000, 1_100_000_000, 4_000_000_000, 4_000_000_000)
    assert made.predicted["memory_bytes"][1] <= 1_100_000_000
    ample = plan("--total", "16", "--memory-limit", "40GB", "--no-picture")
    assert ample.predicted["step_seconds"] < made.predicted["step_seconds"]
    assert {store for _, store in ample.placement.units} != {store for _, store in made.placement.units}


def test_the_total_of_most_throughput_suits_an_unmodified_script(folder: Path) -> None:
    made = plan("--max-throughput", "--memory-limit", "1.4GB", "--no-picture")
    assert made.total_batch_size % 4 == 0 and not made.has_accumulation
    verify_plan(made)
    most = plan("--max-throughput", "--max-accumulation", "3", "--memory-limit", "1.4GB", "--no-picture")
    assert most.predicted["samples_per_second"] >= made.predicted["samples_per_second"]


def test_half_precision_mixes_only_stores_that_compute_alike(folder: Path) -> None:
    document = with_units()
    document["units"]["mixed_precision"] = "bf16"
    Path("profile.json").write_text(json.dumps(document))
    for limit in ("1GB", "1.4GB", "4GB"):
        made = plan("--total", "16", "--memory-limit", limit, "--no-picture")
        verify_plan(made)
        sharded = {placement.store.strategy.is_world_sharded for placement in made.placement.placements}
        assert len(sharded) == 1


def test_the_precision_is_that_of_the_profile(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = with_units()
    document["units"]["mixed_precision"] = "bf16"
    Path("profile.json").write_text(json.dumps(document))
    words = ["plan", "profile.json", "--placement", "auto", "--total", "16", "--memory-limit", "4GB", "--no-picture"]
    assert main([*words, "--mixed-precision", "fp16"]) == 2
    assert "found --mixed-precision fp16, expected bf16" in capsys.readouterr().err
    assert main(words) == 0
    assert 'mixed_precision: "bf16"' in Path("node0.yaml").read_text()
    # Whole and sharded units round differently, and the certificate is about one of the two.
    assert "no placement within the limits with the same rounding" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("words", [("--max-accumulation", "0"), ("--max-accumulation", "-1")])
def test_steps_of_no_micro_batch_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    plan("--max-throughput", "--memory-limit", "4GB", *words, code=2)
    assert f"found --max-accumulation {words[1]}, expected at least 1" in capsys.readouterr().err


def test_two_limits_of_a_rank_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan("--total", "16", "--memory-limit", "4GB", "--set", "rank.0.memory=1GB", code=2)
    assert "name them all in --memory-limit" in capsys.readouterr().err


HOST = {
    "to_device_bytes_per_second": 12e9,
    "to_host_bytes_per_second": 10e9,
    "optimizer_seconds_per_parameter": 1e-9,
    "memory_bytes": 64 * 10**9,
}


def with_devices(**changes: Any) -> dict[str, Any]:
    document = with_units(**changes)
    for node in document["cluster"]["nodes"]:
        node["device"] = "cuda"
    for rank, measured in enumerate(document["ranks"]):
        measured["host"] = HOST | {"optimizer_seconds_per_parameter": (1 + rank) * 1e-9}
    return document


def test_what_is_measured_of_hosts_is_planned_with() -> None:
    document = with_devices()
    document["ranks"][3]["host"]["memory_bytes"] = 32 * 10**9
    cluster = profiled_cluster(Profile.from_dict(document), [10**9] * 4)
    assert cluster.device_link.seconds_per_byte == pytest.approx(1 / 10e9)
    assert cluster.host_limits == (int(0.8 * 64e9), int(0.8 * 32e9))
    # Each rank of a node steps half of the parameters, and the slower one counts.
    trained = 7_000_000 * (BLOCKS + 1)
    assert cluster.host_optimizer_seconds == pytest.approx((2e-9 * trained / 2, 4e-9 * trained / 2))
    del document["ranks"][2]["host"]
    cluster = profiled_cluster(Profile.from_dict(document), [10**9] * 4)
    assert cluster.device_link is None and cluster.host_limits is None and cluster.host_optimizer_seconds == ()


def test_units_go_to_host_memory_where_devices_have_too_little(folder: Path) -> None:
    document = with_devices()
    for rank in document["ranks"]:
        rank["host"]["optimizer_seconds_per_parameter"] = 1e-7  # so slow that nobody would choose it
    Path("profile.json").write_text(json.dumps(document))
    ample = plan("--total", "16", "--memory-limit", "40GB", "--no-picture")
    short = plan("--total", "16", "--memory-limit", "0.75GB", "--no-picture")
    assert UnitStore.HOST not in {placement.store for placement in ample.placement.placements}
    assert UnitStore.HOST in {placement.store for placement in short.placement.placements}
    verify_plan(short)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memory-limit", "0.2GB"], "The nearest that one keeps"),
        (["--memory-limit", "1GB,2GB"], "found 2 sizes in --memory-limit, expected one, or one for each of 4 ranks"),
        ([], "found ranks without a limit of memory"),
        (["--memory-limit", "4GB", "--strategy", "lsdp"], "leave --strategy out"),
        (["--memory-limit", "4GB", "--no-overlap"], "leave it out"),
    ],
)
def test_mistakes_are_one_line(
    folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan("--total", "16", *words, code=2)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not Path("lshdp_plan.json").exists()


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (("units",), "a profile without the sizes of the model's units"),
        (("network", "inside"), "a profile without messages inside nodes"),
        (("ranks", 1, "process_bytes"), "no process_bytes of rank 1"),
    ],
)
def test_an_earlier_profile_says_to_profile_again(
    folder: Path, missing: tuple[Any, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    document = with_units()
    place: Any = document
    for key in missing[:-1]:
        place = place[key]
    del place[missing[-1]]
    Path("profile.json").write_text(json.dumps(document))
    plan("--total", "16", "--memory-limit", "4GB", code=2)
    error = capsys.readouterr().err
    assert message in error and "Profile again" in error and error.count("\n") == 1


def test_a_limit_without_a_placement_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "profile.json", "--total", "16", "--memory-limit", "4GB"]) == 2
    assert "--memory-limit goes with --placement auto" in capsys.readouterr().err


MUTATIONS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another place of a block": lambda plan: plan["placement"]["units"]["h.2"].update(
        store="node" if plan["placement"]["units"]["h.2"]["store"] == "replicate" else "replicate"
    ),
    "another place of a tied block": lambda plan: plan["placement"]["units"]["h.1"].update(
        checkpoint=not plan["placement"]["units"]["h.1"]["checkpoint"]
    ),
    "a block less": lambda plan: plan["placement"]["units"].pop("h.3"),
    "a block that the profile lacks": lambda plan: plan["placement"]["units"].update({"h.9": {"store": "node"}}),
    "a shorter step": lambda plan: plan["predicted"].update(step_seconds=plan["predicted"]["step_seconds"] / 2),
    "less memory": lambda plan: plan["predicted"]["memory_bytes"].__setitem__(0, 1),
    "other batch sizes": lambda plan: [
        rank.update(micro_batch_size=rank["micro_batch_size"] + more)
        for rank, more in zip(plan["batch"]["ranks"], (1, -1), strict=False)
    ],
    "other limits": lambda plan: plan["placement"].update(memory_limit_bytes=[10**10] * 4),
    "smaller blocks": lambda plan: plan["profile"]["units"]["units"][1].update(activation_bytes=1.0),
    "a faster network": lambda plan: plan["profile"]["network"]["all_reduce"].update(seconds_per_byte=1e-12),
    "a higher bound": lambda plan: plan["certificate"].update(
        bound_nanoseconds=plan["certificate"]["step_nanoseconds"] + 1
    ),
    "a step that is claimed shorter": lambda plan: plan["certificate"].update(step_nanoseconds=1, bound_nanoseconds=1),
    "other counts": lambda plan: plan["certificate"]["counts"][0].reverse(),
    "another strategy": lambda plan: (plan.pop("placement"), plan.update(strategy="fsdp")),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_plan_that_was_changed_is_refused(folder: Path, mutation: str) -> None:
    made = plan("--total", "16", "--memory-limit", "1.4GB", "--no-picture").to_dict()
    verify_plan(Plan.from_dict(copy.deepcopy(made)))
    changed = copy.deepcopy(made)
    MUTATIONS[mutation](changed)
    with pytest.raises(CertificateError):
        verify_plan(Plan.from_dict(changed))


def test_many_blocks_of_every_store_are_drawn(folder: Path) -> None:
    from accelerate_lshdp.cli.placement_picture import _draw_blocks, _legend
    from accelerate_lshdp.comparing.report import style
    from accelerate_lshdp.documents.placement import UnitPlacement

    stores = list(UnitStore)
    blocks = [
        (
            f"model.layers.{place}",
            UnitPlacement(
                store=store,
                checkpoint=place % 2 == 0,
                slices=4 if store.takes_slices(f"model.layers.{place}") and place > 30 else 1,
            ),
        )
        for place in range(60)
        for store in [stores[place % len(stores)]]
    ]
    figure = style.new_figure(12, 5)
    axes = figure.subplots()
    _draw_blocks(axes, [("", UnitPlacement()), *blocks])
    labels = [handle.get_label() for handle in _legend([placement for _, placement in blocks])]
    assert set(labels) == {*map(str, stores), "activations recomputed", "1/k: gathered in k slices"}
    assert len(axes.texts) == len(axes.patches) == 61
    # No label is wider than its box.
    figure.canvas.draw()
    for text, box in zip(axes.texts, axes.patches, strict=True):
        inner, outer = text.get_window_extent(), box.get_window_extent()
        assert outer.x0 <= inner.x0 and inner.x1 <= outer.x1 and outer.y0 <= inner.y0 and inner.y1 <= outer.y1
    figure.savefig("blocks.png", dpi=style.DPI)
