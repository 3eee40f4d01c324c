# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""``accelerate-lshdp profile``: a profile on every node, or one clear error and none."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from launching import launch

from accelerate_lshdp.cli import launch as launch_command
from accelerate_lshdp.cli import profile_worker
from accelerate_lshdp.cli.byte_sizes import format_bytes, parse_bytes
from accelerate_lshdp.cli.main import main
from accelerate_lshdp.cli.profile import _memory_limit
from accelerate_lshdp.profiling import Profile, Subject
from accelerate_lshdp.runtime.topology import Topology


SCRIPT = """\
import argparse, os, sys

import torch
from torch.utils.data import DataLoader

from accelerate_lshdp.profiling import Subject


def profiling_subject(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fail", choices=["build", "loss"])
    args = parser.parse_args(argv)
    assert sys.argv[1:] == argv
    here = int(os.environ.get("RANK", "0"))
    if args.fail == "build" and here == 1:
        raise ZeroDivisionError("cannot build")

    def loss(model, batch):
        if args.fail == "loss" and here == 1:
            raise ZeroDivisionError("cannot train")
        return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])

    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    data = [{"x": torch.randn(8), "y": torch.randn(1)} for _ in range(64)]
    return Subject(model, DataLoader(data, batch_size=4), torch.optim.AdamW(model.parameters()), loss)


if __name__ == "__main__":
    raise RuntimeError("the script was run, not imported")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("tiny.py").write_text(SCRIPT)
    return tmp_path


def profile(folder: Path, *words: str):
    command = ["-m", "accelerate_lshdp.cli.main", "profile", "--nodes", "2", "--cpu", "--seconds", "3"]
    return launch([*command, *words], 0, cwd=folder, env={"ACCELERATE_USE_CPU": None}, timeout=90)


def test_the_command_measures_two_ranks(folder: Path) -> None:
    done = profile(folder, "--strategy", "ddp", "--max-batch", "8", "--output", "out.json", "tiny.py")
    assert done.returncode == 0, done.stderr
    measured = Profile.load("out.json")
    assert [rank.rank for rank in measured.ranks] == [0, 1] and measured.cluster.node_sizes == [2]
    assert all(rank.max_micro_batch_size <= 8 for rank in measured.ranks)
    assert str(measured.strategy) == "ddp"
    assert measured.subject.script == "tiny.py" and measured.subject.arguments == ()
    assert measured.subject.parameters == 8 * 32 + 32 + 32 + 1
    assert "321 parameters, strategy ddp" in done.stdout and "wrote out.json\n" in done.stdout
    assert done.stdout.endswith("next: accelerate-lshdp plan out.json --total B\n")
    assert "measuring micro-batches" in done.stderr and "Traceback" not in done.stderr
    # It is what the planner reads.
    largest = [rank.max_micro_batch_size for rank in measured.ranks]
    flags = ["--total", str(sum(largest)), "--no-accumulation", "--no-picture"]
    assert main(["plan", "out.json", *flags]) == 0


@pytest.mark.slow
def test_the_command_says_what_failed_and_writes_nothing(folder: Path) -> None:
    done = profile(folder, "tiny.py", "--fail", "loss")
    assert done.returncode == 1
    assert "rank 1: ZeroDivisionError: cannot train" in done.stderr
    assert done.stderr.count("cannot train") == 1 and "Traceback" not in done.stderr
    assert done.stderr.endswith("No profile was written.\n")
    assert [path.name for path in folder.iterdir() if path.suffix == ".json"] == []


def test_a_killed_rank_is_what_the_command_tells_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ranks that saw it die also complain, of lost connections."""

    def killed(arguments: argparse.Namespace) -> int:
        Path(arguments.script_args[1]).write_text("Connection closed by peer")
        return 137

    monkeypatch.setattr(launch_command, "run", killed)
    assert main(["profile", "--nodes", "2", "--cpu", "tiny.py"]) == 137
    said = capsys.readouterr().err
    assert "a process ended with exit code 137" in said and "Connection" not in said
    assert said.endswith("No profile was written.\n")


