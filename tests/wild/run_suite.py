# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Runs scripts that nobody here wrote and compares them with plain accelerate and with one process.

    python tests/wild/run_suite.py --sources FOLDER [--only PATTERN] [--strategy lsdp] [--table FILE]

Each script runs three times, unchanged: under plain accelerate on as many ranks (how many steps, which learning
rates), under LSHDP with unequal batches, and under LSHDP in one process on the same global batches with plain
accelerate's rates. `README.md` beside this file says what FOLDER holds and what the table means.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from cases import CASES, LEFT_OUT, Case  # noqa: E402
from comparison import Outcome, Row, compare, write_table  # noqa: E402
from forked_launches import ForkServer  # noqa: E402
from launching import launch  # noqa: E402


REPOSITORY = HERE.parent.parent
PETS = 40


def main() -> int:
    """Runs what the command line asks for; returns 1 if a script differs, else 0."""
    arguments = _parse()
    work = Path(arguments.work or tempfile.mkdtemp(prefix="wild-"))
    hub = work / f"hub-{arguments.dtype}"
    python_path = [str(HERE / "in_every_process"), *(arguments.packages or []), str(REPOSITORY)]
    python_path += filter(None, [os.environ.get("PYTHONPATH")])
    environment = {"PYTHONPATH": os.pathsep.join(python_path), "WILD_HUB": str(hub), "HF_HOME": str(hub)}
    if not (hub / "complete").exists():
        shutil.rmtree(hub, ignore_errors=True)
        command = [sys.executable, str(HERE / "build_hub.py"), str(hub), arguments.dtype, str(PETS)]
        subprocess.run(command, env={**os.environ, **environment}, check=True, capture_output=True)
        (hub / "complete").touch()
    server = None if arguments.fresh else ForkServer(environment)
    start = launch if server is None else server.launch
    rows: list[Row] = []
    for case in CASES:
        if re.search(arguments.only, case.title) is None:
            continue
        started = time.monotonic()
        row = run_case(case, arguments, work, environment, start)
        rows.append(row)
        print(f"{row.line()}  [{time.monotonic() - started:.0f} s]", flush=True)
    if server is not None:
        server.close()
    write_table(Path(arguments.table), rows, LEFT_OUT, arguments)
    print(f"table: {arguments.table}; logs: {work}")
    return int(any(not row.is_good for row in rows))


def run_case(
    case: Case, arguments: argparse.Namespace, work: Path, environment: dict[str, str], start: Callable[..., Any]
) -> Row:
    """The three runs of a script and their comparison. ``start`` is `launching.launch` or a fork server's."""
    from accelerate_lshdp import Plan

    folder = work / "runs" / re.sub(r"[^A-Za-z0-9]+", "-", case.title)
    folder.mkdir(parents=True, exist_ok=True)
    ranks = len(case.cut)
    cut, whole = folder / "cut.json", folder / "whole.json"
    options = {"strategy": arguments.strategy, "intra_node": case.intra_node}
    Plan.from_batch_sizes(case.cut, **options).save(cut)
    Plan.from_batch_sizes([sum(case.cut)], **options).save(whole)
    shim = ["-m", "accelerate_lshdp.run", "--plan"]

    def run(name: str, prefix: list[str], count: int, extra: dict[str, str]) -> Outcome:
        return _run(case, arguments, folder / name, prefix, count, {**environment, **extra}, start)

    done = Outcome(folder / "plain" / "record", ranks, ("",) * ranks)
    kept = folder / "plain" / "complete"
    plain = done if arguments.reuse_plain and kept.exists() else run("plain", [], ranks, {"WILD_PLAIN": "1"})
    if plain.failure:
        return compare(case, plain, None, None)
    kept.touch()
    ours = run("ours", [*shim, str(cut)], ranks, {})
    # The whole batch of the world on one rank is not what the script asked for, which has to be said.
    given = {"LSDP_KEEP_PLAN_TOTAL": "1", "WILD_RATES": str(folder / "plain" / "record" / "rates-0.json")}
    one = run("one", [*shim, str(whole)], 1, given) if not ours.failure else None
    return compare(case, plain, ours, one)


def _run(
    case: Case,
    arguments: argparse.Namespace,
    folder: Path,
    prefix: list[str],
    ranks: int,
    environment: dict[str, str],
    start: Callable[..., Any],
) -> Outcome:
    shutil.rmtree(folder, ignore_errors=True)
    record, out = folder / "record", folder / "out"
    record.mkdir(parents=True)
    values = {"out": str(out), "pets": str(Path(environment["WILD_HUB"]) / "pets")}
    script = Path(arguments.sources).resolve() / case.source
    text = case.arguments + (f" {case.whole}" if ranks == 1 else "")
    command = [*prefix, str(script), *(word.format(**values) for word in shlex.split(text))]
    changes = {**environment, **case.environment, "WILD_RECORD": str(record), "WILD_SAMPLES": str(case.samples)}
    try:
        result = start(command, ranks, env=changes, cwd=folder, timeout=arguments.timeout)
    except AssertionError as error:  # it had not ended in time; the message holds the stacks
        (folder / "log").write_text(str(error))
        late = f"had not ended after {arguments.timeout:g} s: {_last_error(str(error))}"
        return Outcome(record, ranks, (late,) * ranks)
    log = [f"--- rank {i}: {p.returncode}\n{p.stdout}\n{p.stderr}" for i, p in enumerate(result.processes)]
    (folder / "log").write_text("\n".join(log))
    codes = [(process.returncode, _last_error(process.stderr)) for process in result.processes]
    return Outcome(record, ranks, tuple(f"exit code {code}: {error}" if code else "" for code, error in codes))


def _last_error(stderr: str) -> str:
    """The line of a traceback that names the error, without the rank that torch may put before it."""
    lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in stderr.splitlines()]
    errors = [line for line in lines if re.match(r"[A-Za-z_.]*(Error|Exception|Exit)\b", line)]
    return (errors or ["no error was printed"])[-1]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run scripts of others under LSHDP and compare.", allow_abbrev=False)
    parser.add_argument("--sources", required=True, metavar="FOLDER", help="holds accelerate/, transformers/ and trl/")
    parser.add_argument("--packages", action="append", metavar="FOLDER", help="packages that only the scripts need")
    parser.add_argument("--only", default="", metavar="PATTERN", help="regular expression of titles")
    parser.add_argument("--strategy", default="lsdp")
    parser.add_argument("--dtype", default="float64", choices=["float32", "float64"], help="of the models")
    parser.add_argument("--timeout", type=float, default=240.0, metavar="SECONDS", help="for one run")
    parser.add_argument("--fresh", action="store_true", help="start each process anew, not as a fork: slower")
    parser.add_argument("--reuse-plain", action="store_true", help="keep what plain accelerate did in --work before")
    parser.add_argument("--work", metavar="FOLDER", help="for logs, models and data; default: a fresh one")
    parser.add_argument("--table", default="wild.md", metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
