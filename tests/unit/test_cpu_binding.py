# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Threads and cores of the ranks of a node: who gets what, from what the kernel and the launcher say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate_lshdp.runtime.cpu_binding import (
    CpuShare,
    is_users_choice,
    share_of_rank,
)
from accelerate_lshdp.runtime.cpu_cores import allowed_cores, cpu_quota, usable_cores


SINGLE = tuple((cpu,) for cpu in range(5))  # five cores with one logical CPU each
DOUBLE = ((0, 4), (1, 5), (2, 6), (3, 7))  # four cores with two, as hyper-threading numbers them


def shares(cores, quota: float | None, ranks: int) -> list[CpuShare]:
    return [share_of_rank(cores, cores, quota, rank, ranks) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("cores", "quota", "ranks", "threads", "cpus"),
    [
        (DOUBLE, None, 2, 2, [(0, 1, 4, 5), (2, 3, 6, 7)]),
        (SINGLE, None, 2, 2, [(0, 1, 2), (3, 4)]),
        (SINGLE, None, 5, 1, [(0,), (1,), (2,), (3,), (4,)]),
        (SINGLE, 2.0, 2, 1, [(0, 1, 2), (3, 4)]),  # the quota limits the threads, not where they run
        (SINGLE, 3.2, 2, 2, [(0, 1, 2), (3, 4)]),  # rounded up
        (SINGLE, 1.9, 2, 1, [None, None]),  # less than a core a rank
        (SINGLE, None, 6, 1, [None] * 6),  # fewer cores than ranks
        (SINGLE, None, 1, 5, [None]),
        (SINGLE, 0.3, 1, 1, [None]),
    ],
)
def test_every_rank_gets_an_equal_share(cores, quota, ranks, threads, cpus):
    assert shares(cores, quota, ranks) == [CpuShare(threads, own) for own in cpus]


def test_a_rank_that_was_given_cores_keeps_them():
    assert share_of_rank(SINGLE, SINGLE[2:3], None, 1, 2) == CpuShare(1, None)
    assert share_of_rank(SINGLE, SINGLE[1:], None, 0, 2) == CpuShare(2, None)  # others may have been given the same


def test_usable_cores_are_what_the_quota_leaves():
    assert [usable_cores(SINGLE, quota) for quota in (None, 0.1, 2.0, 2.1, 64.0)] == [5, 1, 2, 3, 5]


@pytest.mark.parametrize(
    ("environ", "launcher", "expected"),
    [
        ({}, None, False),
        ({"OMP_NUM_THREADS": "1"}, None, True),  # python, mpirun: nobody else can have set it
        ({"OMP_NUM_THREADS": "1"}, {}, False),  # torchrun
        ({"OMP_NUM_THREADS": "8"}, {}, False),  # accelerate, for CPUs
        ({"OMP_NUM_THREADS": "3"}, {}, True),  # accelerate launch --num_cpu_threads_per_process 3
        ({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "1"}, True),
        ({"GOMP_CPU_AFFINITY": "0-3"}, {}, True),
        ({"MKL_NUM_THREADS": "2"}, None, True),
    ],
)
def test_what_the_user_has_set_is_told_from_what_a_launcher_sets_by_itself(environ, launcher, expected):
    assert is_users_choice(environ, launcher, defaults=(1, 8)) is expected


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content + "\n")
    return folder


def test_cores_are_ordered_by_package_and_group_their_logical_cpus(tmp_path):
    places = {0: (0, 0), 1: (1, 0), 2: (0, 1), 3: (1, 1), 4: (0, 0), 5: (1, 0), 6: (0, 1), 7: (1, 1)}
    for cpu, (package, core) in places.items():
        write(tmp_path / f"cpu{cpu}" / "topology", physical_package_id=str(package), core_id=str(core))
    assert allowed_cores(range(8), tmp_path) == ((0, 4), (2, 6), (1, 5), (3, 7))
    assert allowed_cores({5, 2}, tmp_path) == ((2,), (5,))
    assert allowed_cores({1, 0}, tmp_path / "nothing") == ((0,), (1,))


