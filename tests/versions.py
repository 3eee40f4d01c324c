# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Runs the tests of the Trainer with other versions of transformers and accelerate, each in an environment of its own.

    python tests/versions.py                    all rows of VERSIONS
    python tests/versions.py --only 5.17        those of one transformers
    python tests/versions.py -- -k features     what follows goes to pytest

`make test-versions` does the first. An environment takes minutes and a gigabyte, and is kept for the next time.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".venv-versions"
#: (transformers, accelerate). The newest of both are those of the ordinary tests.
VERSIONS = (
    ("5.5.4", "1.15.0"),
    ("5.10.4", "1.15.0"),
    ("5.17.0", "1.15.0"),
    ("5.23.0", "1.12.0"),
)
TESTS = ("tests/scripts/test_trainer_*.py", "tests/scripts/test_imports.py", "tests/scripts/test_run.py")


def environment(transformers: str, accelerate: str) -> Path:
    """The Python of an environment with these versions, made if it does not exist."""
    folder = FOLDER / f"transformers-{transformers}-accelerate-{accelerate}"
    python = folder / "bin" / "python"
    if (folder / "installed").exists():
        return python
    venv.create(folder, with_pip=True)
    # The other pins of the documented install stay; torch above all, of which a newer one would come with CUDA.
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    kept = [pin for pin in pins if not pin.startswith(("transformers==", "accelerate=="))]
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join([*kept, f"transformers=={transformers}", f"accelerate=={accelerate}"]) + "\n")
    install = [python, "-m", "pip", "install", "--quiet", "-c", constraints, "-e", f"{ROOT}[dev]"]
    subprocess.run(install, check=True)
    (folder / "installed").touch()
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description="Test with other versions of transformers and accelerate.")
    parser.add_argument("--only", default="", metavar="VERSION", help="transformers whose version begins so")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest")
    arguments = parser.parse_args()
    tests = [path for pattern in TESTS for path in sorted(ROOT.glob(pattern))]
    failed = []
    for transformers, accelerate in VERSIONS:
        if not transformers.startswith(arguments.only):
            continue
        title = f"transformers {transformers}, accelerate {accelerate}"
        print(f"\n== {title}", flush=True)
        command = [environment(transformers, accelerate), "-m", "pytest", "-q", "--no-header", *tests]
        if subprocess.run([*command, *arguments.pytest], cwd=ROOT).returncode:
            failed.append(title)
    sys.exit(f"failed: {'; '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
