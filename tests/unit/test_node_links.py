# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Nodes of a comparison meet, call each other's ranks, and hear of it when one fails or goes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import pytest
from launching import free_port

from accelerate_lshdp.comparing import node_launch
from accelerate_lshdp.comparing.launch import ENGINE
from accelerate_lshdp.comparing.node_agent import serve_node_0
from accelerate_lshdp.comparing.node_launch import NodeLaunch
from accelerate_lshdp.comparing.rank_processes import RankError
from accelerate_lshdp.runtime.node_links import Hello, NodeLink, NodeLinkError, join_node_0, wait_for_nodes


ADDRESS = "127.0.0.1"


def meet(*others: Hello, own: Hello | None = None, seconds: float = 20) -> list[Any]:
    """What node 0 and the others got or raised."""
    own = own or Hello(0, 1, 1 + len(others), "file")
    port = free_port()

    def tried(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except NodeLinkError as error:
            return error

    with ThreadPoolExecutor(1 + len(others)) as pool:
        first = pool.submit(tried, lambda: wait_for_nodes(own, ADDRESS, port, lambda said: None, seconds))
        rest = [pool.submit(tried, lambda hello=hello: join_node_0(hello, ADDRESS, port, seconds)) for hello in others]
        return [first.result(), *(future.result() for future in rest)]


def test_nodes_come_in_any_order_and_learn_of_all_ranks() -> None:
    (links, sizes), (of_2, sizes_2), (of_1, sizes_1) = meet(Hello(2, 3, 3, "file"), Hello(1, 2, 3, "file"))
    assert sizes == sizes_1 == sizes_2 == [1, 2, 3]
    for number, (link, other) in enumerate(zip(links, (of_1, of_2), strict=True)):
        link.send({"number": number})
        assert other.receive(5) == {"number": number}
        link.close()
        other.close()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Hello(1, 1, 2, "another"), "found another configuration file on node 1 than on node 0"),
        (Hello(1, 1, 3, "file"), "found 3 nodes on node 1, expected 2 as on node 0"),
        (Hello(0, 1, 2, "file"), "found node 0 connecting to node 0"),
        (Hello(2, 1, 2, "file"), "found node 2 connecting to node 0"),
        (Hello(1, 1, 2, "file", version="0"), "found accelerate_lshdp 0 on node 1"),
        (Hello(1, 1, 2, "file", [1, 2]), r"found --nodes \[1, 2\] on node 1, expected \[1, 1\] as on node 0"),
    ],
)
def test_a_node_that_does_not_fit_is_refused_on_both(other: Hello, message: str) -> None:
    for found in meet(other, own=Hello(0, 1, 2, "file", [1, 1])):
        with pytest.raises(NodeLinkError, match=message):
            raise found


def test_nodes_that_do_not_come_are_named() -> None:
    with pytest.raises(NodeLinkError, match="found no connection of node 1, 2 after 0.2 s"):
        wait_for_nodes(Hello(0, 1, 3, "file"), ADDRESS, free_port(), lambda said: None, 0.2)
    with pytest.raises(NodeLinkError, match="found no answer of node 0 at 127.0.0.1:"):
        join_node_0(Hello(1, 1, 2, "file"), ADDRESS, free_port(), 0.2)


def test_connections_of_other_programs_are_told_and_dropped() -> None:
    port, said = free_port(), []
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_for_nodes, Hello(0, 1, 2, "file"), ADDRESS, port, said.append, 20)
        stranger = connect(port)
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        link, sizes = join_node_0(Hello(1, 4, 2, "file"), ADDRESS, port, 20)
        assert sizes == [1, 4]
        stranger.close()
        link.close()
        waiting.result()[0][0].close()
    assert len(said) == 1 and "is none of a node" in said[0]


def connect(port: int) -> socket.socket:
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection((ADDRESS, port), timeout=5)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


class PretendedAgent:
    """A node with some ranks; what a call does is up to the test."""

    def __init__(self, results: Callable[[PretendedAgent, Mapping[str, Any]], list[Any]]) -> None:
        self.results = results
        self.requests: list[str] = []
        self.elsewhere: dict[Connection, Callable[[], bool]] = {}

    def start(self, **arguments: Any) -> None:
        self.requests.append("start")

    def stop(self) -> None:
        self.requests.append("stop")

    def sent_bytes(self) -> int:
        return 100

    def call(self, **arguments: Any) -> list[Any]:
        self.requests.append(arguments["method"])
        return self.results(self, arguments)


