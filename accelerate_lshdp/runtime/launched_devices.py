# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Ranks tell each other which devices they train on before any process group exists, and choose its backend by that.

accelerate takes NCCL on a node with GPUs and gloo on one without. Ranks of both would wait for each other for ever, and
could not even agree on an error.
"""

from __future__ import annotations

import os
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous


_TIMEOUT = timedelta(minutes=30)
_ALIKE, _MIXED = "alike", "mixed"
#: Kept: where rank 0 is the store's server, it must still be there when accelerate asks for the same address.
_stores: list[dist.Store] = []
#: What the ranks of a launch have found, by its address and restarts.
_found: dict[tuple[str, str, str], str] = {}


def choose_backend(on_cpu: bool, asked: str | None = None, timeout: timedelta | None = None) -> str | None:
    """The backend of the process groups that accelerate is to make: gloo, if nodes of the launch have other devices.

    Collective over the ranks of the launch when it is called first, if they are on several nodes and no process group
    exists. Those of one node have the same devices.

    Args:
        on_cpu: whether this rank trains on its processor.
        asked: the backend that the script asks for; None: it leaves that to accelerate.
        timeout: how long to wait for the other ranks. None: half an hour, as gloo does.

    Returns:
        ``asked``, or ``"gloo"``, which carries tensors between processors and devices.

    Raises:
        RuntimeError: on all ranks, if nodes have different devices and a rank asks for another backend; or other ranks
            did not start in time.
    """
    launch = _launch()
    if launch is None or dist.is_initialized():
        return asked
    if launch not in _found:
        _found[launch] = _ask_everyone(launch, _kind(on_cpu), asked, timeout or _TIMEOUT)
    return "gloo" if _found[launch] == _MIXED else asked


def _launch() -> tuple[str, str, str] | None:
    """Names the launch that this process is a rank of, on several nodes; None: it is not."""
    read = os.environ.get
    world_size, local_size = int(read("WORLD_SIZE", "1")), int(read("LOCAL_WORLD_SIZE", "1"))
    address, port = read("MASTER_ADDR"), read("MASTER_PORT")
    if world_size == local_size or not address or not port or "RANK" not in os.environ:
        return None
    # The store of a launch outlives its processes: those that are started again must not read what the first ones said.
    return address, port, read("TORCHELASTIC_RESTART_COUNT", "0")


def _kind(on_cpu: bool) -> str:
    """The kind of this rank's device, by what its collectives need: those of CUDA and ROCm do not know each other."""
    if on_cpu:
        return "cpu"
    device = torch.accelerator.current_accelerator()
    assert device is not None, "the caller has found one"
    return "rocm" if torch.version.hip else device.type


def _ask_everyone(launch: tuple[str, str, str], kind: str, asked: str | None, timeout: timedelta) -> str:
    """Whether the devices of all ranks are alike (collective over the launch); errors as for `choose_backend`."""
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    _stores.append(store)
    store = dist.PrefixStore(f"accelerate_lshdp/devices/{launch[-1]}", store)
    store.set(str(rank), f"{kind} {asked or ''}")
    keys = [str(each) for each in range(world_size)]
    try:
        store.wait(keys, timeout)
    except dist.DistStoreError as error:
        missing = [key for key in keys if not store.check([key])]
        raise RuntimeError(
            f"found {world_size - len(missing)} of {world_size} ranks within {timeout.total_seconds():.0f} s, expected "
            f"all of them; rank {', '.join(missing)} did not start, or does not make its accelerator"
        ) from error
    kinds, backends = zip(*(store.get(key).decode().split(" ") for key in keys), strict=True)
    if len(set(kinds)) == 1:
        return _ALIKE
    if not set(backends) <= {"", "gloo"}:
        found = ", ".join(f"{count} on {each}" for each, count in sorted(Counter(kinds).items()))
        asking = ", ".join(f"{each!r} by rank {keys[index]}" for index, each in enumerate(backends) if each)
        raise RuntimeError(
            f"found ranks with different devices ({found}) and backends that the script asks for ({asking}), expected "
            "'gloo', in which processors and devices can meet, or none"
        )
    return _MIXED
