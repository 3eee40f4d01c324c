# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Unmodified scripts on two ranks, by both launchers: what they see, how they end, and where their errors point."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import base_environment, free_port, launch

from accelerate_lshdp import Plan


TIMEOUT_SECONDS = 90
SIZES = [5, 3]

_SAMPLES = """\
import torch

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return {"x": torch.full((4,), float(index))}
"""

# A plain script: accelerate is imported in the middle, a variable is set for a library that reads it when imported.
_SCRIPT = """\
import json, os, sys
from dataclasses import dataclass

os.environ["HF_HOME"] = os.path.join(os.getcwd(), "own_home")

{first}
from {samples} import Samples  # beside the script
import torch
from huggingface_hub import constants
from accelerate import Accelerator, PartialState
import accelerate.accelerator


@dataclass
class Arguments:
    workers: str = "fork"
    end: str = "return"


class Own(Samples):  # worker processes find it in the script
    pass


def main():
    from transformers import HfArgumentParser  # here, because worker processes import the script again

    (arguments,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    with PartialState().main_process_first():
        pass
    accelerator, second = Accelerator(), accelerate.accelerator.Accelerator()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(Own(), 4, num_workers=1, multiprocessing_context=arguments.workers)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    sizes = []
    for batch in loader:
        sizes.append(len(batch["x"]))
        accelerator.backward(model(batch["x"]).mean())
        optimizer.step()
    facts = {{
        "rank": accelerator.process_index, "ranks": accelerator.num_processes, "sizes": sizes, "argv": sys.argv,
        "types": [type(accelerator).__name__, type(second).__name__], "home": constants.HF_HOME, "cwd": os.getcwd(),
    }}
    sys.stdout.write("facts " + json.dumps(facts) + chr(10))
    sys.stdout.flush()
    if arguments.end == "exit":
        sys.exit(7)
    if arguments.end == "raise" and accelerator.process_index == 1:
        fail()


def fail():
    raise RuntimeError("a mistake of the script on one rank")


if __name__ == "__main__":
    main()
"""

_OURS_FIRST = "from accelerate_lshdp import LSHDPAccelerator"  # then it is this package that imports accelerate


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    package = tmp_path / "project" / "package"
    package.mkdir(parents=True)
    for place in (package, package.parent):
        (place / "samples.py").write_text(_SAMPLES)
    (package / "__init__.py").touch()
    (package / "train.py").write_text(_SCRIPT.format(samples=".samples", first=_OURS_FIRST))
    (package.parent / "train.py").write_text(_SCRIPT.format(samples="samples", first=""))
    Plan.from_batch_sizes(SIZES, strategy="lsdp").save(tmp_path / "plan.json")
    return tmp_path


def check_facts(stdout: str, folder: Path, argv: list[str]) -> None:
    facts = [json.loads(line.split("facts ")[1]) for line in stdout.splitlines() if "facts " in line]
    expected = {
        "ranks": 2, "argv": argv, "types": ["LSHDPAccelerator"] * 2, "home": str(folder / "own_home"),
        "cwd": str(folder),
    }  # fmt: skip
    assert sorted(facts, key=lambda fact: fact["rank"]) == [
        {"rank": rank, "sizes": [size] * 3, **expected} for rank, size in enumerate(SIZES)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["lsdp", "zero1"])
def test_accelerate_launch(folder: Path, strategy: str) -> None:
    Plan.from_batch_sizes(SIZES, strategy=strategy).save(folder / "plan.json")
    script = os.path.join("project", "train.py")
    arguments = [script, "--workers", "spawn", "--end", "exit"]
    result = launch(
        ["-m", "accelerate_lshdp.run", "--plan", "plan.json", *arguments],
        2,
        launcher="accelerate",
        cwd=folder,
        timeout=TIMEOUT_SECONDS,
    )
    check_facts(result.stdout, folder, arguments)
    assert result.returncode == 1 and "exitcode  : 7" in result.stderr, result.stderr  # the launcher's own is always 1
    assert ("zero1 is carried out as zero2" in result.stderr) == (strategy == "zero1")
    assert "Traceback" not in result.stderr.partition("torch/distributed/elastic")[0]


@pytest.mark.slow
def test_own_launch(folder: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "accelerate_lshdp.cli.main", "launch", "--plan", str(folder / "plan.json"),
         "--main-port", str(free_port()), "-m", "package.train", "--end", "raise"],
        cwd=folder / "project",
        env=base_environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    script = str(folder / "project" / "package" / "train.py")
    check_facts(result.stdout, folder / "project", [script, "--end", "raise"])
    assert result.returncode == 1, result.stderr
    lines = [line.removeprefix("[rank1]: ") for line in result.stderr.splitlines() if line.startswith("[rank1]")]
    assert lines[0] == "Traceback (most recent call last):"
    assert [line.split('"')[1] for line in lines if line.startswith("  File ")] == [script] * 3, result.stderr
    assert lines[-1] == "RuntimeError: a mistake of the script on one rank"
