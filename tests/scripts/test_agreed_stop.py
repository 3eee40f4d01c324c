# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A signal to any rank ends a training on all of them: after one step, with a checkpoint, and without an error."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import base_environment
from test_trainer_checkpoints import own_folder, resume
from test_trainer_training import assert_same_run
from torch.utils.data import DataLoader, TensorDataset
from trainer_runs import make_trainer, train
from transformers import TrainerCallback
from workers import WorkerPools

from accelerate_lshdp import LSHDPAccelerator, Plan
from accelerate_lshdp.checkpoint.folder import search, verify


SIZES = [(2, 3), (2, 1)]
#: For strategies under which all ranks have as many micro-batches.
EVEN = [5, 3]
SAVING = {"save_strategy": "steps", "save_steps": 4, "logging_steps": 3}


def is_complete(folder: str | Path) -> bool:
    """Whether a folder is, or has in it, one checkpoint with all of its files."""
    found = search(Path(folder))
    return len(found) == 1 and found[0].problem is None and verify(found[0].path, found[0].manifest) is None


class SendAt(TrainerCallback):
    """Sends this process a signal when it begins a step."""

    def __init__(self, step: int, number: int) -> None:
        self.step, self.number = step, number

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), self.number)


def stop_at(
    folder: str, options: dict[str, Any], strategy: str, sent: dict[int, tuple[int, int]]
) -> tuple[int, list[str], bool]:
    """Sends signals to some ranks; returns the steps made, what is in the folder, and whether handlers are as before.

    Args:
        sent: by rank, before which step (counted from 0), and which signal.
    """
    before = signal.getsignal(signal.SIGTERM)
    trainer = make_trainer(own_folder(folder), SIZES, "gpt2", options, strategy)
    rank = int(os.environ["RANK"])
    if rank in sent:
        trainer.add_callback(SendAt(*sent[rank]))
    trainer.train()
    return (
        trainer.state.global_step,
        sorted(os.listdir(own_folder(folder))),
        signal.getsignal(signal.SIGTERM) == before,
    )


@pytest.mark.parametrize(
    "sent",
    [{1: (5, signal.SIGTERM)}, {0: (5, signal.SIGUSR1)}, {0: (5, signal.SIGTERM), 1: (5, signal.SIGTERM)}],
    ids=["one rank", "the first rank", "all ranks"],
)
def test_all_ranks_save_one_step_and_go_on_from_it(
    workers: WorkerPools, tmp_path: Path, sent: dict[int, tuple[int, int]]
) -> None:
    alone = {"logging_steps": 3, "per_device_train_batch_size": 8}
    [expected] = workers(1).run(train, str(tmp_path / "alone"), None, "gpt2", alone, nodes=(1,))

    stopped = workers(2).run(stop_at, str(tmp_path), SAVING, "ddp", sent, nodes=(1, 1))
    assert stopped == [(6, ["checkpoint-4", "checkpoint-6"], True)] * 2

    found = workers(2).run(resume, str(tmp_path), SIZES, "gpt2", {"logging_steps": 3}, "lsdp", nodes=(1, 1))
    for rank in found:
        rank["train_loss"] = expected["train_loss"]  # of the resumed part alone
    assert_same_run(found, expected)


def test_the_trainers_own_way_is_agreed_on(workers: WorkerPools, tmp_path: Path) -> None:
    """`enable_jit_checkpoint` alone saved on the rank that got the signal, and hung."""
    options = {"save_strategy": "no", "enable_jit_checkpoint": True}
    found = workers(2).run(stop_at, str(tmp_path), options, "ddp", {1: (3, signal.SIGTERM)}, nodes=(1, 1))
    assert [rank[:2] for rank in found] == [(4, ["checkpoint-4"])] * 2


def stop_before_training(folder: str) -> tuple[int, list[str]]:
    """The signal comes when the Trainer has been made, and does not train yet."""
    options = {"save_strategy": "no", "enable_jit_checkpoint": True}
    trainer = make_trainer(own_folder(folder), EVEN, "gpt2", options, "ddp")
    if os.environ["RANK"] == "1":
        for callback in trainer.callback_handler.callbacks:
            if getattr(callback, "jit_manager", None) is not None:
                callback.jit_manager.kill_wait = 0
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
    trainer.train()
    return trainer.state.global_step, sorted(os.listdir(own_folder(folder)))


