# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The shim: a script must not notice it, and every Accelerator must be ours."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from accelerate_lshdp import Plan
from accelerate_lshdp.cli.main import main
from accelerate_lshdp.runtime import backend
from accelerate_lshdp.shim import script as run
from accelerate_lshdp.shim.after_import import after_import


TIMEOUT_SECONDS = 60

# Prints all that a script can tell about how it was started, also after its last line.
_STUB = """\
import sys
LARGE = sorted(set(sys.modules) & {"torch", "numpy", "accelerate", "transformers", "huggingface_hub"})
import atexit, json, multiprocessing, os, pickle, sys
from sibling import WORD

class Record:
    pass

def double(number):
    return 2 * number

def still_main():
    same = sys.modules["__main__"].__dict__ is globals()
    return {"is main": same, "pickled": type(pickle.loads(pickle.dumps(Record()))) is Record, "argv": sys.argv}

facts = {
    "file": __file__, "name": __name__, "package": __package__, "spec": repr(__spec__), "cwd": os.getcwd(),
    "loader": type(__loader__).__name__, "path0": sys.path[0], "sibling": WORD, "large": LARGE,
}
if __name__ == "__main__":
    atexit.register(lambda: print("at exit", json.dumps(still_main())))
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # a child that imports the script again
        facts["spawned"] = pool.map(double, [2])
    print(json.dumps({**facts, **still_main()}))
"""

_MODULE = """\
import atexit, json, sys
from .sibling import WORD
atexit.register(lambda: print(sys.modules["__main__"].__dict__ is globals()))
print(json.dumps([sys.argv, __name__, __package__, __spec__.name, __file__, sys.path[0], WORD]))
"""

_RAISING = """\
def fail():
    try:
        {}["missing"]
    except KeyError as error:
        raise RuntimeError("a mistake of the script") from error

fail()
"""

_USAGE = """\
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float, required=True)
parser.parse_args()
"""


def _environment() -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "OMP_NUM_THREADS": "1"}


def _python(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )


@pytest.fixture
def without_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves accelerate in the test process as it is, where only the running of scripts is tested."""
    monkeypatch.setattr(run, "after_import", lambda package, function: None)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


def test_script_sees_what_it_sees_without_the_shim(tmp_path: Path) -> None:
    folder = tmp_path / "real"
    folder.mkdir()
    (folder / "script.py").write_text(_STUB)
    (folder / "sibling.py").write_text("WORD = 'found beside the script'\n")
    (tmp_path / "link.py").symlink_to(folder / "script.py")  # path[0] is the folder of what a link points to
    arguments = ["./link.py", "--plan", "the script's", "-m", "--", "-x", ""]

    plain = _python(*arguments, cwd=tmp_path)
    shim = _python("-m", "accelerate_lshdp.run", *arguments, cwd=tmp_path)

    assert plain.returncode == 0 and plain.stdout.count('"is main": true') == 2, plain.stderr
    assert '"large": []' in plain.stdout  # so that a script's variables are there when libraries read them
    assert shim.stdout == plain.stdout, shim.stderr
    assert shim.returncode == 0


def test_module_sees_what_it_sees_without_the_shim(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(_MODULE)
    (package / "sibling.py").write_text("WORD = 'found in the package'\n")
    arguments = ["-m", "package", "--flag", "-m"]

    plain = _python(*arguments, cwd=tmp_path)
    shim = _python("-m", "accelerate_lshdp.run", *arguments, cwd=tmp_path)

    assert plain.returncode == 0 and "found in the package" in plain.stdout, plain.stderr
    assert plain.stdout.endswith("True\n")
    assert shim.stdout == plain.stdout, shim.stderr
    assert shim.returncode == 0


@pytest.mark.parametrize(
    "source",
    [
        *(_RAISING, "1 +\n", "raise BaseException('not even an Exception')"),
        *("import sys; sys.exit('a message')", "raise SystemExit(3)", "exit()", _USAGE, None),
    ],
    ids=["exception", "syntax error", "base", "exit message", "exit code", "exit", "usage error", "no such module"],
)
@pytest.mark.usefixtures("without_accelerator")
def test_exit_code_and_traceback_are_the_scripts(
    source: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(source or "")
    started = ["-m", "no_such_package.script"] if source is None else [str(script)]
    plain = _python(*started, cwd=tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)

    # What the interpreter does with it.
    code: object = 0
    try:
        run.main(started)
    except SystemExit as exit_request:
        code = exit_request.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        code = 1
        kind, error, traceback = sys.exc_info()
        sys.excepthook(kind, error, traceback.tb_next)  # without the frame of this test

    assert (code or 0) == plain.returncode
    assert capfd.readouterr().err == plain.stderr  # the whole traceback, without a frame of the shim


@pytest.mark.usefixtures("without_accelerator")
@pytest.mark.parametrize(("error", "code"), [("KeyboardInterrupt", 130), ("ValueError", 1)])
def test_ranks_of_elastic_runs_end_with_the_code_of_a_shell(
    error: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their launcher has to tell Ctrl-C from a mistake of the script."""
    (tmp_path / "script.py").write_text(f"raise {error}")
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setenv("LSDP_ELASTIC", "{}")
    with pytest.raises(SystemExit) as end:
        run.main([str(tmp_path / "script.py")])
    assert end.value.code == code


