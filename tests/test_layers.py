# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Imports run one way: a package may import those of lower layers, and none beside it or above it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import accelerate_lshdp


PACKAGE = Path(accelerate_lshdp.__file__).parent

#: From the lowest to the highest; packages in one row do not know each other.
LAYERS = (
    ("documents",),
    ("planning", "runtime"),
    ("data", "engine"),
    ("checkpoint", "profiling", "estimation", "comparing"),
    ("accelerator",),
    ("trainer",),
    ("shim",),
    ("run", "emulated_cluster"),
    ("benchmarking",),
    ("cli",),
)
_LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}


def imports() -> Iterator[tuple[str, str]]:
    """Each import of this package's modules by each other, also those for types alone: (importing, imported)."""
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}:{node.lineno}: found a relative import, expected an absolute one"
                found = [node.module or ""]
            elif isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            else:
                continue
            for module in found:
                package, _, rest = module.partition(".")
                if package == PACKAGE.name and rest:
                    yield name, rest


def test_every_package_has_a_layer() -> None:
    found = {path.stem for path in PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert found - {"__init__", "__pycache__"} == set(_LAYER_OF)


def test_imports_run_down() -> None:
    up = []
    for importing, imported in imports():
        above, below = importing.partition(".")[0], imported.partition(".")[0]
        if importing != "__init__" and above != below and _LAYER_OF[above] <= _LAYER_OF[below]:
            up.append(f"{importing} imports {imported}")
    assert up == []
