# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What lossy gradient formats cost in accuracy: the evaluation loss of the same trainings in every format.

    python benchmarks/lossy_formats.py

A small ViT learns the embedded handwritten digits on two ranks with unequal batches (20 + 12), once for each format
and seed; seeds choose the weights and the order of the images. Two more rows tell how far runs differ by themselves:
fp32 with the same global batches cut otherwise (16 + 16), which changes nothing but the last bits.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader
from transformers import ViTConfig, ViTForImageClassification


FP32 = "fp32"
#: Name in the table -> batch sizes and keywords of the plan.
FORMATS: dict[str, tuple[list[int], dict[str, Any]]] = {
    FP32: ([20, 12], {}),
    "fp32, 16 + 16": ([16, 16], {}),
    "bf16": ([20, 12], {"communication_dtype": "bf16"}),
    "int8": ([20, 12], {"communication_dtype": "int8"}),
    "powersgd": ([20, 12], {"communication_dtype": "powersgd"}),
    "powersgd, rank 2": ([20, 12], {"communication_dtype": "powersgd", "powersgd_rank": 2}),
    "powersgd, rank 4": ([20, 12], {"communication_dtype": "powersgd", "powersgd_rank": 4}),
    "powersgd, no warm-up": ([20, 12], {"communication_dtype": "powersgd", "powersgd_warmup_steps": 0}),
}
#: Those that the limit is for.
JUDGED = ("bf16", "int8", "powersgd")
LIMIT = 0.02
MODEL = {
    "image_size": 32,
    "patch_size": 16,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "num_channels": 1,
    "num_labels": 10,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
LEARNING_RATE, WARMUP_STEPS, WEIGHT_DECAY, LARGEST_NORM = 1e-3, 20, 0.01, 1.0
RANKS = 2


def train(name: str, seed: int, steps: int) -> dict[str, float]:
    """One training (collective). Returns the evaluation loss, accuracy, and the training loss of the last steps."""
    from accelerate.utils import set_seed

    from accelerate_lshdp import LSHDPAccelerator, Plan
    from accelerate_lshdp.cli.quickstart_data import load_digit_images

    sizes, communication = FORMATS[name]
    set_seed(seed)
    accelerator = LSHDPAccelerator(plan=Plan.from_batch_sizes(sizes, strategy="lsdp", **communication))
    model = ViTForImageClassification(ViTConfig(**MODEL))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    images, held_out = load_digit_images()
    loader = DataLoader(images, batch_size=sum(sizes) // RANKS, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    losses: list[float] = []
    while len(losses) < steps:
        for batch in loader:
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * learning_rate_share(len(losses), steps)
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(batch["pixel_values"]).logits, batch["labels"])
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), LARGEST_NORM)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
            if len(losses) == steps:
                break
    model.eval()
    with torch.no_grad():
        logits = model(held_out.images).logits
    right = float((logits.argmax(1) == held_out.labels).double().mean())
    evaluated = float(torch.nn.functional.cross_entropy(logits.double(), held_out.labels))
    accelerator.free_memory()
    return {"evaluation_loss": evaluated, "accuracy": right, "training_loss": sum(losses[-20:]) / 20}


def learning_rate_share(step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine down to 0."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / (steps - WARMUP_STEPS)))


def rank_main(rank: int, port: int, arguments: argparse.Namespace, results: Any) -> None:
    """All trainings, as one rank. Each rank is a node of its own."""
    places = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank}
    addresses = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_WORLD_SIZE": RANKS}
    os.environ.update({name: str(value) for name, value in {**places, **addresses}.items()})
    os.environ["ACCELERATE_USE_CPU"] = "true"
    torch.set_num_threads(1)
    for seed in range(arguments.seeds):
        for name in arguments.formats:
            result = train(name, seed, arguments.steps)
            if rank == 0:
                results.put((name, seed, result))
                print(f"seed {seed}, {name}: {result}", flush=True)
    dist.barrier()


def table(measured: dict[str, dict[int, dict[str, float]]]) -> str:
    """Markdown: the evaluation loss of every seed, the mean, and how far it is from that of fp32."""
    seeds = sorted(measured[FP32])
    head = ["format", *(f"seed {seed}" for seed in seeds), "mean", "against fp32", "accuracy"]
    rows = [head, ["---"] * len(head)]
    reference = mean_loss(measured[FP32])
    for name, by_seed in measured.items():
        mean = mean_loss(by_seed)
        accuracy = sum(result["accuracy"] for result in by_seed.values()) / len(by_seed)
        losses = [f"{by_seed[seed]['evaluation_loss']:.4f}" for seed in seeds]
        rows.append([name, *losses, f"{mean:.4f}", f"{mean / reference - 1:+.1%}", f"{accuracy:.1%}"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def mean_loss(by_seed: dict[int, dict[str, float]]) -> float:
    return sum(result["evaluation_loss"] for result in by_seed.values()) / len(by_seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--output", type=Path, help="JSON file for the figures.")
    arguments = parser.parse_args()
    if FP32 not in arguments.formats:
        arguments.formats.insert(0, FP32)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    os.environ["OMP_NUM_THREADS"] = "1"
    ranks = mp.start_processes(
        rank_main, args=(port, arguments, results), nprocs=RANKS, join=False, start_method="spawn"
    )
    measured: dict[str, dict[int, dict[str, float]]] = {name: {} for name in arguments.formats}
    while not ranks.join():
        pass
    while not results.empty():
        name, seed, result = results.get()
        measured[name][seed] = result
    print(f"\n{arguments.steps} steps, global batch 32; evaluation loss on 297 held-out digits\n")
    print(table(measured))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(measured, indent=1))
    for name in (name for name in JUDGED if name in measured):
        change = mean_loss(measured[name]) / mean_loss(measured[FP32]) - 1
        print(f"{name}: {change:+.2%}, limit {LIMIT:+.0%}: {'holds' if change <= LIMIT else 'does not hold'}")


if __name__ == "__main__":
    main()
