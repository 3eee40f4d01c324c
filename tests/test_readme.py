"""What the README shows works: its example runs, its plan is a plan, the files and commands that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

from accelerate_lshdp import Plan
from accelerate_lshdp.commands.main import SUBCOMMANDS


ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def test_the_example_trains(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_LSHDP_PLAN"):
        monkeypatch.delenv(name, raising=False)
    example, automatic = blocks("python")
    result: dict = {}
    exec(compile(example, "README.md", "exec"), result)
    assert result["accelerator"].completed_steps == 8
    assert result["accelerator"].samples_seen == len(result["dataset"])
    exec(compile(automatic, "README.md", "exec"), result)
    assert result["accelerator"].plan.automatic.total == 256


def test_the_plan_is_valid():
    (document,) = blocks("json")
    plan = Plan.from_json(document)
    assert plan.batch_sizes == [11, 5] and str(plan.strategy) == "lsdp"


def test_files_and_commands_that_it_names_exist():
    commands = "\n".join(blocks("bash"))
    for path in re.findall(r"(?:accelerate_configs|recipes)/[\w/.+]+", commands):
        assert (ROOT / path).is_file(), path
    for path in re.findall(r"\]\(((?!http)[^)]+)\)", README):
        assert (ROOT / path).exists(), path
    assert set(re.findall(r"accelerate-lshdp (\w+)", commands)) <= set(SUBCOMMANDS)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert set(re.findall(r"^make ([\w-]+)", commands, flags=re.MULTILINE)) <= set(targets)
    for name in re.findall(r"`(test_\w+\*?\.py)`", README):
        assert list((ROOT / "tests").glob(name)), name
