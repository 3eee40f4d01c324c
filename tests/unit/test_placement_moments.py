# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Memory at the moments of a step: never less than a timeline of allocations takes, which is written out here."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from placement_problems import cluster_for

from accelerate_lshdp.documents.placement import UnitPlacement, UnitStore
from accelerate_lshdp.documents.step_memory import stepping_bytes
from accelerate_lshdp.documents.unit_sizes import MeasuredHead
from accelerate_lshdp.planning.placement.from_profile import _needed_at_most
from accelerate_lshdp.planning.placement.inputs import ModelSizes, UnitSize
from accelerate_lshdp.planning.placement.options import pose_placement
from accelerate_lshdp.planning.placement.problem import PlacementProblem


NODES = (2, 2)
AMPLE = 10**12
STORES = (UnitStore.REPLICATE, UnitStore.NODE, UnitStore.WORLD, UnitStore.WORLD_KEPT, UnitStore.WORLD_TO_NODE)
#: Those of units that are gathered for their forward, and again for their backward.
GATHERED = (UnitStore.NODE, UnitStore.WORLD, UnitStore.WORLD_TO_NODE)
#: Of a unit's states: how many ranks share them.
SHARES = {UnitStore.REPLICATE: 1, UnitStore.NODE: 2}


def needed(problem: PlacementProblem, chosen: list[UnitPlacement]) -> list[int]:
    """Bytes of rank 0 in each of its rows; units that are alike are one kind."""
    counts, left = [], list(chosen)
    for kind in problem.kinds:
        own = [left.pop(0) for _ in kind.units]
        counts.append([own.count(option.placement) for option in kind.options])
    return [need for row, need in zip(problem.rows, problem.memory(counts), strict=True) if 0 in row.ranks]


class Timeline:
    """What a rank has allocated, and the most that it had."""

    def __init__(self) -> None:
        self.now = self.most = 0.0

    def take(self, size: float) -> None:
        self.now += size
        self.most = max(self.most, self.now)

    def for_a_moment(self, *sizes: float) -> None:
        self.take(sum(sizes))
        self.now -= sum(sizes)


