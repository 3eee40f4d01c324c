# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The command line: configurations that accelerate reads as meant, and launches with ranks where the plan has them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.utils import DistributedType
from launching import LaunchedProcesses, _run_together, free_port

from accelerate_lshdp import Plan, __version__
from accelerate_lshdp.cli import launch
from accelerate_lshdp.cli.config import Layout, check_with_accelerate
from accelerate_lshdp.cli.exit_codes import shell_code
from accelerate_lshdp.cli.main import main
from accelerate_lshdp.documents.plan import Cluster, Node


SHIPPED = Path(__file__).resolve().parents[2] / "accelerate_configs"
BIN = Path(sys.executable).parent
LAUNCH_SECONDS = 90


def _bare_environment() -> dict[str, str]:
    """What a user has who set nothing: `env -i` with a path and a home."""
    return {"PATH": f"{BIN}{os.pathsep}/usr/bin{os.pathsep}/bin", "HOME": os.environ["HOME"]}


def _launch_nodes(commands: list[list[str | Path]], folder: Path) -> LaunchedProcesses:
    """Runs one launcher a node at the same time, in a bare environment."""
    outputs = folder / "outputs"
    outputs.mkdir()
    with_environment = [(list(map(str, command)), _bare_environment()) for command in commands]
    return _run_together(with_environment, LAUNCH_SECONDS, folder, outputs)


def _records(text: str) -> list[dict]:
    """The JSON lines that the ranks printed, by rank."""
    records = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return sorted(records, key=lambda record: record["rank"])


def _write_configs(folder: Path, *flags: str) -> list[ClusterConfig]:
    assert main(["config", *flags, "--output-dir", str(folder)]) == 0
    return [load_config_from_file(str(file)) for file in sorted(folder.glob("*.yaml"))]


# ---- config ---------------------------------------------------------------------------------------------------------


def test_shipped_configs_are_what_the_command_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"\| `accelerate-lshdp (config [^`]*)` \|", (SHIPPED / "README.md").read_text())
    for command in commands:
        assert main(shlex.split(command)) == 0
    written = {file.name: file.read_text() for file in tmp_path.iterdir()}
    shipped = {file.name: file.read_text() for file in SHIPPED.glob("*.yaml")}
    assert len(commands) == 7 and written == shipped


