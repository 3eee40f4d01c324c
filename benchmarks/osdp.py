# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""OSDP's experiments by formulas: every uniform strategy and the best placement of every block, under memory limits.

    python benchmarks/osdp.py                  # all tables, the limits, and how long the planner takes
    python benchmarks/osdp.py --host           # states may be in host memory, too

Models, memory and links are those of the paper (Jiang et al., IJCAI 2023); its devices are not, as their speed is not
known: they are assumed, below, and so are all rates. Nothing is measured but the planner's processor time. Ratios of
strategies are what to look at; each strategy has the batch size that is best for it.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from limits import Limit, limits_table

from accelerate_lshdp.documents.curves import RankProfile, TimeCurve
from accelerate_lshdp.documents.network import LinkCost
from accelerate_lshdp.documents.placement import UnitStore
from accelerate_lshdp.planning import PlanningError
from accelerate_lshdp.planning.placement.inputs import ModelSizes, PlacementCluster, UnitSize
from accelerate_lshdp.planning.placement.options import pose_placement, uniform_counts, uniform_placements
from accelerate_lshdp.planning.placement.planner import Choice, plan_placement
from accelerate_lshdp.planning.placement.result import PlacementResult, certificate_of
from accelerate_lshdp.planning.placement.search import solve
from accelerate_lshdp.planning.placement.unit_costs import UnitCosts
from accelerate_lshdp.planning.proofs.placement import verify_placement


# Assumed. Operations a second of a device, in training; bytes a second inside a node, between host and device, and of
# the device's memory; what a link between nodes reaches of its rate.
DEVICE_FLOPS = 6.5e12
INSIDE, HOST_LINK, DEVICE_MEMORY = 6e9, 10e9, 600e9
REACHED = 0.8
# Seconds of a message between nodes, of a hop inside one, of a copy from or to the host.
BETWEEN_LATENCY, HOP, COPY_LATENCY = 30e-6, 4e-6, 20e-6
# Bytes of the process on its device; of memory for each parameter in a step of AdamW; host seconds for it on one node.
PROCESS_BYTES = 800_000_000
OPTIMIZER_BYTES, HOST_OPTIMIZER_SECONDS = 28, 1.5e-9 / 32
LARGEST_BATCH = 512
GIB = 2**30


@dataclass(frozen=True)
class Transformer:
    """A transformer whose blocks are alike, trained in fp32.

    Args:
        blocks: number of blocks.
        width: features of a token.
        tokens: tokens of a sample.
        outputs: outputs of the head for each token that has any.
        heads: tokens that have outputs.
        embedded: parameters of embeddings and head, in rows of `width`.
    """

    blocks: int
    width: int
    tokens: int
    outputs: int
    heads: int
    embedded: int

    def sizes(self) -> ModelSizes:
        """The sizes of its units; activations without those that attention in one kernel does not keep."""
        parameters = 12 * self.width**2 + 13 * self.width
        flops = self.tokens * (2 * parameters + 4 * self.tokens * self.width)
        row = 4 * self.width * self.tokens  # bytes of one activation of a block
        root = self.embedded * self.width
        logits = 4 * self.outputs * self.heads
        return ModelSizes(
            tuple(
                UnitSize(f"h.{place}", parameters, parameters, 16 * row, row, flops) for place in range(self.blocks)
            ),
            UnitSize("", root, root, logits, 0, 2 * self.outputs * self.width * self.heads),
            working_bytes=logits,  # their gradient
        )


def _text(blocks: int, width: int, vocabulary: int, tokens: int = 512) -> Transformer:
    return Transformer(blocks, width, tokens, vocabulary, tokens, vocabulary + tokens)


MODELS = {
    "GPT-2 48 x 2048": _text(48, 2048, 50257),
    "GPT-2 48 x 1600": _text(48, 1600, 50257),
    "BERT-large": _text(24, 1024, 30522),
    "ViT-L": Transformer(24, 1024, 197, 1000, 1, 197 + 768 + 1000),
    "OPT-1.3b": _text(24, 2048, 50272),
}


