# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The quickstart as a new user runs it, and its parts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from accelerate_lshdp import Plan
from accelerate_lshdp.cli.main import main
from accelerate_lshdp.cli.quickstart_data import load_digit_images
from accelerate_lshdp.cli.quickstart_report import draw_picture, largest_loss_difference, print_table, saving
from accelerate_lshdp.cli.quickstart_worker import equal_share, share_of_the_faster
from accelerate_lshdp.documents.profile import Profile
from accelerate_lshdp.planning import RankProfile, TimeCurve, plan_fixed_total
from accelerate_lshdp.planning.proofs.plan import verify_plan


BIN = Path(sys.executable).parent
COLUMNS = 100


def _quickstart(folder: Path, *options: str, seconds: float, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in an environment with nothing set."""
    bare = {"PATH": f"{BIN}{os.pathsep}/usr/bin{os.pathsep}/bin", "HOME": os.environ["HOME"], **environment}
    command = [BIN / "accelerate-lshdp", "quickstart", "--output-dir", folder, *options]
    return subprocess.run(command, env=bare, capture_output=True, text=True, timeout=seconds)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("steps", "total"), [(20, 120), pytest.param(60, 500, marks=pytest.mark.slow)])
def test_quickstart_plans_by_speed_and_is_exact(tmp_path: Path, steps: int, total: int) -> None:
    options = ["--steps", str(steps), "--total-batch-size", str(total), "--seconds", "6"]
    options = [] if steps == 60 else options  # those are the defaults
    finished = _quickstart(tmp_path / "out", *options, seconds=230)
    assert finished.returncode == 0, finished.stderr
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "lshdp_plan.json",
        "quickstart.png",
        "results.json",
    ]
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    equal, planned = results["ddp_equal"], results["lshdp"]
    told = f"{equal} {planned}"

    # The slowed rank takes longer over the same number of samples. How much faster the planned run is depends on what
    # else the machine does, so no test says it; the README shows a run.
    assert equal["compute_seconds"][1] > equal["compute_seconds"][0], told
    assert planned["step_seconds"] > 0 and 0 <= planned["idle_fraction"] < 1, told

    assert len(equal["losses"]) == len(planned["losses"]) == steps
    assert all(abs(one - other) < 1e-4 for one, other in zip(equal["losses"], planned["losses"], strict=True))
    assert planned["losses"][-1] < (0.2 if steps == 60 else 0.5) * planned["losses"][0]
    assert min(equal["accuracy"], planned["accuracy"]) > (0.9 if steps == 60 else 0.6)
    assert (equal["strategy"], planned["strategy"]) == ("ddp", "lsdp")

    # A busy machine is measured as far as the plan needs: its budget of seconds may end before.
    plan = Plan.load(tmp_path / "out" / "lshdp_plan.json")
    assert min(rank["max_micro_batch_size"] for rank in plan.profile["ranks"]) >= total * 2 / 3
    assert equal["batch_sizes"] == [total // 2] * 2 and planned["batch_sizes"] == plan.batch_sizes
    assert plan.total_batch_size == total
    verify_plan(plan)
    # Sizes follow what was measured, which on a busy machine is not always what was slowed.
    times = [profile.time(total // 2) for profile in Profile.from_dict(plan.profile).rank_profiles()]
    faster = times.index(min(times))
    if times[faster] < 0.8 * times[1 - faster]:
        assert plan.batch_sizes[faster] > plan.batch_sizes[1 - faster]
    assert plan.predicted["step_seconds"] == plan.certificate["step_seconds"]

    lines = finished.stdout.splitlines()
    assert max(len(line) for line in lines if str(tmp_path) not in line) <= COLUMNS
    assert "slowed 2x by emulation" in finished.stdout
    for label in ("step time", "idle fraction", "samples per second", "final training loss", "held-out accuracy"):
        assert sum(label in line for line in lines) == 1
    assert "Warning" not in finished.stderr


@pytest.mark.slow
def test_a_failed_rank_fails_the_command_with_its_reason(tmp_path: Path) -> None:
    broken = tmp_path / "path" / "sklearn"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('these digits are broken')\n")
    out = tmp_path / "out"
    out.mkdir()
    (out / "results.json").write_text("of an earlier run")
    finished = _quickstart(out, seconds=100, PYTHONPATH=str(broken.parent))
    assert finished.returncode == 1
    assert "these digits are broken" in finished.stderr
    assert "accelerate-lshdp quickstart: training ended with exit code 1" in finished.stderr
    assert list(out.iterdir()) == []


def test_terminating_the_command_ends_its_ranks(tmp_path: Path) -> None:
    command = [BIN / "accelerate-lshdp", "quickstart", "--output-dir", tmp_path / "out"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        started: list[psutil.Process] = []
        deadline = time.monotonic() + 60
        while len(started) < 3 and time.monotonic() < deadline:  # the launcher and two ranks
            time.sleep(0.2)
            started = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        assert process.wait(40) == 128 + signal.SIGTERM
    assert len(started) == 3
    assert psutil.wait_procs(started, timeout=20)[1] == []
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--total-batch-size", "33"], "found --total-batch-size 33, expected an even number from 2 to 1500"),
        (["--total-batch-size", "1502"], "found --total-batch-size 1502"),
        (["--steps", "0"], "found --steps 0"),
        (["--slowdown", "0.5"], "found --slowdown 0.5, expected 1"),
        (["--slowdown", "nan"], "found --slowdown nan"),
        (["--seconds", "0"], "found --seconds 0"),
        (["--seconds", "nan"], "found --seconds nan"),
        (["--seed", "-1"], "found --seed -1"),
    ],
)
def test_impossible_options(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quickstart", "--output-dir", str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_missing_packages_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["quickstart", "--output-dir", str(tmp_path / "out")]) == 2
    assert "matplotlib and scikit-learn cannot be imported" in capsys.readouterr().err


@pytest.mark.parametrize(("largest", "share"), [((300, 300), 250), ((142, 128), 128), ((300, 127), 127)])
def test_a_machine_without_memory_takes_a_total_that_it_could_measure(largest: tuple[int, int], share: int) -> None:
    ranks = [RankProfile(TimeCurve([1, size], [0.1, 1.0]), max_micro_batch_size=size) for size in largest]
    assert equal_share(500, ranks) == share
    assert sum(plan_fixed_total(ranks, 2 * share).batch_sizes) == 2 * share


@pytest.mark.parametrize(
    ("total", "slowdown", "share"), [(500, 2.0, 334), (120, 2.0, 80), (500, 1.0, 250), (2, 1.0, 1), (2, 9.0, 1)]
)
def test_a_profile_reaches_the_faster_ranks_share(total: int, slowdown: float, share: int) -> None:
    assert share_of_the_faster(total, slowdown) == share


def test_digits_are_split_the_same_way_every_time() -> None:
    train, held_out = load_digit_images()
    assert (len(train), len(held_out)) == (1500, 297)
    again, _ = load_digit_images()
    assert torch.equal(train.images, again.images) and torch.equal(train.labels, again.labels)
    assert train.images.shape[1:] == (1, 32, 32)
    assert (train.images.min(), train.images.max()) == (-1, 1)
    assert sorted(held_out.labels.unique().tolist()) == list(range(10))
    unique = torch.cat([train.images, held_out.images]).flatten(1).unique(dim=0)
    assert len(unique) == 1797  # no image is in both parts


def _results(step_seconds: float) -> dict[str, Any]:
    def one(strategy: str, sizes: list[int], seconds: float, compute: list[float], loss: float) -> dict[str, Any]:
        return {
            "strategy": strategy,
            "batch_sizes": sizes,
            "step_seconds": seconds,
            "idle_fraction": 1 - sum(compute) / 2 / max(compute),
            "samples_per_second": sum(sizes) / seconds,
            "compute_seconds": compute,
            "wait_seconds": [seconds - value for value in compute],
            "losses": [2.3, 1.0, loss],
            "accuracy": 0.9762,
            "emulation": {"rank": 1, "slowdown": 2.0},
        }

    return {
        "ddp_equal": one("ddp", [100250, 100250], 1234.5, [600.0, 1200.0], 0.5),
        "lshdp": one("lsdp", [134000, 66500], step_seconds, [0.6 * step_seconds] * 2, 0.50003),
    }


@pytest.mark.parametrize(
    ("step_seconds", "verdict"), [(864.15, "takes 30 % less time"), (1357.95, "takes 10 % more time")]
)
def test_table_says_what_was_measured(step_seconds: float, verdict: str, capsys: pytest.CaptureFixture[str]) -> None:
    results = _results(step_seconds)
    print_table(results)
    text = capsys.readouterr().out
    assert verdict in text
    assert max(map(len, text.splitlines())) <= COLUMNS
    rows = {line.split("│")[1].strip(): line.split("│")[2:5] for line in text.splitlines() if line.startswith("│")}
    cells = {label: [cell.strip() for cell in row] for label, row in rows.items()}
    assert cells["batch sizes (rank 0 + rank 1)"] == ["100250 + 100250", "134000 + 66500", ""]
    assert cells["step time"] == ["1234.500 s", f"{step_seconds:.3f} s", f"{-saving(results) * 100:+.1f} %"]
    assert cells["idle fraction"] == ["25.0 %", "0.0 %", "-25.0 points"]
    assert cells["final training loss"] == ["0.5000", "0.5000", "+3.0e-05"]
    assert cells["held-out accuracy"] == ["97.6 %", "97.6 %", "+0.0 points"]
    assert "differ by at most 3e-05" in text


def test_loss_curves_of_unequal_length_are_not_compared() -> None:
    results = _results(1000.0)
    assert largest_loss_difference(results) == pytest.approx(3e-5)
    results["lshdp"]["losses"].pop()
    with pytest.raises(ValueError):
        largest_loss_difference(results)


def test_picture_is_a_png_of_readable_size(tmp_path: Path) -> None:
    from PIL import Image

    draw_picture(_results(1000.0), tmp_path / "picture.png")
    with Image.open(tmp_path / "picture.png") as picture:
        assert picture.format == "PNG" and picture.width >= 1200
        # Both colours of the curves are there, and the picture is more than its frame.
        colours = {colour for _, colour in picture.convert("RGB").getcolors(maxcolors=1 << 24)}
    assert {(0x00, 0x72, 0xB2), (0xE6, 0x9F, 0x00)} <= colours