def test_a_signal_before_the_training_is_not_lost(workers: WorkerPools, tmp_path: Path) -> None:
    assert workers(2).run(stop_before_training, str(tmp_path), nodes=(1, 1)) == [(1, ["checkpoint-1"])] * 2


@pytest.mark.parametrize("strategy", ["fsdp", "lsdp"])
def test_a_signal_during_a_save_saves_once_more(workers: WorkerPools, tmp_path: Path, strategy: str) -> None:
    found = workers(2).run(save_and_stop, str(tmp_path), strategy, nodes=(1, 1))
    assert [rank[:2] for rank in found] == [(5, ["checkpoint-4", "checkpoint-5"])] * 2


def save_and_stop(folder: str, strategy: str) -> tuple[int, list[str]]:
    """The signal comes to one rank in the middle of its checkpoint of step 4."""
    trainer = make_trainer(own_folder(folder), EVEN, "gpt2", SAVING, strategy)
    if os.environ["RANK"] == "1":
        stock = trainer._save_optimizer_and_scheduler

        def save(output_dir: str) -> None:
            if trainer.state.global_step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            stock(output_dir)

        trainer._save_optimizer_and_scheduler = save
    trainer.train()
    return trainer.state.global_step, sorted(os.listdir(own_folder(folder)))


def test_a_trainer_that_does_not_save_is_ended_by_signals_as_ever(workers: WorkerPools, tmp_path: Path) -> None:
    assert workers(2).run(handlers_while_training, str(tmp_path), nodes=(1, 1)) == [True, True]


def handlers_while_training(folder: str) -> bool:
    before, seen = signal.getsignal(signal.SIGTERM), []

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(signal.getsignal(signal.SIGTERM))

    trainer = make_trainer(own_folder(folder), SIZES, "gpt2", {"num_train_epochs": 1}, "ddp")
    trainer.add_callback(Look())
    trainer.train()
    return set(seen) == {before}


def loop_until_stopped(folder: str, rank_to_stop: int) -> tuple[int, bool]:
    """A loop of a script's own; returns the steps made, and whether its checkpoint is complete here."""
    accelerator = LSHDPAccelerator(plan=Plan.from_batch_sizes([3, 1], strategy="ddp"))
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4)
    )
    accelerator.stop_on_signals()
    steps = 0
    for (x,) in loader:
        if steps == 4 and accelerator.process_index == rank_to_stop:
            os.kill(os.getpid(), signal.SIGTERM)
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if accelerator.stop_requested:
            break
    path = accelerator.save_state(os.path.join(own_folder(folder), "stopped"))
    return steps, is_complete(path)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_loop_of_the_scripts_own_asks(workers: WorkerPools, tmp_path: Path, rank: int) -> None:
    assert workers(2).run(loop_until_stopped, str(tmp_path), rank, nodes=(1, 1)) == [(5, True)] * 2


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.parametrize(("seconds", "code"), [(100.0, 0), (0.0, -signal.SIGTERM)])
def test_a_later_signal_ends_the_process(seconds: float, code: int) -> None:
    """Those that come soon are the same request, which came by several ways."""
    script = (
        "import os, signal, time; from accelerate_lshdp.runtime import stop_requests\n"
        f"stop_requests.SAME_SECONDS = {seconds}\n"
        "requests = stop_requests.of_process; requests.watch()\n"
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.01); os.kill(os.getpid(), signal.SIGTERM)\n"
        "print(requests.received, flush=True)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], env=base_environment(), capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == code, ended.stderr
    assert ended.stdout.strip() == (str(int(signal.SIGTERM)) if code == 0 else "")


FORKED = """
import multiprocessing, os, signal, time
from accelerate_lshdp.runtime.stop_requests import of_process
of_process.watch()
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,), daemon=True)
child.start()
time.sleep(0.2)
child.terminate()
child.join(10)
worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1,))
worker.start()
time.sleep(0.2)
os.kill(worker.pid, signal.SIGUSR1)
worker.join(10)
print(child.exitcode, worker.exitcode, signal.getsignal(signal.SIGTERM) == of_process._note)
"""