@dataclass(frozen=True)
class Devices:
    """Nodes of eight devices.

    Args:
        nodes: number of nodes.
        gigabits: rate of the link between them, 1e9 bits a second; without meaning for one node.
        gigabytes: memory of a device, 2^30 bytes.
    """

    nodes: int
    gigabits: float
    gigabytes: int

    @property
    def name(self) -> str:
        between = f" at {self.gigabits:g} Gb/s" if self.nodes > 1 else ""
        return f"{self.nodes} x 8{between}, {self.gigabytes} GB" if self.nodes > 1 else f"8, {self.gigabytes} GB"

    def cluster(self, model: ModelSizes, has_host: bool) -> PlacementCluster:
        """The cluster, with the times of a model."""
        world, sample = 8 * self.nodes, 3 * model.flops / DEVICE_FLOPS
        profile = RankProfile(
            TimeCurve((1, LARGEST_BATCH), (sample, LARGEST_BATCH * sample)),
            LARGEST_BATCH,
            fixed_seconds=model.trainable * OPTIMIZER_BYTES / DEVICE_MEMORY,
        )
        return PlacementCluster(
            (8,) * self.nodes,
            (profile,) * world,
            (self.gigabytes * GIB,) * world,
            LinkCost(BETWEEN_LATENCY, 8 / (REACHED * self.gigabits * 1e9)),
            LinkCost(HOP, 1 / INSIDE),
            device_link=LinkCost(COPY_LATENCY, 1 / HOST_LINK) if has_host else None,
            host_optimizer_seconds=(model.trainable * HOST_OPTIMIZER_SECONDS,) * self.nodes if has_host else (),
            process_bytes=PROCESS_BYTES,
        )


DEVICES = [
    Devices(nodes, gigabits, gigabytes) for gigabytes in (8, 16) for nodes, gigabits in ((1, 10), (2, 10), (2, 100))
]
STRATEGIES = {store: str(store.strategy) if not store.reshards_to_node else "hpz" for store in UnitStore}


def uniform_rates(model: ModelSizes, cluster: PlacementCluster) -> dict[str, float]:
    """Samples a second of each uniform strategy that fits, "+" with checkpointing, with its best batch size."""
    rates: dict[str, float] = {}
    costs = UnitCosts(model, cluster)
    for samples in range(1, LARGEST_BATCH + 1):
        problem = pose_placement(model, cluster, (samples,) * cluster.world, costs=costs)
        fitting = 0
        for store, name in STRATEGIES.items():
            for checkpoint in (False, True):
                counts = uniform_counts(problem, store, checkpoint)
                if counts is None or not problem.fits(counts):
                    continue
                fitting += 1
                label = f"{name}+" if checkpoint else name
                rate = samples * cluster.world / (problem.nanoseconds(counts) / 1e9)
                rates[label] = max(rate, rates.get(label, 0.0))
        if not fitting:
            break
    return rates


def predict(model: ModelSizes, devices: Devices, has_host: bool) -> dict[str, Any]:
    """The figures of one case: uniform strategies, the best placement without checkpointing, and the best one."""
    cluster = devices.cluster(model, has_host)
    rates = uniform_rates(model, cluster)
    case: dict[str, Any] = {"uniform": rates, "alone": None, "osdp": None, "gap": None, "batch": None, "blocks": {}}
    try:
        case["alone"] = plan_placement(model, cluster, choice=Choice(checkpoint=(False,))).predicted.samples_per_second
    except PlanningError:
        pass
    try:
        best = plan_placement(model, cluster)
    except PlanningError:
        return case
    verify_placement(best.problem, best.certificate)
    case["osdp"], case["gap"] = best.predicted.samples_per_second, best.predicted.gap
    case["batch"], case["blocks"] = best.micro_batches[0][0], blocks_of(best)
    return case