def test_uneven_cpu_nodes(tmp_path: Path) -> None:
    configs = _write_configs(tmp_path, "--nodes", "1,2", "--cpu", "--main-ip", "10.0.0.1", "--mixed-precision", "bf16")
    assert [config.num_processes // config.num_machines for config in configs] == [1, 2]
    assert [config.machine_rank for config in configs] == [0, 1]
    for config in configs:
        assert config.distributed_type == DistributedType.FSDP and config.use_cpu
        assert (config.num_machines, config.rdzv_backend) == (2, "static")
        assert (config.main_process_ip, config.main_process_port) == ("10.0.0.1", 29500)
        assert config.mixed_precision == "bf16"
        assert config.parallelism_config == {}
        # transformers reads it when it decides whether to leave weights empty
        assert config.fsdp_config["fsdp_cpu_ram_efficient_loading"] is False


def test_gpu_nodes(tmp_path: Path) -> None:
    configs = _write_configs(tmp_path, "--nodes", "4,4", "--gpu", "--main-ip", "10.0.0.1", "--main-port", "4000")
    assert [config.num_processes for config in configs] == [8, 8]
    for config in configs:
        assert config.distributed_type == DistributedType.MULTI_GPU and not config.use_cpu
        assert config.gpu_ids == "all" and config.main_process_port == 4000


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_one_rank_needs_no_rendezvous(device: str, tmp_path: Path) -> None:
    (config,) = _write_configs(tmp_path, "--nodes", "1", f"--{device}")
    assert config.distributed_type == DistributedType.NO and config.use_cpu == (device == "cpu")
    assert config.main_process_port is None


@pytest.mark.parametrize(
    ("device", "expected"), [("cpu", DistributedType.FSDP), ("RTX 3090", DistributedType.MULTI_GPU)]
)
def test_config_from_a_plans_cluster(device: str, expected: DistributedType, tmp_path: Path) -> None:
    cluster = Cluster((Node(1, address="10.0.0.7", device=device), Node(2, device=device)))
    Plan.from_batch_sizes([4, 2, 2], cluster=cluster).save(tmp_path / "plan.json")
    configs = _write_configs(tmp_path / "out", "--plan", str(tmp_path / "plan.json"))
    assert [config.num_processes for config in configs] == [2, 4]
    assert all(config.distributed_type == expected for config in configs)
    assert {config.main_process_ip for config in configs} == {"10.0.0.7"}


def test_config_gives_each_node_the_device_of_the_plan(tmp_path: Path) -> None:
    cluster = Cluster((Node(1, address="10.0.0.7", device="cpu"), Node(2, device="RTX 3090")))
    Plan.from_batch_sizes([4, 2, 2], cluster=cluster).save(tmp_path / "plan.json")
    on_cpu, on_gpu = _write_configs(tmp_path / "out", "--plan", str(tmp_path / "plan.json"))
    assert (on_cpu.use_cpu, on_cpu.num_processes, on_cpu.distributed_type) == (True, 2, DistributedType.FSDP)
    assert (on_gpu.use_cpu, on_gpu.num_processes, on_gpu.distributed_type) == (False, 4, DistributedType.MULTI_GPU)
    headers = [(tmp_path / "out" / f"node{node}.yaml").read_text().splitlines()[0] for node in range(2)]
    assert [header.rsplit(", ", 1)[1] for header in headers] == ["CPU (gloo).", "GPU (gloo)."]


def test_config_divides_the_ranks_of_a_plan_by_flags(tmp_path: Path) -> None:
    Plan.from_batch_sizes([4, 2, 2]).save(tmp_path / "plan.json")
    flags = ["--plan", str(tmp_path / "plan.json"), "--nodes", "2,1", "--cpu", "--main-ip", "10.0.0.7"]
    assert [config.num_processes for config in _write_configs(tmp_path / "out", *flags)] == [4, 2]


def test_files_with_other_content_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["config", "--nodes", "1,1", "--cpu", "--main-ip", "10.0.0.1", "--output-dir", str(tmp_path)]
    (tmp_path / "node1.yaml").write_text("mine")
    assert main(flags) == 2
    assert "node1.yaml would be replaced" in capsys.readouterr().err
    assert (tmp_path / "node1.yaml").read_text() == "mine" and not (tmp_path / "node0.yaml").exists()
    assert main([*flags, "--force"]) == 0
    assert main(flags) == 0  # the same content again replaces nothing


def test_accelerate_checks_what_is_written() -> None:
    with pytest.raises(ValueError, match="unknown keys"):
        check_with_accelerate("distributed_type: 'NO'\nsurprise: 1\n")


def test_main_address_survives_yaml(tmp_path: Path) -> None:
    (config, _) = _write_configs(tmp_path, "--nodes", "1,1", "--cpu", "--main-ip", "fe80::1")
    assert config.main_process_ip == "fe80::1"


def test_impossible_layouts_are_rejected() -> None:
    for keywords in (
        {"node_sizes": ()},
        {"node_sizes": (1, 0)},
        {"device": "tpu"},
        {"main_ip": None},
        {"main_port": 0},
        {"main_port": 65536},
        {"mixed_precision": "fp8"},
    ):
        with pytest.raises(ValueError):
            Layout(**{"node_sizes": (1, 2), "device": "cpu", "main_ip": "10.0.0.1", **keywords})


# ---- errors ---------------------------------------------------------------------------------------------------------

_CLUSTER_PLAN = {
    "version": 1,
    "strategy": "lsdp",
    "cluster": {"nodes": [{"ranks": 1, "device": "cpu", "address": "10.0.0.1"}, {"ranks": 2, "device": "RTX 3090"}]},
}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("config --cpu", "say how many ranks each node has"),
        ("config --cpu --plan three.json", "the plan has 3 ranks"),
        ("config --nodes 1,2", "--cpu or --gpu"),
        ("config --nodes 1,2 --cpu", "--main-ip"),
        (
            "config --nodes 1,1 --cpu --main-ip 10.0.0.1 --plan three.json",
            "found 3 ranks, but the nodes [1, 1] have 2",
        ),
        ("config --nodes 2,1 --cpu --plan cluster.json", "found nodes of [1, 2] ranks, but --nodes says [2, 1]"),
        ("config --plan partly.json", "expected one for each node where they differ"),
        ("config --nodes 1,2 --cpu --main-ip 10.0.0.1 --main-port 70000", "found port 70000"),
        ("config --plan missing.json", "missing.json"),
        ("launch script.py", "the number of processes is not known"),
        ("launch --plan equal.json script.py", "the number of processes is not known"),
        ("launch --plan three.json missing.py", "there is no script 'missing.py'"),
        ("launch --plan cluster.json --cpu script.py", "--node-rank"),
        ("launch --plan cluster.json --cpu --node-rank 2 script.py", "found --node-rank 2, expected one from 0 to 1"),
        ("launch --plan three.json --nodes 2 --cpu script.py", "found 3 ranks, but the nodes [2] have 2"),
        ("launch --plan three.json --config_file one_machine.yaml script.py", "starts 2 processes on one machine"),
        ("launch --plan cluster.json --config_file one_machine.yaml script.py", "found nodes of [1, 2] ranks"),
        ("launch --config_file one_machine.yaml --nodes 2 --cpu script.py", "--nodes, --cpu/--gpu cannot be combined"),
        ("launch --config_file missing.yaml script.py", "there is no configuration file"),
        ("launch --config_file list.yaml script.py", "not a configuration of accelerate"),
        ("launch --config_file broken.yaml script.py", "is not YAML"),
        ("launch --config_file total.yaml script.py", "starts no process on this node"),
        ("launch --config_file unknown.yaml script.py", "unknown keys"),
        (
            "launch --plan three.json --placement auto script.py",
            'found strategy "lsdp" together with --placement auto',
        ),
    ],
)
def test_mistakes_are_one_line_and_start_nothing(
    command: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "accelerate_launch", lambda argv: pytest.fail(f"launched {argv}"))
    Path("script.py").write_text("print('ran')")
    Plan.equal().save("equal.json")
    Plan.from_batch_sizes([4, 2, 2]).save("three.json")
    Path("cluster.json").write_text(json.dumps(_CLUSTER_PLAN))
    nodes = [*_CLUSTER_PLAN["cluster"]["nodes"], {"ranks": 1}]
    Path("partly.json").write_text(json.dumps({**_CLUSTER_PLAN, "cluster": {"nodes": nodes}}))
    Path("one_machine.yaml").write_text((SHIPPED / "cpu_1x2.yaml").read_text())
    Path("list.yaml").write_text("- 1\n")
    Path("broken.yaml").write_text("a: [1\n")
    Path("total.yaml").write_text("distributed_type: FSDP\nnum_machines: 2\nnum_processes: 1\n")
    Path("unknown.yaml").write_text("distributed_type: 'NO'\nsurprise: 1\n")
    before = sorted(os.listdir())

    assert main(command.split()) == 2
    captured = capfd.readouterr()
    assert expected in captured.err and captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith(f"accelerate-lshdp {command.split()[0]}: ")
    assert captured.out == "" and sorted(os.listdir()) == before


