# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Launched ranks tell each other their devices before any process group exists."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from accelerate_lshdp.runtime import launched_devices
from accelerate_lshdp.runtime.free_port import free_port


PREAMBLE = """
import json, os, sys
from datetime import timedelta
from types import SimpleNamespace
import torch, torch.distributed as dist
from accelerate_lshdp.runtime import backend
from accelerate_lshdp.runtime.launched_devices import choose_backend

rank, found = int(os.environ["RANK"]), []
torch.accelerator.current_accelerator = lambda *_, **__: SimpleNamespace(type=os.environ.get("KIND", "cuda"))
"""
#: Each launch has a port of its own. The last one lacks rank 1.
CHOICES = """
def ask(cpus, asked, timeout=None, kind="cuda"):
    os.environ.update(MASTER_PORT=ports.pop(), KIND=kind)
    try:
        found.append(choose_backend(rank in cpus, asked.get(rank), timeout))
    except RuntimeError as error:
        found.append(str(error))

ports = json.loads(os.environ["PORTS"])
ask((), {})
ask((0, 1), {0: "mpi"})
ask((1,), {})
ask((0,), {0: "gloo", 1: "cpu:gloo,cuda:gloo"})
ask((1,), {0: "nccl"})
ask((1,), {}, kind="npu")
if rank == 0:
    ask((), {}, timedelta(seconds=1))
print(json.dumps(found))
"""
#: Rank 1 has a device, as far as accelerate can see. What is registered first runs last: the script destroys no group.
RUN = """
import atexit
atexit.register(lambda: print(json.dumps([chosen, total.item(), dist.is_initialized()])))
os.environ["ACCELERATE_USE_CPU"] = str(rank == 0)
if rank == 1:
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    torch.cuda.is_available = backend.has_accelerator = lambda **_: True
if sys.argv[1] == "accelerator":
    from accelerate_lshdp import LSHDPAccelerator

    LSHDPAccelerator()
else:
    from accelerate import PartialState
    from accelerate_lshdp.trainer.installation import install

    install()
    PartialState()
dist.all_reduce(total := torch.ones(()))
chosen = dist.get_backend()
"""


#: accelerate's state knows one process until the package is installed.
LATE = """
import atexit
atexit.register(lambda: print(json.dumps([total.item(), dist.is_initialized()])))
torch.accelerator.current_accelerator = lambda *_, **__: None
from accelerate import PartialState
from accelerate_lshdp.trainer.installation import install

assert PartialState().num_processes == 1
install()
dist.all_reduce(total := torch.ones(()))
"""


def run_ranks(code: str, *arguments: str, served: bool, **environment: str) -> list[Any]:
    """What two ranks on two nodes print last; ``served``: the launcher serves their stores, and not rank 0."""
    from torch.distributed import TCPStore

    ports = [free_port() for _ in range(7)]
    stores = [TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) for port in ports if served]
    environment = {
        **os.environ,
        **environment,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ports[0]),
        "PORTS": json.dumps(list(map(str, ports))),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "TORCHELASTIC_USE_AGENT_STORE": str(served),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + code, *arguments],
            env={**environment, "RANK": str(rank), "GROUP_RANK": str(rank)},
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
        results.append(json.loads(out.splitlines()[-1]))
    del stores
    return results


@pytest.mark.parametrize("served", [False, True], ids=["rank 0 serves", "the launcher serves"])
def test_ranks_on_other_nodes_agree_on_a_backend(served: bool) -> None:
    one, other = run_ranks(CHOICES, served=served)
    late = one.pop()
    assert late.startswith(f"found {'rank 1' if served else 'ranks'} missing after 1 s, expected that all ranks make")
    assert one[:2] == [None, "mpi"] and other[:2] == [None, None]
    assert one[2:4] == other[2:4] == ["gloo", "gloo"]
    assert one[4:] == other[4:]
    assert one[4] == (
        "found ranks with different devices (1 on cpu, 1 on cuda) and backends that the script asks for ('nccl' by "
        "rank 0), expected 'gloo', in which processors and devices can meet, or none"
    )
    assert one[5].startswith("found ranks with different devices (1 on cpu, 1 on npu), expected devices of one kind")


@pytest.mark.parametrize("first", ["accelerator", "state"])
def test_accelerate_makes_the_group_that_was_chosen_and_it_ends_before_the_interpreter(first: str) -> None:
    found = run_ranks(RUN, first, served=False)
    assert found == [["gloo", 2.0, False]] * 2


def test_the_group_of_a_state_that_was_there_before_ends_before_the_interpreter_too() -> None:
    assert run_ranks(LATE, served=False) == [[2.0, False]] * 2


@pytest.mark.parametrize(
    ("on_cpu", "variables"),
    [
        (True, {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}),  # one node
        (True, {"WORLD_SIZE": None}),  # not launched
        (False, {}),  # a device in a cluster's job, without a launcher
    ],
    ids=str,
)
def test_nobody_is_asked(monkeypatch: pytest.MonkeyPatch, on_cpu: bool, variables: dict[str, str | None]) -> None:
    monkeypatch.setattr(launched_devices, "rendezvous", None)  # which would wait for ranks that are not there
    launched = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**launched, **variables}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    assert launched_devices.choose_backend(on_cpu, "mpi") == "mpi"
