# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Imports run one way: a package may import those of lower layers, and none beside it or above it; no circles."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import accelerate_lshdp


PACKAGE = Path(accelerate_lshdp.__file__).parent
#: What emulates nodes: it lies beside the package in a checkout, and is not installed.
LABORATORY = "laboratory"

#: From the lowest to the highest; packages in one row do not know each other.
LAYERS = (
    ("documents",),
    ("planning", "runtime"),
    ("data", "engine"),
    ("checkpoint", "profiling", "estimation", "hosts"),
    ("accelerator",),
    ("trainer", "comparing"),
    ("shim",),
    ("run",),
    ("cli",),
)
_LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}


def imports() -> Iterator[tuple[str, str]]:
    """Each import of this package's modules by each other, also those for types alone: (importing, imported)."""
    for name, module in all_imports():
        package, _, rest = module.partition(".")
        if package == PACKAGE.name and rest:
            yield name, rest


def all_imports() -> Iterator[tuple[str, str]]:
    """Each import in this package's modules, of whatever: (importing, imported)."""
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}:{node.lineno}: found a relative import, expected an absolute one"
                found = [_imported(node.module or "", alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            else:
                continue
            for module in found:
                yield name, module


def _imported(module: str, name: str) -> str:
    """What ``from module import name`` imports: a module of that name, or else what a module holds."""
    inside = PACKAGE.parent.joinpath(*module.split("."), name)
    return f"{module}.{name}" if inside.with_suffix(".py").exists() or inside.is_dir() else module


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


def test_one_command_alone_imports_the_laboratory() -> None:
    importing = {name for name, module in all_imports() if module.partition(".")[0] == LABORATORY}
    assert importing == {"cli.bench"}


def test_the_laboratory_is_not_installed() -> None:
    """The wheel holds the folders that pyproject.toml includes."""
    root = PACKAGE.parent
    included = re.search(
        r"\[tool\.setuptools\.packages\.find\]\ninclude = (\[.*\])", (root / "pyproject.toml").read_text()
    )
    patterns = ast.literal_eval(included[1])
    folders = [path.name for path in root.iterdir() if path.is_dir() and "." not in path.name]
    packages = [name for name in folders if any(fnmatch(name, pattern) for pattern in patterns)]
    assert packages == [PACKAGE.name]
    assert (root / "benchmarks" / LABORATORY / "emulated_cluster").is_dir()
    assert not any({LABORATORY, "emulated_cluster"} & set(path.parts) for path in PACKAGE.rglob("*.py"))


def test_no_modules_import_each_other() -> None:
    modules = {".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    below: dict[str, set[str]] = {}
    for importing, imported in imports():
        below.setdefault(importing, set()).add(imported)
    # What nothing left imports is taken away, again and again: a circle stays.
    left = {importing: imported & modules - {importing} for importing, imported in below.items()}
    while lowest := [name for name, imported in left.items() if not imported & left.keys()]:
        for name in lowest:
            del left[name]
    assert left == {}
