# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What launchers of an elastic run say of each other, on a simulated network with virtual time."""

from __future__ import annotations

import re

import pytest
from launcher_network import Network, begun

from accelerate_lshdp.cli.elastic_notices import ElasticNotices
from accelerate_lshdp.runtime.membership.link import View
from accelerate_lshdp.runtime.membership.membership import Rules
from accelerate_lshdp.runtime.membership.message import Status


class Listeners:
    """The notices of all launchers of a network, and what they have said."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.said: list[list[str]] = [[] for _ in network.launchers]
        self.notices = [ElasticNotices(network.count, network.rules.min_nodes, said.append) for said in self.said]
        self.look()

    def look(self) -> None:
        for notices, launcher in zip(self.notices, self.network.launchers, strict=True):
            notices.tell(View.of(launcher, self.network.now), trains=True)


@pytest.mark.parametrize("how", ["off", "frozen", "deaf"])
@pytest.mark.parametrize("seed", range(6))
def test_all_say_why_a_member_is_out_if_they_look_only_after_the_decision(how: str, seed: int) -> None:
    """It takes milliseconds: those who wait for it see no silent member."""
    network = begun(4, seed)
    listeners = Listeners(network)
    network.run(network.draw.random())
    getattr(network, how).add(2)
    network.run(4.0)
    assert network.members(0) == ["machine0", "machine1", "machine3"]
    listeners.look()
    reason = r"^nothing is heard of machine2 for (1\.\d|2\.0) s: it is off, frozen, or its network is down$"
    if how == "deaf":
        reason = "^machine2 does not hear this node, which hears it: a firewall or a route lets one direction through$"
    for machine in (0, 1, 3):
        [said] = listeners.said[machine]
        assert re.search(reason, said)
    listeners.look()
    assert all(len(listeners.said[machine]) == 1 for machine in (0, 1, 3))


def test_it_is_said_once_where_silence_is_seen_before_the_decision() -> None:
    network = begun(4, 0)
    listeners = Listeners(network)
    network.off.add(2)
    for _ in range(80):
        network.run(0.05)
        listeners.look()
    for machine in (0, 1, 3):
        [said] = listeners.said[machine]
        assert said.startswith("nothing is heard of machine2 for ")


def test_nothing_is_said_of_one_that_leaves_or_has_come_back_at_once() -> None:
    network = begun(4, 0)
    listeners = Listeners(network)
    network.restart(1)
    network.run(4.0)
    assert network.together() and network.current(0).number == 2
    listeners.look()
    assert not listeners.said[0]
    leaving = network.launchers[3]
    leaving.status = Status.LEAVES
    network.run(4.0)
    network.off.add(3)
    assert network.members(0) == ["machine0", "machine2", "machine1"]
    listeners.look()
    assert not listeners.said[0] and not listeners.said[2]
    # It comes back, and is lost.
    network.restart(3)
    network.run(6.0)
    assert network.together()
    network.off.add(3)
    network.run(4.0)
    listeners.look()
    for machine in (0, 2):
        [said] = listeners.said[machine]
        assert said.startswith("nothing is heard of machine3 for ")


def test_what_came_before_another_change_is_said() -> None:
    network = begun(4, 0)
    listeners = Listeners(network)
    network.off.add(2)
    network.run(4.0)
    network.off.add(3)
    network.run(4.0)
    listeners.look()
    names = [said.split()[4] for said in listeners.said[0]]
    assert sorted(names) == ["machine2", "machine3"]


def test_nothing_is_said_of_one_that_only_others_do_not_hear() -> None:
    for seed in range(40):
        network = begun(3, seed)
        listeners = Listeners(network)
        network.run(network.draw.random())
        network.cuts = {frozenset((0, 2))}
        network.run(1.25)
        network.cuts.add(frozenset((1, 2)))  # one message is lost there, too
        network.run(0.3)
        network.cuts.discard(frozenset((1, 2)))
        network.run(1.5)
        assert network.members(1) == ["machine0", "machine1"]
        listeners.look()
        assert not [said for said in listeners.said[1] if "nothing is heard" in said]


def test_one_that_was_frozen_itself_says_nothing_of_others() -> None:
    network = begun(2, 0)
    listeners = Listeners(network)
    network.frozen.add(0)
    network.run(4.0)
    listeners.look()  # before it looks at what it knows
    assert not listeners.said[0]


def test_one_that_has_come_anew_says_nothing_of_the_launcher_before_it() -> None:
    network = begun(3, 0)
    network.off |= {0, 1}
    network.run(3.0)
    network.restart(1)
    listeners = Listeners(network)
    network.run(3.0)
    listeners.look()
    assert not [said for said in listeners.said[1] if "machine1" in said]


def test_too_few_to_train_say_so() -> None:
    network = begun(3, 0, rules=Rules(min_nodes=3))
    listeners = Listeners(network)
    network.off.add(2)
    network.run(3.0)
    listeners.look()
    assert listeners.said[0][1:] == [
        "found 2 of 3 nodes, which are too few to go on: at least 3 are to train. They keep their state and wait for"
        " the rest (elastic.min_nodes)"
    ]


def test_half_that_waits_says_so_and_who_is_back() -> None:
    network = begun(4, 0)
    listeners = Listeners(network)
    network.off |= {0, 1}
    network.run(3.0)
    listeners.look()
    silent, also, waits = listeners.said[3]
    assert {each[:29] for each in (silent, also)} == {f"nothing is heard of machine{machine} " for machine in (0, 1)}
    assert waits.startswith("found 2 of 4 nodes, which are too few to go on")
    network.off.clear()
    network.run(1.0)
    listeners.look()
    assert set(listeners.said[3][3:]) == {"machine0 is back", "machine1 is back"}
