# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The agents of two nodes call their ranks at once, which need each other, and stop those of another kind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from accelerate_lshdp.comparing import node_agent
from accelerate_lshdp.comparing.node_agent import NodeAgent, NodePlace, free_ports


SERVED = """
import os, time
from torch.distributed import TCPStore
from accelerate_lshdp.comparing.rank_processes import serve

class Target:
    def meet(self):
        rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
        self.store = TCPStore("127.0.0.1", port, 2, is_master=rank == 0)

    def tell(self, after):
        if os.environ["RANK"] == "1":
            time.sleep(after)
            self.store.set("told", "yes")
            return self.store.get("told").decode()

serve(Target())
"""


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are only stopped on Linux")


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[NodeAgent]]:
    (tmp_path / "served.py").write_text(SERVED)
    monkeypatch.setattr(node_agent, "_COMMAND", (sys.executable, str(tmp_path / "served.py")))
    ports = free_ports(["one kind", "another"])
    with ExitStack() as stack:
        made = [NodeAgent(NodePlace(node, (1, 1), "127.0.0.1", 1, on_gpu=False, usable_cores=1)) for node in range(2)]
        for agent in made:
            stack.callback(agent.stop)
            agent.start(kinds=ports, threads=1)
        yield made


def call(agents: list[NodeAgent], kind: str, method: str, timeout: float, **arguments: float) -> list[str | None]:
    with ThreadPoolExecutor() as pool:
        calls = [
            pool.submit(agent.call, kind=kind, method=method, timeout=timeout, arguments=arguments) for agent in agents
        ]
        return [result for each in calls for result in each.result()]


def paused(agents: list[NodeAgent], kind: str) -> list[bool]:
    pids = [pid for agent in agents for pid in agent._ranks[kind].pids]
    return [psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in pids]


def test_rank_0_serves_others_after_it_has_answered_and_is_stopped_for_another_kind(agents: list[NodeAgent]) -> None:
    for kind in ("one kind", "another"):
        call(agents, kind, "meet", 50)
        assert call(agents, kind, "tell", 10, after=0.5) == [None, "yes"]
    assert paused(agents, "one kind") == [True, True] and paused(agents, "another") == [False, False]
    assert call(agents, "one kind", "tell", 10, after=0.5) == [None, "yes"]
    assert paused(agents, "one kind") == [False, False] and paused(agents, "another") == [True, True]
