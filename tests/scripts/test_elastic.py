# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Nodes of an elastic run are lost and come back: the others go on, and train what one process trains."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from elastic_run import LOOP, TRAINER, ElasticRun
from launching import base_environment


pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends ranks with their launcher"),
    pytest.mark.timeout(300),
]


#: For the line of `TRAINER` that makes it.
OWN_TRAINER = """
class Own(Trainer):
    def _load_from_checkpoint(self, folder, model=None):
        raise OSError(f"no modules.json in {folder}")

trainer = Own("""
#: Where a script may fail that is not in a backward.
_LESS_OFTEN = ("forward", "step")
#: The buffer of `LOOP`.
_FORWARDS = "0.forwards"


def alone(folder: Path, script: str, *arguments: object) -> dict[str, torch.Tensor]:
    """The parameters that one process trains."""
    folder.mkdir()
    (folder / "train.py").write_text(script)
    # With the order of samples that a run of several has.
    command = [sys.executable, "-m", "accelerate_lshdp.run", "train.py", *map(str, arguments)]
    subprocess.run(command, cwd=folder, env=base_environment(), check=True, capture_output=True)
    return torch.load(folder / "trained.pt")


def error(found: Path, expected: dict[str, torch.Tensor]) -> float:
    trained = torch.load(found / "trained.pt")
    names = [name for name in expected if name not in ("rate", _FORWARDS)]
    apart = sum((trained[name] - expected[name]).square().sum() for name in names)
    size = sum(expected[name].square().sum() for name in names)
    if _FORWARDS in expected:
        assert trained[_FORWARDS] == expected[_FORWARDS]
    return float((apart / size).sqrt())


def makes_no_step_again(run: ElasticRun, node: int) -> None:
    """Checks the steps that a node has told of, of 80.

    One may be missing: the others had made it when this node was interrupted in it, and their state is the newest.
    """
    steps = [int(line.split()[1]) for line in run.output(node).splitlines() if line.startswith("step ")]
    assert steps == sorted(set(steps)) and steps[-1] == 80 and len(steps) >= 79, run.outputs


def test_a_trainer_goes_on_when_a_node_is_lost_and_when_it_returns(tmp_path: Path) -> None:
    """Node 0, to which the others had come to meet it. The Trainer looks for files of its own in checkpoints."""
    expected = alone(tmp_path / "alone", TRAINER, 0, 20, 12)
    with ElasticRun(tmp_path, 3, TRAINER.replace("trainer = Trainer(", OWN_TRAINER), 0.15, 20, 4) as run:
        run.wait_for("step 8 of 3", 0, 1, 2)
        folders = [run.memory(node) for node in range(3)]
        run.kill(0)
        run.wait_for(r"step \d+ of 2", 1, 2)
        run.start(0)
        assert run.end() == [0, 0, 0], run.outputs
        for node in range(3):
            assert "trained 80 steps, epoch 20" in run.output(node), run.outputs
        makes_no_step_again(run, 1)
        assert error(tmp_path, expected) < 1e-9
    assert not any(folder.exists() for folder in folders)  # that of a launcher that was killed is removed by the next


@pytest.mark.slow
def test_a_frozen_node_does_nothing_when_it_wakes_up(tmp_path: Path) -> None:
    expected = alone(tmp_path / "alone", TRAINER, 0, 20, 12)
    with ElasticRun(tmp_path, 3, TRAINER, 0.15, 20, 4) as run:
        run.wait_for("step 5 of 3", 0, 1, 2)
        run.send(1, signal.SIGSTOP)
        run.wait_for(r"step \d+ of 2", 0, 2)
        time.sleep(1)
        run.send(1, signal.SIGCONT)
        run.wait_for("was taken for lost", 1)
        assert run.end() == [0, 0, 0], run.outputs
        makes_no_step_again(run, 0)
        assert error(tmp_path, expected) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(("how", "length"), [("rank", "now"), ("leaves", "now"), ("leaves", "4"), ("two", "now")])
