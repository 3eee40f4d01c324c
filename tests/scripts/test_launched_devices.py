# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Launched ranks tell each other their devices before any process group exists."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from accelerate_lshdp.runtime.free_port import free_port


SCRIPT = """
import json, os, sys
from datetime import timedelta
from types import SimpleNamespace
import torch, torch.distributed as dist
from accelerate_lshdp.runtime import launched_devices
from accelerate_lshdp.runtime.launched_devices import choose_backend

rank, found = int(os.environ["RANK"]), []
torch.accelerator.current_accelerator = lambda *_: SimpleNamespace(type="cuda")

def ask(cpus, asked, timeout=None):
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(len(found))  # ranks that were started again
    try:
        found.append(choose_backend(rank in cpus, asked.get(rank), timeout))
    except RuntimeError as error:
        found.append(str(error))

ask((), {})
ask((0, 1), {0: "mpi"})
ask((1,), {})
ask((0,), {0: "gloo"})
ask((1,), {0: "nccl"})
if rank == 0:
    ask((), {}, timedelta(seconds=1))
else:
    found.append("")
os.environ["TORCHELASTIC_RESTART_COUNT"] = "2"
again = choose_backend(rank == 1)  # as the script's first state, and then the accelerator
dist.init_process_group(again)
dist.all_reduce(total := torch.ones(()))
found += [again, total.item(), choose_backend(rank == 1, "mpi")]
dist.destroy_process_group()
print(json.dumps(found))
"""


@pytest.mark.parametrize("agent_serves", [False, True], ids=["rank 0 serves", "the launcher serves"])
def test_ranks_on_other_nodes_agree_on_a_backend(agent_serves: bool) -> None:
    from torch.distributed import TCPStore

    port = free_port()
    launcher = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if agent_serves else None
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "TORCHELASTIC_USE_AGENT_STORE": str(agent_serves),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    results = []
    for rank in ranks:
        out, errors = rank.communicate(timeout=50)
        assert rank.returncode == 0, errors
        results.append(json.loads(out))
    del launcher
    refused = (
        "found ranks with different devices (1 on cpu, 1 on cuda) and backends that the script asks for ('nccl' by "
        "rank 0), expected 'gloo', in which processors and devices can meet, or none"
    )
    late = (
        "found 1 of 2 ranks within 1 s, expected all of them; rank 1 did not start, or does not make its accelerator"
    )
    alike = [[None, "mpi"], [None, None]]
    for rank, found in enumerate(results):
        last = late if rank == 0 else ""
        assert found == [*alike[rank], "gloo", "gloo", refused, last, "gloo", 2.0, "mpi"]


def test_nobody_is_asked_on_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate_lshdp.runtime import launched_devices

    monkeypatch.setattr(launched_devices, "rendezvous", None)  # which would wait for ranks that are not there
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    assert launched_devices.choose_backend(True, "mpi") == "mpi"
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert launched_devices.choose_backend(True) is None
