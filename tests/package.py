# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Builds the source archive and the wheel, installs the wheel in an environment of its own, and trains with it.

    python tests/package.py

`make package` does it with the environment of the tests, which has the package ``build``. The wheel is built from the
source archive, so that both are tried. Nothing of the working tree is in reach of the program that is run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
TRAIN = """
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 2)
loader = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
for batch in loader:
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
print(f"trained with {type(accelerator).__name__} on {accelerator.num_processes} ranks", flush=True)
"""


def packaged(wheel: Path) -> set[str]:
    """The files of the package in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if name.startswith("accelerate_lshdp/")}


def tracked() -> set[str]:
    """The files of the package that git has."""
    listed = subprocess.run(["git", "ls-files", "accelerate_lshdp"], cwd=ROOT, check=True, capture_output=True)
    return set(listed.stdout.decode().split())


def main() -> None:
    version = re.search(r'^__version__ = "(.*)"$', (ROOT / "accelerate_lshdp/__init__.py").read_text(), re.MULTILINE)[
        1
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, "-m", "build", "--outdir", folder / "dist", ROOT], check=True)
        [wheel], [source] = (sorted((folder / "dist").glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
        if missing := tracked() - packaged(wheel):
            sys.exit(f"found no {', '.join(sorted(missing))} in {wheel.name}, expected all files of the package")
        if f"-{version}-" not in wheel.name or f"-{version}.tar" not in source.name:
            sys.exit(f"found {wheel.name} and {source.name}, expected version {version}, as the package says")
        venv.create(folder / "clean", with_pip=True)
        binaries = folder / "clean" / "bin"
        install = [binaries / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel]
        subprocess.run(install, check=True)
        (folder / "train.py").write_text(TRAIN)
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        for command, expected in (
            (["--version"], version),
            (["launch", "--auto", "--nodes", "2", "--cpu", "train.py"], "trained with LSHDPAccelerator on 2 ranks"),
        ):
            run = subprocess.run(
                [binaries / "accelerate-lshdp", *command], cwd=folder, env=environment, capture_output=True, text=True
            )
            if run.returncode or expected not in run.stdout:
                output = f"{run.stdout}{run.stderr}"
                sys.exit(f"{' '.join(command)}: found code {run.returncode}, expected {expected!r}\n{output}")
        print(f"{wheel.name} and {source.name}: built, installed, and trained with")


if __name__ == "__main__":
    main()
