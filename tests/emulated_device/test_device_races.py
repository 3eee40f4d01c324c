# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Races on the emulated device: every wait that is missing is reported, whatever the timing, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest


pytestmark = [
    pytest.mark.compiler,
    pytest.mark.slow,
    pytest.mark.timeout(300),  # the first test builds the device
]

#: Ranks of each program, and what the report of its race says.
PROGRAMS = {
    "compute_after_copy": (1, "mul on stream 0 reads memory that copy to device"),
    "read_on_host_after_copy": (1, "on the host reads memory that copy to host"),
    "write_on_host_after_copy": (1, "on the host writes memory that copy to device"),
    "write_on_device_after_copy": (1, "on stream 0 writes memory that copy to host"),
    "copy_after_compute": (1, "reads memory that aten::mul"),
    "record_event_after_compute": (1, "reads memory that aten::mul"),
    "chain_of_streams": (1, "reads memory that aten::mul"),
    "record_stream_of_memory": (1, "the memory was another tensor's then"),
    "compute_after_collective": (2, "reads memory that all_reduce"),
    "write_after_collective": (2, "on stream 0 writes memory that all_gather"),
    "collective_after_compute": (2, "all_reduce on stream"),
}
OnDevice = Callable[..., list]


@pytest.mark.parametrize("is_slow", [False, True], ids=["fast", "slow"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_that_wait(on_device: OnDevice, program: str, is_slow: bool) -> None:
    ranks, _ = PROGRAMS[program]
    assert on_device("waiting_programs", "run", program, "waits", is_slow, ranks=ranks) == [(True, [])] * ranks


@pytest.mark.parametrize("program", PROGRAMS)
def test_missing_waits_give_wrong_values(on_device: OnDevice, program: str) -> None:
    ranks, report = PROGRAMS[program]
    for right, races in on_device("waiting_programs", "run", program, "does not wait", True, ranks=ranks):
        assert not right
        assert any(report in race for race in races), races


@pytest.mark.parametrize("program", PROGRAMS)
def test_missing_waits_are_reported_if_all_is_in_time(on_device: OnDevice, program: str) -> None:
    ranks, report = PROGRAMS[program]
    for right, races in on_device("waiting_programs", "run", program, "is lucky", False, ranks=ranks):
        assert right
        assert any(report in race for race in races), races


@pytest.mark.parametrize(
    "program", ["disjoint_parts", "readers_on_two_streams", "order_through_the_host", "seen_by_a_query"]
)
def test_programs_that_need_no_wait(on_device: OnDevice, program: str) -> None:
    assert on_device("device_programs", program) == [[]]
