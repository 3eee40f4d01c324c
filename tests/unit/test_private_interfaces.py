# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Private interfaces of other libraries that the package uses are listed in CONTRIBUTING.md, with a reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import accelerate_lshdp


PACKAGE = Path(accelerate_lshdp.__file__).parent
PAGE = PACKAGE.parent / "CONTRIBUTING.md"
#: Names with an underscore that are documented by those whose they are, or have no effect at run time.
PUBLIC = {
    "_exit",  # os
    "_getframe",  # sys
    "_fields",  # of a named tuple
    "_replace",  # likewise
    "_extra_state",  # key of a state dict, torch.nn.Module.set_extra_state
    "_SubParsersAction",  # argparse has no other name for annotations
}


def private_names(trees: list[ast.Module]) -> set[str]:
    """Names that begin with an underscore, are imported, read or looked up, and are defined nowhere in the package."""
    defined = {name for tree in trees for name in _defined(tree)}
    return {name for tree in trees for name in _used(tree) if name not in defined}


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _used(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match("_[a-zA-Z]", node.attr):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"_[a-z]\w+", node.value):
            yield node.value  # of a getattr
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(PACKAGE.name):
            in_private = any(part.startswith("_") for part in (node.module or "").split(".")[1:])
            yield from (each.name for each in node.names if in_private or each.name.startswith("_"))


def test_each_is_listed():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")]
    own = re.compile("_lshdp_")  # attributes that are put on objects of the user's
    page = PAGE.read_text(encoding="utf-8")
    missing = sorted(
        name for name in private_names(trees) - PUBLIC if not own.match(name) and not re.search(rf"\b{name}\b", page)
    )
    assert missing == []


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("from torch._C import found", {"found"}),
        ("from torch import _found", {"_found"}),
        ("getattr(profiler, '_found', True)", {"_found"}),
        ("tensor._found", {"_found"}),
        ("class A:\n    def __init__(self): self._own = 1\n    def get(self): return self._own", set()),
        ("def _own(): pass\n_own()", set()),
    ],
)
def test_they_are_found(code, expected):
    assert private_names([ast.parse(code)]) == expected