def test_processes_that_are_forked_are_ended_by_signals() -> None:
    """A pool ends its members by SIGTERM, and waits for them. SIGUSR1 would end a loader's worker, and so the rank."""
    ended = subprocess.run(
        [sys.executable, "-c", FORKED], env=base_environment(), capture_output=True, text=True, timeout=60
    )
    assert ended.stdout.strip() == f"{-signal.SIGTERM} 0 True", ended.stderr


class Evaluate(TrainerCallback):
    """The first evaluation is the best."""

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        metrics["eval_loss"] = float(state.global_step)


def stop_after_the_best(folder: str) -> tuple[int, list[str]]:
    options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    options |= {"save_total_limit": 1, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    trainer = make_trainer(own_folder(folder), EVEN, "gpt2", options, "ddp")
    trainer.add_callback(Evaluate())
    if os.environ["RANK"] == "1":
        trainer.add_callback(SendAt(4, signal.SIGTERM))
    trainer.train()
    return trainer.state.global_step, sorted(os.listdir(own_folder(folder)))


def test_the_stopped_step_is_kept_beside_the_best_one(workers: WorkerPools, tmp_path: Path) -> None:
    found = workers(2).run(stop_after_the_best, str(tmp_path), nodes=(1, 1))
    assert [(steps, folders[-1]) for steps, folders in found] == [(5, "checkpoint-5")] * 2, found


def train_twice(folder: str) -> list[int]:
    """A process that was told to end during its first training."""
    made = []
    for number in range(2):
        trainer = make_trainer(own_folder(f"{folder}/{number}"), EVEN, "gpt2", SAVING, "ddp")
        if number == 0 and os.environ["RANK"] == "0":
            trainer.add_callback(SendAt(3, signal.SIGTERM))
        trainer.train()
        made.append(trainer.state.global_step)
    return made


def test_a_process_that_is_told_to_end_does_not_train_on(workers: WorkerPools, tmp_path: Path) -> None:
    assert workers(2).run(train_twice, str(tmp_path), nodes=(1, 1)) == [[4, 1]] * 2


# Many rounds, with signals at random moments.

KINDS = ("one", "all", "half a second apart", "between many saves")


def train_and_be_told(folder: str, seed: int, kind: str, jit: bool) -> tuple[int, list[str], bool]:
    """Gets a signal at a random moment; returns steps, the newest folder, and whether that is complete."""
    moments = random.Random(seed)  # the same on all ranks
    when, chosen = moments.uniform(0.0, 1.5), moments.randrange(2)
    number = moments.choice([signal.SIGTERM, signal.SIGUSR1])
    rank = int(os.environ["RANK"])
    options = {"save_strategy": "no", "enable_jit_checkpoint": True} if jit else {"save_strategy": "steps"}
    options |= {"save_steps": 2 if kind == KINDS[3] else 50, "num_train_epochs": 500, "save_total_limit": 2}
    trainer = make_trainer(own_folder(folder), EVEN, "gpt2", options, ("ddp", "lsdp", "fsdp")[seed % 3])

    class SendAfterAWhile(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step != 1:
                return
            if kind != "one" or rank == chosen:
                later = 0.5 * rank if kind == KINDS[2] else 0.0
                threading.Timer(when + later, os.kill, (os.getpid(), number)).start()

    # Signals that come when a training has ended mean nothing to it; those of this test may, half a second later.
    before = {each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGTERM, signal.SIGUSR1)}
    trainer.add_callback(SendAfterAWhile())
    trainer.train()
    time.sleep(0.7)
    for each, handler in before.items():
        signal.signal(each, handler)
    folders = sorted(os.listdir(own_folder(folder)), key=lambda name: int(name.rpartition("-")[2]))
    return trainer.state.global_step, folders[-1:], is_complete(os.path.join(own_folder(folder), folders[-1]))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_many_rounds(workers: WorkerPools, tmp_path: Path, kind: str) -> None:
    for seed in range(14):
        folder = str(tmp_path / f"round{seed}")
        found = workers(2).run(train_and_be_told, folder, seed, kind, seed % 4 == 3, nodes=(1, 1))
        steps = {rank[0] for rank in found}
        assert len(steps) == 1, found
        assert [rank[1:] for rank in found] == [([f"checkpoint-{steps.pop()}"], True)] * 2, found
