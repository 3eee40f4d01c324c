# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Launchers that start anew are proof that those before have ended, which others need to go on without them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from launcher_network import Network, begun

from accelerate_lshdp.runtime.membership.message import Message, Status


def test_half_without_it_waits_and_goes_on_when_it_is_back() -> None:
    network = begun(2, 3)
    network.off.add(0)
    network.run(20)
    assert network.current(1).number == 1
    network.off.clear()
    network.launchers[0] = network.start(0)  # it has forgotten all
    network.run(8)
    # The new start is proof that the first one has ended, so that there is nobody who might decide otherwise.
    assert network.together() and network.members(0) == ["machine1", "machine0"]


def test_a_part_waits_for_one_that_may_have_decided() -> None:
    network = begun(4, 12)
    network.split({0, 1}, {2, 3})
    network.run(4)
    assert network.members(0) == ["machine0", "machine1"]
    network.off.add(1)
    network.run(1)
    network.split({0}, {1, 2, 3})
    network.off.clear()
    network.launchers[1] = network.start(1)
    network.run(20)
    # The first one trains on alone: it and the one that has ended could decide so.
    assert network.members(0) == ["machine0"] and network.current(2).number == 1
    network.split(set(range(4)))
    network.run(8)
    assert network.together()


def where_the_first_does_not_know_what_the_others_have_decided(seeds: range) -> Iterator[Network]:
    """It is frozen; the others have let in the fourth, and have ended since; and the fourth is cut off."""
    for seed in seeds:
        network = begun(4, seed)
        network.off.add(3)
        network.run(4 + network.draw.random())
        network.frozen.add(2)
        network.run(1.2)
        network.frozen = {0}
        network.run(0.3)
        network.off.clear()
        network.launchers[3] = network.start(3)
        network.run(4)
        # Unless the silence of the third one was noticed before.
        if network.members(3) == ["machine1", "machine2", "machine3"] and network.current(0).number == 2:
            network.split({0, 1, 2}, {3})
            network.off |= {1, 2}
            network.run(1)
            yield network


@pytest.mark.parametrize("seconds", [0.0, 0.3, 0.5, 0.7, 0.9])
def test_one_that_is_left_does_not_contradict_what_the_others_have_decided(seconds: float) -> None:
    networks = list(where_the_first_does_not_know_what_the_others_have_decided(range(10)))
    assert len(networks) >= 3
    for network in networks:
        network.frozen.clear()
        network.run(seconds)
        network.restart(1, 2)
        network.run(6)
        assert network.trains({0, 1, 2}) and network.contradictions == []
        network.split(set(range(4)))
        network.run(8)
        assert network.together() and network.contradictions == []


def test_two_that_are_left_and_do_not_reach_each_other_do_not_contradict_each_other() -> None:
    networks = list(where_the_first_does_not_know_what_the_others_have_decided(range(6)))
    assert networks
    for network in networks:
        network.frozen.clear()
        network.restart(1, 2)
        network.run(5)
        for machine in (1, 2):
            network.off.add(machine)
            network.run(4)
        assert network.members(0) == ["machine0"]
        network.split_at_once({0}, {1, 2, 3})
        network.restart(1, 2)
        network.run(6)
        # Those that had let in the fourth have ended on both sides: each is left alone for all that it can know.
        assert network.trains({0}) and network.trains({1, 2, 3}) and network.contradictions == []
        network.split(set(range(4)))
        network.run(12)
        assert network.together() and network.contradictions == []


def test_a_late_message_does_not_end_who_has_come_after_it() -> None:
    network = begun(3, 1)
    late, send = [], network.send

    def noted(sender: int, receiver: int, message: Message) -> None:
        if (receiver, message.sender.identity, message.status) == (0, ("machine2", "start2"), Status.JOINS):
            late.append(message)
        send(sender, receiver, message)

    network.send = noted
    network.off.add(2)
    network.run(4)
    for seconds in (0.3, 6.0):
        network.restart(2)
        network.run(seconds)
        network.off.add(2)
        network.run(0.5 if seconds < 1 else 0.0)
    network.off.clear()
    network.run(1)
    assert network.launchers[2].me.incarnation == "start3" and network.together()
    network.launchers[0].hear(late[0], network.now)
    # The first one must not go on alone with the second one started anew: the third one may have decided with it.
    network.split({0}, {1}, {2})
    network.off.add(1)
    network.run(0.2)
    network.restart(1)
    network.split({0, 1}, {2})
    network.run(5)
    assert not network.launchers[0].has_quorum(network.now)


def test_a_run_that_all_have_lost_is_founded_again() -> None:
    """Also if one that came in between has heard of it from the last member, and tells the others."""
    network = begun(3, 1)
    network.off |= {1, 2}
    network.run(5)
    network.off = {2}
    network.launchers[1] = network.start(1)
    network.run(2)
    assert not network.launchers[0].has_quorum(network.now) and network.current(1).number == 1
    network.off = {0, 2}
    network.run(3)
    network.restart(0, 2)
    network.run(5)
    # Not number 1: who had heard of the run has its ranks continue, from checkpoints.
    assert network.together() and network.current(0).number == 2 and network.current(0).ranks_at_start == 3
    assert {member.incarnation for member in network.current(0).members} == {"start2"}
