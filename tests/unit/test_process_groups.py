# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Process groups of nodes with different devices."""

from __future__ import annotations

import re
from datetime import timedelta
from types import SimpleNamespace

import pytest
from accelerate.utils import GradScalerKwargs, InitProcessGroupKwargs

from accelerate_lshdp.accelerator import process_groups
from accelerate_lshdp.accelerator.session import Session
from accelerate_lshdp.runtime.topology import Topology


def backend_of(monkeypatch, handlers, found):
    """The handlers that accelerate is given, and what the ranks were asked, if they find `found`."""
    asked = []

    def choose(on_cpu, own, timeout):
        asked.append((own, timeout))
        return found or own

    monkeypatch.setattr(process_groups, "choose_backend", choose)
    keywords = {} if handlers is None else {"kwargs_handlers": handlers}
    process_groups.meet_other_devices(True, keywords)
    return keywords.get("kwargs_handlers"), asked[0]


def test_devices_of_one_kind_are_left_to_accelerate(monkeypatch):
    own = InitProcessGroupKwargs(timeout=timedelta(seconds=7))
    assert backend_of(monkeypatch, [own], None) == ([own], (None, timedelta(seconds=7)))
    assert own.backend == InitProcessGroupKwargs().backend
    assert backend_of(monkeypatch, None, None) == (None, (None, None))


def test_others_meet_over_gloo(monkeypatch):
    other = GradScalerKwargs()
    (kept, made), _ = backend_of(monkeypatch, [other], "gloo")
    assert kept is other and made.backend == "gloo"


def test_what_the_script_says_of_its_groups_stays(monkeypatch):
    own = InitProcessGroupKwargs(timeout=timedelta(seconds=7))
    backend_of(monkeypatch, [own], "gloo")
    assert own.backend == "gloo" and own.timeout == timedelta(seconds=7)


def test_ranks_are_told_of_another_backend(monkeypatch):
    _, (asked, _) = backend_of(monkeypatch, [InitProcessGroupKwargs(backend="mpi")], None)
    assert asked == "mpi"


@pytest.mark.parametrize(
    ("groups", "precision", "finds_placement", "expected"),
    [
        ("cpu:gloo,cuda:nccl", "no", False, "process groups over cpu:gloo,cuda:nccl, expected gloo on all ranks"),
        ("cpu:gloo,cuda:gloo", "fp16", False, "fp16, expected bf16 or no mixed precision"),
        ("cpu:gloo,cuda:gloo", "no", True, "a placement that the run is to find, expected strategy lsdp"),
    ],
)
def test_what_devices_of_different_types_cannot_do_is_refused(
    monkeypatch, groups, precision, finds_placement, expected
):
    monkeypatch.setattr("torch.distributed.get_backend_config", lambda: groups)
    topology = Topology(0, (1, 1), ("cuda", "cpu"))
    session = SimpleNamespace(topology=topology, finds_placement=finds_placement)
    with pytest.raises(ValueError, match=f"found nodes with devices of types cuda, cpu and {re.escape(expected)}"):
        Session._check_that_devices_meet(session, precision)


@pytest.mark.parametrize("types", [(), ("cuda", "cuda")])
def test_devices_of_one_type_may_do_all(types):
    session = SimpleNamespace(topology=Topology(0, (1, 1), types), finds_placement=True)
    Session._check_that_devices_meet(session, "fp16")
