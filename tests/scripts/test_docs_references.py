# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The reference pages say what the code says: options, keys of plan files, environment variables, messages."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib.util
import json
import re
from pathlib import Path

import pytest
from docs_messages import PACKAGE, matches, messages, texts
from docs_pages import ROOT
from markdown_it import MarkdownIt

from accelerate_lshdp import LSDPPlugin
from accelerate_lshdp.cli.main import SUBCOMMANDS, make_parser
from accelerate_lshdp.documents.placement import ModelPlacement, UnitPlacement
from accelerate_lshdp.documents.plan import Automatic, Batch, Cluster, Communication, Link, Node, Plan, RankBatch


DOCS = ROOT / "docs"
# In the source, but no variables that users of this package set.
NOT_VARIABLES = {
    *("F8_E4M3", "F8_E5M2", "HF_HUB_OFFLINE", "MEGATRON_LM", "MULTI_GPU", "NAME_OR_CONFIG", "PARALLELISM_CONFIG_"),
    *("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "PLAN_VARIABLE", "PLAN_VERSION"),
}


def tables(page: str) -> dict[str, list[list[str]]]:
    """The cells of all rows of the tables of a page, by the heading above; without rows of headings."""
    found: dict[str, list[list[str]]] = {}
    heading, in_body = "", False
    tokens = MarkdownIt("commonmark").enable("table").parse((DOCS / page).read_text(encoding="utf-8"))
    for token, following in zip(tokens, tokens[1:], strict=False):
        if token.type == "heading_open":
            heading = following.content
        elif token.type in ("tbody_open", "tbody_close"):
            in_body = token.type == "tbody_open"
        elif token.type == "tr_open" and in_body:
            found.setdefault(heading, []).append([])
        elif token.type == "td_open" and in_body:
            found[heading][-1].append(following.content)
    return found


def code_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_list_of_commands_is_complete():
    named = [code_in(row[0])[0] for row in tables("commands.md")["Commands"]]
    assert named == [*SUBCOMMANDS, "-m accelerate_lshdp.run"]


def parser_of(command: str) -> argparse.ArgumentParser:
    return next(a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction)).choices[command]


@pytest.mark.parametrize("command", SUBCOMMANDS)
def test_options_are_those_of_the_parser(command: str):
    described = {}
    for cells in tables("commands.md").get(command, []):
        for option in code_in(cells[0]):
            described[option.split()[0]] = cells
    actions = [a for a in parser_of(command)._actions if not isinstance(a, argparse._HelpAction)]
    options = {option: action for action in actions for option in action.option_strings}
    assert set(described) == set(options)
    for option, cells in described.items():
        action = options[option]
        if action.default not in (None, False, [], argparse.SUPPRESS):
            default = f"{action.default:g}" if isinstance(action.default, float) else str(action.default)
            assert default in cells[1].replace("`", "") or cells[1] == "all", f"{option}: default {default}"
        if action.metavar and action.option_strings[0] == option:
            assert f"`{option} {action.metavar}`" in cells[0], f"{option} {action.metavar}"


PLAN_TABLES = {
    "batch": Batch,
    "batch.ranks": RankBatch,
    "automatic": Automatic,
    "communication": Communication,
    "placement": ModelPlacement,
    "placement.units": UnitPlacement,
    "cluster": Cluster,
    "cluster.nodes": Node,
    "cluster.link": Link,
}


def test_sections_of_a_plan_are_those_that_are_read():
    described = {code_in(row[0])[0]: row[1] for row in tables("plan_file.md")["Sections"]}
    fields = {field.name for field in dataclasses.fields(Plan)} - {"source"}
    assert set(described) == fields | {"version"}
    assert {key for key, needed in described.items() if needed == "yes"} == {"version", "strategy"}


@pytest.mark.parametrize("section", PLAN_TABLES)
def test_keys_of_a_section_are_those_that_are_read(section: str):
    described = {code_in(key)[0]: (needed, default) for key, needed, default, _ in tables("plan_file.md")[section]}
    fields = {field.name: field.default for field in dataclasses.fields(PLAN_TABLES[section])}
    if section == "batch":
        fields["total"] = dataclasses.MISSING  # computed, and checked, when a file is read
    assert set(described) == set(fields)
    for name, (needed, default) in described.items():
        assert (needed == "yes") == (fields[name] is dataclasses.MISSING), name
        value = fields[name]
        nothing = value in (dataclasses.MISSING, None, ()) or dataclasses.is_dataclass(value)
        shown = "" if nothing else json.dumps(value).strip('"').removesuffix(".0")
        assert default.strip("`") == shown, name


def variables_in_source() -> set[str]:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(re.findall(r"^[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+_?$|^RANK$", node.value))
    return found - NOT_VARIABLES


def test_environment_variables_are_those_of_the_source():
    described = {name for rows in tables("environment.md").values() for row in rows for name in code_in(row[0])}
    options = {f"LSDP_{field.name.upper()}" for field in dataclasses.fields(LSDPPlugin)} - {"LSDP_TOKEN_COUNTER"}
    assert described == variables_in_source() | options


def test_arguments_of_the_trainer_are_those_of_transformers():
    """Read from the source of transformers: importing its Trainer takes seconds."""
    folder = Path(importlib.util.find_spec("transformers").origin).parent
    source = "".join(
        (folder / name).read_text(encoding="utf-8") for name in ("training_args.py", "trainer_pt_utils.py")
    )
    for cells in tables("trainer.md")["What the arguments mean"]:
        for argument in code_in(cells[0]):
            assert re.search(rf"^    {argument.partition('=')[0]}: ", source, flags=re.MULTILINE), argument


def quotes() -> list[str]:
    """The messages that troubleshooting.md quotes: the code in the first column of its tables, but for names."""
    cells = [row[0] for rows in tables("troubleshooting.md").values() for row in rows]
    return [quote for cell in cells for quote in code_in(cell) if " " in quote]


def test_every_quoted_message_is_in_the_source():
    source = texts()
    gone = [quote for quote in quotes() if not any(matches(quote, text) for text in source)]
    assert not gone, "no longer in the source; correct docs/troubleshooting.md:\n" + "\n".join(gone)


def test_every_quote_is_of_messages():
    """Of one, or of a family; a quote that matched at random would pass whatever the source says."""
    everything = messages()
    assert quotes()
    for quote in quotes():
        assert len(re.findall("[A-Za-z]", quote)) >= 9, quote
        assert sum(matches(quote, message.text) for message in everything) <= 25, quote


def test_pictures_are_drawn(tmp_path: Path):
    spec = importlib.util.spec_from_file_location("draw", DOCS / "pictures" / "draw.py")
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    draw.main([str(tmp_path)])
    page = (DOCS / "how_it_works.md").read_text(encoding="utf-8")
    for name in draw.PICTURES:
        assert (tmp_path / name).stat().st_size > 10_000
        assert f"(pictures/{name})" in page and (DOCS / "pictures" / name).is_file()
