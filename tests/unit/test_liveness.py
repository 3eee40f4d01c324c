# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Nodes that tell each other that they are there: on a simulated network, with clocks that the test moves."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerate_lshdp.runtime.liveness import FULL_MESH, Liveness


BEAT, NOTICE, STEP = 0.5, 2.0, 0.01


class Network:
    """Nodes whose beats are not in step, and whose messages arrive at once, or not at all."""

    def __init__(self, count: int, seed: int, loss: float = 0.0) -> None:
        self.now = 100.0
        self.draw = random.Random(seed)
        self.loss = loss
        self.nodes = [
            Liveness(node, count, beat_seconds=BEAT, notice_seconds=NOTICE, now=self.now) for node in range(count)
        ]
        self.next_beat = [self.now + self.draw.uniform(0, BEAT) for _ in range(count)]
        self.stopped: set[int] = set()
        self.cut: set[int] = set()
        #: (seconds, who noticed, of whom, whether it is silent)
        self.noticed: list[tuple[float, int, int, bool]] = []
        self.sent = 0

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += STEP
            for node, state in enumerate(self.nodes):
                if node in self.stopped or self.now < self.next_beat[node]:
                    continue
                self.next_beat[node] = self.now + BEAT
                self.deliver(node, state.beat())
                for change in state.look(self.now):
                    self.noticed.append((self.now, node, change.node, change.is_silent))

    def deliver(self, sender: int, counters: list[int]) -> None:
        for receiver in self.nodes[sender].receivers():
            self.sent += 1
            lost = self.draw.random() < self.loss
            if not lost and not {sender, receiver} & self.cut and receiver not in self.stopped:
                self.nodes[receiver].hear(counters, self.now)


@settings(max_examples=60, deadline=None)
@given(count=st.integers(2, FULL_MESH), seed=st.integers(0, 10**6), kind=st.sampled_from(["stop", "cut"]))
def test_all_others_notice_a_lost_node_in_time(count: int, seed: int, kind: str) -> None:
    network = Network(count, seed)
    network.run(3 + network.draw.random())
    assert network.noticed == []
    victim, lost_at = network.draw.randrange(count), network.now
    (network.stopped if kind == "stop" else network.cut).add(victim)
    network.run(2.5)
    by = {node: at for at, node, of, is_silent in network.noticed if of == victim and is_silent}
    assert set(by) == set(range(count)) - {victim}
    assert max(by.values()) - lost_at <= NOTICE + 2 * STEP
    assert all(of == victim or node == victim for _, node, of, _ in network.noticed)


@settings(max_examples=20, deadline=None)
@given(count=st.integers(FULL_MESH + 1, 64), seed=st.integers(0, 10**6))
def test_many_nodes_notice_it_with_few_messages(count: int, seed: int) -> None:
    network = Network(count, seed)
    network.run(6)
    assert network.noticed == []
    assert all(len(node.receivers()) <= (count - 1).bit_length() for node in network.nodes)
    victim, lost_at = network.draw.randrange(count), network.now
    network.stopped.add(victim)
    hops = (count - 1).bit_length()
    network.run(NOTICE + BEAT * hops + 1)
    by = {node: at for at, node, of, is_silent in network.noticed if of == victim and is_silent}
    assert set(by) == set(range(count)) - {victim}
    assert max(by.values()) - lost_at <= NOTICE + BEAT * hops


@settings(max_examples=20, deadline=None)
@given(count=st.integers(2, 16), seed=st.integers(0, 10**6))
def test_datagrams_that_are_lost_now_and_then_are_no_silence(count: int, seed: int) -> None:
    network = Network(count, seed, loss=0.01)
    network.run(30)
    back = [each for each in network.noticed if each[3]]
    # Three in a row of one way: one in a million beats, and beyond two nodes there are other ways.
    assert back == []


def test_a_node_that_comes_back_is_said_with_its_time() -> None:
    network = Network(3, 1)
    network.run(3)
    network.cut.add(1)
    network.run(5)
    network.cut.clear()
    network.run(1)
    told = [(node, of, is_silent) for _, node, of, is_silent in network.noticed if node == 0]
    assert told == [(0, 1, True), (0, 1, False)]


def test_a_node_that_was_frozen_itself_says_nothing_of_others() -> None:
    network = Network(4, 2)
    network.run(3)
    network.stopped.add(0)
    network.run(20)
    network.stopped.clear()
    network.run(3)
    assert [each for each in network.noticed if each[1] == 0] == []
    assert {each[1] for each in network.noticed} == {1, 2, 3}


def test_who_ends_in_order_is_not_missed() -> None:
    network = Network(4, 3)
    network.run(3)
    network.deliver(2, network.nodes[2].end())
    network.stopped.add(2)
    network.run(10)
    assert network.noticed == []


def test_who_was_never_heard_of_is_not_silent() -> None:
    """A firewall may let no datagrams through, and the run be well."""
    network = Network(3, 4)
    network.cut.add(2)
    network.run(20)
    assert network.noticed == []
    assert network.nodes[0].unheard() == [2] and network.nodes[2].unheard() == [0, 1]


def silences(network: Network, nodes: Iterable[int]) -> list[tuple[int, float] | None]:
    return [network.nodes[node].longest_silence(network.now) for node in nodes]


def test_the_longest_silence_is_told() -> None:
    network = Network(4, 5)
    network.run(3)
    assert silences(network, range(4)) == [None] * 4
    network.stopped.add(3)
    network.run(10)
    network.stopped.add(2)
    network.run(5)
    for found in silences(network, (0, 1)):
        assert found is not None and found[0] == 3
        assert found[1] == pytest.approx(15, abs=1)
