# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""accelerate's own test scripts pass when every `Accelerator` in them is ours, with equal batches and `ddp`.

They run unchanged. `test_sync`'s checks of gradient accumulation, which the script itself leaves out on CPUs, are
called one by one; under `lsdp`, too, but for what they expect of gradients between micro-batches on one node, whose
ranks share them (`test_no_sync.py`).
"""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path

import accelerate
import pytest
from accelerate import Accelerator, PartialState
from accelerate.test_utils import RegressionDataset
from accelerate.test_utils.scripts import test_ops, test_sync
from launching import launch

from accelerate_lshdp import LSHDPAccelerator, Plan, Strategy


SCRIPTS = Path(accelerate.__file__).parent / "test_utils" / "scripts"
PLAN = Plan.equal(strategy="ddp")

# Runs a script as `python script.py` does, and says which accelerators it made.
_DRIVER = """\
import json, runpy, sys
from accelerate import Accelerator, PartialState
from accelerate_lshdp import LSHDPAccelerator

made = set()
initialise = LSHDPAccelerator.__init__

def count(self, *args, **kwargs):
    initialise(self, *args, **kwargs)
    made.add((str(self.strategy), self.num_processes, self.plan.batch is None))

LSHDPAccelerator.__init__ = count
script = sys.argv.pop(1)
if script.endswith("test_ops.py"):
    Accelerator()  # it makes none itself: its PartialState() would know nothing of the other process
    assert PartialState().num_processes == 2
runpy.run_path(script, run_name="__main__")
print("made " + json.dumps(sorted(made)))
"""


@pytest.mark.parametrize(
    "script",
    # What test_ops.py and test_sync.py check is called one by one below.
    ["test_script.py", *(pytest.param(name, marks=pytest.mark.slow) for name in ("test_ops.py", "test_sync.py"))],
)
def test_script_passes_on_two_processes(tmp_path, script):
    driver = tmp_path / "driver.py"
    driver.write_text(_DRIVER)
    result = launch(
        ["-m", "accelerate_lshdp.run", driver, SCRIPTS / script],
        2,
        env={"ACCELERATE_LSHDP_PLAN": PLAN.to_json()},
        cwd=tmp_path,
    )
    assert [process.returncode for process in result.processes] == [0, 0], result.stderr[-6000:]
    for process in result.processes:
        assert json.loads(process.stdout.rpartition("made ")[2]) == [["ddp", 2, True]]


def run_accumulation_check(name: str, strategy: str, *flags: bool) -> None:
    """The check on fixed data: where random data gives a gradient near 0, Adam turns its rounding into real steps."""
    test_sync.Accelerator = partial(LSHDPAccelerator, plan=Plan.equal(strategy=strategy))
    test_sync.RegressionDataset = partial(RegressionDataset, seed=96)
    try:
        getattr(test_sync, name)(*flags)
    finally:
        test_sync.Accelerator, test_sync.RegressionDataset = Accelerator, RegressionDataset


@pytest.mark.parametrize("name", ["test_gradient_accumulation", "test_gradient_accumulation_with_opt_and_scheduler"])
@pytest.mark.parametrize(
    "flags",
    list(itertools.product([False, True], repeat=3)),
    ids=lambda f: "-".join(n for n, on in zip(["split", "dispatch", "sync_each"], f, strict=True) if on) or "plain",
)
def test_gradient_accumulation_of_test_sync(workers, name, flags):
    workers(2).run(run_accumulation_check, name, "ddp", *flags)


@pytest.mark.parametrize("name", ["test_gradient_accumulation", "test_gradient_accumulation_with_opt_and_scheduler"])
@pytest.mark.parametrize(("nodes", "flags"), [((1, 1), (True, True, False)), ((2,), (False, False, True))])
def test_gradient_accumulation_of_test_sync_under_lsdp(workers, name, nodes, flags):
    workers(2).run(run_accumulation_check, name, "lsdp", *flags, nodes=nodes)


def run_ops_checks() -> tuple[bool, int]:
    """`test_ops` with the accelerator's methods in place of accelerate's functions."""
    accelerator = LSHDPAccelerator(plan=PLAN)
    stock = {name: getattr(test_ops, name) for name in ("gather", "pad_across_processes", "reduce")}
    try:
        for name in stock:
            setattr(test_ops, name, getattr(accelerator, name))
        for check in (*stock, "gather_non_contiguous", "reduce_sum", "reduce_mean", "reduce_max", "op_checker"):
            if check != "reduce":
                getattr(test_ops, f"test_{check}")(PartialState())
    finally:
        for name, function in stock.items():
            setattr(test_ops, name, function)
    return accelerator.strategy is Strategy.DDP, accelerator.num_processes


def test_methods_of_the_accelerator_pass_test_ops(workers):
    assert workers(2).run(run_ops_checks) == [(True, 2)] * 2
