# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The messages of the package, as its source has them; `…` stands for what is filled in."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import accelerate_lshdp


PACKAGE = Path(accelerate_lshdp.__file__).parent
FILLED_IN = "…"
_LOGGED = ("warn", "warning", "warning_once")
# Python's own protocol for lazily imported names.
_NOT_FOR_USERS = ("AttributeError", "ConstructorError", "SystemExit")


@dataclass(frozen=True)
class Message:
    """A text that an error, a warning or a refusal consists of, and where it stands."""

    text: str
    place: str


def texts() -> set[str]:
    """All texts in the source of the package, put together as Python does; without short ones."""
    found = {_text(node) for _, tree in _modules() for node in ast.walk(tree)}
    return {text for text in found if text is not None and len(text) > 8}


def messages() -> list[Message]:
    """Errors that are raised and warnings, where their text stands beside; not those that only hand on another's."""
    found = []
    for path, tree in _modules():
        for node in ast.walk(tree):
            for text in _of(node):
                if len(re.findall(r"[A-Za-z]{2,}", text)) >= 3:
                    found.append(Message(text, f"{path.relative_to(PACKAGE.parent)}:{node.lineno}"))
    return found


def matches(quote: str, text: str) -> bool:
    """Whether a text has a quote in it, in which `…` may stand for anything."""
    start, text = 0, _plain(text)
    for part in map(_plain, quote.split(FILLED_IN)):
        found = text.find(part, start)
        if found < 0:
            return False
        start = found + len(part)
    return True


@functools.cache
def _plain(text: str) -> str:
    return " ".join(text.split()) if text.strip() else text


@functools.cache
def _modules() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(PACKAGE.rglob("*.py"))]


def _of(node: ast.AST) -> Iterator[str]:
    """The texts of a node that raises, warns, or yields a mistake."""
    values: list[ast.expr] = []
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and _name(node.exc) not in _NOT_FOR_USERS:
        values = node.exc.args
    elif isinstance(node, ast.Call) and _name(node) in (*_LOGGED, "raise_on_all_ranks"):
        values = node.args[:1]
    elif isinstance(node, ast.Yield) and node.value is not None:
        values = [node.value]
    for value in values:
        text = _text(value)
        if text is not None:
            yield text


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def _text(node: ast.AST) -> str | None:
    """A string, an f-string or a sum of them; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else FILLED_IN for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [_text(node.left), _text(node.right)]
        return None if parts == [None, None] else "".join(FILLED_IN if part is None else part for part in parts)
    return None
