# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Are plans as good as predicted, and does the automatic mode reach them, on ranks of unequal speed?

    python benchmarks/uneven_cluster.py --output-dir outputs/uneven_cluster

Four CPU ranks on this machine get 80, 50, 40 and 30 % of a core by kernel quotas and train a ViT of 14 M parameters on
real images. It wants a machine with two cores and nothing else to do, and takes about thirteen minutes. The exit code
is 1 when one of the limits printed at the end is broken.

    profile   one profiling run: how long it takes
    plans     plans for several global batches, executed: predicted against measured compute, idle fraction. What is
              predicted is for the speed that the machine has meanwhile, which steps without communication show
    auto      automatic batch sizes from an equal split; then one rank's share is halved in mid-run. After 30 steps of
              each: step time against that of the plan made by full profiling for that situation, in turns. At the end:
              parameters against those of fixed equal batches
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from emulated_speeds import EmulatedSpeeds
from laboratory.emulated_cluster.cgroups import ControlGroup
from laboratory.speed_check import CheckedRank, speed_of
from limits import Limit, limits_table
from uneven_cluster_report import print_report

from accelerate_lshdp.comparing.cases import equal_sizes
from accelerate_lshdp.comparing.rank_processes import RankError, RankProcesses
from accelerate_lshdp.planning import BatchSizes, PlanningError, plan_fixed_total
from accelerate_lshdp.profiling import Profile


PHASES = ("profile", "plans", "auto")
# ViT of 14.2 million parameters: 64 patches of 8 x 8 pixels.
MODEL = {
    "image_size": 64,
    "patch_size": 8,
    "num_channels": 1,
    "hidden_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "intermediate_size": 1536,
    "num_labels": 10,
}
SMALL_MODEL = {**MODEL, "image_size": 32, "hidden_size": 96, "num_hidden_layers": 2, "intermediate_size": 384}
# Steps at the beginning of each block that are not counted: caches are cold, and ranks arrive one by one.
UNCOUNTED = 1
START_SECONDS = 180.0
BUILD_SECONDS = 120.0
SLOWEST_STEP_SECONDS = 30.0


