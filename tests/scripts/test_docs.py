# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Every code block of README.md and docs/ runs, or says why not and is checked; links lead somewhere.

How blocks are written and run: docs_pages.py. Launches take minutes and are in the slow tests; in the others, Python
blocks run, and the real parsers read the commands of all bash blocks.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from docs_pages import LANGUAGES, PAGES, REASONS, ROOT, Block, commands_in, name_of, read_blocks, run_page
from laboratory.config import BenchmarkConfig
from launching import base_environment

from accelerate_lshdp import Plan
from accelerate_lshdp.cli.main import make_parser
from accelerate_lshdp.comparing.config import ComparisonConfig
from accelerate_lshdp.documents.cluster_file import load_cluster
from accelerate_lshdp.documents.hosts import load_hosts
from accelerate_lshdp.shim import script


BLOCKS = [block for page in PAGES for block in read_blocks(page)]
# Their blocks are not run: for those who change the package or measure it.
FOR_CONTRIBUTORS = tuple(
    ROOT / name
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/HISTORY.md", "benchmarks/README.md", "tests/README.md")
)
# Its Python blocks make every Trainer of a process ours.
OWN_PROCESS = "docs/trainer.md"
# Its Python files are launched, all of them.
WITH_LAUNCHES_ONLY = ("docs/two_machines.md",)
NOT_RUN_AT_MOST = 5
WHOLE_PLAN = {"version": 1, "strategy": "lsdp"}


def blocks_in(language: str) -> list:
    return [pytest.param(block, id=str(block)) for block in BLOCKS if block.language == language]


def pages_with(language: str) -> list:
    named = {name_of(block.page): block.page for block in BLOCKS if block.language == language}
    return [pytest.param(page, id=name) for name, page in named.items()]


def run_in_a_process(page: Path, folder: Path, what: str, timeout: float) -> None:
    command = [sys.executable, str(ROOT / "tests/docs_pages.py"), str(page), str(folder), what]
    result = subprocess.run(command, env=base_environment(), capture_output=True, text=True, timeout=timeout)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-8000:]