def simulated(model: ModelSizes, chosen: list[UnitPlacement], samples: int) -> float:
    """The most bytes of two steps of a rank, fp32, units in the order of the model, the root last among `chosen`."""
    *of_units, of_root = chosen
    head, time = model.head, Timeline()
    gathered = [u.parameters * 4 for u, own in zip(model.units, of_units, strict=True) if own.store in GATHERED]
    largest = max(gathered, default=0)

    def share(placement: UnitPlacement) -> int:
        return SHARES.get(placement.store, 4)

    for unit, placement in zip((*model.units, model.root), chosen, strict=True):
        time.take(unit.parameters * 12 / share(placement))  # with AdamW's moments
        if placement.store is UnitStore.REPLICATE:
            time.take(unit.parameters * 4)  # gradients in buffers that stay
    if of_root.store is not UnitStore.REPLICATE:
        time.take(2 * model.root.parameters * 4)  # gathered all the time, and its gradient before it is reduced
    for step in range(2):
        time.take(samples * (model.root.activation_bytes - head.kept_bytes))
        for unit, placement in zip(model.units, of_units, strict=True):
            if placement.store in GATHERED:
                time.for_a_moment(2 * largest)
            time.take(samples * (unit.input_bytes if placement.checkpoint else unit.activation_bytes))
            if placement.store is UnitStore.WORLD_KEPT:
                time.take(unit.parameters * 4)
            if placement.store is UnitStore.WORLD_TO_NODE:
                time.take(unit.parameters * 4 / 2)
        time.take(samples * head.kept_bytes)
        time.take(samples * head.own_output_bytes)
        if step:
            # Those of the step before, which are held until the forward has returned.
            time.for_a_moment(0)
            time.now -= samples * head.output_bytes
        time.for_a_moment(samples * head.working_bytes)
        # What the outputs hold stays, the other activations of the head are free.
        time.now -= samples * (head.kept_bytes + head.own_output_bytes)
        time.take(samples * head.output_bytes)
        comes, message = [], 0.0  # of the unit before, which FSDP2 keeps
        for unit, placement in reversed(list(zip(model.units, of_units, strict=True))):
            gradient, whole = unit.parameters * 4 / share(placement), unit.parameters * 4
            again = unit.activation_bytes * samples if placement.checkpoint else 0.0
            around = largest + whole if placement.store in GATHERED else 0.0
            unreduced = 0.0 if placement.store is UnitStore.REPLICATE else whole
            time.for_a_moment(samples * head.units_working_bytes, again, around, unreduced, message)
            time.now -= samples * (unit.input_bytes if placement.checkpoint else unit.activation_bytes)
            if placement.store is UnitStore.WORLD_KEPT:
                time.now -= whole
            if placement.store is UnitStore.WORLD_TO_NODE:
                time.now -= whole / 2
            if placement.store is not UnitStore.REPLICATE:
                time.take(gradient)
                comes.append(gradient)
                message = whole
        time.now -= samples * (model.root.activation_bytes - head.kept_bytes)
        if of_root.store is not UnitStore.REPLICATE:
            comes.append(model.root.parameters * 4 / share(of_root))
            time.for_a_moment(model.root.parameters * 4)
            time.take(comes[-1])
        time.for_a_moment(stepping_bytes(4 * model.trainable, 4 * model.largest_parameter))
        time.now -= sum(comes)  # zero_grad
    return time.most


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelSizes, list[UnitPlacement], int]:
    count = draw(st.integers(1, 5))
    mega = st.integers(0, 40).map(lambda size: size * 1e6)
    units = []
    for place in range(count):
        parameters, kept = draw(st.integers(1, 20)) * 10**6, draw(mega)
        given_to = kept * draw(st.sampled_from([0.0, 0.1, 1.0]))
        units.append(UnitSize(f"h.{place}", parameters, parameters, kept, given_to, 1e9, None, parameters // 2))
    of_head, parameters = draw(mega), draw(st.integers(1, 20)) * 10**6
    root = UnitSize("", parameters, parameters, of_head + draw(mega), 0, 1e9, None, parameters)
    output, own = draw(mega), draw(st.sampled_from([0.0, 0.5, 1.0]))
    head = MeasuredHead(of_head, 2 * draw(mega), 2 * draw(mega), output, output * own)
    placements = st.builds(UnitPlacement, st.sampled_from(STORES), st.booleans())
    chosen = [draw(placements) for _ in units]
    chosen.append(UnitPlacement(draw(st.sampled_from([s for s in STORES if s is not UnitStore.WORLD_TO_NODE]))))
    return ModelSizes(tuple(units), root, head.working_bytes, head=head), chosen, draw(st.integers(1, 4))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_no_moment_of_a_step_needs_more_than_its_rows_say(
    case: tuple[ModelSizes, list[UnitPlacement], int],
) -> None:
    model, chosen, samples = case
    # Names that differ in no size would make one kind; sizes may be equal, so units are told apart here.
    units = tuple(replace(unit, flops=unit.flops + place) for place, unit in enumerate(model.units))
    model = replace(model, units=units)
    problem = pose_placement(model, cluster_for(model, NODES, (AMPLE,) * 4), (samples,) * 4)
    assert max(needed(problem, chosen)) >= simulated(model, chosen, samples) - 1


def posed(head: MeasuredHead | None, samples: int = 2) -> tuple[ModelSizes, PlacementProblem]:
    size = 6_000_000
    units = tuple(UnitSize(f"h.{place}", size, size, 30e6, 2e6, 9e9, None, size // 2) for place in range(4))
    root = UnitSize("", size, size, 21e6, 0, 1e9, None, size)
    model = ModelSizes(units, root, 40e6, head=head)
    return model, pose_placement(model, cluster_for(model, NODES, (AMPLE,) * 4), (samples,) * 4)


def test_the_three_moments_written_out() -> None:
    head = MeasuredHead(
        kept_bytes=20e6, working_bytes=40e6, units_working_bytes=8e6, output_bytes=20e6, own_output_bytes=5e6
    )
    model, problem = posed(head)
    chosen = [UnitPlacement(UnitStore.WORLD)] * 4 + [UnitPlacement(UnitStore.WORLD)]
    size = model.root.parameters
    kept = 5 * size * 12 // 4 + 2 * 4 * size  # parameters and moments; the root gathered, and its gradient
    loss, backward, step = needed(problem, chosen)
    assert loss == kept + 2 * (4 * 30e6 + 21e6 + 5e6 + 40e6) + 2 * 4 * size
    # Activations of a unit are more than a quarter of its gradient; those of the root's beginning are less.
    assert backward == kept + 2 * (4 * 30e6 + 20e6 + 8e6) + max(2 * 1e6, size) + (2 + 1 + 1) * 4 * size
    assert step == kept + 5 * size + 2 * 20e6 + 2 * 4 * size + stepping_bytes(4 * 5 * size, 4 * size)


def test_outputs_of_the_forward_before_count_where_the_head_works_on_less() -> None:
    head = MeasuredHead(0, working_bytes=4e6, units_working_bytes=4e6, output_bytes=50e6, own_output_bytes=10e6)
    _, problem = posed(head, samples=1)
    _, less = posed(replace(head, output_bytes=10e6), samples=1)
    chosen = [UnitPlacement(UnitStore.REPLICATE)] * 5
    assert needed(problem, chosen)[0] - needed(less, chosen)[0] == 40e6


def test_without_the_head_there_is_one_moment_at_which_all_is_there() -> None:
    _, problem = posed(None)
    assert len(problem.rows) == 1 and problem.rows[0].name == "rank 0, 1, 2, 3"


def test_gradients_of_several_micro_batches_are_there_all_the_time() -> None:
    head = MeasuredHead(0, 0, 0, 0, 0)
    model, once = posed(head)
    several = pose_placement(model, cluster_for(model, NODES, (AMPLE,) * 4), (2,) * 4, 2)
    chosen = [UnitPlacement(UnitStore.NODE)] * 4 + [UnitPlacement(UnitStore.REPLICATE)]
    size = model.root.parameters
    assert needed(several, chosen)[0] - needed(once, chosen)[0] == math.ceil(4 * 4 * size / 2)


@settings(max_examples=50, deadline=None)
@given(cases())
def test_what_a_profile_calls_beyond_the_model_has_no_term_of_it_left_out(
    case: tuple[ModelSizes, list[UnitPlacement], int],
) -> None:
    """A measured peak less `_needed_at_most` is at least the peak less what the rows of a rank alone say."""
    model, _, samples = case
    problem = pose_placement(model, cluster_for(model, (1,), (AMPLE,)), (samples,))
    chosen = [UnitPlacement(UnitStore.REPLICATE)] * len(model.everything)
    states = 16 * sum(unit.parameters for unit in model.everything)
    assert _needed_at_most(model, samples, states) <= max(needed(problem, chosen))
