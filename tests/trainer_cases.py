# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Runs the scripts in `trainer_scripts/`, which never mention this package, and reads what they leave behind.

A run happens inside the pool's workers (transformers takes seconds to import), in three ways: by the shim, or with the
one line that a user changes (`LSHDPTrainer`, `LSHDPCallback`). `start_alone` is the oracle: one process, plain
transformers and plain accelerate, with the total batch as its batch size. What is compared is what users see: the
saved model, `trainer_state.json`, `train_results.json`, and the lines in which the Trainer says what it will do.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import runpy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from training_cases import ADAM_EPS, relative_error


SCRIPTS = Path(__file__).resolve().parent / "trainer_scripts"
TRAINER_SCRIPTS = ("causal_lm", "sequence_classification", "image_classification")
LOOP = "accelerate_loop"
#: Those that take all of `TrainingArguments` on their command line.
ANY_ARGUMENT = ("causal_lm", "sequence_classification")
SHIM, MIXIN, CALLBACK = WAYS = ("shim", "mixin", "callback")

#: Samples in a global batch, and of the data set: an epoch has 5 global batches, the last one of 7 samples.
TOTAL, SAMPLES = 12, 55
PARAMETER_TOLERANCE = 5e-6  # fp32, as tests/exactness.py
#: Of logged losses and gradient norms, which are computed from parameters that may be off by the above.
LOG_TOLERANCE = 2e-6

_COMMON = {
    "samples": SAMPLES,
    "learning_rate": 3e-3,
    "weight_decay": 0.05,
    "adam_epsilon": ADAM_EPS,
    "max_grad_norm": 0.3,
    "warmup_steps": 3,
    "seed": 7,
}
_TRAINER = {
    "do_train": "True",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": "True",
}
#: What the user of each script says, but for batch size, accumulation and checkpoints.
ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "causal_lm": {**_COMMON, **_TRAINER, "num_train_epochs": 2},
    "sequence_classification": {**_COMMON, **_TRAINER, "max_steps": 8},
    "image_classification": {**_COMMON, "max_steps": 8},
    LOOP: {**_COMMON, "max_steps": 8},
}
#: What must be the same as in one process in the logs of a step, as far as one process logs it.
LOGGED = (
    "step",
    "epoch",
    "loss",
    "grad_norm",
    "learning_rate",
    "num_input_tokens_seen",
    "eval_loss",
    "eval_accuracy",
)
#: What must be the same as in one process in the Trainer's announcement of a training.
ANNOUNCED = (
    "Num examples",
    "Num Epochs",
    "Num update steps per epoch",
    "Total train batch size (w. parallel, distributed & accumulation)",
    "Gradient Accumulation steps",
    "Total optimization steps",
    "Number of trainable parameters",
)


@dataclass(frozen=True)
class Run:
    """One start of a script.

    `folder` gets one folder a node, as nodes share no file system; `plan` is the path of a plan file, None in one
    process. `arguments` are added to those of `ARGUMENTS`, in place of them where they have the same name;
    "{node}" in one stands for the number of the node.
    """

    script: str
    folder: str
    batch_size: int
    accumulation: int = 1
    way: str | None = None
    plan: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def output(self, node: int = 0) -> Path:
        return Path(self.folder, f"node{node}")

    @property
    def announced(self) -> Path:
        """Where what the Trainer has announced is kept."""
        return Path(self.folder, "announced.json")

    def command_line(self, node: int) -> list[str]:
        given = {
            **ARGUMENTS[self.script],
            "output_dir": self.output(node),
            "per_device_train_batch_size": self.batch_size,
            "gradient_accumulation_steps": self.accumulation,
            **self.arguments,
        }
        words = []
        for name, value in given.items():
            if value is not None:
                words += [f"--{name}"] if value is True else [f"--{name}", str(value).format(node=node)]
        return words


@dataclass(frozen=True)
class Outcome:
    """What a script has left.

    `log` has one entry an optimizer step, and one an evaluation; `state` and `announced` are the Trainer's. `kept` are
    the names of the checkpoints on each node.
    """

    parameters: Mapping[str, Tensor]
    log: list[dict[str, float]]
    state: Mapping[str, float]
    announced: Mapping[str, str]
    kept: list[set[str]]


def edited_script(script: str, way: str, plan: str, folder: Path) -> Path:
    """A copy of the script with the one line changed that a user changes for the mixin or the callback."""
    source = (SCRIPTS / f"{script}.py").read_text()
    name, given = {
        MIXIN: ("LSHDPTrainer", f"LSHDPTrainer(plan={plan!r},"),
        CALLBACK: ("LSHDPCallback", rf"\1(callbacks=[LSHDPCallback(plan={plan!r})],"),
    }[way]
    source, calls = re.subn(r"(?<=trainer = )((?:transformers\.)?Trainer)\(", given, source)
    # The callback's import comes before all others, the mixin's after them: the order must not matter.
    lines = source.splitlines(keepends=True)
    imports = [index for index, line in enumerate(lines) if re.match(r"(import|from|\)) ?", line)]
    lines.insert(imports[0] if way == CALLBACK else imports[-1] + 1, f"from accelerate_lshdp import {name}\n")
    if calls != 1:
        raise ValueError(f"{script}.py has {calls} lines `trainer = Trainer(`, expected one")
    path = folder / f"{script}.py"
    path.write_text("".join(lines))
    return path


