# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What commands tell beside their results: a busy machine, progress in a file, and for whom a node waits."""

from __future__ import annotations

import io
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from launching import apply_environment, base_environment, free_port
from test_commands_plan import a_profile

from accelerate_lshdp import Plan
from accelerate_lshdp.cli import quickstart, quickstart_report
from accelerate_lshdp.cli.busy import busy_hint, unlike_emulation
from accelerate_lshdp.cli.main import main
from accelerate_lshdp.cli.progress import progress
from accelerate_lshdp.cli.waiting_nodes import Meeting, report_waiting
from accelerate_lshdp.documents.profile import Profile


# A busy machine


def test_plan_repeats_that_the_machine_was_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    document = a_profile()
    words = ["--total", "36", "--no-picture", "--no-yaml"]
    Path("profile.json").write_text(json.dumps(document))
    assert main(["plan", "profile.json", *words]) == 0
    assert "busy" not in capsys.readouterr().out

    document["ranks"][2]["spread"][1] = 0.234
    Path("profile.json").write_text(json.dumps(document))
    assert main(["plan", "profile.json", *words]) == 0
    hint = (
        "The times of rank 2 varied by 23% while they were measured (above 10%: the machine was busy, measure again)"
    )
    assert f"\n{hint}.\n" in capsys.readouterr().out
    assert busy_hint(Profile.from_dict(document)) == f"{hint}."


def two_ranks(slower: float, largest: int = 32) -> Profile:
    """Rank 1 takes so many times as long as rank 0, which can train on so many samples."""
    document = a_profile(cluster={"nodes": [{"ranks": 2, "address": None, "device": "cpu"}]})
    fast, slow = document["ranks"][:2]
    fast["max_micro_batch_size"] = largest
    slow["seconds"] = [slower * seconds for seconds in fast["seconds"]]
    slow["bucket_ready"] = [
        {**curve, "seconds": [slower * seconds for seconds in curve["seconds"]]} for curve in fast["bucket_ready"]
    ]
    return Profile.from_dict({**document, "ranks": [fast, slow]})


@pytest.mark.parametrize(
    ("slower", "largest", "sizes", "slowdown", "told"),
    [
        (2.0, 32, [24, 12], 2.0, None),
        (1.0, 32, [18, 18], 1.0, None),
        (1.1, 32, [19, 17], 2.0, "is slowed 2x, but 32 samples took it 1.1x as long as rank 0: something else"),
        (4.0, 32, [29, 7], 2.0, "32 samples took it 4x as long"),
        (2.0, 16, [16, 16], 2.0, "because no more than 16 were measured on rank 0 (limited by request)"),
        (2.0, 32, [1, 1], 2.0, "with 2 in a global batch no other cut has a shorter step"),
    ],
)
def test_quickstart_says_why_a_slowed_rank_does_not_show(
    slower: float, largest: int, sizes: list[int], slowdown: float, told: str | None
) -> None:
    found = unlike_emulation(two_ranks(slower, largest), sizes, 1, slowdown)
    assert found is None if told is None else told in found


