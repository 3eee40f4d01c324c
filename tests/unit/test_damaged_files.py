# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Files that users write, damaged in 2,000 ways: the command that reads one goes on, or says in one line why not."""

from __future__ import annotations

import functools
import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from file_mutations import json_text, mutate, yaml_text
from launching import TESTS
from test_commands_plan import a_profile

from accelerate_lshdp import Plan
from accelerate_lshdp.cli.main import main, make_parser
from accelerate_lshdp.documents.unit_sizes import MeasuredUnit, ModelUnits
from accelerate_lshdp.estimation.model_measurement import MeasuredModel
from accelerate_lshdp.planning import PlanningError


CLUSTER = """\
nodes:
  - {device: RTX 3090, ranks: 2, memory: 64 GiB}
  - {device: my card, tflops: 12, device_memory: 16 GiB}
  - {cpu: 8, memory: 32 GiB}
network: {rate: 1 Gb/s, delay: 0.2 ms}
"""
BENCH = """\
models: {small: {kind: vit, image_size: 32, hidden_size: 96, num_labels: 10}}
total_batch_size: 12
strategies: [torch_ddp, {strategy: hdp, batch_sizes: [6, 4, 2]}, {strategy: lshdp, batch_sizes: plan}, 'lshdp:bf16']
rounds: 2
profile_seconds: 6
interleaved: true
"""
EMULATION = """\
clusters:
  uneven: {nodes: [{cpu: 0.9, ranks: 2, memory: 4 GiB}, {cpu: 0.6}]}
networks: [1 Gb/s, {rate: 250 Mb/s, delay: 1 ms}]
limits:
  - {name: faster, ratio: [lshdp fp32, [torch_ddp], 1 Gb/s], at_most: 0.9}
  - {name: prediction, error: prediction median, at_most: 0.3}
"""
#: Cases of each kind of file; with those of the checkpoints' documents 2,000.
CASES = {
    "plan": 250,
    "verified plan": 250,
    "profile": 250,
    "cluster": 250,
    "bench": 150,
    "emulated bench": 150,
    "launch": 350,
}


#: Each kind is several tests, so that none of them is long.
PARTS = 5

#: Made anew by every command, which takes longer than to read a small file.
_parser = functools.cache(make_parser)


class _ReadWell(Exception):
    """The command has read its file and would now begin its work."""


def a_plan_with_proof(folder: Path) -> Any:
    (folder / "profile.json").write_text(json.dumps(a_profile()))
    words = ["--total", "12", "--no-yaml", "--no-picture", "--output", str(folder / "made.json")]
    assert main(["plan", str(folder / "profile.json"), *words]) == 0
    return json.loads((folder / "made.json").read_text())


def document_of(kind: str, folder: Path) -> tuple[Any, Callable[[Any], str]]:
    """A valid document of a kind, and how it is written."""
    if kind == "plan":
        cluster = a_profile()["cluster"]
        link = {"bandwidth_bits_per_second": 1e9, "latency_seconds": 1e-4}
        plan = Plan.from_batch_sizes([(4, 2), (2, 2), (1, 2), (1, 2)], communication_dtype="powersgd").to_dict()
        return {**plan, "cluster": {**cluster, "link": link}, "automatic": {"total": 16, "dead_band": 0.1}}, json_text
    if kind == "verified plan":
        return a_plan_with_proof(folder), json_text
    if kind == "profile":
        return a_profile(), json_text
    shipped = (TESTS.parent / "accelerate_configs" / "cpu_2x2_node0.yaml").read_text()
    texts = {"cluster": CLUSTER, "bench": BENCH, "emulated bench": EMULATION + BENCH, "launch": shipped}
    return yaml.safe_load(texts[kind]), yaml_text