def blocks_of(result: PlacementResult) -> dict[str, int]:
    """How many blocks have each placement."""
    return dict(
        Counter(
            str(own.store) + ("+" if own.checkpoint else "") for name, own in result.placement.units if name
        ).most_common()
    )


def best_uniform(case: dict[str, Any]) -> tuple[str, float]:
    """The fastest uniform strategy and its samples a second; of equal ones the first."""
    rates = case["uniform"]
    if not rates:
        return "none fits", 0.0
    name = max(rates, key=lambda label: round(rates[label], 9))
    return name, rates[name]


def check_ratios(cases: dict[str, dict[str, dict[str, Any]]]) -> list[Limit]:
    """What placements have to gain, as the slower rate's share of the faster one."""
    slow, fast = "2 x 8 at 10 Gb/s, 8 GB", "2 x 8 at 100 Gb/s, 16 GB"
    gpt, wide, vit = cases["GPT-2 48 x 1600"][slow], cases["GPT-2 48 x 2048"][fast], cases["ViT-L"][slow]
    gains = [
        ("GPT-2 48 x 1600: fsdp / placement without checkpointing", gpt["alone"] / gpt["uniform"]["fsdp"], 1.37),
        ("GPT-2 48 x 1600: best uniform / osdp", gpt["osdp"] / best_uniform(gpt)[1], 1.08),
        ("ViT-L: best uniform / osdp", vit["osdp"] / best_uniform(vit)[1], 1.22),
        ("GPT-2 48 x 2048, 16 GB, 100 Gb/s: best uniform / osdp", wide["osdp"] / best_uniform(wide)[1], 1.20),
    ]
    # Gains are given with two digits.
    limits = [Limit(what, 1 / gain, 1 / (least - 0.005)) for what, gain, least in gains]
    rates = [(best_uniform(case)[1], case["osdp"]) for own in cases.values() for case in own.values() if case["osdp"]]
    limits.append(Limit("all cases: best uniform / osdp, the largest", max(u / o for u, o in rates), 1.0))
    return limits


def different_blocks(blocks: int, seed: int = 0) -> ModelSizes:
    """A model whose blocks all have other sizes."""
    rng, base = random.Random(seed), Transformer(blocks, 1024, 512, 50257, 512, 50769).sizes()
    units = []
    for unit in base.units:
        size, kept = rng.uniform(0.3, 2), rng.uniform(0.3, 2)
        parameters = int(unit.parameters * size)
        units.append(
            replace(
                unit,
                parameters=parameters,
                trainable=parameters,
                activation_bytes=unit.activation_bytes * kept,
                flops=unit.flops * size,
            )
        )
    return replace(base, units=tuple(units))


#: Name, model, the processor seconds that one batch vector may take, and the gap that may be left.
SOLVED = (
    ("48 equal blocks", MODELS["GPT-2 48 x 1600"].sizes(), 0.1, 0.005),
    ("48 different blocks", different_blocks(48), 0.1, 0.005),
    ("100 different blocks", different_blocks(100), 0.5, 0.001),
    ("1,000 different blocks", different_blocks(1000), 2.0, 0.001),
)


#: Limits of memory that are tried: how far they lie between the least that a uniform placement needs and the most.
LIMIT_SHARES = (0.05, 0.15, 0.3, 0.5, 0.7)