def start(run: Run) -> None:
    """Body of a case: runs the script on this rank to its end, and writes down what the Trainer announced."""
    node = int(os.environ.get("GROUP_RANK", "0"))
    script, arguments = SCRIPTS / f"{run.script}.py", run.command_line(node)
    with _as_in_a_new_process(), _announcements() as announced:
        if run.way == SHIM:
            from accelerate_lshdp import run as shim

            try:
                shim.main(["--plan", run.plan, str(script), *arguments])
            except SystemExit as ended:
                if ended.code:
                    raise AssertionError(
                        f"{script} exited with {ended.code}; its traceback is in the output"
                    ) from None
        else:
            if run.way is not None:
                script = Path(run.folder, script.name)
            sys.argv = [str(script), *arguments]
            runpy.run_path(str(script), run_name="__main__")
    if int(os.environ.get("RANK", "0")) == 0:
        run.announced.write_text(json.dumps(announced))


def start_alone(run: Run) -> None:
    """`start` without a launcher and without this package: plain transformers and plain accelerate."""
    import transformers

    # With accumulation, the Trainer of this version does not divide this head's loss by the number of micro-batches:
    # it takes `num_items_in_batch`, and ignores it. The attribute is transformers' own way to say so.
    transformers.BertForSequenceClassification.accepts_loss_kwargs = False
    start(run)
    if any(name.partition(".")[0] == "accelerate_lshdp" for name in sys.modules):
        raise AssertionError("the oracle has imported accelerate_lshdp")


def outcome_of(run: Run) -> Outcome:
    from safetensors.torch import load_file

    folder = run.output()
    parameters = load_file(folder / "model.safetensors")
    announced = json.loads(run.announced.read_text())
    nodes = sorted(Path(run.folder).glob("node*"))
    kept = [{path.name for path in node.glob("checkpoint-*")} for node in nodes]
    if run.script == LOOP:
        return Outcome(parameters, json.loads((folder / "log.json").read_text()), {}, {}, kept)
    state = json.loads((folder / "trainer_state.json").read_text())
    results = json.loads((folder / "train_results.json").read_text())
    names = ("epoch", "global_step", "max_steps", "num_train_epochs", "num_input_tokens_seen")
    facts = {name: state[name] for name in names if state.get(name) is not None}
    facts["train_loss"] = results["train_loss"]
    facts["train_samples"] = round(results["train_samples_per_second"] * results["train_runtime"])
    facts.update(best_step=state["best_global_step"] or 0, best_metric=state["best_metric"] or 0.0)
    steps = [entry for entry in state["log_history"] if "loss" in entry or "eval_loss" in entry]
    return Outcome(parameters, steps, facts, announced, kept)


def compare(actual: Outcome, expected: Outcome, first_step: int = 1) -> None:
    """Raises AssertionError where a run differs from one process; `first_step` is the first one since it started."""
    assert actual.announced == {name: expected.announced[name] for name in actual.announced}
    assert actual.announced.keys() == expected.announced.keys()
    wanted = [entry for entry in expected.log if entry["step"] >= first_step]
    log = [entry for entry in actual.log if entry["step"] >= first_step]
    assert [entry["step"] for entry in log] == [entry["step"] for entry in wanted]
    for entry, reference in zip(log, wanted, strict=True):
        for name in reference.keys() & LOGGED:
            assert name in entry, f"step {entry['step']} has no {name}: {sorted(entry)}"
            _check_close(f"step {entry['step']}, {name}", entry[name], reference[name])
    assert actual.state.keys() == expected.state.keys()
    for name, value in expected.state.items():
        if first_step == 1 or name not in ("train_loss", "train_samples"):  # of the resumed part alone
            _check_close(name, actual.state[name], value)
    error = relative_error(actual.parameters, expected.parameters)
    assert error <= PARAMETER_TOLERANCE, f"parameters are off by {error:.2e}"


def _check_close(what: str, actual: float, expected: float) -> None:
    exact = isinstance(expected, int) or "epoch" in what or "learning_rate" in what
    tolerance = 1e-12 if exact else LOG_TOLERANCE
    assert abs(actual - expected) <= tolerance * abs(expected), f"{what}: {actual}, in one process {expected}"


def announced_in(text: str) -> dict[str, str]:
    """The values of `ANNOUNCED`, in lines such as `[transformers]   Num Epochs = 2`."""
    pairs = [line.rpartition(" = ") for line in text.splitlines()]
    names = [(name.rpartition("  ")[2].strip(), value.strip()) for name, _, value in pairs]
    return {name: value for name, value in names if name in ANNOUNCED}


@contextlib.contextmanager
def _announcements() -> Iterator[dict[str, str]]:
    """What the Trainer announces in its logs before it trains."""
    found: dict[str, str] = {}

    class Reader(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.update(announced_in(record.getMessage()))

    import transformers

    logger, reader = logging.getLogger("transformers.trainer"), Reader()
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_info()
    logger.addHandler(reader)
    try:
        yield found
    finally:
        logger.removeHandler(reader)
        transformers.logging.set_verbosity(verbosity)


def _new(cls: type, *args: Any, **kwargs: Any) -> Any:
    return object.__new__(cls)


@contextlib.contextmanager
def _as_in_a_new_process() -> Iterator[None]:
    """Takes back what a script, the shim or the callback changes for the whole process."""
    import accelerate
    import transformers.trainer

    # Where `__new__` has once been set, Python does not let a class be as it was without it.
    accelerate.Accelerator.__new__ = staticmethod(_new)
    namespaces = [accelerate.Accelerator, accelerate.PartialState, transformers.Trainer, transformers.trainer]
    before = [dict(vars(namespace)) for namespace in namespaces]
    argv, path, main, hook = list(sys.argv), list(sys.path), sys.modules["__main__"], sys.excepthook
    try:
        yield
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"], sys.excepthook = argv, path, main, hook
        for namespace, names in zip(namespaces, before, strict=True):
            for name in [name for name in vars(namespace) if name not in names]:
                delattr(namespace, name)
            for name, value in names.items():
                if vars(namespace)[name] is not value:
                    setattr(namespace, name, value)