@pytest.mark.usefixtures("without_accelerator")
def test_what_to_do_stands_behind_errors_of_shards(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch
) -> None:
    """torch's words are those that `test_averages_of_shards_are_refused_by_torch` gets."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    script = tmp_path / "script.py"
    for words, is_explained in ((f"aten.add_: {run._MIXED_TENSORS}, need to convert", True), ("another", False)):
        script.write_text(f"raise RuntimeError({words!r})")
        with pytest.raises(RuntimeError) as caught:
            run.main([str(script)])
        sys.excepthook(caught.type, caught.value, caught.tb.tb_next)
        assert ("Train under lsdp or ddp" in capfd.readouterr().err.splitlines()[-1]) == is_explained


@pytest.mark.usefixtures("without_accelerator")
def test_own_exception_hook_is_used(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "sys.excepthook = lambda kind, error, trace: print('hook', error, trace.tb_frame.f_code.co_filename)\n"
        "raise ValueError('x')"
    )
    with pytest.raises(ValueError) as caught:
        run.main([str(script)])
    sys.excepthook(caught.type, caught.value, caught.tb.tb_next)
    assert capfd.readouterr().out == f"hook x {script}\n"


@pytest.mark.usefixtures("without_accelerator")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--plan", "missing.json", "script.py"], "missing.json"),
        (["--plan", "bad.json", "script.py"], "bad.json"),
        (["missing.py"], "there is no script 'missing.py'"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ACCELERATE_LSHDP_PLAN", raising=False)
    Path("script.py").write_text("print('ran')")
    Path("bad.json").write_text('{"version": 1, "strategy": "lsdp", "surprise": 0}')
    with pytest.raises(SystemExit) as caught:
        run.main(arguments)
    assert caught.value.code == 2
    captured = capfd.readouterr()
    assert expected in captured.err and captured.err.count("\n") == 1 and captured.out == ""
    assert "ACCELERATE_LSHDP_PLAN" not in os.environ


@pytest.mark.usefixtures("without_accelerator")
def test_another_engine_is_told_before_the_script_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    for variable, engine in (("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"), ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM")):
        monkeypatch.setenv(variable, "true")
        with pytest.raises(SystemExit) as caught:
            run.main([str(script)])
        assert caught.value.code == 2
        captured = capfd.readouterr()
        assert f"{engine} is switched on by {variable}" in captured.err and captured.err.count("\n") == 1
        assert captured.out == ""
        monkeypatch.delenv(variable)


def test_function_is_called_after_the_import_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    (tmp_path / "watched.py").write_text("import colorsys\nNAMES = ['own']")
    calls: list[list[str]] = []
    after_import("watched", lambda: calls.append(sys.modules["watched"].NAMES))
    try:
        assert importlib.util.find_spec("watched").name == "watched"  # libraries ask so whether a package is there
        assert importlib.util.find_spec("no_such_package") is None and calls == []

        import watched

        assert calls == [["own"]] and sys.meta_path == finders
        importlib.reload(watched)
        assert len(calls) == 1
        after_import("watched", lambda: calls.append([]))  # has been imported
        assert len(calls) == 2 and sys.meta_path == finders
    finally:
        sys.modules.pop("watched", None)


def test_cpu_is_forced_only_without_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setattr(backend, "has_accelerator", lambda several_ranks: True)
    backend.prepare_environment()
    assert "ACCELERATE_USE_CPU" not in os.environ and os.environ["ACCELERATE_USE_FSDP"] == "true"

    monkeypatch.setattr(backend, "has_accelerator", lambda several_ranks: False)
    backend.prepare_environment()
    assert os.environ["ACCELERATE_USE_CPU"] == "true" and "ACCELERATE_USE_FSDP" not in os.environ


def test_cpu_that_was_asked_for_is_kept_on_a_gpu_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setattr(backend, "has_accelerator", lambda several_ranks: True)
    backend.prepare_environment()
    assert os.environ["ACCELERATE_USE_CPU"] == "true" and "ACCELERATE_USE_FSDP" not in os.environ


_ACCELERATORS = """\
import json
import accelerate
from accelerate.accelerator import Accelerator
from transformers import Trainer, TrainingArguments
from accelerate_lshdp import LSHDPAccelerator
import torch

