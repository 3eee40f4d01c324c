# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""One rank of some short trainings: prints for each the bytes of the process before it, and those that it took.

The driver starts it (`memory_runs.launch`) with what is to be trained, and with the folder of the control group that
the rank is alone in. The kernel counts the group's peak; without a group a thread looks often.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from memory_runs.model import Transformer, batch

from accelerate_lshdp import LSHDPAccelerator, Plan


#: In the data set; more than a step of any job takes.
_SAMPLES = 64
_TINY = {"width": 16, "vocabulary": 64, "tokens": 8}


class Watch:
    """The largest proportional set size that a thread has seen since `restart`, beside the group's own peak.

    Args:
        group: folder of the control group of this rank alone; None: it has none.
    """

    def __init__(self, group: Path | None) -> None:
        self._group = group
        self._ample = None if group is None else (group / "memory.limit_in_bytes").read_text()
        self._largest = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def restart(self) -> None:
        """Begins a new peak."""
        if self._group is not None:
            (self._group / "memory.max_usage_in_bytes").write_text("0")
        self._largest = 0
        if self._group is None and not self._thread.is_alive():
            self._thread.start()

    def now(self) -> int:
        """Bytes of this moment."""
        return proportional_bytes() if self._group is None else self._read("usage")

    def peak(self) -> int:
        """The most bytes since `restart`."""
        return self._largest if self._group is None else self._read("max_usage")

    def limit(self, count: int | None) -> None:
        """Sets the limit of the group; None: that which it was made with."""
        if self._group is not None:
            text = self._ample if count is None else str(count)
            (self._group / "memory.limit_in_bytes").write_text(text)

    def _read(self, what: str) -> int:
        return int((self._group / f"memory.{what}_in_bytes").read_text())

    def _look(self) -> None:
        while not self._stop.wait(0.01):
            self._largest = max(self._largest, proportional_bytes())


def proportional_bytes() -> int:
    """The proportional set size of this process: of memory that n processes share, 1/n."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def train(accelerator: LSHDPAccelerator, sizes: dict[str, Any], steps: int, watch: Watch, base: int) -> dict[str, int]:
    """Trains a new model for some steps; returns the most bytes above `base` in each part of it."""
    marks: dict[str, int] = {}

    def note(part: str) -> None:
        marks[part] = max(marks.get(part, 0), watch.peak() - base)
        watch.restart()

    watch.restart()
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
    jobs = json.loads(sys.argv[1])
    group = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    torch.set_num_threads(1)
    watch = Watch(group)
    for number, job in enumerate(jobs):
        torch.manual_seed(number)
        accelerator = LSHDPAccelerator(plan=Plan.from_dict(job["plan"]), cpu=True)
        # The same model, but tiny: code, process groups and threads that a training needs belong to the process.
        train(accelerator, {**job["model"], **_TINY}, 2, watch, 0)
        give_back()
        base = watch.now()
        if job.get("allowed") is not None:
            watch.limit(base + job["allowed"][accelerator.process_index])
        marks = train(accelerator, job["model"], job["steps"], watch, base)
        print(json.dumps({"base": base, "marks": marks}), flush=True)
        watch.limit(None)
        give_back()
    accelerator.end_training()  # of all: it ends the process group


if __name__ == "__main__":
    main()
