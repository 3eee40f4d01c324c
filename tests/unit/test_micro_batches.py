# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""When it is decided whether gradients stay on the device between micro-batches."""

from __future__ import annotations

from accelerate_lshdp.engine.stores.streamed.micro_batches import MicroBatches


class RoomForAll:
    """Stands in for the gradients that are kept, which always fit."""

    def look(self) -> None:
        pass

    backward_begins = backward_ends = look

    def fit(self) -> bool:
        return True


class OneRank:
    """Stands in for a node of one rank, whose vote decides."""

    def vote(self, number: int, keeps: bool, has_kept: bool | None) -> None:
        self.keeps = keeps

    def all_keep(self, number: int) -> bool:
        return self.keeps


def train_a_step(micro_batches: MicroBatches) -> bool:
    """Two micro-batches; whether the next step keeps gradients."""
    for synchronise in (False, True):
        micro_batches.begin(synchronise, goes_on=synchronise)
        micro_batches.end(synchronise)
    return micro_batches.all_keep


def test_decided_by_the_first_step() -> None:
    assert train_a_step(MicroBatches(RoomForAll(), OneRank(), True, waits_for_step=False))


def test_decided_when_the_moments_of_other_parameters_are_there() -> None:
    """The first optimizer step makes them, on the device: what was free before it is not what is left."""
    micro_batches = MicroBatches(RoomForAll(), OneRank(), True, waits_for_step=True)
    assert not train_a_step(micro_batches)
    assert not train_a_step(micro_batches)  # the first step was skipped, as gradients in fp16 have overflowed
    micro_batches.others_stepped()
    assert train_a_step(micro_batches)


def test_goes_on_as_before_until_it_is_known() -> None:
    micro_batches = MicroBatches(RoomForAll(), OneRank(), True, waits_for_step=True)
    micro_batches.go_on(True)
    assert train_a_step(micro_batches)
