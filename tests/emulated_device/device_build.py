# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Builds the C++ extension of the emulated device, once for each version of its sources and of torch.

As a program, it builds the extension and ends. Who has built it loads it in a fraction of a second.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension


FOLDER = Path(__file__).resolve().parent
NAME = "emulated_device_extension"
SOURCES = ["operators.cpp", "module.cpp"]
# Hardly optimised: the kernels are torch's own, and compiling takes longer than all tests. With NDEBUG, as torch is
# built with it: some of its classes have a member more without.
FLAGS = ["-O1", "-g0", "-w", "-DNDEBUG"]


def missing_tools() -> str | None:
    """What the extension cannot be built without and is not there."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"found no C++ compiler ({compiler})"
    return None if cpp_extension.is_ninja_available() else "found no ninja, with which torch builds extensions"


def build_folder() -> Path:
    """Where the extension is built: outside of the checkout, as torch does it, and named by what it is built of."""
    digest = hashlib.sha256(repr((torch.__version__, SOURCES, FLAGS)).encode())
    for path in sorted([*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    return Path(root) / f"emulated_device_{digest.hexdigest()[:16]}"


def load_extension() -> ModuleType:
    """Builds the extension if need be, and loads it into this process, where its device is there from then on."""
    folder = build_folder()
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / "built"
    with (folder / "in_use").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not built.exists():
            # torch's own lock is a file that stays if its owner is killed, and then is waited for forever.
            (folder / "lock").unlink(missing_ok=True)
            sources = [str(FOLDER / name) for name in SOURCES]
            module = cpp_extension.load(NAME, sources, extra_cflags=FLAGS, build_directory=str(folder))
            built.touch()
            return module
    # Not by torch's loader: it would compile everything again for another checkout with the same sources.
    spec = importlib.util.spec_from_file_location(NAME, folder / f"{NAME}.so")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    load_extension()
