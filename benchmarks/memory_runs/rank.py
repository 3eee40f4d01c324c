# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""One rank of some short trainings: prints for each the bytes of the process before it, and those that it took.

The driver starts it (`memory_runs.launch`) with what is to be trained, and with the folder of the control group that
the rank is alone in; the ranks of its node are in the one around it. The kernel counts the bytes of both.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
from memory_runs.model import Transformer, batch

from accelerate_lshdp import LSHDPAccelerator, Plan


#: In the data set; more than a step of any job takes.
_SAMPLES = 64
_TINY = {"width": 16, "vocabulary": 64, "tokens": 8}


class Group:
    """A memory control group, whose bytes the kernel counts: present ones, and the most since `restart`.

    Args:
        folder: of the group.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ample = self._text("limit")

    def restart(self) -> None:
        """Begins a new peak."""
        self._write("max_usage", "0")

    def now(self) -> int:
        """Bytes of this moment."""
        return int(self._text("usage"))

    def peak(self) -> int:
        """The most bytes since `restart`."""
        return int(self._text("max_usage"))

    def limit(self, count: int | None) -> None:
        """Sets the limit; None: that which the group was made with."""
        self._write("limit", self._ample if count is None else str(count))

    def _text(self, what: str) -> str:
        return (self._folder / f"memory.{what}_in_bytes").read_text().strip()

    def _write(self, what: str, text: str) -> None:
        (self._folder / f"memory.{what}_in_bytes").write_text(text)


def train(accelerator: LSHDPAccelerator, sizes: dict[str, Any], steps: int, group: Group, base: int) -> dict[str, int]:
    """Trains a new model for some steps; returns the most bytes above `base` in each part of it."""
    marks: dict[str, int] = {}

    def note(part: str) -> None:
        marks[part] = max(marks.get(part, 0), group.peak() - base)
        group.restart()

    group.restart()
    model = Transformer(**sizes)
    optimizer = torch.optim.AdamW(model.parameters())
    rows = batch(sizes, _SAMPLES)["input_ids"]
    loader = torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in rows], batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    note("start")
    done = 0
    while done < steps:
        for inputs in loader:
            with accelerator.accumulate(model):
                loss = model(**inputs).loss
                note("forward")
                accelerator.backward(loss)
                note("backward")
                del loss
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                note("optimizer")
                done += accelerator.sync_gradients
            if done >= steps:
                break
    accelerator.free_memory()
    return marks


def give_back() -> None:
    """Gives all free memory back to the system, so that a training does not find that of the one before it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def main() -> None:
    """Trains the jobs of the argument one after the other; prints a line for each."""
    jobs, group = json.loads(sys.argv[1]), Group(Path(sys.argv[2]))
    node = Group(Path(sys.argv[2]).parent)
    torch.set_num_threads(1)
    for number, job in enumerate(jobs):
        torch.manual_seed(number)
        accelerator = LSHDPAccelerator(plan=Plan.from_dict(job["plan"]), cpu=True)
        is_first = accelerator.topology.local_rank == 0
        # The same model, but tiny: code, process groups and threads that a training needs belong to the process.
        train(accelerator, {**job["model"], **_TINY}, 2, group, 0)
        give_back()
        accelerator.wait_for_everyone()
        base, node_base = group.now(), node.now()
        if is_first:
            node.restart()
            if job.get("allowed") is not None:
                node.limit(node_base + job["allowed"][accelerator.topology.node])
        accelerator.wait_for_everyone()
        marks = train(accelerator, job["model"], job["steps"], group, base)
        accelerator.wait_for_everyone()
        print(json.dumps({"base": base, "marks": marks, "node_peak": node.peak() - node_base}), flush=True)
        accelerator.wait_for_everyone()
        if is_first:
            node.limit(None)
        give_back()
    accelerator.end_training()  # of all: it ends the process group


if __name__ == "__main__":
    main()