class Benchmark:
    """The phases, on ranks that are running and built."""

    def __init__(self, ranks: RankProcesses, speeds: EmulatedSpeeds, arguments: argparse.Namespace) -> None:
        self.ranks = ranks
        self.speeds = speeds
        self.arguments = arguments
        self.results: dict[str, Any] = {}
        self.limits: list[Limit] = []

    def profile(self, shares: Sequence[float], largest_total: int) -> tuple[Profile, float]:
        """One profiling run under these shares, for totals up to one; returns the profile and its wall seconds."""
        arguments = self.arguments
        say(f"profiling at shares {list(shares)}")
        self.ranks.call("prepare_profile", timeout=BUILD_SECONDS, seed=arguments.seed)
        self.speeds.apply(shares)
        most = largest_total - len(shares) + 1
        seconds = arguments.profile_seconds
        told = self.ranks.call(
            "profile", timeout=120 + 3 * seconds, seconds=seconds, max_batch=most, total=arguments.total
        )
        self.speeds.lift()
        return Profile.from_dict(told[0]["profile"]), max(entry["wall_seconds"] for entry in told)

    def profile_phase(self) -> Profile:
        profile, seconds = self.profile(self.arguments.shares, max(*self.arguments.totals, self.arguments.total))
        self.results["profile"] = {"wall_seconds": seconds, **profile.to_dict()}
        self.limits.append(Limit("profiling run: seconds", seconds, 90.0))
        return profile

    def plans_phase(self, profile: Profile) -> None:
        rows = self.results["plans"] = []
        for total in self.arguments.totals:
            rows.append(self._execute(profile, make_plan(profile, total)))
        middle = median(abs(row["error"]) for row in rows)
        self.limits.append(Limit("predicted compute of a plan: error, median over plans", middle, 0.05))
        # One sample more or less on the slowest rank is a fifth of its work at 32, whatever the plan.
        most = max(rows, key=lambda row: row["total_batch_size"])
        self.limits.append(
            Limit(f"idle fraction, global batch {most['total_batch_size']}", most["idle_fraction"], 0.06)
        )

    def _execute(self, profile: Profile, plan: BatchSizes) -> dict[str, Any]:
        """Trains with a plan and compares what it predicted."""
        say(f"executing {plan.micro_batches}")
        self._begin("plan", plan.micro_batches)
        # Of the plan for which the ranks were profiled: what the profile says of other sizes is to be seen.
        sizes = [size for size, _ in make_plan(profile, self.arguments.total).micro_batches]
        self.ranks.call("prepare_check", timeout=BUILD_SECONDS, sizes=sizes, seed=self.arguments.seed)
        self.speeds.apply(self.arguments.shares)
        checks, steps = [self._check_speed()], []
        for _ in range(self.arguments.plan_blocks):
            steps += [seconds for seconds, _ in self._train("plan", self.arguments.plan_steps)]
            checks.append(self._check_speed())
        statistics = self.ranks.call("statistics", timeout=BUILD_SECONDS, name="plan")[0]
        self.speeds.lift()
        self.ranks.call("end", timeout=BUILD_SECONDS, name="plan")
        measured = statistics["compute_seconds"]
        # The machine is not as fast as when the ranks were profiled, minutes ago.
        expected = [rank.time(size) for rank, size in zip(profile.ranks, sizes, strict=True)]
        slowdown = speed_of(checks, checks, expected, [1] * len(sizes)).slowdown
        predicted = [slowdown * seconds for seconds in plan.rank_seconds]
        return {
            "slowdown": slowdown,
            "total_batch_size": plan.total_batch_size,
            "micro_batches": plan.micro_batches,
            "predicted_seconds": predicted,
            "measured_seconds": measured,
            "error": max(predicted) / max(measured) - 1,
            "rank_errors": [one / other - 1 for one, other in zip(predicted, measured, strict=True)],
            "predicted_idle_fraction": 1 - sum(predicted) / len(predicted) / max(predicted),
            "idle_fraction": statistics["idle_fraction"],
            "step_seconds": statistics["step_seconds"],
            "wait_seconds": statistics["wait_seconds"],
            "steps": len(steps),
            "all_step_seconds": steps,
            "check_seconds": [[rank.seconds for rank in check] for check in checks],
            "profiled_check_seconds": expected,
        }

    def _check_speed(self) -> list[CheckedRank]:
        return self.ranks.call("check_speed", timeout=BUILD_SECONDS)

    def auto_phase(self, profile: Profile) -> None:
        arguments = self.arguments
        halved = [share / 2 if rank == arguments.halved_rank else share for rank, share in enumerate(arguments.shares)]
        self._begin("auto", "auto", arguments.total)
        situations: list[dict[str, Any]] = []
        self.results["automatic"] = {"situations": situations}
        for name, shares in (("from an equal split", arguments.shares), ("after a rank's share was halved", halved)):
            say(f"automatic batch sizes, {name}")
            self.speeds.apply(shares)
            learning = self._train("auto", arguments.steps)
            self.speeds.lift()
            if shares is halved:
                profile, _ = self.profile(halved, arguments.total)
            plan = make_plan(profile, arguments.total)
            situations.append({"name": name, "shares": shares, **self._compare_with(plan, shares, learning)})
            self.limits.append(Limit(f"automatic / full profiling, {name}: step time", situations[-1]["ratio"], 1.08))
        steps = sum(situation["automatic_steps"] for situation in situations)
        say(f"the same {steps} steps with equal batches")
        self._begin("equal", [(size, 1) for size in equal_sizes(arguments.total, len(arguments.shares))])
        self._train("equal", steps)
        difference = max(self.ranks.call("difference", timeout=BUILD_SECONDS, name="auto", other="equal"))
        self.results["automatic"].update(
            decisions=self.ranks.call("decisions", timeout=BUILD_SECONDS, name="auto")[0],
            steps=steps,
            parameter_difference=difference,
        )
        self.limits.append(Limit(f"parameters after {steps} steps: relative difference", difference, 5e-6))

    def _compare_with(self, plan: BatchSizes, shares: Sequence[float], learning: Sequence[Any]) -> dict[str, Any]:
        """The automatic training as it now is and the plan, in turns: a few steps of one, a few of the other."""
        arguments = self.arguments
        self._begin("fixed", plan.micro_batches)
        self.speeds.apply(shares)
        automatic, fixed = [], []
        for _ in range(arguments.blocks):
            automatic += self._train("auto", UNCOUNTED + arguments.block_steps)[UNCOUNTED:]
            fixed += self._train("fixed", UNCOUNTED + arguments.block_steps)[UNCOUNTED:]
        self.speeds.lift()
        self.ranks.call("end", timeout=BUILD_SECONDS, name="fixed")
        seconds = [median(seconds for seconds, _ in steps) for steps in (automatic, fixed)]
        return {
            "automatic_seconds": seconds[0],
            "fixed_seconds": seconds[1],
            "ratio": seconds[0] / seconds[1],
            "automatic_batch_sizes": automatic[-1][1],
            "fixed_batch_sizes": plan.batch_sizes,
            "learning": [{"seconds": seconds, "batch_sizes": sizes} for seconds, sizes in learning],
            "automatic_block_seconds": [seconds for seconds, _ in automatic],
            "fixed_block_seconds": [seconds for seconds, _ in fixed],
            "automatic_steps": len(learning) + arguments.blocks * (UNCOUNTED + arguments.block_steps),
        }

    def _begin(self, name: str, batch_sizes: Any, total: int | None = None) -> None:
        told = {"name": name, "seed": self.arguments.seed, "batch_sizes": batch_sizes, "total_batch_size": total}
        self.ranks.call("begin", timeout=BUILD_SECONDS, **told)

    def _train(self, name: str, steps: int) -> list[tuple[float, list[int]]]:
        """Seconds (mean over ranks, which wait for each other in every step) and batch sizes of each step."""
        told = self.ranks.call("train", timeout=60 + SLOWEST_STEP_SECONDS * steps, name=name, steps=steps)
        return [(sum(seconds for seconds, _ in step) / len(step), step[0][1]) for step in zip(*told, strict=True)]


