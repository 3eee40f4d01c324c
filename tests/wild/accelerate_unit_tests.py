#!/usr/bin/env python
# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""accelerate's own unit tests, once as they are and once with every `Accelerator` ours: a table of the differences.

    python tests/wild/accelerate_unit_tests.py SOURCES [--strategy lsdp] [--files test_optimizer.py ...]

SOURCES is a folder with accelerate's sources (`tests/` and `examples/`), which are only read; see ACCELERATE.md. Ends
with 1 if a test that passes as it is fails with ours and is not in `accelerate_unit_refusals.json`, or no longer fails
although it is.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path


HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent.parent
INSIDE = HERE / "accelerate_unit"
REFUSALS = HERE / "accelerate_unit_refusals.json"
#: Those that can run on a CPU without the network and make or serve an accelerator in some way.
FILES = (
    "test_accelerator.py",
    "test_big_modeling.py",
    "test_compile.py",
    "test_cpu.py",
    "test_data_loader.py",
    "test_dataclasses.py",
    "test_grad_sync.py",
    "test_hooks.py",
    "test_kwargs_handlers.py",
    "test_logging.py",
    "test_memory_utils.py",
    "test_metrics.py",
    "test_modeling_utils.py",
    "test_offload.py",
    "test_optimizer.py",
    "test_scheduler.py",
    "test_state_checkpointing.py",
    "test_tracking.py",
    "test_utils.py",
)
STOCK, OURS = "stock", "ours"
#: Of an outcome: its reason, in the table.
_REASON_LENGTH = 300

Outcomes = dict[str, tuple[str, str]]  # test -> (outcome, reason)


def main() -> int:
    arguments = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if not (arguments.sources / "tests" / "test_accelerator.py").is_file():
        print(f"{arguments.sources} has no tests/test_accelerator.py: give the folder of accelerate's sources")
        return 2
    differences: list[tuple[str, tuple[str, str], tuple[str, str]]] = []
    counts = {STOCK: Counter(), OURS: Counter()}
    for name in arguments.files:
        found = {}
        for side in (STOCK, OURS):
            found[side] = run_file(arguments.sources, name, side, arguments)
            counts[side].update(outcome for outcome, _ in found[side].values())
        differences += compare(found[STOCK], found[OURS])
        line = "   ".join(f"{side} {_counted(found[side])}" for side in (STOCK, OURS))
        print(f"{name:32} {line}", flush=True)
    for side in (STOCK, OURS):
        print(f"{side}: " + ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts[side].items())))
    return report(differences, json.loads(REFUSALS.read_text()), arguments.files)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, help="folder with accelerate's tests/ and examples/")
    parser.add_argument("--strategy", default="lsdp", help="of every accelerator (default: lsdp)")
    parser.add_argument("--files", nargs="+", default=FILES, help="files of tests/ (default: all that can run here)")
    parser.add_argument("--test-seconds", type=int, default=120, help="bound of one test")
    parser.add_argument("--file-seconds", type=int, default=900, help="bound of one file, on one side")
    parser.add_argument("-k", default="", help="pytest's own selection of tests")
    arguments = parser.parse_args()
    arguments.sources = arguments.sources.resolve()
    return arguments


def run_file(sources: Path, name: str, side: str, arguments: argparse.Namespace) -> Outcomes:
    """The outcome of each test of a file, in a process and a working directory of its own."""
    with tempfile.TemporaryDirectory(prefix="accelerate_unit_") as folder:
        here = Path(folder)
        for part in ("tests", "examples"):
            (here / part).symlink_to(sources / part)
        (here / "pytest.ini").write_text("[pytest]\n")
        outcomes = here / "outcomes.jsonl"
        command = [sys.executable, "-m", "pytest", "-q", "-c", "pytest.ini", "--rootdir", ".", "-p", "unit_outcomes"]
        command += ["-p", "no:cacheprovider", f"--timeout={arguments.test_seconds}", f"tests/{name}"]
        if arguments.k:
            command += ["-k", arguments.k]
        process = subprocess.Popen(
            command,
            cwd=here,
            env=_environment(side, arguments.strategy, outcomes),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        late = False
        try:
            output, _ = process.communicate(timeout=arguments.file_seconds)
        except subprocess.TimeoutExpired:
            late = True
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        except BaseException:  # interrupted: what was started ends, too
            os.killpg(process.pid, signal.SIGKILL)
            raise
        found: Outcomes = {}
        if outcomes.exists():
            for line in map(json.loads, outcomes.read_text().splitlines()):
                found[line["test"].removeprefix("tests/")] = (line["outcome"], line["reason"])
        if late or process.returncode not in (0, 1, 5):
            how = f"took more than {arguments.file_seconds} s" if late else f"ended with {process.returncode}"
            found[f"{name} (the whole file)"] = ("failed", f"{how}: {output[-2000:]}")
        return found


def _environment(side: str, strategy: str, outcomes: Path) -> dict[str, str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "LSDP_", "FSDP_"))
    }
    path = [str(INSIDE / "plugin"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if side == OURS:
        path = [str(INSIDE / "start"), str(PROJECT), *path]
        environment["LSDP_STRATEGY"] = strategy
    environment.update(
        PYTHONPATH=os.pathsep.join(path),
        PYTHONDONTWRITEBYTECODE="1",  # the sources are not to be written to
        UNIT_OUTCOMES=str(outcomes),
        HF_HUB_OFFLINE="1",
        HF_DATASETS_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
    )
    return environment


def compare(stock: Outcomes, ours: Outcomes) -> list[tuple[str, tuple[str, str], tuple[str, str]]]:
    """Tests whose outcome differs: (test, outcome as it is, outcome with ours)."""
    missing = ("missing", "")
    names = list(dict.fromkeys([*stock, *ours]))
    pairs = [(name, stock.get(name, missing), ours.get(name, missing)) for name in names]
    return [(name, one, other) for name, one, other in pairs if one[0] != other[0]]


def report(differences: list, refusals: dict[str, str], files: list[str]) -> int:
    """Prints the table; returns the exit code."""
    unexpected = 0
    print("\n| test | stock | ours | reason |\n|---|---|---|---|")
    for name, stock, ours in differences:
        reason = refusals.get(name)
        worse = stock[0] == "passed" and ours[0] != "passed"
        unexpected += worse and reason is None
        shown = reason or " ".join((ours[1] if worse else stock[1]).split())[:_REASON_LENGTH]
        print(f"| `{name}` | {stock[0]} | {ours[0]} | {'' if not worse or reason else 'NOT BY DESIGN: '}{shown} |")
    gone = [n for n in refusals if n.partition("::")[0] in files and n not in {d[0] for d in differences}]
    for name in gone:
        print(f"| `{name}` | | | listed as refused, but does not differ |")
    print(f"\n{unexpected} differences that are not by design, {len(gone)} listed ones that are none")
    return 1 if unexpected or gone else 0


def _counted(outcomes: Outcomes) -> str:
    counted = Counter(outcome for outcome, _ in outcomes.values())
    return " ".join(f"{counted[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))


if __name__ == "__main__":
    sys.exit(main())
