# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""``accelerate-lshdp plan``: what it makes of a profile, what it prints, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accelerate_lshdp import Plan, planning
from accelerate_lshdp.cli import plan as plan_command
from accelerate_lshdp.cli.config import check_with_accelerate
from accelerate_lshdp.cli.main import main
from accelerate_lshdp.cli.plan_prediction import predict, split_equally
from accelerate_lshdp.documents.plan import Strategy
from accelerate_lshdp.documents.profile import Profile
from accelerate_lshdp.engine.policies import choose_mechanism, shard_groups_of
from accelerate_lshdp.planning import BatchSizes, RankProfile, TimeCurve, plan_fixed_total
from accelerate_lshdp.runtime.topology import Topology


# Seconds a sample. At 36 samples all ranks finish together: 16, 8, 8 and 4 samples in 0.16 s.
PACE = (0.01, 0.02, 0.02, 0.04)
OPTIMIZER_SECONDS, LOAD_SECONDS = 0.03, 0.02
FIXED_SECONDS = OPTIMIZER_SECONDS + LOAD_SECONDS  # of every step, whatever the batch
SIZES = (1, 2, 4, 8, 16, 32)


def a_profile(**changes: Any) -> dict[str, Any]:
    """Two nodes of two ranks, exactly linear; the network is so fast that the backward hides all of it."""
    ranks = [
        {
            "rank": rank,
            "batch_sizes": list(SIZES),
            "seconds": [pace * size for size in SIZES],
            "spread": [0.01] * len(SIZES),
            "max_micro_batch_size": SIZES[-1],
            "limited_by": "request",
            "device": f"processor {rank}",
            "optimizer_seconds": OPTIMIZER_SECONDS,
            "communication_load_seconds": LOAD_SECONDS,
            "accumulation_overhead_seconds": 0.0,
            "memory": {"batch_sizes": [1, 32], "bytes": [10**9, 32 * 10**9]},
            "memory_limit_bytes": 40 * 10**9,
            "bucket_ready": [
                {"batch_sizes": list(SIZES), "seconds": [share * pace * size for size in SIZES]}
                for share in (0.5, 0.9)
            ],
        }
        for rank, pace in enumerate(PACE)
    ]
    fit = {"latency_seconds": 1e-6, "seconds_per_byte": 1e-9}
    document = {
        "version": 1,
        "kind": "profile",
        "strategy": "lsdp",
        "subject": {"script": "train.py", "arguments": [], "parameters": 500, "gradient_bytes": 2000},
        "cluster": {
            "nodes": [
                {"ranks": 2, "address": "10.0.0.1", "device": "cpu"},
                {"ranks": 2, "address": None, "device": "cpu"},
            ]
        },
        "ranks": ranks,
        "bucket_bytes": [1000, 1000],
        "network": {**fit, "ping_pong": [[1000, 2e-6]], "all_reduce": {**fit, "points": [[1000, 2e-6]]}},
        "measured_seconds": 60.0,
        "versions": {"torch": "2.13.0"},
    }
    return {**document, **changes}