def time_solver(model: ModelSizes, repeats: int) -> dict[str, float]:
    """Processor seconds of posing and solving one batch vector, of verifying it, and the gap: the worst of the limits.

    Of each limit the median of the repetitions counts.
    """
    cluster = Devices(2, 10, 10**6).cluster(model, False)
    samples = (4,) * cluster.world
    ample = pose_placement(model, cluster, samples)
    needs = [ample.memory(counts)[0] for counts in uniform_placements(ample)]
    found = []
    for share in LIMIT_SHARES:
        limit = int(min(needs) + share * (max(needs) - min(needs)))
        limited = replace(cluster, memory_limits=(limit,) * cluster.world)
        taken, verified = [], []
        for _ in range(repeats):
            before = time.process_time()
            problem = pose_placement(model, limited, samples)
            solution = solve(problem, known=uniform_placements(problem))
            taken.append(time.process_time() - before)
            before = time.process_time()
            verify_placement(problem, certificate_of(problem, solution))
            verified.append(time.process_time() - before)
        found.append((median(taken), median(verified), solution.gap))
    seconds, verify_seconds, gaps = zip(*found, strict=True)
    return {"seconds": max(seconds), "verify_seconds": max(verify_seconds), "gap": max(gaps)}


def main(argv: list[str] | None = None) -> int:
    """Prints the tables; returns 1 if a limit is broken."""
    arguments = _parse(argv)
    cases = {
        name: {devices.name: predict(model.sizes(), devices, arguments.host) for devices in DEVICES}
        for name, model in MODELS.items()
        if arguments.model in (None, name)
    }
    limits = check_ratios(cases) if arguments.model is None and not arguments.host else []
    solver = {}
    if arguments.model is None:
        for name, model, most, most_gap in SOLVED:
            solver[name] = time_solver(model, arguments.repeats)
            what = f"{name}: processor seconds of a batch vector (worst of five limits)"
            limits.append(Limit(what, solver[name]["seconds"], most))
            limits.append(Limit(f"{name}: gap", solver[name]["gap"], most_gap))
    _print(cases, solver, limits)
    if arguments.json is not None:
        results = {
            "configuration": {
                "host": arguments.host,
                "models": {name: asdict(model) for name, model in MODELS.items()},
                "device_flops": DEVICE_FLOPS,
                "inside_bytes_per_second": INSIDE,
                "share_of_rate": REACHED,
                "process_bytes": PROCESS_BYTES,
            },
            "cases": cases,
            "solver": solver,
            "limits": [limit.to_dict() for limit in limits],
        }
        arguments.json.write_text(json.dumps(results, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return 0 if all(limit.holds for limit in limits) else 1


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", choices=MODELS, help="one model only, without limits")
    parser.add_argument("--host", action="store_true", help="states may be in host memory, too (lsdp)")
    parser.add_argument("--repeats", type=int, default=5, help="of the planner's time (default: 5)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures there")
    return parser.parse_args(argv)


def _print(
    cases: dict[str, dict[str, dict[str, Any]]], solver: dict[str, dict[str, float]], limits: Sequence[Limit]
) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=170)
    names = list(dict.fromkeys(label for own in cases.values() for case in own.values() for label in case["uniform"]))
    names.sort(key=lambda label: (list(STRATEGIES.values()).index(label.rstrip("+")), label))
    for model, own in cases.items():
        table = Table(
            title=f"{model}: samples a second; + with checkpointing, alone: without it, -: does not fit",
            title_justify="left",
        )
        for heading in ("devices", *names, "alone", "osdp", "gain", "blocks of osdp"):
            table.add_column(heading, justify="left" if heading in ("devices", "blocks of osdp") else "right")
        for devices, case in own.items():
            shown = [case["uniform"].get(label) for label in names] + [case["alone"], case["osdp"]]
            uniform = best_uniform(case)[1]
            gain = f"{case['osdp'] / uniform:.2f}" if uniform and case["osdp"] else "-"
            blocks = ", ".join(f"{count} {name}" for name, count in case["blocks"].items())
            table.add_row(devices, *("-" if rate is None else f"{rate:.4g}" for rate in shown), gain, blocks)
        console.print(table)
    for name, figures in solver.items():
        console.print(
            f"{name}: {figures['seconds']:.3f} s of processor time for a batch vector, gap {figures['gap']:.4%};"
            f" verified in {figures['verify_seconds']:.3f} s"
        )
    if limits:
        console.print(limits_table(limits))


if __name__ == "__main__":
    raise SystemExit(main())
