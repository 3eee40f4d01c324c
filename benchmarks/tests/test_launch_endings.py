# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`launch --hosts` with recipes and a Trainer script on four machines: they train, and leave nothing behind."""

from __future__ import annotations

import random
import re
import shutil
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from emulated_machines import ROOT, Machines, emulated_machines
from endless_trainer import TRAINER
from laboratory.emulated_cluster import EmulatedCluster
from laboratory.emulated_cluster.debian_tools import DebianTools
from launch_endings import ENDINGS, assert_nothing_is_left, end_at, files_of


MISSING = EmulatedCluster.missing()
pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(MISSING is not None, reason=f"no emulated cluster here: {MISSING}"),
    pytest.mark.timeout(1200),
]

COUNT = 4
STEPS = "4"
VIT = ["recipes/vit_image_classification.py", "--output_dir", "outputs", "--max_train_steps"]
GPT2 = ["recipes/gpt2_causal_lm.py", "--output_dir", "outputs", "--train_file", "text.txt"]
GPT2 += ["--block_size", "32", "--max_train_steps"]
#: Seconds; training begins after some 25 of them.
LATEST = 45.0
#: Words of a script that ends after some steps, and of one that trains for longer than a test.
SHORT = {"vit": [*VIT, STEPS], "gpt2": [*GPT2, STEPS], "trainer": ["trainer.py", STEPS]}
LONG = {"vit": [*VIT, "1000000"], "gpt2": [*GPT2, "1000000"], "trainer": ["trainer.py", "1000000"]}
#: Folders that the scripts make.
OUTPUTS = ("outputs", *(f"out{node}" for node in range(COUNT)))


@pytest.fixture
def machines(debian_tools: DebianTools, tmp_path: Path) -> Iterator[Machines]:
    # Not in the folder of the test, whose name is too long for the sockets that ssh makes among temporary files.
    with emulated_machines(COUNT, tmp_path, debian_tools) as made, tempfile.TemporaryDirectory() as temporary:
        made.environment["TMPDIR"] = temporary
        for node in range(COUNT):
            shutil.copytree(ROOT / "recipes", made.own_folder(node) / "recipes")
            (made.own_folder(node) / "trainer.py").write_text(TRAINER)
            (made.own_folder(node) / "text.txt").write_text(Path(textwrap.__file__).read_text(encoding="utf-8"))
        yield made


def arguments(words: list[str], machines: Machines) -> list[str]:
    return ["--auto", "--env", f"TMPDIR={machines.environment['TMPDIR']}", *words]


def assert_no_temporary_files(machines: Machines) -> None:
    # torch keeps a cache there for all processes of a user.
    names = {path.name for path in Path(machines.environment["TMPDIR"]).iterdir()}
    assert {name for name in names if not name.startswith("torchinductor_")} == set()


@pytest.mark.parametrize("script", SHORT)
def test_it_trains_and_leaves_nothing(machines: Machines, script: str) -> None:
    before = files_of(machines)
    process = machines.start("launch", arguments(SHORT[script], machines))
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert set(re.findall(r"^node (\d) \| .*1 CPU process", output, re.MULTILINE)) == set("0123"), output
    # One rank writes what a recipe has found; a Trainer says on all machines that it has come to its end.
    ends = machines.own_folder(0) / "outputs" / "all_results.json"
    assert ends.exists() or output.count("training has ended") == COUNT, output
    assert_nothing_is_left(machines, before, OUTPUTS)
    assert_no_temporary_files(machines)


@pytest.mark.parametrize("script", LONG)
def test_nothing_is_left_at_any_moment(machines: Machines, script: str) -> None:
    moments = random.Random(script)
    for ending in ENDINGS:
        end_at(machines, ending, moments.uniform(0.3, LATEST), arguments(LONG[script], machines), OUTPUTS)
        assert_no_temporary_files(machines)