def test_a_loop_goes_on(tmp_path: Path, how: str, length: str) -> None:
    expected = alone(tmp_path / "alone", LOOP.replace("batch_size=4", "batch_size=16"), 0, 120, "loads", "now")
    with ElasticRun(tmp_path, 4, LOOP, 0.1, 120, "loads", length) as run:
        run.wait_for('"step": 10,', 0)
        if how == "rank":
            [rank] = run.ranks(2)
            rank.kill()
        elif how == "leaves":
            run.launchers[3].send_signal(signal.SIGTERM)
            assert run.launchers[3].wait(60) == 128 + signal.SIGTERM, run.outputs
            run.start(3)
        else:  # half of them, without the one that is listed first: nobody may decide until one is back
            run.send(0, signal.SIGSTOP)
            run.send(1, signal.SIGSTOP)
            run.wait_for("too few to go on", 2, 3)
            run.send(0, signal.SIGCONT)
            run.send(1, signal.SIGCONT)
        assert run.end() == [0, 0, 0, 0], run.outputs
        trained = [json.loads(line) for line in run.output(0).splitlines() if line.startswith('{"step"')]
        assert [each["step"] for each in trained] == list(range(1, 121)), run.outputs
        assert [each["first"] for each in trained] == [16 * (step % 3) for step in range(120)], run.outputs
        assert {each["total"] for each in trained} == {16}
        assert error(tmp_path, expected) < 1e-9
        assert torch.load(tmp_path / "trained.pt")["rate"] == pytest.approx(expected["rate"], rel=1e-9)


