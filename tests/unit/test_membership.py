# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Launchers that agree on who is in a run: on a simulated network that loses, delays and splits, with virtual time."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launcher_network import Network, begun

from accelerate_lshdp.runtime.membership.membership import Rules
from accelerate_lshdp.runtime.membership.message import Message, Status


EXAMPLES = int(os.environ.get("MEMBERSHIP_EXAMPLES", "25"))


@settings(max_examples=8, deadline=None)
@given(count=st.integers(1, 8), seed=st.integers(0, 10**6))
def test_nothing_changes_while_nothing_happens(count: int, seed: int) -> None:
    network = begun(count, seed)
    network.run(30)
    assert network.together() and network.current(0).number == 1


@settings(max_examples=15, deadline=None)
@given(count=st.integers(3, 8), seed=st.integers(0, 10**6), how=st.sampled_from(["off", "frozen"]))
def test_a_lost_member_is_out_in_three_seconds(count: int, seed: int, how: str) -> None:
    network = begun(count, seed)
    network.run(network.draw.random())
    lost = network.draw.randrange(count)
    getattr(network, how).add(lost)
    network.run(3.0)
    assert network.together() and network.current((lost + 1) % count).number == 2
    network.off.clear(), network.frozen.clear()
    if how == "off":
        network.launchers[lost] = network.start(lost)
    network.run(6)
    assert network.together() and network.current(lost).number == 3
    # Who stayed has kept its place, and who came back is the last.
    assert network.members(0)[-1] == f"machine{lost}"


@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=st.integers(0, 10**6), seconds=st.floats(1.0, 12.0))
def test_a_launcher_that_was_frozen_knows_nothing_of_others(seed: int, seconds: float) -> None:
    network = begun(2, seed)
    network.run(1 + network.draw.random())
    network.frozen.add(0)
    network.run(seconds)
    network.frozen.clear()
    network.run(0.1)
    # The second half has not the first-listed member, so it waits; and the first has not lost the second.
    network.run(5)
    assert network.together() and network.current(0).number == 1


def test_two_that_come_and_do_not_hear_each_other_are_not_both_let_in() -> None:
    network = begun(4, 16)
    network.off |= {2, 3}
    network.run(5)
    assert network.members(0) == ["machine0", "machine1"]
    number = network.current(0).number
    network.off.clear()
    network.launchers[2:] = [network.start(2), network.start(3)]
    network.cuts = {frozenset((2, 3))}
    network.run(20)
    assert len(network.members(0)) == 3 and network.current(0).number == number + 1
    network.cuts.clear()
    network.run(6)
    assert network.together()


def test_half_goes_on_with_the_member_that_is_listed_first() -> None:
    network = begun(4, 2)
    network.split({0, 3}, {1, 2})
    network.run(5)
    assert network.members(0) == ["machine0", "machine3"] and network.current(1).number == 1
    assert not network.launchers[1].has_quorum(network.now) and network.launchers[0].has_quorum(network.now)
    assert {member.name for member in network.launchers[1].hearing.silent(network.now)} == {"machine0", "machine3"}
    network.split(set(range(4)))
    network.run(8)
    assert network.together()


def test_each_part_goes_on_if_it_was_told_to() -> None:
    network = begun(4, 2, rules=Rules(any_part=True))
    network.split({0, 3}, {1, 2})
    network.run(6)
    assert network.members(0) == ["machine0", "machine3"] and network.members(1) == ["machine1", "machine2"]
    network.split(set(range(4)))
    network.run(10)
    assert network.together()


def test_the_larger_part_wins_when_parts_that_went_on_meet() -> None:
    network = begun(4, 2, rules=Rules(any_part=True))
    network.split({0, 1, 2}, {3})
    network.run(6)
    assert network.members(3) == ["machine3"]
    network.split(set(range(4)))
    network.run(10)
    assert network.together() and network.members(3) == [f"machine{machine}" for machine in range(4)]
    assert network.launchers[3].me.incarnation == "start2" and network.launchers[0].me.incarnation == "start1"


def test_a_member_that_does_not_hear_of_it_is_left_out_again() -> None:
    """Its datagrams come, and those to it do not, as behind some firewalls."""
    network = begun(3, 13)
    send = network.send
    network.send = lambda sender, receiver, message: None if receiver == 2 else send(sender, receiver, message)
    network.run(4)
    assert network.members(0) == ["machine0", "machine1"] and network.current(2).number == 1
    assert all(launcher.node is not None for launcher in network.launchers[:2])


