# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Does `accelerate-lshdp launch --auto` on unmodified scripts come to what profiling and planning give?

    python benchmarks/automatic_start.py --output-dir outputs/automatic_start

Two scripts in `benchmarks/automatic_start/`, a loop on accelerate and one with the Trainer, train a ViT on real images
with two CPU ranks, of which rank 1 gets half a core by a kernel quota (rank 0 a whole one). Each is started

    alone       as one process, without this package, with the ranks' batch sizes together: the parameters to reach
    auto        with `launch --auto`
    planned     with the plan of a profile that was measured under the same quotas

The last two in turns. The exit code is 1 if parameters differ by more than 5e-6 from those of one process, or if after
40 steps a step of `auto` takes more than 1.08 times one of `planned`. It needs root on Linux for the quotas, a machine
with two cores and nothing else to do, and takes about a quarter of an hour.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from laboratory.emulated_cluster.cgroups import ControlGroup
from limits import Limit, limits_table

from accelerate_lshdp.documents.plan import Plan


SCRIPTS = Path(__file__).with_name("automatic_start")
KINDS = ("loop", "with_trainer")
CORES = (1.0, 0.5)
LONGEST_SECONDS = 600.0
#: Of a rank's process, which may start others (workers) that are in its group with it.
LOOK_EVERY_SECONDS = 0.1


class Quotas:
    """Gives each rank that a launcher starts its share of a core, from its first tenth of a second on."""

    def __init__(self, groups: Sequence[ControlGroup], marker: str) -> None:
        self._groups = groups
        self._marker = marker
        self._ended = threading.Event()
        self._limited: set[int] = set()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Quotas:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def count(self) -> int:
        """Processes that were limited."""
        return len(self._limited)

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_EVERY_SECONDS):
            for pid, rank in ranks_of(self._marker):
                if pid not in self._limited:
                    self._limited.add(pid)
                    self._groups[rank].add(pid)


def ranks_of(marker: str) -> Iterator[tuple[int, int]]:
    """Process and rank of all that were started with this mark in their environment, and are a rank."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            environment = dict(word.partition("=")[::2] for word in words)
            if environment.get("AUTOMATIC_START") == marker and "RANK" in environment:
                yield int(folder.name), int(environment["RANK"])


class Benchmark:
    """All starts of one invocation."""

    def __init__(self, arguments: argparse.Namespace, groups: Sequence[ControlGroup] | None) -> None:
        self.arguments = arguments
        self._groups = groups
        self._starts = 0
        self.results: dict[str, Any] = {}
        self.limits: list[Limit] = []

    def _script(self, kind: str, batch_size: int, folder: Path) -> list[str]:
        arguments = self.arguments
        steps = arguments.steps + arguments.counted
        own = ["--batch_size", batch_size, "--max_steps", steps, "--layers", arguments.layers, "--output_dir", folder]
        return [str(SCRIPTS / f"{kind}.py"), *map(str, own)]

    def _start(self, words: Sequence[str], *, ranks: int) -> None:
        self._starts += 1
        marker = f"{os.getpid()}-{self._starts}"
        environment = {**os.environ, "AUTOMATIC_START": marker, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        environment.pop("ACCELERATE_LSHDP_PLAN", None)
        limited = Quotas(self._groups, marker) if ranks and self._groups else contextlib.nullcontext()
        with limited:
            done = subprocess.run(
                [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=LONGEST_SECONDS
            )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
        if ranks and self._groups and limited.count != ranks:
            raise RuntimeError(f"found {limited.count} processes of ranks to slow down, expected {ranks}")

    def _launch(self, *words: str) -> None:
        self._start(["-m", "accelerate_lshdp.cli.main", *words], ranks=len(CORES))

    def plan(self) -> Path:
        """Profiles under the quotas, and plans for the scripts' total."""
        arguments = self.arguments
        folder = arguments.output_dir
        profile, plan = folder / "profile.json", folder / "plan.json"
        total = str(arguments.batch_size * len(CORES))
        own = [*self._script("measured", arguments.batch_size, folder)]
        options = ["--nodes", "2", "--cpu", "--seconds", str(arguments.profile_seconds), "--total-batch-size", total]
        self._launch("profile", *options, "--output", str(profile), *own)
        options = ["--total", total, "--no-accumulation", "--no-picture", "--no-yaml", "--output", str(plan)]
        self._start(["-m", "accelerate_lshdp.cli.main", "plan", str(profile), *options], ranks=0)
        return plan

    def run(self, kind: str, plan: Path) -> None:
        """All starts of one script."""
        arguments = self.arguments
        alone = self._folder(kind, "alone")
        say(f"{kind}: alone")
        self._start(self._script(kind, arguments.batch_size * len(CORES), alone), ranks=0)
        seconds: dict[str, list[float]] = {"auto": [], "planned": []}
        differences: dict[str, list[float]] = {"auto": [], "planned": []}
        for turn in range(arguments.turns):
            for name, told in (("auto", ["--auto", "--nodes", "2", "--cpu"]), ("planned", ["--plan", str(plan)])):
                say(f"{kind}: {name}, turn {turn + 1} of {arguments.turns}")
                folder = self._folder(kind, f"{name}{turn}")
                self._launch("launch", *told, *self._script(kind, arguments.batch_size, folder))
                seconds[name] += json.loads((folder / "seconds.json").read_text())[-arguments.counted :]
                differences[name].append(difference(folder, alone))
        steps = {name: median(values) for name, values in seconds.items()}
        ratio = steps["auto"] / steps["planned"]
        self.results[kind] = {"step_seconds": steps, "ratio": ratio, "seconds": seconds, "differences": differences}
        found = max(max(values) for values in differences.values())
        self.limits += [
            Limit(f"{kind}: step after {arguments.steps} steps, automatic / planned", ratio, 1.08),
            Limit(f"{kind}: parameters, relative difference from one process", found, 5e-6),
        ]

    def _folder(self, kind: str, name: str) -> Path:
        folder = self.arguments.output_dir / kind / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def difference(folder: Path, reference: Path) -> float:
    """||p - q|| / ||q|| over all parameters of two saved models."""
    from safetensors.torch import load_file

    one, other = (load_file(place / "model.safetensors") for place in (folder, reference))
    if one.keys() != other.keys():
        raise RuntimeError(f"found other parameters in {folder} than in {reference}")
    apart = sum((one[name].double() - other[name].double()).square().sum().item() for name in other)
    return (apart / sum(value.double().square().sum().item() for value in other.values())) ** 0.5