@pytest.mark.parametrize("page", [page for page in pages_with("python") if page.id not in WITH_LAUNCHES_ONLY])
def test_python_blocks_run(page: Path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # and back afterwards
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_LSHDP_PLAN"):
        monkeypatch.delenv(name, raising=False)
    if name_of(page) == OWN_PROCESS:
        run_in_a_process(page, tmp_path, "python", 110)
    else:
        run_page(page, tmp_path, launches=False)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", pages_with("bash"))
def test_all_blocks_run(page: Path, tmp_path):
    run_in_a_process(page, tmp_path, "launches", 1100)


def test_blocks_say_what_they_are():
    """A misspelt language, marker or name would leave a block out."""
    for block in BLOCKS:
        assert block.language in LANGUAGES, f"{block}: {block.language!r}"
        assert block.not_run is None or (block.language == "bash" and block.not_run in REASONS), block
        if block.language == "python":
            compile(block.text, str(block), "exec")
        if block.language in ("python", "json", "yaml") and block.file:
            assert re.fullmatch(r"[\w-]+\.(py|json|yaml)", block.file), f"{block}: {block.about!r}"
        else:
            assert not block.about or block.language == "bash" and block.machine, f"{block}: {block.about!r}"
    assert sum(block.not_run is not None for block in BLOCKS) <= NOT_RUN_AT_MOST
    comments = [comment for page in PAGES for comment in re.findall(r"<!--.*?-->", page.read_text(), flags=re.DOTALL)]
    assert len(comments) == sum(block.not_run is not None for block in BLOCKS), comments


def test_files_are_used():
    for block in BLOCKS:
        if block.file:
            users = [other.text for other in BLOCKS if other.page == block.page and other is not block]
            assert any(block.file in text for text in users), f"{block}: nothing uses {block.file}"


def test_outputs_follow_what_printed_them():
    for block, before in zip(BLOCKS[1:], BLOCKS, strict=False):
        if block.language == "text":
            assert before.page == block.page and before.language in ("bash", "python") and not before.not_run, block


@pytest.mark.parametrize("block", blocks_in("json"))
def test_plans_are_valid(block: Block):
    document = json.loads(block.text)
    Plan.from_dict(document if "version" in document else {**WHOLE_PLAN, **document})


@pytest.mark.parametrize("block", blocks_in("yaml"))
def test_yaml_files_are_read(block: Block, tmp_path):
    """Each is for `estimate`, for `bench`, or for commands with `--hosts`."""
    file = tmp_path / block.file
    file.write_text(block.text, encoding="utf-8")
    if "clusters" in yaml.safe_load(block.text):
        assert BenchmarkConfig.load(file).models
    elif "strategies" in yaml.safe_load(block.text):
        assert ComparisonConfig.load(file).models
    elif "network" in yaml.safe_load(block.text):
        assert load_cluster(file).nodes
    else:
        assert load_hosts(file)


@pytest.mark.parametrize("block", blocks_in("bash"))
def test_commands_are_understood(block: Block, capsys):
    """bash reads the block, and parsers read its commands, whether it runs or not."""
    assert subprocess.run(["bash", "-n"], input=block.text, text=True, timeout=10).returncode == 0
    for command in commands_in(block):
        try:
            check_command(command)
        except SystemExit as error:
            assert error.code in (None, 0), f"{block}: {command}\n{capsys.readouterr().err}"


def check_command(words: list[str]) -> None:
    """Raises AssertionError or SystemExit for a command that its program would refuse."""
    for word in words:
        if re.match(r"(accelerate_configs|benchmarks|recipes)/.*\.\w+$", word):
            assert (ROOT / word).is_file(), word
    if words[0] == "accelerate-lshdp":
        make_parser().parse_args(words[1:])
    elif words[:2] == ["accelerate", "launch"]:
        from accelerate.commands.launch import launch_command_parser

        arguments = launch_command_parser().parse_args(words[2:])
        if arguments.training_script == "accelerate_lshdp.run":
            assert arguments.module
            script._parse(arguments.training_script_args)
    elif words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert words[1] in targets, words


@pytest.mark.parametrize("page", [pytest.param(page, id=name_of(page)) for page in (*PAGES, *FOR_CONTRIBUTORS)])
def test_links_lead_somewhere(page: Path):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(((?!http)[^)]+)\)", text):
        path, _, heading = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        if heading:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert heading in [anchor(title) for title in headings], f"{page.name}: {target}"
    for name in re.findall(r"`(test_\w+\*?\.py)`", text):
        assert [*(ROOT / "tests").rglob(name), *(ROOT / "benchmarks").rglob(name)], name


def test_the_readme_needs_no_link_into_the_repository():
    """A package index shows it alone: it names files, and a reader there misses a picture only."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"(?<!!)\[[^\]]*\]\((?!https://)[^)]*\)", text) == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "tests/README.md"])
def test_named_files_exist(page: str):
    """In code style, from the root of the repository, of the package, or of a folder of tests; NAME stands for any."""
    text = (ROOT / page).read_text(encoding="utf-8")
    places = (ROOT, ROOT / "accelerate_lshdp", *(folder for folder in (ROOT / "tests").rglob("*") if folder.is_dir()))
    places = (*places, ROOT / "tests", ROOT / "benchmarks", ROOT / "benchmarks" / "tests")
    for name in re.findall(r"`([\w./*-]+(?:/|\.(?:json|md|png|py|toml|txt|yaml)))`", text):
        made = "/" not in name and any(name in block.text for block in BLOCKS)  # such as lshdp_plan.json
        assert made or any(any(place.glob(name.replace("NAME", "*"))) for place in places), f"{page}: {name}"


def anchor(title: str) -> str:
    """As GitHub makes it from a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def test_all_pages_can_be_found():
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"]({page.name})" in index, page.name
