# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Messages that name an option tell those who do not touch their script what to set instead of the keyword."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import accelerate_lshdp
from accelerate_lshdp import LSDPPlugin, Plan
from accelerate_lshdp.runtime.option_advice import option_advice, variable_of


PACKAGE = Path(accelerate_lshdp.__file__).parent
OPTIONS = [option.name for option in fields(LSDPPlugin)]
NAMES_OPTION = re.compile(rf"LSDPPlugin\b|\b({'|'.join(OPTIONS)})=['{{]")
_WITHOUT_VARIABLE = "token_counter"
HELPERS = {"option_advice", "variable_of"}
#: The helper itself, and where each message says of the option in question whether a keyword or a variable gave it.
EXEMPT = {"option_advice.py", "plugin.py", "plan_resolution.py"}


def messages(tree: ast.Module) -> Iterator[ast.expr]:
    """All texts of a module but its docstrings; of joined texts the whole."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        text = isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        parent = parents.get(node)
        if not text or isinstance(parent, (ast.Expr, ast.JoinedStr, ast.FormattedValue)):
            continue
        while isinstance(parent, ast.BinOp):
            node, parent = parent, parents.get(parent)
        yield node


def lacks_variable(message: ast.expr) -> bool:
    constants = [n.value for n in ast.walk(message) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    calls = {n.func.id for n in ast.walk(message) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    # Of a placeholder only a brace is left: `{name}={value}` stays apart from `name={value}`.
    text = "".join(constants)
    if isinstance(message, ast.JoinedStr):
        text = "".join(v.value if isinstance(v, ast.Constant) else "{" for v in message.values)
    if f"LSDPPlugin({_WITHOUT_VARIABLE}=" in text:
        return False
    sentence = re.search(r"\s", text) is not None  # names and keys are no messages
    return sentence and NAMES_OPTION.search(text) is not None and "LSDP_" not in text and not calls & HELPERS


def test_every_message_that_names_an_option_names_its_variable() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name in EXEMPT:
            continue
        tree = ast.parse(path.read_text())
        found += [
            f"{path.relative_to(PACKAGE)}:{message.lineno}" for message in messages(tree) if lacks_variable(message)
        ]
    assert found == [], "name the option by accelerate_lshdp.runtime.option_advice.option_advice(option, value)"


@pytest.mark.parametrize(
    ("code", "lacks"),
    [
        ("raise ValueError('give LSDPPlugin(batch_norm=\"local\")')", True),
        ("raise ValueError(f'found {x}; or use ' 'intra_node=\\'collectives\\' instead')", True),
        ("raise ValueError(f'give {option_advice(\"batch_norm\")} instead')", False),
        ("raise ValueError('set LSDPPlugin(prefetch=2), or LSDP_PREFETCH=2')", False),
        ("'''Takes LSDPPlugin(prefetch=2), as said.'''", False),
        ("x = {'strategy=': 1}", False),
    ],
)
def test_the_search_finds_what_it_should(code: str, lacks: bool) -> None:
    assert any(map(lacks_variable, messages(ast.parse(code)))) is lacks


@pytest.mark.parametrize("option", [option for option in OPTIONS if option != _WITHOUT_VARIABLE])
def test_the_advice_works(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable that it names is the one that is read, and a plan decides what it says a plan decides."""
    values = {"batch_norm": "local", "intra_node": "collectives", "communication_dtype": "bf16", "strategy": "ddp"}
    values |= {"placement": "auto"}
    values |= {"loss_weighting": "none", "mixed_precision": "bf16", "reshard_after_forward": "true"}
    values |= {"pin_memory": "true", "units": "Block", "prefetch": "3", "powersgd_rank": "3"}
    values |= {"powersgd_warmup_steps": "3", "bucket_megabytes": "3"}
    text = option_advice(option, values[option])
    assert text.startswith(f"LSDPPlugin({option}='{values[option]}')")
    assert f"{variable_of(option)}={values[option]}" in text
    default = getattr(LSDPPlugin().resolve(), option)
    monkeypatch.setenv(variable_of(option), values[option])
    assert getattr(LSDPPlugin().resolve(), option) != default
    decided = getattr(LSDPPlugin().resolve(Plan.equal()), option) == getattr(LSDPPlugin().resolve(), option)
    assert decided is ("in the plan" not in text)


@pytest.mark.parametrize(
    ("option", "value"),
    [("batch_norm", "ignore"), ("prefetch", "0"), ("powersgd_rank", "0"), ("bucket_megabytes", "-1"), ("units", "")],
)
def test_what_is_wrong_in_a_variable_names_it(option: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable_of(option), value)
    if option == "units":  # nothing is no value
        assert LSDPPlugin().resolve().units is None
        return
    with pytest.raises(ValueError, match=variable_of(option)):
        LSDPPlugin().resolve()


def test_an_option_without_variable_has_a_keyword_alone() -> None:
    assert option_advice("token_counter") == "LSDPPlugin(token_counter=...)"
