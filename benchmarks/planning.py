# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""How good are planning rules, on random clusters of GPUs whose times were measured?

    python benchmarks/planning.py --curves gpu_time_curves.json

Every rule cuts the same global batches of the same random clusters of 2, 4, 8 and 64 GPUs. The time of a rank is the
measured one at exactly its batch size; the table shows the slowest rank's time divided by the best that any cut
reaches. Then the planner itself is timed. The exit code is 1 when one of the limits printed below is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from gpu_curves import ENVIRONMENT, Cluster, Curve, CurveFamily, curves_path, draw_clusters, load_families
from limits import Limit, limits_table
from planning_rules import (
    equal_split,
    exact_from_curves,
    exact_from_probes,
    iterative_rule,
    linear_fit,
    makespan,
    optimal_makespan,
    running_maximum,
)

from accelerate_lshdp.planning import RankProfile, TimeCurve, plan_fixed_total, verify_certificate


CLUSTER_SIZES = (2, 4, 8, 64)
PROBES, CURVES = "LSHDP, probes", "LSHDP, full curves"
RULES: dict[str, Callable[[Sequence[Curve], int], list[int]]] = {
    "equal split": equal_split,
    "the paper's rule": iterative_rule,
    "linear fit + solver": linear_fit,
    PROBES: exact_from_probes,
    CURVES: exact_from_curves,
}
SMOOTHED = f"{CURVES} *"
# (ranks, global batch, seconds that the planner may take)
SOLVER_LIMITS = ((256, 30_000, 0.05), (10_000, 1_000_000, 2.0))
# The measured curves end at 16 samples or so; for large batches each of their entries counts as so many samples.
SAMPLES_AN_ENTRY = 16
# What a makespan may differ from the optimum by rounding alone.
ROUNDING = 1e-12


def compare_rules(
    families: Sequence[CurveFamily], clusters_a_size: int, seed: int, sizes: Sequence[int] = CLUSTER_SIZES
) -> dict[str, dict[str, Any]]:
    """Replays all rules on ``clusters_a_size`` random clusters of each size.

    Returns:
        For each rule, for "all" and each cluster size: `mean`, `median`, `p95`, `best` and `worst` of makespan /
        optimum; `wrong_total`, the share of cases in which the batch sizes do not sum to the global batch; `cases`.
    """
    ratios: dict[str, dict[int, list[float]]] = {name: {} for name in (*RULES, SMOOTHED)}
    wrong: dict[str, dict[int, list[bool]]] = {name: {} for name in ratios}
    for gpus in sizes:
        for cluster in draw_clusters(families, gpus, clusters_a_size, seed):
            for name, (ratio, is_wrong) in _replay(cluster).items():
                ratios[name].setdefault(gpus, []).append(ratio)
                wrong[name].setdefault(gpus, []).append(is_wrong)
    return {
        name: {
            "all": _summary(sum(ratios[name].values(), []), sum(wrong[name].values(), [])),
            **{str(gpus): _summary(ratios[name][gpus], wrong[name][gpus]) for gpus in sizes},
        }
        for name in ratios
    }


def _replay(cluster: Cluster) -> dict[str, tuple[float, bool]]:
    """For each rule: makespan / optimum, and whether the sizes do not sum to the total."""
    curves, total = cluster.curves, cluster.total_batch_size
    optimum = optimal_makespan(curves, total)
    sizes = {name: rule(curves, total) for name, rule in RULES.items()}
    replayed = {name: (makespan(curves, cut) / optimum, sum(cut) != total) for name, cut in sizes.items()}
    smooth = running_maximum(curves)
    ratio = makespan(smooth, sizes[CURVES]) / optimal_makespan(smooth, total)
    return {**replayed, SMOOTHED: (ratio, replayed[CURVES][1])}


def _summary(ratios: Sequence[float], wrong: Sequence[bool]) -> dict[str, float]:
    return {
        "mean": float(np.mean(ratios)),
        "median": float(np.median(ratios)),
        "p95": float(np.quantile(ratios, 0.95)),
        "best": float(np.min(ratios)),
        "worst": float(np.max(ratios)),
        "wrong_total": float(np.mean(wrong)),
        "cases": len(ratios),
    }


def check_rules(compared: Mapping[str, Mapping[str, Any]]) -> list[Limit]:
    """The limits on our own rules."""
    smoothed, probes, full = compared[SMOOTHED]["all"], compared[PROBES]["all"], compared[CURVES]["all"]
    return [
        Limit(f"{SMOOTHED}: farthest from 1", max(smoothed["worst"] - 1, 1 - smoothed["best"]), ROUNDING),
        Limit(f"{PROBES}: mean", probes["mean"], 1.004),
        Limit(f"{PROBES}: p95", probes["p95"], 1.02),
        Limit("LSHDP: share of wrong totals", max(probes["wrong_total"], full["wrong_total"]), 0.0),
    ]


