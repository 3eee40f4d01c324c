# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The worker pool itself: order, isolation, failures told apart, and recovery from hangs and deaths."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from launching import has_ended, launch


LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


def all_reduce_rank(factor: float) -> tuple[int, float]:
    value = torch.tensor(float(dist.get_rank())) * factor
    dist.all_reduce(value)
    return dist.get_rank(), value.item()


def launcher_environment(names: tuple[str, ...]) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def raise_on(ranks: tuple[int, ...]) -> int:
    print(f"rank {dist.get_rank()} was here")
    if dist.get_rank() in ranks:
        raise LookupError(f"no batch on rank {dist.get_rank()}")
    return dist.get_rank()


def loop_forever() -> None:
    while True:
        time.sleep(0.01)


def raise_or_reduce() -> None:
    if dist.get_rank() == 0:
        raise LookupError("before the collective")
    dist.all_reduce(torch.ones(1))


def leave_collective_behind() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)
    raise LookupError("one all_reduce has no partner")


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def destroy_world() -> None:
    dist.destroy_process_group()


def dirty_process() -> tuple[DistributedType, int, int]:
    accelerator = Accelerator(gradient_accumulation_steps=4)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.manual_seed(dist.get_rank() + 100)
    random.seed(dist.get_rank() + 100)
    os.environ["LEFT_BEHIND"] = "1"
    return accelerator.distributed_type, accelerator.num_processes, accelerator.local_process_index


def inspect_process() -> dict[str, object]:
    return {
        "singletons": [bool(state._shared_state) for state in (AcceleratorState, PartialState, GradientState)],
        "dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "random": (torch.rand(()).item(), random.random()),
        "environment": "LEFT_BEHIND" in os.environ,
        "accumulation": Accelerator().gradient_accumulation_steps,
    }


def make_groups(count: int) -> int:
    for _ in range(count):
        dist.new_group()
    return len(dist.distributed_c10d._world.pg_map)


def test_results_come_in_rank_order(workers):
    assert workers(3).run(all_reduce_rank, 2.0) == [(0, 6.0), (1, 6.0), (2, 6.0)]


def test_processes_are_kept_between_cases(workers):
    workers(2).run(all_reduce_rank, 1.0)
    pids = workers(2).pids
    workers(2).run(raise_on, (0,), expect_failure=True)
    workers(2).run(all_reduce_rank, 1.0)
    assert workers(2).pids == pids and len(pids) == 2


def test_nodes_and_environment(workers):
    seen = workers(3).run(launcher_environment, (*LAUNCHER_NAMES, "LSDP_X", "OMP_NUM_THREADS"), nodes=(1, 2))
    assert [tuple(environment.values())[:5] for environment in seen] == [
        ("0", "3", "0", "1", "0"),
        ("1", "3", "0", "2", "1"),
        ("2", "3", "1", "2", "1"),
    ]
    assert all(environment["LSDP_X"] is None and environment["OMP_NUM_THREADS"] == "1" for environment in seen)
    changed = workers(3).run(launcher_environment, ("LSDP_X", "GROUP_RANK"), env={"LSDP_X": "1", "GROUP_RANK": None})
    assert changed == [{"LSDP_X": "1", "GROUP_RANK": None}] * 3
    assert workers(3).run(launcher_environment, ("LSDP_X", "GROUP_RANK")) == [{"LSDP_X": None, "GROUP_RANK": "0"}] * 3


def test_nodes_must_fit_the_world(workers):
    with pytest.raises(ValueError, match=r"nodes \(1, 1\) must be positive and sum to the 3 ranks"):
        workers(3).run(all_reduce_rank, 1.0, nodes=(1, 1))


def test_nothing_leaks_into_the_next_case(workers):
    dirty = workers(2).run(dirty_process, nodes=(1, 1))
    assert dirty == [(DistributedType.MULTI_CPU, 2, 0)] * 2
    clean = workers(2).run(inspect_process)
    assert clean[0] == clean[1] == workers(2).run(inspect_process)[0]
    assert clean[0]["singletons"] == [False, False, False]
    assert clean[0]["dtype"] == "torch.float32" and clean[0]["grad"] and not clean[0]["environment"]
    assert clean[0]["accumulation"] == 1


def test_tracebacks_of_all_ranks_are_shown(workers):
    with pytest.raises(AssertionError) as failure:
        workers(3).run(raise_on, (0, 2))
    message = str(failure.value)
    assert "rank 1: returned" in message and "rank 2 was here" in message
    for rank in (0, 2):
        assert f"LookupError: no batch on rank {rank}" in message and f"--- rank {rank}: \nTraceback" in message


def test_expected_failures_are_returned(workers):
    first, second, third = workers(3).run(raise_on, (0, 2), expect_failure=True)
    assert second is None
    assert (first.type, first.message) == ("LookupError", "no batch on rank 0")
    assert third.message == "no batch on rank 2" and "Exception" in third.bases and "raise_on" in third.traceback