@pytest.mark.parametrize("strategy", ["osdp", "fsdp"])
def test_what_is_measured_of_osdp_is_said(
    strategy: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch_command, "run", lambda arguments: 1)
    main(["profile", "--nodes", "2", "--cpu", "--strategy", strategy, "tiny.py"])
    assert ('with all of them in store "node"' in capsys.readouterr().err) == (strategy == "osdp")


def test_the_ranks_are_told_what_the_command_was_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(launch_command, "run", lambda arguments: told.append(arguments) or 1)
    monkeypatch.setenv("ACCELERATE_LSHDP_PLAN", "of another run")
    flags = ["--output", "o.json", "--seconds", "7.5", "--strategy", "fsdp", "--max-batch", "9"]
    limits = ["--memory-limit", "8GB", "--memory-limit", "rank.1=6GB", "--node-memory-limit", "1GiB"]
    script = ["-m", "tiny", "--epochs", "3"]
    main(["profile", *flags, *limits, "--total-batch-size", "20", "--config_file", "node1.yaml", *script])
    (arguments,) = told
    assert arguments.config_file == Path("node1.yaml") and arguments.plan is None and arguments.module
    worker = profile_worker._parse(arguments.script_args)
    expected = profile_worker._parse([*flags, *limits, "--total-batch-size", "20", *script])
    assert {**vars(worker), "error_file": None} == vars(expected)
    assert "ACCELERATE_LSHDP_PLAN" not in os.environ


# ---- the worker, on several nodes -----------------------------------------------------------------------------------


def run_worker(folder: Path, words: list[str]) -> tuple[int, str, list[str]]:
    """One rank, in a working directory of its own. Returns exit code, what it said, and the files there."""
    own = folder / os.environ["RANK"]
    own.mkdir()
    before, argv, path = Path.cwd(), list(sys.argv), list(sys.path)
    os.chdir(own)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            code = profile_worker.main(["--seconds", "1", "--max-batch", "2", str(folder / "tiny.py"), *words])
    finally:
        os.chdir(before)
        sys.argv, sys.path = argv, path
    return code, said.getvalue(), [file.name for file in own.iterdir()]


def test_every_node_gets_the_profile(folder: Path, workers) -> None:
    results = workers(3).run(run_worker, folder, [], nodes=(1, 2))
    assert [(code, files) for code, _, files in results] == [
        (0, ["lshdp_profile.json"]),
        (0, ["lshdp_profile.json"]),
        (0, []),
    ]
    first, second = (Profile.load(folder / rank / "lshdp_profile.json") for rank in ("0", "1"))
    assert first == second and first.cluster.node_sizes == [1, 2]
    assert first.cluster.nodes[0].address == "127.0.0.1"  # so that the plan's YAML files can name it
    assert "measuring the network" in results[1][1] and results[2][1] == ""


@pytest.mark.parametrize("where", ["build", "loss"])
def test_what_fails_on_one_rank_fails_everywhere(where: str, folder: Path, workers) -> None:
    results = workers(3).run(run_worker, folder, ["--fail", where], nodes=(1, 2))
    expected = "rank 1: ZeroDivisionError: cannot " + ("build (" if where == "build" else "train")
    for rank, (code, said, files) in enumerate(results):
        assert code == 1 and files == []
        assert said.count("ZeroDivisionError") == said.count(expected) == (0 if rank == 2 else 1)
    if where == "build":
        assert f"{folder}/tiny.py, line 16, in profiling_subject)" in results[0][1]


# ---- the script -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_module", [False, True])
def test_the_script_is_imported_and_asked(is_module: bool, folder: Path) -> None:
    subject = profile_worker.load_subject("tiny" if is_module else "tiny.py", [], is_module=is_module)
    assert isinstance(subject, Subject)
    sys.modules.pop("tiny", None)


