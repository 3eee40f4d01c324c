# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Ranks tell each other which devices they train on before any process group exists, and choose its backend by that.

accelerate takes NCCL on a node with GPUs and gloo on one without. Ranks of both would wait for each other for ever,
and could not even agree on an error.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from accelerate_lshdp.runtime.groups import is_gloo


#: Kinds whose tensors gloo takes. accelerate lets nobody choose the backend of some others (NPU, MLU).
_MEET = ("cpu", "cuda", "rocm")
#: As torch's, for gloo and for NCCL.
_TIMEOUT, _TIMEOUT_ON_DEVICES = timedelta(minutes=30), timedelta(minutes=10)
#: Whether the ranks of a launch have different devices, by its address.
_found: dict[tuple[str, str], bool] = {}
#: Kept until a group exists: where rank 0 serves the store, it must be there when accelerate comes to its address.
_stores: list[dist.Store] = []


def choose_backend(on_cpu: bool, asked: str | None = None, timeout: timedelta | None = None) -> str | None:
    """The backend of the process groups that accelerate is to make: gloo, if nodes of the launch have other devices.

    Collective over the ranks of the launch when it is called first, if they are on several nodes and no process group
    exists. Those of one node have the same devices.

    Args:
        on_cpu: whether this rank trains on its processor.
        asked: the backend that the script asks for; None: it leaves that to accelerate.
        timeout: how long to wait for the other ranks. None: as long as torch does.

    Returns:
        ``asked``, or ``"gloo"``, which carries tensors between processors and devices.

    Raises:
        RuntimeError: on all ranks, if nodes have different devices that cannot meet, or a rank asks for another
            backend; or other ranks did not start in time.
    """
    launch = _launch(on_cpu)
    if launch is None:
        return asked
    if launch not in _found:
        if dist.is_initialized():
            return asked
        timeout = timeout or (_TIMEOUT if on_cpu else _TIMEOUT_ON_DEVICES)
        _found[launch] = _are_mixed(_kind(on_cpu), asked, timeout)
    return "gloo" if _found[launch] else asked


def group_exists() -> None:
    """Takes note that accelerate has made its group, which holds the store of the launch from now on.

    A group that is made after that one was destroyed would else find the old one's addresses in the store.
    """
    _stores.clear()


def _launch(on_cpu: bool) -> tuple[str, str] | None:
    """The address of the launch on several nodes that this process is a rank of; None: it is none."""
    read = os.environ.get
    world_size, local_size = int(read("WORLD_SIZE", "1")), int(read("LOCAL_WORLD_SIZE", "1"))
    address, port = read("MASTER_ADDR"), read("MASTER_PORT")
    if world_size == local_size or not address or not port or "RANK" not in os.environ:
        return None
    # On a device, accelerate makes no group without it: the process trains alone, whatever the cluster has set.
    return (address, port) if on_cpu or "LOCAL_RANK" in os.environ else None


def _kind(on_cpu: bool) -> str:
    """The kind of this rank's device, by what its collectives need: those of CUDA and ROCm do not know each other."""
    if on_cpu:
        return "cpu"
    device = torch.accelerator.current_accelerator()
    assert device is not None, "the caller has found one"
    return "rocm" if torch.version.hip else device.type


def _are_mixed(kind: str, asked: str | None, timeout: timedelta) -> bool:
    """Whether ranks have different kinds of devices (collective over the launch); errors as for `choose_backend`."""
    missing = ""
    try:
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        _stores.append(store)
        # The store may outlive its processes: those that are started again write over what the first ones said.
        store = dist.PrefixStore("accelerate_lshdp/devices", store)
        store.set(str(rank), f"{kind} {asked or ''}")
        keys = [str(each) for each in range(world_size)]
        try:
            store.wait(keys, timeout)
        except dist.DistStoreError:
            missing = " rank " + ", ".join(key for key in keys if not store.check([key]))
            raise
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise RuntimeError(
            f"found{missing or ' ranks'} missing after {timeout.total_seconds():.0f} s, expected that all ranks make "
            f"their accelerator. Start every node, and see whether another one has failed ({error})"
        ) from error
    kinds, _, backends = zip(*(text.decode().partition(" ") for text in store.multi_get(keys)), strict=True)
    if len(set(kinds)) == 1:
        return False
    _require_meeting(kinds, backends)
    return True


def _require_meeting(kinds: Sequence[str], backends: Sequence[str]) -> None:
    """Checks that ranks with different devices can meet; all of them check the same.

    Args:
        kinds: of each rank's device.
        backends: that each rank's script asks for; empty: none.

    Raises:
        RuntimeError: they cannot.
    """
    found = "found ranks with different devices (" + ", ".join(
        f"{n} on {k}" for k, n in sorted(Counter(kinds).items())
    )
    if not set(kinds) <= set(_MEET):
        raise RuntimeError(
            f"{found}), expected devices of one kind, or some of {', '.join(_MEET)}, which gloo connects"
        )
    asking = [f"{each!r} by rank {rank}" for rank, each in enumerate(backends) if each and not is_gloo(each)]
    if asking:
        raise RuntimeError(
            f"{found}) and backends that the script asks for ({', '.join(asking)}), expected 'gloo', in which "
            "processors and devices can meet, or none"
        )