def test_an_expected_failure_that_does_not_come_fails(workers):
    with pytest.raises(AssertionError, match="no rank raised"):
        workers(2).run(raise_on, (), expect_failure=True)


@pytest.mark.slow
def test_endless_loop_shows_stacks_and_is_survived(workers):
    workers(2).run(all_reduce_rank, 1.0)
    pids = workers(2).pids
    with pytest.raises(AssertionError) as failure:
        workers(2).run(loop_forever, timeout=1.0)
    message = str(failure.value)
    assert message.count("no answer after") == 2 and message.count("in loop_forever") == 2
    assert workers(2).run(all_reduce_rank, 1.0) == [(0, 1.0), (1, 1.0)]
    assert not set(pids) & set(workers(2).pids)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_rank_that_raises_before_a_collective_is_not_waited_for(workers):
    start = time.monotonic()
    workers(2).run(all_reduce_rank, 1.0)
    with pytest.raises(AssertionError) as failure:
        workers(2).run(raise_or_reduce, expect_failure=True, failure_grace=0.5)
    assert time.monotonic() - start < 20
    message = str(failure.value)
    assert "LookupError: before the collective" in message
    assert "rank 1: no answer after" in message and "in raise_or_reduce" in message


def test_unmatched_collective_does_not_reach_the_next_case(workers):
    errors = workers(2).run(leave_collective_behind, expect_failure=True)
    assert [error.type for error in errors] == ["LookupError"] * 2
    assert workers(2).run(all_reduce_rank, 1.0) == [(0, 1.0), (1, 1.0)]


@pytest.mark.slow
def test_killed_worker_is_reported_and_replaced(workers):
    with pytest.raises(AssertionError, match="rank 0: died: killed by SIGKILL"):  # rank 0 holds the store
        workers(2).run(die_on, 0, failure_grace=2.0, expect_failure=True)
    assert workers(2).run(all_reduce_rank, 1.0) == [(0, 1.0), (1, 1.0)]


@pytest.mark.slow
def test_worker_killed_between_cases_is_replaced(workers):
    workers(2).run(all_reduce_rank, 1.0)
    os.kill(workers(2).pids[1], signal.SIGKILL)
    assert workers(2).run(all_reduce_rank, 1.0) == [(0, 1.0), (1, 1.0)]


def test_destroyed_or_crowded_world_is_renewed(workers):
    workers(2).run(all_reduce_rank, 1.0)
    pids = workers(2).pids
    workers(2).run(destroy_world)
    assert workers(2).run(make_groups, 20) == [21, 21]
    assert workers(2).run(make_groups, 1) == [2, 2]
    assert workers(2).pids == pids


def test_local_functions_are_refused(workers):
    with pytest.raises(TypeError, match="not a top-level function"):
        workers(2).run(lambda: None)


@pytest.mark.slow
def test_workers_end_with_their_parent(tmp_path):
    script = tmp_path / "orphans.py"
    script.write_text(
        "import os, sys\n"
        f"sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}\n"
        "import test_workers, workers\n"
        "pool = workers.WorkerPool(1)\n"
        "pool.run(test_workers.all_reduce_rank, 1.0)\n"
        "print(*pool.pids, flush=True)\n"
        "os._exit(0)\n"
    )
    finished = launch([script], nproc=0, env={"TMPDIR": str(tmp_path)}, timeout=60)
    pid = int(finished.stdout)
    deadline = time.monotonic() + 5
    while not has_ended(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert has_ended(pid)


def test_launch_gives_ranks_their_environment():
    code = "import os; print(*(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK')))"
    finished = launch(["-c", code + "; raise SystemExit(int(os.environ['RANK']))"], nproc=3, nodes=(1, 2), timeout=20)
    assert finished.stdout.splitlines() == ["0 0 1 0", "1 0 2 1", "2 1 2 1"]
    assert finished.returncode == 1 and [process.returncode for process in finished.processes] == [0, 1, 2]


@pytest.mark.slow
def test_accelerate_launch_on_uneven_nodes(tmp_path):
    script = tmp_path / "script.py"
    names = (*LAUNCHER_NAMES, "ACCELERATE_USE_CPU")
    # One string: an unbuffered print of several writes them one by one, between those of the other rank.
    script.write_text(f"import os; print(' '.join(os.environ[n] for n in {names}) + '\\n', end='', flush=True)")
    finished = launch([script], nproc=3, nodes=(1, 2), launcher="accelerate", timeout=60)
    assert finished.returncode == 0, finished.stderr
    assert sorted(finished.stdout.splitlines()) == ["0 3 0 1 0 true", "1 3 0 2 1 true", "2 3 1 2 1 true"]


def test_launch_kills_what_does_not_end():
    code = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    with pytest.raises(AssertionError, match="had not ended after 1 s") as failure:
        launch(["-c", code], nproc=1, timeout=1.0)
    message = str(failure.value)
    assert "Current thread" in message and 'File "<string>", line 1 in <module>' in message
    assert has_ended(int(message.split("---\n")[1].splitlines()[0]))