@pytest.mark.parametrize(
    ("text", "error", "expected"),
    [
        ("x = 1\n", ValueError, "bad.py has no function profiling_subject(argv). Add one:"),
        ("def profiling_subject(argv):\n    return 3\n", ValueError, "bad.py returned int, expected"),
        ("def f(\n", RuntimeError, "SyntaxError: '(' was never closed (bad.py, line 1)"),
        ("def profiling_subject(argv):\n    exit(7)\n", RuntimeError, "exit code 7 (bad.py, line 2, in prof"),
        ("\n1 / 0\n", RuntimeError, "ZeroDivisionError: division by zero (bad.py, line 2, in <module>)"),
    ],
)
def test_what_a_script_has_to_define_is_explained(text: str, error: type, expected: str, folder: Path) -> None:
    Path("bad.py").write_text(text)
    with pytest.raises(error) as caught:
        profile_worker.load_subject("bad.py", [])
    assert expected in str(caught.value)
    assert ("def profiling_subject(argv):" in str(caught.value)) == (error is ValueError)
    sys.modules.pop("bad", None)


def test_a_script_does_not_replace_a_module_of_its_name(folder: Path) -> None:
    Path("argparse.py").write_text(SCRIPT.replace("import argparse, os, sys", "import os, sys; import argparse"))
    assert isinstance(profile_worker.load_subject("argparse.py", []), Subject)
    assert sys.modules["argparse"] is argparse
    del sys.modules["profiled_argparse"]


# ---- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tiny.py"], "--nodes"),
        (["--nodes", "2", "missing.py"], "there is no script 'missing.py'"),
        (["--config_file", "missing.yaml", "tiny.py"], "there is no configuration file"),
        (["--nodes", "1,1", "--cpu", "--main-ip", "127.0.0.1", "tiny.py"], "--node-rank"),
    ],
)
def test_mistakes_are_one_line_and_start_nothing(
    words: list[str], expected: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *words]) == 2
    said = capsys.readouterr().err
    assert expected in said and said.count("\n") == 1 and said.startswith("accelerate-lshdp profile: ")


def options(rank: int, *words: str):
    """What rank ``rank`` of the nodes (1, 2) is told to measure."""
    arguments = profile_worker._parse([*words, "tiny.py"])
    topology = Topology(rank, (1, 2))
    told = SimpleNamespace(
        num_processes=3, process_index=rank, topology=topology, lsdp_plugin=SimpleNamespace(bucket_megabytes=25.0)
    )
    return profile_worker._options(arguments, told)


def test_memory_limits_are_those_of_the_rank() -> None:
    words = ("--memory-limit", "8GB", "--memory-limit", "rank.2=6GB")
    assert [options(rank, *words).memory_limit_bytes for rank in range(3)] == [8 * 10**9, 8 * 10**9, 6 * 10**9]
    words = ("--node-memory-limit", "12GB", "--memory-limit", "rank.2=5GB")
    assert [options(rank, *words).memory_limit_bytes for rank in range(3)] == [12 * 10**9, 6 * 10**9, 5 * 10**9]
    assert options(0).memory_limit_bytes is None
    with pytest.raises(ValueError, match="for rank 3, expected one of the ranks 0 to 2"):
        options(0, "--memory-limit", "rank.3=1GB")


def test_no_rank_measures_more_than_the_others_leave() -> None:
    assert options(0).max_batch is None
    assert options(0, "--max-batch", "9").max_batch == 9
    assert options(0, "--total-batch-size", "20").max_batch == 18
    assert options(0, "--total-batch-size", "20", "--max-batch", "9").max_batch == 9
    with pytest.raises(ValueError, match="at least one sample for each of 3 ranks"):
        options(0, "--total-batch-size", "2")


@pytest.mark.parametrize(
    ("text", "count"), [("8GB", 8 * 10**9), ("1.5 kB", 1500), ("2GiB", 2 * 2**30), ("700B", 700), ("3mb", 3 * 10**6)]
)
def test_amounts_of_memory(text: str, count: int) -> None:
    assert parse_bytes(text) == count and _memory_limit(f"rank.12={text}") == (12, count)
    assert abs(parse_bytes(format_bytes(count)) - count) <= 0.005 * count


@pytest.mark.parametrize(
    "text", ["", "8", "GB", "-1GB", "8 XB", "0.1B", "rank.1=8", "rank.x=8GB", "node.1=8GB", "=8GB"]
)
def test_what_is_no_amount_of_memory_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected an amount of memory such as 8GB"):
        _memory_limit(text)