def test_two_members_that_do_not_hear_each_other_are_not_both_in() -> None:
    """Both reach the third: a cable or a firewall between two of them alone."""
    network = begun(3, 15)
    network.cuts = {frozenset((0, 1))}
    network.run(4)
    number = network.current(2).number
    assert number == 2 and network.members(2) in (["machine0", "machine2"], ["machine1", "machine2"])
    network.run(30)
    assert network.current(2).number == number  # the other one is not in and out again
    network.cuts.clear()
    network.run(8)
    assert network.together()


def test_who_does_not_hear_the_members_is_not_let_in() -> None:
    """It could not train with them, and each change would end their ranks."""
    network = begun(3, 13)
    network.off.add(2)
    network.run(4)
    number = network.current(0).number
    network.off.clear()
    network.launchers[2] = network.start(2)
    send = network.send
    network.send = lambda sender, receiver, message: None if receiver == 2 else send(sender, receiver, message)
    network.run(30)
    assert network.members(0) == ["machine0", "machine1"] and network.current(0).number == number
    network.send = send
    network.run(6)
    assert network.together()


def test_a_launcher_of_another_run_is_named() -> None:
    network = Network(2, 14)
    network.launchers[1]._run = "another"
    network.run(3)
    assert network.launchers[0].hearing.foreign(network.now) == ["machine1"] and network.current(0).number == 0


def test_a_run_waits_for_as_many_as_it_needs() -> None:
    network = begun(3, 4, rules=Rules(min_nodes=3))
    network.off.add(2)
    network.run(10)
    assert network.current(0).number == 1
    network.off.clear()
    network.launchers[2] = network.start(2)
    network.run(6)
    assert network.together() and network.current(0).number == 2


def test_no_more_join_than_are_allowed() -> None:
    network = begun(3, 5, rules=Rules(max_nodes=3))
    network.count += 1
    network.started.append(0)
    network.launchers.append(network.start(3))
    network.run(10)
    assert network.current(0).number == 1
    network.off.add(1)
    network.run(5)
    assert sorted(network.members(0)) == ["machine0", "machine2", "machine3"]


def test_who_leaves_is_out_and_who_has_ended_changes_nothing() -> None:
    network = begun(3, 6)
    network.launchers[0].status = Status.LEAVES
    network.run(1)
    assert network.current(1).number == 1  # where all are told to end, none is to be left out at once
    network.run(4)
    assert network.members(1) == ["machine1", "machine2"] and network.launchers[0].node is None
    network.launchers[1].status = Status.ENDED
    network.run(1)
    network.off.add(2)
    network.run(10)
    assert network.current(1).number == 2 and network.launchers[1].has_ended


def test_who_has_left_is_in_no_generation_any_more() -> None:
    network = begun(3, 6)
    network.launchers[2].say(Status.LEAVES)
    network.run(0.3)
    network.launchers[2].say(Status.LEFT, ended_in=1)
    network.run(0.3)
    network.launchers[1].lost_ranks = 1
    network.run(0.3)
    assert network.members(0) == ["machine0", "machine1"] and network.current(0).number == 2


@pytest.mark.parametrize(("count", "leavers"), [(2, [0]), (3, [1, 2]), (3, [0, 1])])
def test_who_has_left_is_not_waited_for(count: int, leavers: list[int]) -> None:
    network = begun(count, 6)
    for machine in leavers:
        network.launchers[machine].say(Status.LEAVES)
        network.run(0.5)
        network.launchers[machine].say(Status.LEFT, ended_in=1)
        network.run(0.5)
        network.off.add(machine)
    network.run(3)
    [left] = set(range(count)) - set(leavers)
    assert network.members(left) == [f"machine{left}"] and network.launchers[left].has_quorum(network.now)


def test_launchers_that_are_no_members_do_not_hold_up_one_that_leaves() -> None:
    network = begun(4, 6)
    network.launchers[2].say(Status.LEAVES)
    for _ in range(4):
        network.restart(3)
        network.run(0.4)
        network.launchers[3].say(Status.LEAVES)
        network.run(0.6)
        network.off.add(3)
    assert "machine2" not in network.members(0)


