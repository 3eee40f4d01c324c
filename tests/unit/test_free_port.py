# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Ports for processes that are still to be started."""

import random
import socket

import pytest

from accelerate_lshdp.runtime import free_port as module
from accelerate_lshdp.runtime.free_port import free_port


@pytest.fixture
def system_range(tmp_path, monkeypatch):
    def write(first: int) -> None:
        (tmp_path / "range").write_text(f"{first}\t60999\n")
        monkeypatch.setattr(module, "_SYSTEM_RANGE", tmp_path / "range")

    return write


def test_is_none_that_the_system_gives_to_others(system_range):
    system_range(32768)
    ports = [free_port() for _ in range(50)]
    assert all(10_000 <= port < 32768 for port in ports)


def test_does_not_depend_on_the_seed(system_range):
    system_range(32768)
    found = []
    for _ in range(3):
        random.seed(0)
        found.append(free_port())
    assert len(set(found)) > 1


def test_can_be_listened_on():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))
        listener.listen()


def test_is_not_one_that_is_taken(system_range):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        port = taken.getsockname()[1]
        assert module._bound(port) is None


@pytest.mark.parametrize("first", [1024, None], ids=["all ports are the system's", "unknown"])
def test_is_any_port_where_the_system_leaves_none(system_range, tmp_path, monkeypatch, first):
    if first is None:
        monkeypatch.setattr(module, "_SYSTEM_RANGE", tmp_path / "nowhere")
    else:
        system_range(first)
    assert free_port() > 0