def slow_network(seconds: float) -> dict[str, Any]:
    """Every bucket travels this long."""
    fit = {"latency_seconds": seconds, "seconds_per_byte": 0.0}
    return {**fit, "ping_pong": [], "all_reduce": {**fit, "points": []}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("profile.json").write_text(json.dumps(a_profile()))
    return tmp_path


def plan(*words: str) -> Plan:
    assert main(["plan", "profile.json", *words]) == 0
    return Plan.load("lshdp_plan.json")


def test_the_plan_is_written_with_all_that_explains_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = plan("--total", "36", "--no-accumulation")
    assert made.batch_sizes == [16, 8, 8, 4] and str(made.strategy) == "lsdp"
    assert made.cluster.node_sizes == [2, 2]
    assert Profile.from_dict(made.profile) == Profile.load("profile.json")
    predicted = made.predicted
    # 0.16 s of forward and backward, and 0.02 s of sending gradients meanwhile.
    assert predicted["compute_seconds"] == pytest.approx([0.18] * 4)
    assert predicted["idle_fraction"] == pytest.approx(0, abs=1e-9)
    # Both buckets are ready before the backward ends, and then travel in no time: forward, backward and optimizer.
    assert predicted["step_seconds"] == pytest.approx(0.16 + FIXED_SECONDS)
    assert predicted["memory_bytes"] == [16 * 10**9, 8 * 10**9, 8 * 10**9, 4 * 10**9]
    assert sorted(path.name for path in folder.iterdir()) == [
        "lshdp_plan.json",
        "lshdp_plan.png",
        "node0.yaml",
        "node1.yaml",
        "profile.json",
    ]

    output = capsys.readouterr().out
    rows = [" ".join(line.split()) for line in output.splitlines()]
    assert "rank node device batch micro-batches compute idle memory" in rows
    assert "0 0 processor 0 16 1 x 16 0.18 s 0.0% 16 GB (60% free)" in rows
    assert "3 1 processor 3 4 1 x 4 0.18 s 0.0% 4 GB (90% free)" in rows
    for line in (
        "plan:          0.21 s a step (predicted), 171.4 samples/s, 0.0% idle",
        # 9 samples on each: 0.38 s on the slowest, 0.2225 s on average, and 0.03 s of optimizer
        "equal batches: 0.41 s a step (predicted), 87.8 samples/s, 38.4% idle",
        "The plan's step takes 49% less time.",
        "wrote lshdp_plan.json, lshdp_plan.png, node0.yaml, node1.yaml",
        "next: on every node N, accelerate-lshdp launch --config_file nodeN.yaml --plan lshdp_plan.json"
        " YOUR_TRAINING_SCRIPT.py ITS_ARGUMENTS",
    ):
        assert line in output, output


def test_a_plan_that_lacks_time_of_profiling_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = a_profile()
    document["ranks"][0]["limited_by"] = "time"
    Path("profile.json").write_text(json.dumps(document))
    plan("--total", "36", "--no-accumulation", "--no-picture", "--no-yaml")
    assert "Profile for longer" not in capsys.readouterr().out
    assert plan("--total", "128", "--no-accumulation", "--no-picture", "--no-yaml").batch_sizes[0] == 32
    found = capsys.readouterr().out
    assert "(32 samples on rank 0); larger ones may be faster. Profile for longer. (accelerate-lshdp profile" in found


def test_the_yaml_files_are_what_config_writes(folder: Path) -> None:
    plan("--total", "36", "--main-port", "4000", "--mixed-precision", "bf16", "--yaml-dir", "yaml")
    flags = ["--main-port", "4000", "--mixed-precision", "bf16", "--output-dir", "expected"]
    assert main(["config", "--plan", "lshdp_plan.json", *flags]) == 0
    for name in ("node0.yaml", "node1.yaml"):
        text = Path("yaml", name).read_text()
        assert text == Path("expected", name).read_text()
        check_with_accelerate(text)


def test_a_changed_yaml_file_is_kept_and_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("node1.yaml").write_text("mine")
    plan("--total", "36", "--no-picture")
    assert Path("node1.yaml").read_text() == "mine" and Path("node0.yaml").exists()
    captured = capsys.readouterr()
    assert "node1.yaml is kept" in captured.err and "wrote lshdp_plan.json, node0.yaml\n" in captured.out
    plan("--total", "36", "--no-picture", "--force")
    check_with_accelerate(Path("node1.yaml").read_text())


def test_several_nodes_need_an_address_for_their_yaml_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [{"ranks": 2, "address": None, "device": "cpu"}] * 2
    Path("profile.json").write_text(json.dumps(a_profile(cluster={"nodes": nodes})))
    assert main(["plan", "profile.json", "--total", "36"]) == 2
    assert "--main-ip" in capsys.readouterr().err and not Path("lshdp_plan.json").exists()
    assert plan("--total", "36", "--no-yaml").batch_sizes is not None
    assert not list(folder.glob("*.yaml"))


def test_machines_of_a_file_need_no_yaml_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("machines.yaml").write_text("nodes: [{address: alpha, ranks: 2}, {address: beta, ranks: 2, ssh: b@beta}]")
    made = plan("--total", "36", "--hosts", "machines.yaml", "--no-picture")
    assert [node.address for node in made.cluster.nodes] == ["alpha", "beta"]
    # What was measured stays as it was.
    assert [node.device for node in made.cluster.nodes] == ["cpu", "cpu"]
    assert sorted(path.name for path in folder.iterdir()) == ["lshdp_plan.json", "machines.yaml", "profile.json"]
    # The file does not say that the machines train on processors, as they were profiled.
    command = "next: accelerate-lshdp launch --hosts machines.yaml --cpu"
    assert f"{command} --plan lshdp_plan.json YOUR" in capsys.readouterr().out
    plan("--total", "36", "--hosts", "machines.yaml", "--no-picture", "--mixed-precision", "bf16")
    assert f"{command} --mixed-precision bf16 --plan lshdp_plan.json YOUR" in capsys.readouterr().out
    Path("machines.yaml").write_text("nodes: [{address: alpha, ranks: 2, cpu: 4}, {address: beta, ranks: 2, cpu: 8}]")
    plan("--total", "36", "--hosts", "machines.yaml", "--no-picture")
    assert "next: accelerate-lshdp launch --hosts machines.yaml --plan" in capsys.readouterr().out
    assert main(["plan", "--verify", "lshdp_plan.json"]) == 0
    words = ["plan", "profile.json", "--total", "36", "--hosts", "machines.yaml"]
    assert main([*words, "--main-ip", "192.0.2.1"]) == 2
    assert "--main-ip cannot be combined with --hosts" in capsys.readouterr().err
    Path("machines.yaml").write_text("nodes: [{address: alpha, ranks: 2}, {address: beta, ranks: 1}]")
    assert main(words) == 2
    assert "found machines with [2, 1] ranks, but the profile is of nodes with [2, 2]" in capsys.readouterr().err
    mixed = a_profile()
    mixed["cluster"]["nodes"][1]["device"] = "cuda"
    Path("profile.json").write_text(json.dumps(mixed))
    Path("machines.yaml").write_text("nodes: [{address: alpha, ranks: 2, cpu: 4}, {address: beta, ranks: 2}]")
    assert main(words) == 2
    assert "nodes[1]: found a machine that does not say that it trains on a GPU" in capsys.readouterr().err


def test_limits_can_be_overridden_and_stay_in_the_plan(folder: Path) -> None:
    flags = ("--total", "36", "--no-accumulation", "--no-picture", "--no-yaml")
    made = plan(*flags, "--set", "rank.0.max=10", "--set", "rank.1.memory=5GB,rank.2.max=9")
    # Memory is linear here, 1 GB a sample: rank 1 gets 5; rank 3 has to take what nobody else may.
    assert made.batch_sizes == [10, 5, 9, 12]
    assert made.profile["ranks"][0]["max_micro_batch_size"] == 10
    assert made.profile["ranks"][1]["memory_limit_bytes"] == 5 * 10**9
    assert main(["plan", "--verify", "lshdp_plan.json"]) == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--total", "3"], "nearest feasible total is 4"),
        (["--total", "200", "--no-accumulation"], "nearest feasible total is 128"),
        (["--total", "36", "--set", "rank.0.min=3"], "expected rank.N.max=M"),
        (["--total", "36", "--set", "rank.4.max=3"], "the ranks 0 to 3"),
        (["--total", "36", "--set", "rank.0.max=33"], "expected 1 to 32 samples"),
        (["--total", "36", "--set", "rank.0.max=0"], "expected 1 to 32 samples"),
        (["--total", "36", "--set", "rank.0.memory=lots"], "an amount of memory such as 8GB"),
        (["--total", "36", "--set", "rank.0.memory=10MB"], "memory"),
        (["--total", "36", "--max-accumulation", "3"], "--max-throughput"),
        (["--total", "36", "--nodes", "1,3"], "found nodes of [2, 2] ranks, but --nodes says [1, 3]"),
        (["--total", "36", "--output", "plan.png"], "--picture"),
        (["--total", "36", "--output", "plan.json", "--picture", "plan.json"], "--picture"),
        (["--total", "36", "--picture", "no/such.png"], "found --picture no/such.png, expected a file in a folder"),
        (["--total", "99999999999999"], "found --total 99999999999999, expected at most 1000000"),
        (
            ["--max-throughput", "--max-accumulation", "100000"],
            "found --max-accumulation 100000, expected at most 256",
        ),
        ([], "--total B"),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    words: list[str], expected: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "profile.json", *words]) == 2
    captured = capsys.readouterr()
    assert expected in captured.err and captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("accelerate-lshdp plan: ") and captured.out == ""
    assert [path.name for path in folder.iterdir()] == ["profile.json"]


