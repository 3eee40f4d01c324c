# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Calls a function at the end of a module's first import, whoever imports it.

The suite must not import torch or a library before the script does: that would change what the script sees. It has
its own few lines for this rather than the package's, so that the run without the package is without it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Watcher(MetaPathFinder):
    """Finds a module through the other finders and has its loader call the function afterwards."""

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self._name = name
        self._function = function
        self._is_asking = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name or self._is_asking:
            return None
        self._is_asking = True
        try:
            found = (finder.find_spec(name, path, target) for finder in list(sys.meta_path))
            spec = next((spec for spec in found if spec is not None), None)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:  # `find_spec` may be called several times for one import
                    sys.meta_path.remove(self)
                    self._function()

            spec.loader.exec_module = execute_and_call
        return spec


def after_import(name: str, function: Callable[[], None]) -> None:
    """Calls ``function`` once, when the module ``name`` has been executed.

    Args:
        name: full name of a module that has not been imported yet.
        function: takes nothing.
    """
    sys.meta_path.insert(0, _Watcher(name, function))
