# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What only the tests of the benchmarks need; fixtures of all tests are in the conftest.py of the root."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from laboratory.emulated_cluster.debian_tools import DebianTools
from laboratory.emulated_cluster.system import ClusterError


@pytest.fixture(autouse=True)
def laboratory_for_programs(clean_process: None) -> None:
    """Programs that a test starts find the laboratory, as the test does by pytest's configuration."""
    # Not by monkeypatch: it would be undone after all other fixtures, and with it what tests change by it.
    inherited = os.environ.get("PYTHONPATH")
    folders = [str(Path(__file__).resolve().parents[1]), *([inherited] if inherited else [])]
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)


@pytest.fixture(scope="session")
def debian_tools(tmp_path_factory: pytest.TempPathFactory) -> DebianTools:
    """Programs that emulated machines need, unpacked once."""
    found = DebianTools(tmp_path_factory.mktemp("tools"))
    for program in ("sshd", "iptables-legacy"):
        try:
            found.find(program)
        except ClusterError as error:
            pytest.skip(str(error))
    return found