@pytest.mark.parametrize("nodes", ["", "1,", "0", "-1", "two", "1.5"])
def test_nodes_must_be_numbers(nodes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["config", f"--nodes={nodes}", "--cpu"])
    assert caught.value.code == 2
    assert "expected the number of ranks on each node" in capsys.readouterr().err


def test_help_and_version_do_not_load_torch() -> None:
    code = (
        "import sys\n"
        "from accelerate_lshdp.cli.main import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "finally:\n"
        "    print({'torch', 'accelerate', 'numpy'} & set(sys.modules), file=sys.stderr)\n"
    )
    for arguments, expected in ((["--version"], __version__), (["launch", "--help"], "GLOO_SOCKET_IFNAME")):
        result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=30)
        assert result.returncode == 0 and expected in result.stdout
        assert result.stderr == "set()\n"


# ---- launch ---------------------------------------------------------------------------------------------------------

# Without this package: what the launcher itself makes of the files.
_PLACES = """\
import json, os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
places = [int(os.environ[name]) for name in names]
print(json.dumps({"rank": dist.get_rank(), "places": places, "sum": total.item()}) + "\\n", end="", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_uneven_nodes_get_the_ranks_of_the_plan(tmp_path: Path) -> None:
    (tmp_path / "places.py").write_text(_PLACES)
    address = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port())]
    result = _launch_nodes(
        [
            ["accelerate", "launch", "--config_file", SHIPPED / f"cpu_1+2_node{node}.yaml", *address, "places.py"]
            for node in (1, 0)
        ],
        tmp_path,
    )
    assert result.returncode == 0, result.stderr
    node1, node0 = (_records(process.stdout) for process in result.processes)
    # RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE
    assert [record["places"] for record in node0] == [[0, 3, 0, 1, 0, 2]]
    assert [record["places"] for record in node1] == [[1, 3, 0, 2, 1, 2], [2, 3, 1, 2, 1, 2]]
    assert all(record["sum"] == 3 for record in node0 + node1)


_OURS = """\
import json, os, sys
import torch.distributed as dist
from {package} import {name} as Accelerator

