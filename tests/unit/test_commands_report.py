# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""``accelerate-lshdp report``: what it writes and prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmark_results import make_results

from accelerate_lshdp.cli.main import main
from accelerate_lshdp.comparing.report import gallery


def test_report_is_written_beside_the_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results.json").write_text(json.dumps(make_results()))
    assert main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "lshdp fp32 has the shortest step" in printed.out and "holds" in printed.out and printed.err == ""
    files = printed.out.rsplit("wrote ", 1)[1].strip().split(", ")
    assert {Path(file) for file in files} == {path for path in tmp_path.iterdir() if path.name != "results.json"}
    assert {"results.md", "report.html"} < {Path(file).name for file in files}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "found no such file, expected what `accelerate-lshdp bench` wrote"),
        ("", "found nothing, expected what `accelerate-lshdp bench` wrote"),
        ("not JSON", "found text that is not JSON"),
        ("[]", "found an empty list, expected an object"),
        ('{"ddp_equal": {}}', 'kind: found null, expected "benchmark"'),
        (json.dumps({**make_results(), "version": 2}), "version: found 2, expected 1"),
        (json.dumps({**make_results(), "wall_seconds": "long"}), "wall_seconds: found"),
    ],
)
def test_other_files_are_refused_in_one_line(
    text: str | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "results.json").write_text(text)
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert says in error and str(tmp_path / "results.json") in error and error.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_a_file_instead_of_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results.json").write_text(json.dumps(make_results()))
    assert main(["report", str(tmp_path / "results.json")]) == 2
    assert "expected the folder that holds results.json" in capsys.readouterr().err


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gallery, "find_spec", lambda name: None)
    (tmp_path / "results.json").write_text(json.dumps(make_results()))
    assert main(["report", str(tmp_path)]) == 0
    assert "pip install 'accelerate-lshdp[pictures]'" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.png")) and (tmp_path / "report.html").is_file()
