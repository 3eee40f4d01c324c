# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Files that have to be the same on all machines: which they are, and how agents write and read them."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

import pytest
from test_hosts_findings import facts_of

from accelerate_lshdp.hosts.agent import MachineAgent, answer
from accelerate_lshdp.hosts.script_files import MOST_FILES, code_beside, copy_to_all, from_here


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(*names: str) -> None:
    for name in names:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")


def test_code_is_what_lies_beside_the_script_and_below() -> None:
    make("train.py", "models/vit.py", "data.csv", ".git/hook.py", "__pycache__/train.py", "env/lib/x.py")
    make("env/pyvenv.cfg", ".train.py.swp.py")
    Path(".#train.py").symlink_to("anna@studio.123")
    Path("models/lost.py").symlink_to("nowhere.py")
    assert code_beside("train.py") == ["models/vit.py", "train.py"]
    assert code_beside("models/vit.py") == ["models/vit.py"]
    assert code_beside(None) == ["models/vit.py", "train.py"]
    assert code_beside(str(Path("train.py").absolute())) == ["models/vit.py", "train.py"]


def test_a_script_elsewhere_has_no_place_on_other_machines(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="outside of the current folder"):
        code_beside("../train.py")
    assert from_here(tmp_path / "a" / ".." / "train.py") == "train.py"


def test_a_folder_with_too_much_code() -> None:
    make(*(f"part{number}.py" for number in range(MOST_FILES + 1)))
    with pytest.raises(ValueError, match=f"more than {MOST_FILES} Python files"):
        code_beside("part0.py")


def test_an_agent_writes_whole_files_inside_of_its_folder(folder: Path) -> None:
    agent = MachineAgent()
    content = base64.b64encode(b"print()\n").decode()
    assert agent.write(file="a/b.py", content=content) == hashlib.sha256(b"print()\n").hexdigest()
    assert Path("a/b.py").read_bytes() == b"print()\n"
    assert [path.name for path in Path("a").iterdir()] == ["b.py"]
    for outside in ("../b.py", "/tmp/b.py", "a/../../b.py"):
        with pytest.raises(ValueError, match="inside of the folder"):
            agent.write(file=outside, content=content)


def test_an_agent_reads_a_file_or_a_folder() -> None:
    make("out/results.json", "out/pictures/step.png")
    agent = MachineAgent()
    assert set(agent.read(path="out")) == {"out/results.json", "out/pictures/step.png"}
    assert base64.b64decode(agent.read(path="out/results.json")["out/results.json"]) == b"# out/results.json\n"
    with pytest.raises(ValueError, match="found 0 files"):
        agent.read(path="missing")


def test_an_agent_does_what_it_is_for_and_nothing_else() -> None:
    found = answer(MachineAgent(), {"number": 3, "request": "__init__", "arguments": {}})
    assert found["number"] == 3 and "found the request '__init__'" in found["error"]
    assert (
        "ValueError" in answer(MachineAgent(), {"number": 4, "request": "read", "arguments": {"path": "x"}})["error"]
    )


def test_only_what_differs_is_copied() -> None:
    make("train.py", "model.py")
    digests = {name: hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in ("train.py", "model.py")}

    class Connection:
        def __init__(self) -> None:
            self.written: dict[str, bytes] = {}

        def ask(self, request: str, timeout: float, **arguments: Any) -> str:
            assert request == "write"
            self.written[arguments["file"]] = base64.b64decode(arguments["content"])
            return hashlib.sha256(self.written[arguments["file"]]).hexdigest()

    connections = {node: Connection() for node in range(2)}
    facts = {0: facts_of(0), 1: facts_of(1)}
    facts[0].files.update(digests)
    facts[1].files.update({"train.py": "another", "model.py": digests["model.py"]})
    copied = copy_to_all(["model.py", "train.py"], facts, connections)
    assert copied == {1: {"train.py": digests["train.py"]}}
    assert connections[1].written == {"train.py": b"# train.py\n"} and connections[0].written == {}