def test_the_next_command_leaves_the_training_script_to_the_user(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was profiled need not train anything: nothing but a function that the measuring calls."""
    Path("my plans").mkdir()
    assert main(["plan", "profile.json", "--total", "36", "--no-picture", "--output", "my plans/plan.json"]) == 0
    assert Path("my plans/node1.yaml").exists()
    expected = "--config_file 'my plans/nodeN.yaml' --plan 'my plans/plan.json' YOUR_TRAINING_SCRIPT.py ITS_ARGUMENTS"
    assert f"next: on every node N, accelerate-lshdp launch {expected}\n" in capsys.readouterr().out


def test_what_was_profiled_from_python_is_planned_like_any_script(folder: Path) -> None:
    document = a_profile()
    document["subject"]["script"] = None
    Path("profile.json").write_text(json.dumps(document))
    assert plan("--total", "36", "--no-accumulation", "--no-picture", "--no-yaml").batch_sizes == [16, 8, 8, 4]


def test_a_plan_whose_proof_fails_is_not_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def worse(ranks: list[RankProfile], total: int, **options: Any) -> BatchSizes:
        best = plan_fixed_total(ranks, total, **options)
        sizes = [best.batch_sizes[0] - 1, *best.batch_sizes[1:3], best.batch_sizes[3] + 1]
        return replace(best, batch_sizes=sizes, micro_batches=[(size, 1) for size in sizes])

    monkeypatch.setattr(planning, "plan_fixed_total", worse)
    assert main(["plan", "profile.json", "--total", "36", "--no-accumulation"]) == 2
    assert "rank 0 of the plan" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["profile.json"]


@pytest.mark.parametrize("text", [None, "", "{}", '{"version": 1, "strategy": "lsdp"}'])
def test_what_is_no_profile_is_refused(text: str | None, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if text is not None:
        Path("other.json").write_text(text)
    assert main(["plan", "other.json", "--total", "36"]) == 2
    captured = capsys.readouterr()
    assert "other.json" in captured.err and "accelerate-lshdp profile" in captured.err
    assert main(["plan"]) == 2 and "name a profile" in capsys.readouterr().err


def test_memory_that_was_not_measured_can_only_be_limited_by_samples(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = a_profile()
    document["ranks"][1].update(memory=None, memory_limit_bytes=None)
    Path("profile.json").write_text(json.dumps(document))
    assert main(["plan", "profile.json", "--total", "36", "--set", "rank.1.memory=1GB"]) == 2
    assert "memory was not measured on rank 1" in capsys.readouterr().err
    assert plan("--total", "36", "--no-yaml").predicted["memory_bytes"][1] is None
    assert "not measured" in capsys.readouterr().out


def test_more_memory_than_was_measured_gives_no_more_samples(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = a_profile()
    document["ranks"][0]["limited_by"] = "memory"
    Path("profile.json").write_text(json.dumps(document))
    flags = ("--total", "128", "--no-accumulation", "--no-picture", "--no-yaml")
    assert plan(*flags, "--set", "rank.0.memory=80GB").batch_sizes == [32, 32, 32, 32]
    assert "rank 0 was measured up to 32 samples" in capsys.readouterr().err


def test_a_slow_network_is_planned_for_unless_overlap_is_refused(folder: Path) -> None:
    """The second bucket is ready at 90 % of the backward and then needs 0.1 s: until 0.244 s, if all take 0.16 s."""
    Path("profile.json").write_text(json.dumps(a_profile(network=slow_network(0.1))))
    flags = ("--total", "36", "--no-accumulation", "--no-picture", "--no-yaml")
    made = plan(*flags)
    # With the first bucket at 50 %: 0.08 + 0.2 s. Equal finishing times still mean equal compute. What sending takes
    # of the processors is over before the network is.
    assert made.predicted["step_seconds"] == pytest.approx(0.28 + OPTIMIZER_SECONDS)
    made = plan(*flags, "--no-overlap")
    assert made.predicted["step_seconds"] == pytest.approx(0.16 + 0.2 + FIXED_SECONDS)


def test_world_sharded_strategies_do_not_overlap_and_other_strategies_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("profile.json").write_text(json.dumps(a_profile(network=slow_network(0.1))))
    made = plan("--total", "36", "--strategy", "fsdp", "--no-accumulation", "--no-picture", "--no-yaml")
    assert str(made.strategy) == "fsdp" and made.profile["strategy"] == "fsdp"
    assert "were measured for lsdp, not for fsdp" in capsys.readouterr().err
    # Two gathers and a scatter are one and a half all-reduces.
    assert made.predicted["step_seconds"] == pytest.approx(0.16 + 0.3 + FIXED_SECONDS)


@pytest.mark.parametrize("strategy", list(Strategy))
@pytest.mark.parametrize("node_sizes", [(1,), (4,), (2, 2), (1, 2), (1, 1, 1)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_shard_groups_are_the_engines(strategy: Strategy, node_sizes: tuple[int, ...], device: str) -> None:
    topology = Topology(0, node_sizes)
    engine = shard_groups_of(strategy, topology, choose_mechanism(strategy, topology, device, "auto"))
    nodes = [{"ranks": size, "address": None, "device": device} for size in node_sizes]
    document = a_profile(strategy=str(strategy), cluster={"nodes": nodes})
    document["ranks"] = document["ranks"][: sum(node_sizes)]
    assert Profile.from_dict(document).shard_groups() == [list(group) for group in engine]


@pytest.mark.parametrize(
    ("strategy", "groups"), [("ddp", [[0], [1], [2], [3]]), ("lsdp", [[0, 1], [2, 3]]), ("fsdp", [[0, 1, 2, 3]])]
)
def test_accumulation_is_equal_where_parameters_are_shared(
    strategy: str, groups: list[list[int]], folder: Path
) -> None:
    """100 samples do not fit in one micro-batch of at most 20, 20, 10 and 4."""
    document = a_profile(strategy=strategy)
    for rank, largest in zip(document["ranks"], (20, 20, 10, 4), strict=True):
        rank["max_micro_batch_size"] = largest
    Path("profile.json").write_text(json.dumps(document))
    made = plan("--total", "100", "--no-picture", "--no-yaml")
    assert made.total_batch_size == 100 and made.has_accumulation
    counts = [steps for _, steps in made.micro_batches]
    assert all(len({counts[rank] for rank in group}) == 1 for group in groups)
    assert made.batch.allow_unequal_accumulation == (len(set(counts)) > 1)
    made.check(4, groups, [2, 2])
    assert main(["plan", "profile.json", "--total", "100", "--no-accumulation"]) == 2


def test_the_highest_throughput(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a network to wait for, more samples share one optimizer step."""
    made = plan("--max-throughput", "--no-picture", "--no-yaml")
    assert made.batch_sizes == [32, 16, 16, 8]  # rank 0 is full; more on the others would only make them slower
    assert made.predicted["step_seconds"] == pytest.approx(0.32 + FIXED_SECONDS)
    assert "batch size 18 (x 4 ranks = 72) in an unmodified loop" in capsys.readouterr().out
    more = plan("--max-throughput", "--max-accumulation", "2", "--no-picture", "--no-yaml")
    assert max(steps for _, steps in more.micro_batches) == 2
    assert more.total_batch_size / more.predicted["step_seconds"] > 72 / 0.37
    assert "an unmodified loop needs a multiple of 4" in capsys.readouterr().out


def test_the_highest_throughput_is_one_that_a_batch_size_makes(folder: Path) -> None:
    """Where a rank's memory ends at an odd size, the best of all totals is none of a script's batch size x ranks."""
    free = plan("--max-throughput", "--max-accumulation", "1", "--set", "rank.0.max=31", "--no-picture", "--no-yaml")
    made = plan("--max-throughput", "--set", "rank.0.max=31", "--no-picture", "--no-yaml")
    assert free.total_batch_size % 4 and made.total_batch_size % 4 == 0
    assert abs(made.total_batch_size - free.total_batch_size) < 4
    assert main(["plan", "--verify", "lshdp_plan.json"]) == 0


def test_predictions_follow_the_model_of_a_step() -> None:
    curve, ready = TimeCurve((1, 4), (0.1, 0.4)), TimeCurve((1, 4), (0.05, 0.2))
    rank = RankProfile(curve, 4, bucket_ready=[ready, curve], fixed_seconds=0.01, accumulation_overhead_seconds=0.02)
    # Two micro-batches of 4, with 0.02 s between them; the buckets travel 0.3 and 0.05 s after they are ready.
    prediction = predict([rank], [(4, 2)], [0.3, 0.05], 0.0)
    assert prediction.compute_seconds == pytest.approx([0.82])
    assert prediction.step_seconds == pytest.approx(0.01 + 0.42 + max(0.4, 0.2 + 0.35, 0.4 + 0.05))
    assert prediction.batch_sizes == [8] and prediction.samples_per_second == pytest.approx(
        8 / prediction.step_seconds
    )
    assert predict([rank], [(4, 2)], None, 0.5).step_seconds == pytest.approx(0.01 + 0.82 + 0.5)


@pytest.mark.parametrize(
    ("total", "accumulation", "expected"),
    [
        (4, False, [(2, 1), (2, 1)]),
        (5, False, [(3, 1), (2, 1)]),
        (1, False, None),
        (8, False, None),
        (8, True, [(2, 2), (2, 2)]),
        (14, True, [(1, 7), (1, 7)]),
        (9, True, None),  # 5 and 4 samples have no common number of micro-batches but one
    ],
)
def test_equal_splits(total: int, accumulation: bool, expected: list[tuple[int, int]] | None) -> None:
    ranks = [RankProfile(TimeCurve((1, 3), (0.1, 0.3)), largest) for largest in (3, 2)]
    assert split_equally(ranks, total, allow_accumulation=accumulation) == expected


def test_verify_accepts_a_plan_and_refuses_a_changed_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan("--total", "36", "--no-accumulation", "--no-picture", "--no-yaml")
    capsys.readouterr()
    assert main(["plan", "--verify", "lshdp_plan.json"]) == 0
    assert "the certificate holds" in capsys.readouterr().out
    original = json.loads(Path("lshdp_plan.json").read_text())

    def moved(document: dict[str, Any]) -> None:  # one sample from a rank to another: as many, but slower
        document["batch"]["ranks"][0]["micro_batch_size"] -= 1
        document["batch"]["ranks"][3]["micro_batch_size"] += 1

    def faster(document: dict[str, Any]) -> None:  # then rank 3 should have had more
        rank = document["profile"]["ranks"][3]
        rank["seconds"] = [seconds / 4 for seconds in rank["seconds"]]

    def unproved(document: dict[str, Any]) -> None:
        del document["certificate"]

    for change in (moved, faster, unproved):
        document = json.loads(json.dumps(original))
        change(document)
        Path("changed.json").write_text(json.dumps(document))
        assert main(["plan", "--verify", "changed.json"]) == 2, change.__name__
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1


def test_planning_needs_no_torch(folder: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'accelerate', 'transformers', 'psutil'):\n"
        "    sys.modules[name] = None\n"  # importing one raises
        "from accelerate_lshdp.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]) or main(['plan', '--verify', 'lshdp_plan.json']))\n"
    )
    command = [sys.executable, "-c", code, "plan", "profile.json", "--total", "36"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert Path("lshdp_plan.json").exists() and Path("node1.yaml").exists()
    assert Path("lshdp_plan.png").stat().st_size > 20_000


def test_without_matplotlib_there_is_a_plan_but_no_picture(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan_command, "find_spec", lambda name: None)
    assert main(["plan", "profile.json", "--total", "36", "--picture", "mine.png"]) == 2
    assert "matplotlib" in capsys.readouterr().err and not Path("lshdp_plan.json").exists()
    plan("--total", "36")
    assert "no picture: matplotlib is not installed" in capsys.readouterr().err
    assert not list(folder.glob("*.png"))


@pytest.mark.parametrize("ranks", [4, 20])
def test_the_picture_shows_curves_and_bars(ranks: int, folder: Path) -> None:
    from matplotlib.image import imread

    document = a_profile(cluster={"nodes": [{"ranks": 4, "address": None, "device": "cpu"}]})
    document["ranks"] = [{**document["ranks"][rank % 4], "rank": rank} for rank in range(ranks)]
    document["cluster"]["nodes"][0]["ranks"] = ranks
    Path("profile.json").write_text(json.dumps(document))
    plan("--total", str(9 * ranks), "--picture", "picture.png", "--no-yaml")
    pixels = imread("picture.png")[..., :3]
    assert not Path("lshdp_plan.png").exists() and pixels.shape[1] > 1000
    for half in (pixels[:, : pixels.shape[1] // 2], pixels[:, pixels.shape[1] // 2 :]):
        assert 0.02 < (half.min(axis=-1) < 0.9).mean() < 0.6