def words_of(kind: str, file: Path) -> list[str]:
    """The command that reads a file of this kind."""
    beside = str(file.parent / "written")
    return {
        "plan": ["launch", "--plan", str(file), "--cpu", "--node-rank", "0", "-m", "script"],
        "verified plan": ["plan", "--verify", str(file)],
        "profile": ["plan", str(file), "--total", "12", "--no-yaml", "--no-picture", "--output", beside],
        "cluster": ["estimate", "--model", "gpt2", "--formats", "fp32", "--cluster", str(file)],
        "bench": ["bench", str(file), "--output-dir", beside, "--nodes", "3", "--cpu"],
        "emulated bench": ["bench", str(file), "--output-dir", beside, "--in-process"],
        "launch": ["launch", "--config_file", str(file), "-m", "script"],
    }[kind]


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands stop where they have read everything; a model is not measured and placed again for every file."""

    def stop(*_: object, **__: object) -> None:
        raise _ReadWell

    def unplaced(*_: object, **__: object) -> None:
        raise PlanningError("nothing is placed here")

    units = tuple(MeasuredUnit((f"h.{place}",), 9 * 10**6, 9 * 10**6, 5e6, 1e6, 2e9, 10**6) for place in range(10))
    root = MeasuredUnit(("",), 10**7, 10**7, 0, 0, 0, 10**7)
    measured = MeasuredModel("a model", ModelUnits(units, root, 0), ((3000, 3000),) * 10, 6e10)
    monkeypatch.setattr("accelerate_lshdp.cli.main.make_parser", _parser)
    monkeypatch.setattr("accelerate_lshdp.cli.launch.accelerate_launch", stop)
    monkeypatch.setattr("accelerate_lshdp.cli.bench_nodes.compare_on_nodes", stop)
    monkeypatch.setattr("laboratory.bench.run_benchmark", stop)
    monkeypatch.setattr("accelerate_lshdp.estimation.model_measurement.measure_config", lambda *_, **__: measured)
    monkeypatch.setattr("accelerate_lshdp.estimation.model_sources.load_config", lambda *_: None)
    monkeypatch.setattr("accelerate_lshdp.estimation.estimates.plan_trainable", unplaced)


def what_went_wrong(words: list[str], file: Path, errors: Callable[[], str]) -> str | None:
    """How a command broke its promise: to end well, or with code 2 and one clear line that names the file."""
    try:
        code = main(words)
    except _ReadWell:
        code = 0
    except (Exception, SystemExit) as error:
        return "".join(traceback.format_exception(error)[-3:])
    said = [line for line in errors().splitlines() if not line.startswith("... ")]
    if code == 0:
        return None
    prefix = f"accelerate-lshdp {words[0]}: "
    if code != 2 or len(said) != 1 or not said[0].startswith(prefix):
        return f"exit code {code}, said {said}"
    clear = file.name in said[0] and any(word in said[0] for word in ("found", "finds", "expected"))
    if not clear or len(said[0]) > len(prefix) + 1200:
        return f"not clear: {said[0][:2000]}"
    return None


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", CASES)
def test_a_damaged_file_is_read_or_refused_in_one_line(
    kind: str, part: int, tmp_path: Path, no_work: None, capsys: pytest.CaptureFixture[str]
) -> None:
    document, write = document_of(kind, tmp_path)
    file = tmp_path / ("damaged.json" if write is json_text else "damaged.yaml")
    file.write_text(write(document))
    capsys.readouterr()
    assert what_went_wrong(words_of(kind, file), file, lambda: capsys.readouterr().err) is None
    broken = []
    for case in range(part, CASES[kind], PARTS):
        file.write_bytes(mutate(document, write, f"{kind} {case}"))
        capsys.readouterr()
        found = what_went_wrong(words_of(kind, file), file, lambda: capsys.readouterr().err)
        if found is not None:
            broken.append(f"case {case}: {found}\n--- file:\n{file.read_bytes()[:1500]!r}\n")
    assert not broken, f"{len(broken)} of {CASES[kind] // PARTS}:\n" + "\n".join(broken[:4])