def test_the_smallest_quota_on_the_way_counts_version_2(tmp_path):
    root = tmp_path / "cgroup"
    write(root / "outer", cpu__max="300000 100000")
    write(root / "outer" / "inner", cpu__max="max 100000")
    proc = write(tmp_path / "proc", cgroup="0::/outer/inner", mounts=f"cgroup2 {root} cgroup2 rw,nosuid 0 0")
    assert cpu_quota(proc) == 3.0
    write(root / "outer" / "inner", cpu__max="80000 100000")
    assert cpu_quota(proc) == 0.8


def test_a_mount_whose_name_has_a_space(tmp_path):
    root = tmp_path / "my groups"
    write(root / "mine", cpu__max="50000 100000")
    escaped = str(root).replace(" ", "\\040")
    proc = write(tmp_path / "proc", cgroup="0::/mine", mounts=f"cgroup2 {escaped} cgroup2 rw 0 0")
    assert cpu_quota(proc) == 0.5


def test_quota_version_1(tmp_path):
    root = tmp_path / "cgroup"
    mounts = f"cgroup {root}/memory cgroup rw,memory 0 0\ncgroup {root}/cpu cgroup rw,cpu,cpuacct 0 0"
    proc = write(tmp_path / "proc", cgroup="4:memory:/other\n3:cpu,cpuacct:/mine\n0::/", mounts=mounts)
    write(root / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert cpu_quota(proc) is None
    write(root / "cpu" / "mine", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    assert cpu_quota(proc) == 1.5


def test_in_a_container_only_the_mount_itself_exists(tmp_path):
    root = write(tmp_path / "cgroup", cpu__max="250000 100000")
    proc = write(tmp_path / "proc", cgroup="0::/kubepods/pod1/abc", mounts=f"cgroup2 {root} cgroup2 rw 0 0")
    assert cpu_quota(proc) == 2.5


def test_no_control_groups_no_quota(tmp_path):
    assert cpu_quota(tmp_path) is None


RANK_ON_DEVICE = """
import json, os, torch
from accelerate_lshdp.runtime.cpu_binding import apply_thread_share
apply_thread_share()
apply_thread_share()
print(json.dumps([torch.get_num_threads(), sorted(os.sched_getaffinity(0))]))
"""
RANK = """
import json, os, torch
from accelerate_lshdp.runtime.cpu_binding import apply_cpu_share
apply_cpu_share()
apply_cpu_share()
print(json.dumps([torch.get_num_threads(), sorted(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS")]))
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not tell where a process may run")
@pytest.mark.parametrize("chosen", [None, "1"])
def test_a_rank_settles(chosen):
    cores = allowed_cores(os.sched_getaffinity(0))
    if len(cores) < 2 or (cpu_quota() or 2) < 2:
        pytest.skip("fewer than two cores may be used here, so ranks share them")
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    environment.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="2", **({"OMP_NUM_THREADS": chosen} if chosen else {}))
    done = subprocess.run(
        [sys.executable, "-c", RANK], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    told = done.stderr.count("Each of this node's 2 ranks computes with")
    if chosen is not None:
        assert json.loads(done.stdout) == [1, sorted(os.sched_getaffinity(0)), "1"] and told == 0
        return
    share = share_of_rank(cores, cores, cpu_quota(), 0, 2)
    assert json.loads(done.stdout) == [share.threads, list(share.cpus), str(share.threads)]
    assert share.cpus and told == 1


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not tell where a process may run")
@pytest.mark.parametrize("chosen", [None, "1"])
def test_a_rank_on_a_device_takes_threads_and_no_cores(chosen):
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    environment.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="2", **({"OMP_NUM_THREADS": chosen} if chosen else {}))
    done = subprocess.run(
        [sys.executable, "-c", RANK_ON_DEVICE], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    cores = allowed_cores(os.sched_getaffinity(0))
    threads = int(chosen or share_of_rank(cores, cores, cpu_quota(), 0, 2).threads)
    assert json.loads(done.stdout) == [threads, sorted(os.sched_getaffinity(0))]