def say(what: str) -> None:
    """Tells the person who waits what is going on."""
    print(f"... {what}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Runs everything; returns 1 if a limit is broken. What was measured is written before."""
    arguments = parse(argv)
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    refusal = "not wanted" if arguments.no_quotas else ControlGroup.missing()
    if refusal is not None and not arguments.no_quotas:
        print(f"benchmarks/automatic_start.py: no CPU quotas: {refusal}", file=sys.stderr)
        return 2
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        groups = None
        if refusal is None:
            groups = [stack.enter_context(ControlGroup(f"start{i}", share)) for i, share in enumerate(CORES)]
        benchmark = Benchmark(arguments, groups)
        say("profile and plan")
        plan = benchmark.plan()
        for kind in arguments.kinds:
            benchmark.run(kind, plan)
    results = {
        "configuration": {
            **{key: value for key, value in vars(arguments).items() if not isinstance(value, Path)},
            "cores": list(CORES) if groups else None,
            "planned_batch_sizes": Plan.load(plan).batch_sizes,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "seconds_in_all": time.monotonic() - begun,
        },
        "scripts": benchmark.results,
        "limits": [limit.to_dict() for limit in benchmark.limits],
    }
    text = json.dumps(results, indent=2, allow_nan=False) + "\n"
    (arguments.output_dir / "results.json").write_text(text, encoding="utf-8")
    print_report(results, benchmark.limits)
    return 0 if all(limit.holds for limit in benchmark.limits) else 1


def print_report(results: dict[str, Any], limits: Sequence[Limit]) -> None:
    """Prints the tables."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Median step, plan {results['configuration']['planned_batch_sizes']}", title_justify="left")
    for heading in ("script", "automatic", "planned", "ratio"):
        table.add_column(heading, justify="left" if heading == "script" else "right")
    for kind, result in results["scripts"].items():
        steps = result["step_seconds"]
        table.add_row(kind, f"{steps['auto']:.4g} s", f"{steps['planned']:.4g} s", f"{result['ratio']:.3f}")
    console = Console(width=100)
    console.print(table)
    console.print(limits_table(limits))


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--output-dir", type=Path, default=Path("outputs", "automatic_start"), help="for results.json and all else")
    add("--kinds", type=lambda text: text.split(","), default=list(KINDS), help=f"some of {','.join(KINDS)}")
    add("--batch-size", type=int, default=16, help="of the scripts, on each of the two ranks")
    add("--layers", type=int, default=6, help="of the model")
    add("--steps", type=int, default=40, help="steps before those that are counted")
    add("--counted", type=int, default=24, help="steps that are counted")
    add("--turns", type=int, default=4, help="of the automatic and the planned start")
    add("--profile-seconds", type=float, default=60.0, help="budget of the profile")
    add("--no-quotas", action="store_true", help="with equally fast ranks, to try the benchmark itself")
    arguments = parser.parse_args(argv)
    unknown = set(arguments.kinds) - set(KINDS)
    if unknown:
        parser.error(f"found kinds {sorted(unknown)}, expected some of {','.join(KINDS)}")
    return arguments


if __name__ == "__main__":
    raise SystemExit(main())
