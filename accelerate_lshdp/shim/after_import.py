# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Calls a function as soon as a package has been imported, by whomever.

The shim imports nothing large before the script does it: scripts set variables such as ``HF_HOME``,
``OMP_NUM_THREADS`` or ``CUDA_VISIBLE_DEVICES`` in their first lines, and libraries read them when they are imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(package: str, function: Callable[[], None]) -> None:
    """Calls ``function`` once: now if ``package`` has been imported, else at the end of its import.

    Whoever imports the package sees what ``function`` did to it, and the exceptions that it raises.
    """
    if package in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _Finder(package, function))


class _Finder(MetaPathFinder):
    """Finds nothing itself: it has the other finders' loader of one package call the function."""

    def __init__(self, package: str, function: Callable[[], None]) -> None:
        self._package = package
        self._function = function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._package:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            self._watch(spec.loader)
        return spec

    def _watch(self, loader: object) -> None:
        # The loader of this one spec, not its class. A spec may be asked for without being loaded (to see whether
        # the package is there), so the finder stays until a load has succeeded.
        execute = loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            loader.exec_module = execute
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._function()

        loader.exec_module = execute_and_call
