# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Ranks are forked from a process that has imported what their script imports."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from accelerate_lshdp.cli.node_ranks import NodeRanks
from accelerate_lshdp.runtime.elastic_rank import NodeFolder
from accelerate_lshdp.shim.warm_ranks import imports_of


def test_imports_of_a_script_are_found(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, torch\nfrom transformers import Trainer, GPT2Config\nfrom . import here\ndef f(): import x\n"
    )
    assert imports_of(str(script)) == [("os", []), ("torch", []), ("transformers", ["Trainer", "GPT2Config"])]
    script.write_text("import (")
    assert imports_of(str(script)) == imports_of(str(tmp_path / "none.py")) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends ranks with their launcher")
def test_a_rank_imports_nothing_of_torch_for_its_first_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """It would take a second of the pause for which others wait."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    (tmp_path / "train.py").write_text(
        "import sys\nimport torch\nbefore = set(sys.modules)\n"
        "torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())\n"
        "print('imported', sorted(set(sys.modules) - before), flush=True)\n"
    )
    with NodeRanks("train.py", ["train.py"], NodeFolder(tmp_path)) as ranks:
        ranks.start([{"RANK": "0"}])
        assert ranks.wait(60) and ranks.codes == [0]
    captured = capfd.readouterr()
    assert "imported []" in captured.out and "not forked" not in captured.err


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends ranks with their launcher")
@pytest.mark.parametrize("forked", [True, False])
def test_ranks_are_started_and_their_codes_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, forked: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", root)
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, time, random\n"
        "print(os.environ['RANK'], sys.argv[1:], random.random(), flush=True)\n"
        "time.sleep(60 if os.environ['RANK'] == '2' else 0)\n"
        "sys.exit(int(os.environ['RANK']))\n"
    )
    with NodeRanks(str(script) if forked else None, ["train.py", "--steps", "3"], NodeFolder(tmp_path)) as ranks:
        ranks.start([{"RANK": "0"}, {"RANK": "3"}])
        assert ranks.wait(60) and sorted(ranks.codes) == [0, 3]
        left = [NodeFolder(tmp_path).gate(1), NodeFolder(tmp_path).stepped(1), NodeFolder(tmp_path).control(0)]
        for each in left:
            each.touch()
        ranks.start([{"RANK": "2"}])
        assert not any(each.exists() for each in left)  # the next ranks may be of a generation with that number
        deadline = time.monotonic() + 60
        while "2 [" not in (text := capfd.readouterr().out) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert ranks.has_any and not ranks.wait(0.1)
        ranks.signal(signal.SIGTERM)
        assert ranks.wait(10) and ranks.codes == [-signal.SIGTERM]
        ranks.start([{"RANK": "2"}])
        pid = next(iter(ranks._pids.values()))
    with pytest.raises(ProcessLookupError):  # it ends with what has started it
        os.kill(pid, 0)
    assert "--steps" in text