def test_quickstart_ends_with_reasons_to_doubt_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = two_ranks(1.1).to_dict()
    document["ranks"][0]["spread"][1] = 0.234

    def launch(arguments: object) -> int:
        replace(Plan.from_batch_sizes([19, 17]), profile=document).save(tmp_path / "lshdp_plan.json")
        (tmp_path / "results.json").write_text("{}")
        return 0

    monkeypatch.setattr(quickstart, "_launch", launch)
    for shown in ("draw_picture", "print_table"):
        monkeypatch.setattr(quickstart_report, shown, lambda *_: None)
    assert main(["quickstart", "--output-dir", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "The times of rank 0 varied by 23% while they were measured" in said
    assert "Rank 1 is slowed 2x, but 32 samples took it 1.1x as long as rank 0" in said


# Progress


def test_progress_is_plain_lines_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):  # what makes other libraries take a file for a terminal
        monkeypatch.setenv(name, "1")
    told = io.StringIO()
    monkeypatch.setattr(sys, "stderr", told)
    with progress(True) as advance:
        for done in range(21):
            advance("measuring micro-batches", done / 2, 10)
        advance("measuring the network", 0, 0)
    text = told.getvalue()
    assert "\r" not in text and "\x1b" not in text
    assert re.sub(r"in \d+ s", "in N s", text).splitlines() == [
        "measuring micro-batches ...",
        "measuring micro-batches: 25 %",
        "measuring micro-batches: 50 %",
        "measuring micro-batches: 75 %",
        "measuring micro-batches: done in N s",
        "measuring the network ...",
        "measuring the network: done in N s",
    ]


def test_progress_is_shown_by_one_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    told = io.StringIO()
    monkeypatch.setattr(sys, "stderr", told)
    with progress(False) as advance:
        advance("measuring", 1, 2)
    assert told.getvalue() == ""


# Waiting nodes

PLACE = "10.0.0.1:29500"
ADDRESSES = ("10.0.0.1", "10.0.0.2", None)


@pytest.mark.parametrize(
    ("node", "addresses", "connected", "told"),
    [
        (0, ADDRESSES, [], f"node 0 has waited 20 s for node 1 (10.0.0.2), node 2 to connect to {PLACE}"),
        (0, ADDRESSES, ["10.0.0.2"], f"for node 2 to connect to {PLACE}; connected so far: 10.0.0.2"),
        (0, ADDRESSES, ["10.0.0.3"], "for 1 of node 1 (10.0.0.2), node 2 to connect"),
        (0, ADDRESSES, ["10.0.0.2", "10.0.0.3"], "for node 1 (10.0.0.2), node 2 to begin, which have connected to"),
        (1, ADDRESSES, [], f"node 1 has waited 20 s for node 0, which does not answer at {PLACE}. Start it there"),
        (1, ADDRESSES, ["10.0.0.1"], f"for node 2, or one of them, to connect to node 0, which answers at {PLACE}"),
        (1, ADDRESSES[:2], ["10.0.0.1"], f"for node 0, which answers at {PLACE}, to begin"),
    ],
)
def test_a_node_says_for_whom_it_waits(
    node: int, addresses: tuple[str | None, ...], connected: list[str], told: str
) -> None:
    assert told in Meeting(node, addresses, "10.0.0.1", 29500).describe(connected, 20.0)


@contextmanager
def other_node(port: int) -> Iterator[None]:
    """A process that is connected to a port."""
    code = (
        f"import socket, sys; s = socket.create_connection(('127.0.0.1', {port})); print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield
        process.stdin.close()


def test_connections_of_others_are_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        first, second = (Meeting(node, (None, None), "127.0.0.1", port) for node in (0, 1))
        assert first.connected() == second.connected() == []
        with socket.create_connection(("127.0.0.1", port)), server.accept()[0]:
            assert first.connected() == [] and second.connected() == [
                "127.0.0.1"
            ]  # node 0 is no other node for itself
            with other_node(port), server.accept()[0]:
                assert first.connected() == ["127.0.0.1"]


def test_waits_are_told_until_they_are_over() -> None:
    told, over = io.StringIO(), []
    meeting = Meeting(1, ("127.0.0.1", None), "127.0.0.1", free_port())
    with report_waiting(meeting, lambda: bool(over), every=0.02, stream=told):
        deadline = time.monotonic() + 10
        while told.getvalue().count("\n") < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        over.append(True)
        time.sleep(0.1)
        count = told.getvalue().count("\n")
        time.sleep(0.1)
    lines = told.getvalue().splitlines()
    assert len(lines) == count >= 3
    assert all(line.startswith("accelerate-lshdp launch: node 1 has waited 0 s for node 0") for line in lines)


def test_ranks_that_were_there_for_a_moment_are_not_waited_for() -> None:
    """A launcher whose ranks have failed within ten seconds has met the others."""
    told, looks = io.StringIO(), iter([False, True])
    meeting = Meeting(1, ("127.0.0.1", None), "127.0.0.1", free_port())
    with report_waiting(meeting, lambda: next(looks), every=1.2, stream=told):
        time.sleep(1.5)
    assert told.getvalue() == ""


@pytest.mark.slow
def test_both_nodes_of_a_launch_tell_for_whom_they_wait(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')\n")
    port = free_port()
    flags = ["--nodes", "1,1", "--cpu", "--main-ip", "127.0.0.1", "--main-port", str(port)]
    command = [sys.executable, "-m", "accelerate_lshdp.cli.main", "launch", *flags, "--node-rank"]
    environment = apply_environment(base_environment(), {"ACCELERATE_USE_CPU": None})
    for alone, told in (
        ("1", f"node 1 has waited 10 s for node 0, which does not answer at 127.0.0.1:{port}"),
        ("0", f"node 0 has waited 10 s for node 1 to connect to 127.0.0.1:{port}"),
    ):
        error = tmp_path / f"stderr{alone}"
        with open(error, "w") as stream, open(tmp_path / "stdout", "w") as output:
            options = {"cwd": tmp_path, "env": environment, "stdout": output}
            waiting = subprocess.Popen([*command, alone, "train.py"], stderr=stream, **options)
            deadline = time.monotonic() + 60
            while told not in error.read_text() and time.monotonic() < deadline:
                time.sleep(0.2)
            text = error.read_text()
            other = subprocess.Popen([*command, "01".replace(alone, ""), "train.py"], stderr=stream, **options)
            try:
                assert told in text
                assert waiting.wait(60) == other.wait(60) == 0
            finally:
                waiting.kill()
                other.kill()
                waiting.wait()
                other.wait()
        assert (tmp_path / "stdout").read_text().count("trained") == 2
