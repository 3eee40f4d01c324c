# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Divides the CPU of a node among its ranks: a number of threads for each, and cores of its own.

torchrun and ``accelerate launch`` start several ranks with one thread each, whatever the machine has. Where nobody
gives a number of threads, every rank takes all cores. Neither way takes account of a container's CPU quota.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch

from accelerate_lshdp.runtime.cpu_cores import allowed_cores, cpu_quota, usable_cores
from accelerate_lshdp.runtime.parent_death import environment_at_start


logger = logging.getLogger(__name__)

THREADS_VARIABLE = "OMP_NUM_THREADS"
#: Variables by which users choose threads or their cores; where one is set, nothing is changed.
_USERS_VARIABLES = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "MKL_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND")


@dataclass(frozen=True, slots=True)
class CpuShare:
    """A rank's share of its node's CPU.

    Attributes:
        threads: for computing.
        cpus: logical CPUs of its own; None: it stays where it is.
    """

    threads: int
    cpus: tuple[int, ...] | None


def share_of_rank(
    node: Sequence[Sequence[int]],
    own: Sequence[Sequence[int]],
    quota: float | None,
    local_rank: int,
    local_ranks: int,
) -> CpuShare:
    """Computes an equal share of a node's CPU for one of its ranks.

    No cores are handed out where there are fewer of them than ranks, where the quota is less than one core a rank
    (then each rank runs for a part of the time, best on whichever core is free), and where ranks are bound already.

    Args:
        node: the cores that all ranks together may use, each with its logical CPUs, in an order in which neighbours
            belong together.
        own: those that this rank may use; fewer, if somebody has given it a part.
        quota: CPU seconds per second that the node's ranks get together; None: no limit.
        local_rank: which of them this is.
        local_ranks: how many they are.
    """
    threads = min(max(1, usable_cores(node, quota) // local_ranks), len(own))
    enough = len(node) >= local_ranks and (quota is None or quota >= local_ranks)
    if local_ranks == 1 or not enough or len(own) < len(node):
        return CpuShare(threads, None)
    # Neighbours in the order of `node` share caches and memory, so each rank gets a run of them. The first ranks get
    # the cores that are left over.
    each, more = divmod(len(node), local_ranks)
    ends = list(accumulate(each + (rank < more) for rank in range(local_ranks)))
    cores = node[ends[local_rank] - each - (local_rank < more) : ends[local_rank]]
    return CpuShare(threads, tuple(sorted(chain.from_iterable(cores))))


def is_users_choice(environ: Mapping[str, str], launcher: Mapping[str, str] | None, defaults: Collection[int]) -> bool:
    """Whether the user, and not a launcher's default, has chosen the number of threads or bound them.

    Args:
        environ: of this rank.
        launcher: environment with which the user started torchrun or ``accelerate launch``; None: neither of them
            started this process, or it is not known.
        defaults: numbers of threads that launchers set by themselves.
    """
    if any(name in environ for name in _USERS_VARIABLES):
        return True
    if THREADS_VARIABLE not in environ:
        return False
    # The same variable may come from either. It is the launcher's if the launcher itself was started without it, and
    # its value is one that launchers choose.
    by_launcher = launcher is not None and THREADS_VARIABLE not in launcher
    return not (by_launcher and environ[THREADS_VARIABLE] in map(str, defaults))


def apply_cpu_share() -> None:
    """Gives this rank its share of the node's CPU, unless the user has chosen one; says so once a node.

    A second call changes nothing. Nor is anything changed on systems without ``sched_getaffinity`` (all but Linux),
    and under launchers that do not give a rank its place on the node.
    """
    local_rank, local_ranks = _place_on_node()
    share = _open_share(local_rank, local_ranks)
    if share is None:
        return
    before = torch.get_num_threads()
    if local_ranks == 1 and share.threads == before:
        return
    # Threads before cores: set_num_threads may start threads, which are bound with the others below.
    os.environ[THREADS_VARIABLE] = str(share.threads)  # else accelerate would choose, and for the whole machine
    torch.set_num_threads(share.threads)
    place = ""
    if share.cpus is not None:
        try:
            _bind(share.cpus)
            place = " on cores of its own"
        # Some containers forbid it. The number of threads is right nevertheless.
        except OSError as error:
            place = f" (cores of its own are not possible here: {error})"
    if local_rank == 0 and (place or share.threads != before):
        _say(share.threads, before, local_ranks, place)


def apply_thread_share() -> None:
    """Lets a rank on a device compute with its share of the node's cores where something is computed on the host.

    As `apply_cpu_share`, but the rank may run on any core: others may be nearer to its device.
    """
    local_rank, local_ranks = _place_on_node()
    share, before = _open_share(local_rank, local_ranks), torch.get_num_threads()
    if share is None or share.threads == before or str(before) != os.environ.get(THREADS_VARIABLE, str(before)):
        return  # chosen by the script (torch.set_num_threads), or as it should be
    torch.set_num_threads(share.threads)
    if local_rank == 0:
        _say(share.threads, before, local_ranks, " on the CPU")


def _place_on_node() -> tuple[int, int]:
    """The local rank, and the number of ranks of this node."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))
    return int(os.environ.get("LOCAL_RANK", "0")), int(ranks)


def _open_share(local_rank: int, local_ranks: int) -> CpuShare | None:
    """The share of a rank; None where the user has chosen one, or it is not known."""
    if not hasattr(os, "sched_getaffinity") or (local_ranks > 1 and "LOCAL_RANK" not in os.environ):
        return None
    own, node, quota = allowed_cores(os.sched_getaffinity(0)), cores_of_node(), cpu_quota()
    share = share_of_rank(node, own, quota, local_rank, local_ranks)
    defaults = (1, _all_cores() // local_ranks, usable_cores(node, quota) // local_ranks, share.threads)
    return None if is_users_choice(os.environ, _launcher_environment(), defaults) else share


def _say(threads: int, before: int, local_ranks: int, place: str) -> None:
    ranks = "This rank computes" if local_ranks == 1 else f"Each of this node's {local_ranks} ranks computes"
    count = f"{threads} thread{'s' if threads > 1 else ''}"
    instead = f" instead of {before}" if threads != before else ""
    logger.warning(
        f"{ranks} with {count}{instead}{place}: its share of the CPU. Set {THREADS_VARIABLE} to choose yourself"
    )


def cores_of_node() -> tuple[tuple[int, ...], ...]:
    """The cores that this node's ranks may use together: those of the launcher, if it may use more than this rank."""
    own = os.sched_getaffinity(0)
    # A rank that was bound before (by this function, or by a second accelerator) has a part of them only.
    launchers = os.sched_getaffinity(os.getppid())
    return allowed_cores(launchers if launchers > own else own)


def _all_cores() -> int:
    """The number of physical cores of the machine, as accelerate counts them, whatever of it may be used."""
    import psutil

    return psutil.cpu_count(logical=False) or 1


def _launcher_environment() -> dict[str, str] | None:
    """The environment that torchrun or ``accelerate launch`` was started with, None if this is no rank of theirs."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return environment_at_start(os.getppid())


def _bind(cpus: Collection[int]) -> None:
    """Binds all threads of this process to logical CPUs; the system call binds one thread."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cpus)
        except ProcessLookupError:
            continue  # it has ended meanwhile