def say(what: str) -> None:
    """Tells the person who waits what is going on."""
    print(f"... {what}", file=sys.stderr, flush=True)


def make_plan(profile: Profile, total: int) -> BatchSizes:
    """The best plan for a profile; with accumulation if the total is beyond the micro-batches that were measured."""
    ranks = profile.rank_profiles()
    return plan_fixed_total(
        ranks,
        total,
        allow_accumulation=total > sum(rank.largest_micro_batch for rank in ranks),
        bucket_seconds=profile.bucket_seconds(),
        shard_groups=profile.shard_groups(),
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the phases; returns 1 if a limit is broken, 2 if a phase failed. What was measured is always written."""
    arguments = parse(argv)
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    refusal = "not wanted" if arguments.no_quotas else ControlGroup.missing()
    model = SMALL_MODEL if arguments.small else MODEL
    started = time.monotonic()
    failure: str | None = None
    script = Path(__file__).with_name("uneven_cluster_rank.py")
    with RankProcesses.on_loopback(script, len(arguments.shares)) as ranks:
        options = {"strategy": arguments.strategy, "bucket_megabytes": arguments.bucket_megabytes}
        described = ranks.call("build", timeout=START_SECONDS, model=model, emulated=refusal is not None, **options)[0]
        with EmulatedSpeeds(ranks, refusal, arguments.period) as speeds:
            benchmark = Benchmark(ranks, speeds, arguments)
            try:
                _run_phases(benchmark)
            except (RankError, PlanningError) as error:
                failure = str(error)
    results = {
        "configuration": {
            **{key: value for key, value in vars(arguments).items() if not isinstance(value, Path)},
            **described,
            "model": model,
            "speeds": speeds.description,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "seconds_in_all": time.monotonic() - started,
        },
        **benchmark.results,
        "limits": [limit.to_dict() for limit in benchmark.limits],
        "failure": failure,
    }
    text = json.dumps(results, indent=2, allow_nan=False) + "\n"
    (arguments.output_dir / "results.json").write_text(text, encoding="utf-8")
    print_report(results, limits_table(benchmark.limits))
    if failure is not None:
        print(f"benchmarks/uneven_cluster.py: {failure}", file=sys.stderr)
        return 2
    return 0 if all(limit.holds for limit in benchmark.limits) else 1


def _run_phases(benchmark: Benchmark) -> None:
    arguments = benchmark.arguments
    if "profile" in arguments.phases:
        profile = benchmark.profile_phase()
        profile.save(arguments.output_dir / "profile.json")
    else:
        profile = Profile.load(arguments.output_dir / "profile.json")
    if "plans" in arguments.phases:
        benchmark.plans_phase(profile)
    if "auto" in arguments.phases:
        benchmark.auto_phase(profile)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options."""

    def numbers(kind: type) -> Any:
        return lambda text: [kind(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--output-dir", type=Path, default=Path("outputs", "uneven_cluster"), help="for results.json, profile.json")
    add("--phases", type=lambda text: text.split(","), default=list(PHASES), help=f"some of {','.join(PHASES)}")
    add("--shares", type=numbers(float), default=[0.8, 0.5, 0.4, 0.3], help="of a core, one a rank")
    add("--halved-rank", type=int, default=0, help="whose share is halved in mid-run")
    add("--period", type=float, default=0.02, help="of the quotas, in seconds")
    add("--no-quotas", action="store_true", help="emulate by sleeping even where quotas can be used")
    add("--strategy", default="lsdp", help="default: lsdp")
    add("--bucket-megabytes", type=float, default=25.0, help="size of the gradient buckets of ddp")
    add("--total", type=int, default=32, help="global batch of the automatic mode, for which ranks are profiled")
    totals = "global batches of the executed plans; the largest one's idle fraction has a limit"
    add("--totals", type=numbers(int), default=[16, 32, 64, 128, 256], help=totals)
    add("--profile-seconds", type=float, default=60.0, help="budget of a profiling run")
    add("--plan-blocks", type=int, default=4, help="blocks of steps of each executed plan, speed checks between them")
    add("--plan-steps", type=int, default=3, help="steps of each block")
    add("--steps", type=int, default=30, help="steps that the automatic mode gets in each situation")
    add("--blocks", type=int, default=2, help="turns in which automatic and fixed steps are measured")
    add("--block-steps", type=int, default=4, help="counted steps of each turn")
    add("--seed", type=int, default=0)
    add("--small", action="store_true", help="a tiny model, to try the benchmark itself")
    arguments = parser.parse_args(argv)
    unknown = set(arguments.phases) - set(PHASES)
    if unknown:
        parser.error(f"found phases {sorted(unknown)}, expected some of {','.join(PHASES)}")
    if not 0 <= arguments.halved_rank < len(arguments.shares):
        parser.error(f"found --halved-rank {arguments.halved_rank}, expected one of {len(arguments.shares)} ranks")
    if "profile" not in arguments.phases and not (arguments.output_dir / "profile.json").is_file():
        parser.error(f"found no profile.json in {arguments.output_dir}: run the phase profile first")
    return arguments


if __name__ == "__main__":
    raise SystemExit(main())
