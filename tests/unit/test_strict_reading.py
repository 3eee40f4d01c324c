# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""From text to plain values: what YAML can say beyond them is one line, and what people mean is taken as meant."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from accelerate_lshdp.cli.launch_config import read_launch_config
from accelerate_lshdp.cli.main import main
from accelerate_lshdp.comparing.config import ComparisonConfig, ConfigError
from accelerate_lshdp.documents.cluster_file import load_cluster, read_cluster
from accelerate_lshdp.documents.strict_reading import parse_yaml, read_yaml
from accelerate_lshdp.documents.value_checks import PlanError


def bomb() -> str:
    """Ten aliases of ten aliases of ..., ten deep: ten thousand million values in a few hundred characters."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, 10):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]")
    return "\n".join(lines)


REFUSED = {
    "nothing": ("", "found nothing, expected a cluster"),
    "comments": ("# nothing\n", "found nothing but comments"),
    "no YAML": ("a: [1\n", r"not YAML \(.*, line 2 column 1\), expected a cluster"),
    "control character": ("a: \x02", "not YAML"),
    "two documents": ("a: 1\n---\nb: 2\n", "not YAML"),
    "deep": ("[" * 100 + "]" * 100, "more than 64 levels of nesting"),
    "very deep": ("[" * 100_000, "more than 64 levels of nesting"),
    "deep tables": ("{a: " * 5000, "more than 64 levels of nesting"),
    "huge integer": (f"a: [1, {'9' * 6000}]", r"a\[1\]: found .* expected"),
    "large integer": (f"a: {2**70}", r"a: found 1180\d+, expected one that fits 64 bits"),
    "hexadecimal": (f"a: 0x{'f' * 6000}", "a: found an integer of 24000 bits"),
    "infinite": ("a: {b: .inf}", "a.b: found inf, expected a finite number"),
    "python": ("a: !!python/object/apply:os.getcwd []", r"a: found the tag !!python/object.*line 1"),
    "own tag": ("a:\n  b: !mine 3", r"a.b: found the tag !mine \(line 2\)"),
    "binary": ("a: !!binary aGFsbG8=", "a: found the tag !!binary"),
    "no number": ("a: !!int x", 'a: found "x"'),
    "no table": ("a: !!map 3", "a: found"),
    "number as key": ("a: {1: 2}", r"a: found the key 1 \(line 1\), expected keys that are strings"),
    "list as key": ("a: {[1]: 2}", "a: found the key a list of 1"),
    "twice": ("a:\n  b: 1\n  b: 2", r"a: found the key 'b' twice \(line 3\)"),
    "endless": ("a: &x [*x]", "found an alias within what it stands for"),
    "endless merge": ("a: &x {<<: *x}", "found an alias within what it stands for"),
    "bomb": (bomb(), "found aliases for more than 100000 values"),
    "merged number": ("a: {<<: 3}", "expected a table to merge"),
    "unknown alias": ("a: *nowhere", "not YAML"),
    "large": ("a: " + "x" * (1 << 20), "found 1048579 characters"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_plain_is_refused_with_its_place(name: str) -> None:
    text, message = REFUSED[name]
    with pytest.raises(PlanError, match=message) as caught:
        parse_yaml(text, "cluster")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_what_is_plain_is_read() -> None:
    text = "base: &base {rate: 1 Gb/s, delay: 0}\nlist: [*base, {<<: *base, delay: 1e-3}]\nday: 2024-01-31\n"
    base = {"rate": "1 Gb/s", "delay": 0}
    assert parse_yaml(text, "cluster") == {
        "base": base,
        "list": [base, {"rate": "1 Gb/s", "delay": "1e-3"}],  # YAML's floats have a point
        "day": "2024-01-31",
    }


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"a: \xff")
    with pytest.raises(PlanError, match="a.yaml: found bytes that are not UTF-8"):
        read_yaml(tmp_path / "a.yaml", "cluster")


@pytest.mark.parametrize("text", ["nodes: " + "[" * 5000, "nodes: [3]\nnetwork: 4", "3", "nodes: !x 1"])
def test_every_reader_of_a_cluster_names_its_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"a.yaml: .*(found|expected)"):
        load_cluster(tmp_path / "a.yaml")
    with pytest.raises(ConfigError, match=r"a.yaml: .*(found|expected)"):
        ComparisonConfig.load(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"cpu": 10**400}, "cpu"),
        ({"cpu": 1, "memory": "1e400 TiB"}, "memory"),
        ({"cpu": 1, "memory": "1e300 TiB"}, "memory"),
        ({"cpu": 1, "ranks": 10**9}, "ranks"),
    ],
)
def test_sizes_of_no_machine(node: dict, message: str) -> None:
    with pytest.raises(ValueError, match=rf"nodes\[0\].{message}: found .*expected"):
        read_cluster({"nodes": [node], "network": {"rate": "1 Gb/s"}})


LAUNCH = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "fsdp_config": {"fsdp_version": 2},
    "use_cpu": True,
    "num_machines": 1,
    "machine_rank": 0,
    "num_processes": 2,
    "main_process_port": 0,
    "mixed_precision": "no",
}


def launch_file(folder: Path, suffix: str = ".yaml", **changes: object) -> Path:
    """A launch configuration; changes are written as they stand."""
    file = folder / f"node{suffix}"
    if suffix == ".json":
        file.write_text(json.dumps({**LAUNCH, **changes}))
    else:
        file.write_text("\n".join(f"{key}: {value}" for key, value in {**LAUNCH, **changes}.items()))
    return file


def written_to(folder: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = folder / "as_meant.yaml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_processes": '"2"', "num_machines": "'1'", "machine_rank": '"0"'}, {"num_processes": 2}),
        ({"main_process_port": '"29500"'}, {"main_process_port": 29500}),
        ({"mixed_precision": "no"}, {"mixed_precision": "no"}),
        ({"mixed_precision": "BF16"}, {"mixed_precision": "bf16"}),
        ({"use_cpu": '"true"', "debug": '"false"'}, {"use_cpu": True, "debug": False}),
        ({"distributed_type": "NO", "num_processes": 1}, {"num_processes": 1}),
        ({"gpu_ids": 0}, {"gpu_ids": "0"}),
        ({"main_training_function": "2024-01-31"}, {"main_training_function": "2024-01-31"}),
    ],
)
def test_a_launch_file_is_taken_as_meant(tmp_path: Path, changes: dict, expected: dict) -> None:
    """accelerate's own launcher then takes it, too."""
    file = launch_file(tmp_path, **changes)
    config, understood = read_launch_config(file, written_to(tmp_path))
    assert understood != file
    arguments = launch_command_parser().parse_args(["--config_file", str(understood), "script.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    for key, value in expected.items():
        for found in (getattr(config, key), getattr(arguments, key)):
            assert (found, type(found)) == (value, type(value)), key


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_a_launch_file_without_a_number_of_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    """accelerate takes it for -1 and advises a flag of its own command."""
    file = tmp_path / f"nobody{suffix}"
    file.write_text(json.dumps({"distributed_type": "FSDP", "use_cpu": True}))
    assert main(["launch", "--config_file", str(file), "-m", "script"]) == 2
    said = capsys.readouterr().err
    assert "num_processes: found no number, expected that of the ranks of this node" in said
    file.write_text(json.dumps({"distributed_type": "NO", "use_cpu": True}))  # one process is what this type says
    config, understood = read_launch_config(file, written_to(tmp_path))
    assert config.num_processes == 1
    arguments = launch_command_parser().parse_args(["--config_file", str(understood), "script.py"])
    assert _validate_launch_command(arguments)[0].num_processes == 1


def test_a_file_that_accelerate_reads_alike_is_handed_on(tmp_path: Path) -> None:
    for suffix, changes in ((".yaml", {"mixed_precision": '"no"'}), (".json", {})):
        file = launch_file(tmp_path, suffix, **changes)
        assert read_launch_config(file, written_to(tmp_path))[1] == file


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_processes": "two"}, 'num_processes: found "two"'),
        ({"num_processes": -1}, "num_processes: found no number"),
        ({"num_processes": "2.5"}, "num_processes: found 2.5"),
        ({"num_processes": "9" * 6000}, "expected one that fits 64 bits|num_processes: found"),
        ({"num_processes": 10**12}, "num_processes: found 1000000000000"),
        ({"num_machines": "[" * 3000}, "levels of nesting"),
        ({"fsdp_config": 3}, "fsdp_config: found 3, expected a table"),
        ({"fsdp_config": [1]}, "fsdp_config: found a list"),
        ({"main_process_ip": 10}, "main_process_ip: found 10, expected a string"),
        ({"main_process_port": 70000}, "main_process_port: found 70000"),
        ({"machine_rank": "!!python/name:os.system"}, "machine_rank: found the tag"),
        ({"distributed_type": "FAST"}, 'distributed_type: found "FAST"'),
        ({"compute_environment": 3}, "compute_environment: found 3"),
        ({"mixed_precision": 16}, "mixed_precision: found 16"),
        ({"use_cpu": 1}, "use_cpu: found 1, expected true or false"),
    ],
)
@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_a_launch_file_that_means_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict, message: str, suffix: str
) -> None:
    file = launch_file(tmp_path, suffix, **changes)
    if suffix == ".json" and any("!!" in str(value) or "[[" in str(value) for value in changes.values()):
        message = "found"  # what is syntax in YAML is a string in JSON
    if suffix == ".json" and "num_processes" in changes and isinstance(changes["num_processes"], str):
        message = "num_processes: found"
    assert main(["launch", "--config_file", str(file), "-m", "script"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "accelerate-lshdp launch: " in said and f"{file}: " in said
    assert re.search(message, said) and len(said) < 600, said


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"model_type": ' + "9" * 6000, '{"model_type": "gpt2", "n_embd": "x"}']
)
def test_a_models_configuration_that_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "cluster.yaml").write_text("nodes: [{cpu: 1}]\nnetwork: {rate: 1 Gb/s}\n")
    words = ["--model", str(tmp_path / "config.json"), "--cluster", str(tmp_path / "cluster.yaml")]
    assert main(["estimate", *words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "config.json: " in said


def test_a_benchmark_says_before_it_starts_that_a_model_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.yaml"
    file.write_text(
        "clusters: {one: {nodes: [{cpu: 1}]}}\nnetworks: [1 Gb/s]\ntotal_batch_size: 4\nstrategies: [ddp]\n"
        "models: {broken: {kind: vit, hidden_size: [1]}}\n"
    )
    assert main(["bench", str(file), "--in-process", "--output-dir", str(tmp_path / "out")]) == 2
    assert "bench.yaml: models.broken: found arguments that transformers refuses" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
