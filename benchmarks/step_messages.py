# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What ranks and launchers tell each other, beside gradients: messages, bytes and seconds, with 2 to 64 ranks.

    python benchmarks/step_messages.py
    python benchmarks/step_messages.py --ranks 2,4,8 --parameters 700 --changing

Each rank is a process in a network namespace of this program's own, in which nothing else sends. In a step it tells
the others what its loss is, as it does unless the script says how losses count, and after the backward how long it
took and which parameters it has used. Messages and bytes a step are those that a rank hands to the network; beside
them stand the bytes that the kernel has sent, with headers of TCP and what gloo tells the other end. A beat is what a
launcher tells others twice a second, with one rank a node. Seconds are those of all ranks on the cores of one machine.
It needs root.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import multiprocessing
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from accelerate_lshdp.accelerator.losses.observations import SeenLoss
from accelerate_lshdp.accelerator.losses.telling import told
from accelerate_lshdp.accelerator.losses.values import CrossEntropies
from accelerate_lshdp.runtime import row_group
from accelerate_lshdp.runtime.heartbeats import message_bytes
from accelerate_lshdp.runtime.liveness import Liveness
from accelerate_lshdp.runtime.step_exchange import REPORT_BYTES, RankReport, StepExchange
from accelerate_lshdp.runtime.wait_clock import WaitClock


STEPS = 20
#: What a rank tells of a loss that is known.
LOSS, _ = told(SeenLoss(*[1.0] * 4, *[math.nan] * 3, 1.0, math.nan, *[1.0] * 12, values=CrossEntropies()))
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of unshare(2); Python has it from 3.12 on


def sent_bytes() -> int:
    """Bytes that the loopback of this network namespace has carried."""
    # /sys shows the interfaces of the namespace in which it was mounted.
    [counts] = re.findall(r"^\s*lo:(.*)$", Path("/proc/net/dev").read_text(), re.MULTILINE)
    return int(counts.split()[8])


def exchanges(rank: int, size: int, folder: str, usages: Sequence[torch.Tensor], results: Any) -> None:
    """One rank: its steps, without training; the parameters that it uses in turn."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(minutes=5))
    exchange = StepExchange(rank, size, WaitClock())
    report = RankReport(1.0, 0.1, 0.1, 0.0)
    exchange.make_loss_rows()
    exchange.share_loss(LOSS).wait()  # the first ones connect
    exchange.after_backward(report, [usages[0]]).wait()
    dist.barrier()
    time.sleep(0.2)
    before, seconds = sent_bytes(), []
    for step in range(1, 1 + STEPS):
        began = time.perf_counter()
        telling = exchange.share_loss(LOSS)
        reports, _ = exchange.after_backward(report, [usages[step % len(usages)]]).wait()
        telling.wait()
        seconds.append(time.perf_counter() - began)
        assert len(reports) == size
    time.sleep(0.5)  # until all have sent theirs
    sent = sent_bytes() - before
    if not rank:
        results.put((sent / size / STEPS, statistics.median(seconds)))
    dist.barrier()


def measure(size: int, usages: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Bytes a rank and step that the kernel has sent, and the median seconds of a step's exchange."""
    context = multiprocessing.get_context("fork")  # what is imported is shared
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=exchanges, args=(rank, size, folder, usages, results)) for rank in range(size)]
        for each in ranks:
            each.start()
        found = results.get(timeout=300)
        for each in ranks:
            each.join(60)
    return found


def payload(size: int, parameters: int, changing: bool) -> tuple[int, int]:
    """Messages and bytes that a rank hands to the network in a step."""
    rows, bits = [len(LOSS), REPORT_BYTES + 1], -(-parameters // 8)
    if size <= row_group.DIRECT_RANKS:
        # To each of the others; of the bits a part, and one that has been united.
        rows += [-(-bits // size)] * 2 if changing else []
        return (size - 1) * len(rows), (size - 1) * sum(rows)
    rounds = math.ceil(math.log2(size))
    # With a byte that says whether they have come.
    messages, count = rounds * len(rows), (size - 1) * sum(1 + row for row in rows)
    return (messages + rounds, count + rounds * (1 + bits)) if changing else (messages, count)


def beat(nodes: int) -> tuple[int, int]:
    """Messages and bytes that a launcher sends in a beat."""
    receivers = Liveness(0, nodes, beat_seconds=0.5, notice_seconds=2.0, now=0.0).receivers()
    return len(receivers), len(receivers) * message_bytes(nodes)


def main() -> int:
    """Runs and prints what the docstring of this module says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", default="2,4,8,16,32,64")
    parser.add_argument("--parameters", type=int, default=150, help="of the model")
    parser.add_argument("--changing", action="store_true", help="a rank uses all but one, in each step another one")
    arguments = parser.parse_args()
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
        raise PermissionError(ctypes.get_errno(), "a network namespace of its own needs root")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    if arguments.parameters < 2:
        parser.error(f"found --parameters {arguments.parameters}, expected at least 2")
    usages = [torch.ones(arguments.parameters) for _ in range(2 if arguments.changing else 1)]
    for index, usage in enumerate(usages):
        usage[index] = 0.0 if arguments.changing else 1.0
    titles = ["ranks", "messages", "bytes", "/ 128 ranks", "sent", "seconds", "messages a beat", "bytes"]
    print("  ".join(titles))
    for size in map(int, arguments.ranks.split(",")):
        messages, count = payload(size, arguments.parameters, arguments.changing)
        sent, seconds = measure(size, usages)
        told = [size, messages, count, f"{count / 128 / size:.0%}", f"{sent:.0f}", f"{seconds:.4f}", *beat(size)]
        print("  ".join(f"{value:>{len(title)}}" for title, value in zip(titles, told, strict=True)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
