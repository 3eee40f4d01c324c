# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Process groups of plans whose nodes have different devices."""

from __future__ import annotations

import re
from datetime import timedelta
from types import SimpleNamespace

import pytest
from accelerate.utils import GradScalerKwargs, InitProcessGroupKwargs

from accelerate_lshdp.accelerator.process_groups import meet_on_hosts
from accelerate_lshdp.accelerator.session import Session
from accelerate_lshdp.documents.cluster import Cluster, Node
from accelerate_lshdp.documents.plan import Plan
from accelerate_lshdp.runtime.topology import Topology


def plan(*devices: str | None) -> Plan:
    return Plan.from_batch_sizes([1] * len(devices), cluster=Cluster(tuple(Node(1, device=each) for each in devices)))


MIXED = plan("cpu", "RTX 3090")


@pytest.mark.parametrize(
    "unmixed", [Plan.from_batch_sizes([1, 1]), plan("cpu", "CPU"), plan("cuda", "A100"), plan(None, "cpu")], ids=str
)
def test_others_are_left_to_accelerate(unmixed):
    keywords = {"kwargs_handlers": [InitProcessGroupKwargs()]}
    meet_on_hosts(unmixed, keywords)
    assert keywords["kwargs_handlers"][0].backend == InitProcessGroupKwargs().backend
    keywords = {}
    meet_on_hosts(unmixed, keywords)
    assert keywords == {}


def test_mixed_ones_are_over_gloo():
    other = GradScalerKwargs()
    keywords = {"kwargs_handlers": [other]}
    meet_on_hosts(MIXED, keywords)
    kept, made = keywords["kwargs_handlers"]
    assert kept is other and made.backend == "gloo"


def test_what_the_script_says_of_its_groups_stays():
    own = InitProcessGroupKwargs(timeout=timedelta(seconds=7))
    meet_on_hosts(MIXED, {"kwargs_handlers": [own]})
    assert own.backend == "gloo" and own.timeout == timedelta(seconds=7)


def test_another_backend_is_refused():
    with pytest.raises(ValueError, match="found InitProcessGroupKwargs.backend='mpi'.*expected backend='gloo'"):
        meet_on_hosts(MIXED, {"kwargs_handlers": [InitProcessGroupKwargs(backend="mpi")]})


@pytest.mark.parametrize(
    ("groups", "precision", "finds_placement", "expected"),
    [
        ("cpu:gloo,cuda:nccl", "no", False, "process groups over cpu:gloo,cuda:nccl, expected gloo on all ranks"),
        ("cpu:gloo,cuda:gloo", "fp16", False, "mixed_precision='fp16', expected 'bf16' or 'no'"),
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