def time_solver(families: Sequence[CurveFamily], ranks: int, total: int, repeats: int) -> float:
    """Median seconds of `plan_fixed_total` for random GPUs of the workload that was measured on most kinds of GPU.

    The profiles are made before; the certificate is verified afterwards.
    """
    rng = np.random.default_rng(ranks)
    curves = list(max(families, key=lambda family: len(family.curves)).curves.values())
    profiles = []
    for index in rng.integers(len(curves), size=ranks):
        curve = curves[index]
        sizes = [(entry + 1) * SAMPLES_AN_ENTRY for entry in range(len(curve))]
        profiles.append(RankProfile(TimeCurve(tuple(sizes), tuple(curve.tolist())), sizes[-1]))
    taken = []
    for _ in range(repeats):
        before = time.perf_counter()
        result = plan_fixed_total(profiles, total)
        taken.append(time.perf_counter() - before)
    verify_certificate(profiles, result.certificate)
    return median(taken)


def main(argv: list[str] | None = None) -> int:
    """Prints the tables; returns 1 if a limit is broken, 2 if there are no curves."""
    arguments = _parse(argv)
    try:
        path = curves_path(arguments.curves)
    except FileNotFoundError as error:
        print(f"benchmarks/planning.py: {error}", file=sys.stderr)
        return 2
    families, skipped = load_families(path)
    compared = compare_rules(families, arguments.clusters, arguments.seed)
    limits = check_rules(compared)
    for ranks, total, most_seconds in SOLVER_LIMITS:
        seconds = time_solver(families, ranks, total, arguments.repeats)
        what = f"planner, {ranks:,} ranks, global batch {total:,}: seconds (median of {arguments.repeats})"
        limits.append(Limit(what, seconds, most_seconds))
    results = {
        "configuration": {
            "clusters of each size": arguments.clusters,
            "seed": arguments.seed,
            "workloads": {family.name: sorted(family.curves) for family in families},
            "skipped curves": skipped,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "versions": {"python": platform.python_version(), "numpy": np.__version__},
        },
        "rules": compared,
        "limits": [limit.to_dict() for limit in limits],
    }
    print_tables(results, limits)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return 0 if all(limit.holds for limit in limits) else 1


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--curves", metavar="PATH", help=f"measured curves (default: {ENVIRONMENT}, or ../shared/data)"
    )
    parser.add_argument("--clusters", type=int, default=2000, metavar="N", help="of each size (default: 2000)")
    parser.add_argument("--seed", type=int, default=0, help="of the random clusters (default: 0)")
    parser.add_argument("--repeats", type=int, default=5, help="of the planner's time (default: 5)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures there")
    return parser.parse_args(argv)


def print_tables(results: Mapping[str, Any], limits: Sequence[Limit]) -> None:
    """The rules, then the limits."""
    from rich.console import Console
    from rich.table import Table

    configuration = results["configuration"]
    skipped = "; ".join(f"{count} {reason}" for reason, count in configuration["skipped curves"].items())
    rules = Table(
        title="Makespan / optimum on measured GPU curves (1.000 is the best that any cut reaches)",
        title_justify="left",
        caption=f"{configuration['clusters of each size']:,} random clusters of each size, seed"
        f" {configuration['seed']}, {len(configuration['workloads'])} workloads. Curves left out: {skipped}.\n"
        "Probes: powers of two and the largest batch. Where batch sizes sum to less than the global batch, a ratio is"
        " flattered.\n* Both makespan and optimum on the curves' running maximum, which is what the planner is exact"
        " for.",
        caption_justify="left",
    )
    rules.add_column("rule")
    for heading in ("mean", "median", "p95", "worst", "wrong total"):
        rules.add_column(heading, justify="right")
    for gpus in CLUSTER_SIZES:
        rules.add_column(f"{gpus} GPUs\nmean / p95", justify="right")
    for name, figures in results["rules"].items():
        total = figures["all"]
        shown = [f"{total[key]:.4f}" for key in ("mean", "median", "p95", "worst")]
        sizes = [f"{figures[str(gpus)]['mean']:.3f} / {figures[str(gpus)]['p95']:.3f}" for gpus in CLUSTER_SIZES]
        rules.add_row(name, *shown, f"{total['wrong_total']:.0%}", *sizes)
    console = Console(width=140)
    console.print(rules)
    console.print(limits_table(limits))


if __name__ == "__main__":
    raise SystemExit(main())
