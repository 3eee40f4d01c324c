# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""One rank of some short trainings: prints for each the bytes of its node before it, and the most that it took.

The driver starts it (`memory_runs.launch`) with what is to be trained, and with the folder of the control group that
the ranks of its node are in. The kernel counts the group's bytes.
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


def train(accelerator: LSHDPAccelerator, sizes: dict[str, Any], steps: int) -> None:
    """Trains a new model for some steps."""
    model = Transformer(**sizes)
    optimizer = torch.optim.AdamW(model.parameters())
    rows = batch(sizes, _SAMPLES)["input_ids"]
    loader = torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in rows], batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    done = 0
    while done < steps:
        for inputs in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**inputs).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                done += accelerator.sync_gradients
            if done >= steps:
                break
    accelerator.free_memory()


def give_back() -> None:
    """Gives all free memory back to the system, so that a training does not find that of the one before it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def main() -> None:
    """Trains the jobs of the argument one after the other; prints a line for each."""
    jobs, group = json.loads(sys.argv[1]), Group(Path(sys.argv[2]))
    torch.set_num_threads(1)
    for number, job in enumerate(jobs):
        torch.manual_seed(number)
        accelerator = LSHDPAccelerator(plan=Plan.from_dict(job["plan"]), cpu=True)
        # The same model, but tiny: code, process groups and threads that a training needs belong to the process.
        train(accelerator, {**job["model"], **_TINY}, 2)
        give_back()
        accelerator.wait_for_everyone()
        base = group.now()
        # All ranks of the node have read it; then one of them sets the limit, which holds when all go on.
        accelerator.wait_for_everyone()
        if accelerator.topology.local_rank == 0:
            group.restart()
            if job.get("allowed") is not None:
                group.limit(base + job["allowed"][accelerator.topology.node])
        accelerator.wait_for_everyone()
        train(accelerator, job["model"], job["steps"])
        accelerator.wait_for_everyone()
        print(json.dumps({"base": base, "peak": group.peak() - base}), flush=True)
        accelerator.wait_for_everyone()
        if accelerator.topology.local_rank == 0:
            group.limit(None)
        give_back()
    accelerator.end_training()  # of all: it ends the process group


if __name__ == "__main__":
    main()