class Own(Accelerator):
    pass

class Derived(LSHDPAccelerator):
    pass

first = Accelerator(gradient_accumulation_steps=3, step_scheduler_with_optimizer=False)
keywords = [first.gradient_accumulation_steps, first.step_scheduler_with_optimizer]
try:
    Own()
except TypeError as error:
    told = str(error)
trainer = Trainer(torch.nn.Linear(2, 2), TrainingArguments(output_dir="out", report_to=[], use_cpu=True))
print(json.dumps({
    "types": [type(x).__name__ for x in (first, accelerate.Accelerator(), Derived(), trainer.accelerator)],
    "keywords": keywords,
    "batch sizes": first.plan.batch_sizes,
    "told": told,
}))
"""


def test_every_accelerator_is_ours(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_ACCELERATORS)
    Plan.from_batch_sizes([4], strategy="ddp").save(tmp_path / "plan.json")

    result = _python("-m", "accelerate_lshdp.run", "--plan", "plan.json", "script.py", cwd=tmp_path)

    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["types"] == ["LSHDPAccelerator", "LSHDPAccelerator", "Derived", "LSHDPAccelerator"]
    assert found["keywords"] == [3, False]
    assert found["batch sizes"] == [4]
    assert "__main__.Own is a subclass" in found["told"] and "LSHDPAccelerator" in found["told"]


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ("distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2", "distributed_type DEEPSPEED"),
        ("distributed_type: MEGATRON_LM\nmegatron_lm_config: {}", "distributed_type MEGATRON_LM"),
        ("distributed_type: FSDP\nparallelism_config:\n  parallelism_config_tp_size: 2", "a parallelism_config"),
    ],
)
def test_config_file_of_another_engine_is_refused(
    section: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, script = tmp_path / "config.yaml", tmp_path / "script.py"
    config.write_text(f"compute_environment: LOCAL_MACHINE\nnum_processes: 2\nuse_cpu: true\n{section}\n")
    script.touch()
    assert main(["launch", "--config_file", str(config), str(script)]) == 2
    assert f"{told}, which cannot share a model with LSHDP" in capsys.readouterr().err


def test_gpus_that_are_not_there_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('must not run')")
    for asked in (
        ["--nodes", "2", "--gpu"],
        ["--config_file", str(Path(__file__).parents[2] / "accelerate_configs" / "gpu_multi_node0.yaml")],
    ):
        assert main(["launch", *asked, str(script)]) == 2
        assert "asks for GPUs, but torch finds none" in capsys.readouterr().err