@pytest.mark.parametrize(
    ("strategy", "sizes", "how"),
    [
        ("lsdp", (2, 2), "power"),
        pytest.param("group_sharding", (2, 2), "rank", marks=pytest.mark.slow),
        pytest.param("lsdp", (2, 2), "rank", marks=pytest.mark.slow),
        pytest.param("lsdp", (2, 2), "leaves", marks=pytest.mark.slow),
        pytest.param("lsdp", (2, 1, 1), "power", marks=pytest.mark.slow),
        pytest.param("lsdp", (1, 3), "freeze", marks=pytest.mark.slow),
        pytest.param("ddp", (2, 2), "rank", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_share_the_state_of_a_node_keep_it_together(
    tmp_path: Path, strategy: str, sizes: tuple[int, ...], how: str
) -> None:
    """No step is made twice, and there is no checkpoint."""
    expected = alone(tmp_path / "alone", LOOP.replace("batch_size=4", "batch_size=16"), 0, 120, "loads", "now")
    environment = {"LSDP_STRATEGY": strategy}
    with ElasticRun(tmp_path, sizes, LOOP, 0.1, 120, "loads", "now", environment=environment) as run:
        run.wait_for('"step": 10,', 0)
        if how == "power":
            run.kill(1)
        elif how == "freeze":
            run.send(1, signal.SIGSTOP)
        elif how == "leaves":
            run.launchers[1].send_signal(signal.SIGTERM)
            assert run.launchers[1].wait(60) == 128 + signal.SIGTERM, run.outputs
        else:
            run.ranks(1)[-1].kill()
        run.wait_for("generation 2", 0)
        if how == "freeze":
            run.send(1, signal.SIGCONT)
        elif how != "rank":
            run.start(1)
        run.wait_for("generation 2" if how == "rank" else "generation 3", 1)
        assert run.end() == [0] * len(sizes), run.outputs
        trained = [json.loads(line) for line in run.output(0).splitlines() if line.startswith('{"step"')]
        assert [each["step"] for each in trained] == list(range(1, 121)), run.outputs
        assert "could not be kept" not in run.output(0), run.outputs
        assert error(tmp_path, expected) < 1e-9
        assert torch.load(tmp_path / "trained.pt")["rate"] == pytest.approx(expected["rate"], rel=1e-9)


@pytest.mark.slow
def test_all_that_are_told_to_end_save_the_same_step(tmp_path: Path) -> None:
    script = TRAINER.replace('"save_strategy": "no"', '"save_strategy": "epoch"').replace(
        '"out"', "'out' + os.environ['RANK']"
    )
    with ElasticRun(tmp_path, 2, script, 0.3, 20, 4) as run:
        run.wait_for("step 4 of 2", 0, 1)
        for launcher in run.launchers.values():
            launcher.send_signal(signal.SIGTERM)
        assert run.end() == [0, 0], run.outputs
        saved = [sorted(path.name for path in (tmp_path / f"out{rank}").iterdir()) for rank in range(2)]
        assert len(saved[0]) >= 1 and saved[0] == saved[1], saved


@pytest.mark.slow
def test_a_run_that_all_members_have_lost_goes_on_from_its_checkpoints(tmp_path: Path) -> None:
    """One that was a member before is on its way back, and knows that there was a run."""
    expected = alone(tmp_path / "alone", TRAINER, 0, 20, 12)
    script = TRAINER.replace('"save_strategy": "no"', '"save_strategy": "steps", "save_steps": 5')
    with ElasticRun(tmp_path, 2, script, 0.05, 20, 6) as run:
        run.wait_for("step 8 of 2", 0, 1)
        run.send(1, signal.SIGSTOP)
        run.wait_for(r"step \d+ of 1", 0)
        run.send(1, signal.SIGCONT)
        run.wait_for("was taken for lost", 1)
        run.kill(0)
        run.start(0)
        assert run.end() == [0, 0], run.outputs
        since = run.output(1).rpartition("generation ")[2]
        steps = [int(line.split()[1]) for line in since.splitlines() if line.startswith("step ")]
        assert steps == list(range(steps[0], 81)) and steps[0] > 1 and steps[0] % 5 == 1, run.outputs
        assert "it goes on from checkpoint-" in run.output(0) + run.output(1), run.outputs
        assert error(tmp_path, expected) < 1e-9


@pytest.mark.slow
def test_a_loop_that_does_not_load_is_told_to(tmp_path: Path) -> None:
    with ElasticRun(tmp_path, 3, LOOP, 0.1, 400, "does not", "now") as run:
        run.wait_for('"step": 10,', 0)
        run.kill(2)
        assert run.end()[:2] == [1, 1], run.outputs
        assert "has to call accelerator.load_state" in run.output(0), run.outputs


@pytest.mark.slow
def test_a_script_that_fails_ends_the_run(tmp_path: Path) -> None:
    failing = "        assert done < 5 or os.environ['RANK'] != '1'\n"
    script = LOOP.replace("        if done == steps:", failing + "        if done == steps:")
    with ElasticRun(tmp_path, 3, script, 0.1, 400, "loads", "now") as run:
        assert run.end() == [1, 1, 1], run.outputs
        assert "AssertionError" in run.output(1) and "the script has failed on 127.0.0.1" in run.output(0), run.outputs


@pytest.mark.parametrize("where", ["backward", *(pytest.param(each, marks=pytest.mark.slow) for each in _LESS_OFTEN)])
def test_an_error_of_one_rank_of_a_node_ends_the_run(tmp_path: Path, where: str) -> None:
    """The other rank of its node has the state with it, and must not take it for a rank that was lost."""
    line = {
        "forward": "        assert done < 5 or os.environ['RANK'] != '1', 'own'\n",
        "backward": "        inputs.requires_grad_().register_hook(own)\n",
        "step": "        optimizer.optimizer.register_step_pre_hook(own)\n",
    }[where]
    own = "def own(*_):\n    assert done < 5 or os.environ['RANK'] != '1', 'own'\n\n"
    script = LOOP.replace("steps = int(sys", own + "steps = int(sys")
    script = script.replace("        accelerator.backward(model", line + "        accelerator.backward(model")
    with ElasticRun(tmp_path, (2, 1), script, 0.1, 400, "loads", "now") as run:
        assert run.end() == [1, 1], run.outputs
        assert run.output(0).count("AssertionError: own\n") == 1, run.outputs
        assert "generation 2" not in run.output(0) + run.output(1), run.outputs