accelerator = Accelerator({keywords})
print(json.dumps({{
    "rank": accelerator.process_index,
    "world": accelerator.num_processes,
    "node": int(os.environ.get("GROUP_RANK", 0)),
    "type": type(accelerator).__name__,
    "backend": dist.get_backend() if dist.is_initialized() else None,
    "device": accelerator.device.type,
    "batch sizes": accelerator.plan.batch_sizes,
    "argv": sys.argv[1:],
}}) + "\\n", end="", flush=True)
accelerator.wait_for_everyone()
sys.exit(3 if sys.argv[1:] == ["--fail-on", str(accelerator.process_index)] else 0)
"""
_LSHDP_SCRIPT = _OURS.format(package="accelerate_lshdp", name="LSHDPAccelerator", keywords="batch_sizes=[3, 1]")
_UNMODIFIED_SCRIPT = _OURS.format(package="accelerate", name="Accelerator", keywords="")


@pytest.mark.slow
def test_documented_line_from_a_bare_environment(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_LSHDP_SCRIPT)
    result = _launch_nodes(
        [["accelerate", "launch", "--config_file", SHIPPED / "cpu_1x2.yaml", "train.py", "--lr", "1"]], tmp_path
    )
    assert result.returncode == 0, result.stderr
    records = _records(result.stdout)
    assert [record["rank"] for record in records] == [0, 1]
    for record in records:
        assert (record["world"], record["backend"], record["device"]) == (2, "gloo", "cpu")
        assert record["batch sizes"] == [3, 1] and record["argv"] == ["--lr", "1"]


@pytest.mark.slow
def test_unmodified_script_under_accelerate_launch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_UNMODIFIED_SCRIPT)
    Plan.from_batch_sizes([3, 1], strategy="ddp").save(tmp_path / "plan.json")
    shim = ["-m", "accelerate_lshdp.run", "--plan", "plan.json", "train.py", "--plan", "the script's"]
    result = _launch_nodes([["accelerate", "launch", "--config_file", SHIPPED / "cpu_1x2.yaml", *shim]], tmp_path)
    assert result.returncode == 0, result.stderr
    records = _records(result.stdout)
    assert [record["rank"] for record in records] == [0, 1]
    for record in records:
        assert (record["type"], record["world"], record["backend"]) == ("LSHDPAccelerator", 2, "gloo")
        assert record["batch sizes"] == [3, 1] and record["argv"] == ["--plan", "the script's"]


def test_launch_on_uneven_nodes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_UNMODIFIED_SCRIPT)
    Plan.from_batch_sizes([4, 2, 1], strategy="ddp").save(tmp_path / "plan.json")
    flags = ["--nodes", "1,2", "--cpu", "--main-ip", "127.0.0.1", "--main-port", str(free_port())]
    result = _launch_nodes(
        [
            ["accelerate-lshdp", "launch", "--plan", "plan.json", *flags, "--node-rank", str(node), "train.py"]
            for node in (0, 1)
        ],
        tmp_path,
    )
    assert result.returncode == 0, result.stderr
    records = _records(result.stdout)
    assert [(record["rank"], record["node"], record["world"]) for record in records] == [
        (0, 0, 3),
        (1, 1, 3),
        (2, 1, 3),
    ]
    assert all(record["batch sizes"] == [4, 2, 1] for record in records)
    assert "node 1 of 2: 2 CPU processes" in result.processes[1].stderr


def test_launch_returns_the_exit_code_of_a_rank(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_UNMODIFIED_SCRIPT)
    Plan.from_batch_sizes([3, 1], strategy="ddp").save(tmp_path / "plan.json")
    command = ["accelerate-lshdp", "launch", "--plan", "plan.json", "--cpu", "train.py", "--fail-on", "1"]
    result = _launch_nodes([command], tmp_path)
    assert result.returncode == 3, result.stderr
    assert [record["rank"] for record in _records(result.stdout)] == [0, 1]  # as many processes as the plan has ranks


@pytest.mark.slow
def test_launch_of_a_module_on_one_rank(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text(_UNMODIFIED_SCRIPT)
    Plan.from_batch_sizes([4], strategy="ddp").save(tmp_path / "plan.json")
    command = ["accelerate-lshdp", "launch", "--plan", "plan.json", "--cpu", "-m", "package.train", "--fail-on", "0"]
    result = _launch_nodes([command], tmp_path)
    assert result.returncode == 3, result.stderr
    (record,) = _records(result.stdout)
    assert (record["world"], record["type"], record["device"]) == (1, "LSHDPAccelerator", "cpu")


def test_codes_of_signals_are_the_shells() -> None:
    assert [shell_code(code) for code in (0, 3, -9)] == [0, 3, 137]


def test_launch_prepares_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "accelerate_launch", lambda argv: started.append(argv) or 7)
    monkeypatch.setattr(launch, "node_cores", lambda: 12)
    monkeypatch.setattr(launch, "local_device", lambda: "gpu")
    for name in ("OMP_NUM_THREADS", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    Path("train.py").touch()
    Plan.from_batch_sizes([1] * 8).save("plan.json")
    config = str(SHIPPED / "gpu_multi_node1.yaml")
    address = ["--main-ip", "10.0.0.9", "--main-port", "4000"]

    assert (
        main(["launch", "--config_file", config, *address, "--plan", "plan.json", "train.py", "-m", "--plan", "x"])
        == 7
    )
    assert os.environ["ACCELERATE_LSHDP_PLAN"] == str(tmp_path / "plan.json")
    assert os.environ["OMP_NUM_THREADS"] == "3" and "ACCELERATE_USE_CPU" not in os.environ
    address = ["--main_process_ip", "10.0.0.9", "--main_process_port", "4000"]
    shim = ["-m", "accelerate_lshdp.run", "train.py", "-m", "--plan", "x"]
    assert started == [["--config_file", config, *address, *shim]]

    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert main(["launch", "--nodes", "8", "--cpu", "-m", "package", "--flag"]) == 7  # the plan from the environment
    assert os.environ["OMP_NUM_THREADS"] == "5" and os.environ["ACCELERATE_USE_CPU"] == "true"
    assert started[1][2:] == ["-m", "accelerate_lshdp.run", "-m", "package", "--flag"]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What `accelerate launch` would have been given, in a folder with a script and without a plan."""
    launches: list[list[str]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "accelerate_launch", lambda argv: launches.append(argv) or 0)
    for name in ("ACCELERATE_LSHDP_PLAN", "LSDP_STRATEGY", "LSDP_COMMUNICATION_DTYPE", "LSDP_KEEP_PLAN_TOTAL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("LSDP_PLACEMENT", raising=False)
    Path("train.py").touch()
    return launches


@pytest.mark.parametrize("flags", [["--auto"], ["--plan", "open.json"], []])
def test_launches_may_leave_the_placement_to_the_run(started, monkeypatch, flags) -> None:
    Plan.equal(strategy="osdp").save("open.json")
    assert main(["launch", *flags, "--nodes", "2", "--cpu", "--placement", "auto", "train.py"]) == 0
    assert os.environ.pop("LSDP_PLACEMENT") == "auto" and len(started) == 1
    plan = Plan.from_environment()
    assert (plan is None) == (flags == [])
    assert plan is None or plan.leaves_placement_open


@pytest.mark.parametrize(
    ("device", "flags", "ranks", "first_line"),
    [
        ("cpu", [], 1, "1 CPU process"),
        ("cpu", ["--nodes", "2"], 2, "2 CPU processes"),
        ("gpu", [], 3, "3 GPU processes"),
        ("gpu", ["--cpu"], 1, "1 CPU process"),
    ],
)
def test_automatic_launch_needs_no_plan(started, monkeypatch, capsys, device, flags, ranks, first_line) -> None:
    import torch

    monkeypatch.setattr(launch, "local_device", lambda: device)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    read: list[int] = []
    monkeypatch.setattr(launch, "_check_plan", lambda plan, config, file: read.append(config.num_processes))
    assert main(["launch", "--auto", *flags, "train.py", "--lr", "1"]) == 0
    assert read == [ranks] and f": {first_line}" in capsys.readouterr().err
    assert started[0][2:] == ["-m", "accelerate_lshdp.run", "train.py", "--lr", "1"]
    plan = Plan.from_environment()
    assert plan == Plan.auto() and plan.leaves_total_open and plan.strategy.value == "lsdp"


def test_automatic_launch_takes_options_of_the_environment(started, monkeypatch) -> None:
    monkeypatch.setenv("LSDP_STRATEGY", "ddp")
    monkeypatch.setenv("LSDP_COMMUNICATION_DTYPE", "bf16")
    assert main(["launch", "--auto", "--nodes", "2", "--cpu", "train.py"]) == 0
    assert Plan.from_environment() == Plan.auto(strategy="ddp", communication_dtype="bf16")


def test_the_total_of_a_plan_can_be_kept(started) -> None:
    Plan.from_batch_sizes([3, 1]).save("plan.json")
    assert main(["launch", "--plan", "plan.json", "--keep-plan-total", "--cpu", "train.py"]) == 0
    assert os.environ["LSDP_KEEP_PLAN_TOTAL"] == "1"


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        (["--auto", "--plan", "plan.json"], None, "not allowed with argument"),
        (["--auto", "--keep-plan-total"], None, "which has no total of its own"),
        (["--auto"], "plan.json", "together with a plan in ACCELERATE_LSHDP_PLAN"),
    ],
)
def test_automatic_launch_refuses_plans_beside_it(started, monkeypatch, capsys, flags, environment, message) -> None:
    if environment is not None:
        monkeypatch.setenv("ACCELERATE_LSHDP_PLAN", environment)
    try:
        code = main(["launch", *flags, "train.py"])
    except SystemExit as refused:
        code = refused.code
    assert code == 2 and message in capsys.readouterr().err and not started