def test_lost_ranks_make_a_new_generation_of_the_same_members() -> None:
    network = begun(3, 7)
    network.launchers[1].lost_ranks = 1
    network.run(2)
    assert network.together() and network.current(0).number == 2
    network.run(5)
    assert network.current(0).number == 2


def test_a_script_that_fails_is_told_to_all() -> None:
    network = begun(3, 8)
    network.launchers[2].status, network.launchers[2].code = Status.FAILED, 7
    network.run(2)
    found = [launcher.failure() for launcher in network.launchers]
    assert [(member.name, code) for member, code in found] == [("machine2", 7)] * 3
    assert network.current(0).number == 1


@settings(max_examples=2 * EXAMPLES, deadline=None)
@given(seed=st.integers(0, 10**9), away=st.sets(st.integers(1, 3), min_size=1))
def test_a_part_goes_on_if_the_network_splits_while_launchers_come(seed: int, away: set[int]) -> None:
    """Members must not decide on launchers that do not hear of it any more: they would wait for them."""
    network = begun(4, seed)
    for machine in away:
        network.off.add(machine)
        network.run(4)
    before = network.current(0)
    for machine in away:
        network.launchers[machine] = network.start(machine)
    network.off.clear()
    network.run(network.draw.uniform(0.0, 1.5))
    part = {machine for machine in range(4) if network.draw.random() < 0.5}
    network.split_at_once(part, set(range(4)) - part)
    # What is decided while the messages that tell of it are lost cannot be known to both parts.
    is_decided = any(network.current(machine).number > before.number for machine in range(4))
    network.run(8)
    assert is_decided or network.trains(part) or network.trains(set(range(4)) - part)
    network.split(set(range(4)))
    network.run(12)
    assert network.together() and network.contradictions == []


@settings(max_examples=EXAMPLES, deadline=None)
@given(count=st.integers(2, 6), seed=st.integers(0, 10**9), loss=st.sampled_from([0.0, 0.1, 0.3]))
def test_whatever_happens_all_agree_and_come_together_again(count: int, seed: int, loss: float) -> None:
    network = begun(count, seed) if not loss else Network(count, seed, loss=loss)
    network.loss = loss
    draw = network.draw
    network.run(5)
    for _ in range(8):
        event = draw.choice(["split", "heal", "freeze", "thaw", "off", "on", "ranks", "leaves", "left", "wait"])
        machine = draw.randrange(count)
        if event == "leaves" and machine not in network.frozen | network.off:
            network.launchers[machine].say(Status.LEAVES)
        elif event == "left":
            for each in range(count):
                if network.launchers[each].status is Status.LEAVES and each not in network.frozen | network.off:
                    network.launchers[each].say(Status.LEFT)
                    network.run(draw.uniform(0, 0.5))
                    network.off.add(each)
        elif event == "split":
            part = {m for m in range(count) if draw.random() < 0.5}
            network.split(part, set(range(count)) - part)
        elif event == "heal":
            network.split(set(range(count)))
        elif event == "freeze":
            network.frozen.add(machine)
        elif event == "thaw":
            network.frozen.clear()
        elif event == "off":
            network.off.add(machine)
        elif event == "on" and machine in network.off:
            network.off.discard(machine)
            network.launchers[machine] = network.start(machine)
        elif event == "ranks" and network.launchers[machine].node is not None:
            network.launchers[machine].lost_ranks = network.current(machine).number
        network.run(draw.uniform(0.1, 4.0))
    assert network.contradictions == []
    network.split(set(range(count)))
    network.frozen.clear()
    told = {machine for machine, launcher in enumerate(network.launchers) if launcher.status is Status.LEAVES}
    for machine in list(network.off | told):
        network.off.discard(machine)
        network.launchers[machine] = network.start(machine)
    for _ in range(8):
        network.run(5)
        if network.together():
            break
    assert network.contradictions == []
    assert network.together()


def test_messages_are_read_as_they_were_written() -> None:
    network = begun(3, 9)
    network.off.add(2)
    messages, send = [], network.send

    def noted(sender: int, receiver: int, message: Message) -> None:
        messages.append(message)
        send(sender, receiver, message)

    network.send = noted
    network.run(4)
    assert any(message.vote.proposed and message.vote.accepted for message in messages)
    assert all(Message.from_bytes(message.to_bytes()) == message for message in messages)
    assert Message.from_bytes(b"{}") is None and Message.from_bytes(b"\xff") is None