class Nodes:
    """Node 0 in this thread, node 1 in another one."""

    def __init__(self, here: PretendedAgent, there: PretendedAgent) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        self.link, self.other = TestLink(ours), TestLink(theirs)
        self.launch = NodeLaunch(here, [self.link], [1, 2], None, [ENGINE])
        self.codes: list[Any] = []
        self.thread = threading.Thread(target=self._serve, args=(there,))
        self.thread.start()

    def _serve(self, agent: PretendedAgent) -> None:
        try:
            self.codes.append(serve_node_0(self.other, agent))
        except NodeLinkError as error:
            self.codes.append(error)

    def end(self) -> None:
        self.link.close()
        self.thread.join(10)


class TestLink(NodeLink):
    """A link whose socket is not one of TCP."""

    __test__ = False

    def __init__(self, connected: socket.socket) -> None:
        self.connection = Connection(connected.detach())


@pytest.fixture
def nodes() -> Iterator[Callable[..., Nodes]]:
    made: list[Nodes] = []

    def make(here: Callable[..., list[Any]], there: Callable[..., list[Any]]) -> Nodes:
        made.append(Nodes(PretendedAgent(here), PretendedAgent(there)))
        return made[-1]

    yield make
    for each in made:
        each.end()


def test_calls_reach_all_ranks_in_their_order(nodes: Callable[..., Nodes]) -> None:
    both = nodes(lambda agent, asked: [asked["arguments"]["x"]], lambda agent, asked: [{"a": 1}, [2, 3]])
    with both.launch as launch:
        assert launch.call("train", x="here") == ["here", {"a": 1}, [2, 3]]
        assert launch.sent_between_nodes() == [100, 100] and launch.several_clocks
    both.link.send({"finished": 1})
    both.thread.join(10)
    assert both.codes == [1]


def raising(error: Exception) -> Callable[..., list[Any]]:
    def work(agent: PretendedAgent, asked: Mapping[str, Any]) -> list[Any]:
        raise error

    return work


def test_an_error_of_another_node_is_told_with_its_place(nodes: Callable[..., Nodes]) -> None:
    both = nodes(lambda *_: [0], raising(RankError("rank 1 raised:\nValueError", True, "rank 1 raised: ValueError")))
    with both.launch as launch:
        with pytest.raises(RankError, match="(?s)node 1: rank 1 raised:.*ValueError") as caught:
            launch.call("begin")
        assert caught.value.ranks_usable and caught.value.summary == "node 1: rank 1 raised: ValueError"


def test_ranks_that_wait_for_one_that_failed_are_given_up(
    nodes: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_launch, "FAILURE_GRACE", 0.3)
    given_up = threading.Event()

    def wait(agent: PretendedAgent, asked: Mapping[str, Any]) -> list[Any]:
        (link, give_up), *_ = agent.elsewhere.items()
        assert link.poll(20)  # as RankProcesses.call watches it
        given_up.set()
        give_up()
        return []

    both = nodes(raising(RankError("rank 0 ended during train")), wait)
    with both.launch as launch:
        with pytest.raises(RankError, match="node 0: rank 0 ended during train") as caught:
            launch.call("train", timeout=60)
        assert not caught.value.ranks_usable and not given_up.is_set()
    assert given_up.wait(10)
    # The late answer to what was given up is not taken for one to another request.
    with both.launch as launch:
        assert launch.sent_between_nodes() == [100, 100]


def test_a_node_that_has_gone_is_named_at_once(nodes: Callable[..., Nodes]) -> None:
    def leave(agent: PretendedAgent, asked: Mapping[str, Any]) -> list[Any]:
        both.other.close()
        return [0, 0]

    both = nodes(lambda *_: [0], leave)
    with pytest.raises(RankError, match="^node 1 has gone") as caught, both.launch as launch:
        launch.call("train", timeout=60)
    assert not caught.value.ranks_usable
    with pytest.raises(RankError, match="node 1 has gone"):
        both.launch.__enter__()


def test_node_0_that_has_gone_ends_the_others(nodes: Callable[..., Nodes]) -> None:
    both = nodes(lambda *_: [0], lambda *_: [0, 0])
    both.link.close()
    both.thread.join(10)
    assert "node 0 has gone before the comparison was finished" in str(both.codes[0])
