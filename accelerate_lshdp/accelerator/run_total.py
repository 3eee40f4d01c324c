# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""How many samples the global batches of a run have: what the plan says, held against what the script assumes.

A script that does not know this package computes its steps, epochs and schedules for global batches of its own batch
size x ranks. Under the shim a loop of its own therefore gets just these, cut as the plan says: a plan of another
total, or one that accumulates, is refused at the first backward. A plan without a total takes it from there.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

from accelerate.logging import get_logger

from accelerate_lshdp.accelerator.automatic_sizes import AutomaticSizes, starting_batch
from accelerate_lshdp.accelerator.plugin import parse_flag
from accelerate_lshdp.data.place import MicroBatchPlace
from accelerate_lshdp.data.script_total import script_total
from accelerate_lshdp.documents.plan import Automatic, Plan
from accelerate_lshdp.runtime.agreement import raise_on_all_ranks
from accelerate_lshdp.runtime.object_exchange import all_objects


if TYPE_CHECKING:
    from accelerate_lshdp.accelerator.accelerator import LSHDPAccelerator

logger = get_logger(__name__)

KEEP_VARIABLE = "LSDP_KEEP_PLAN_TOTAL"


def keeps_plan_total() -> bool:
    """Whether the user says that the script is meant for the plan's global batches, whatever its batch size.

    Raises:
        ValueError: the variable is neither true nor false.
    """
    text = os.environ.get(KEEP_VARIABLE, "")
    try:
        return bool(text.strip()) and parse_flag(text)
    except ValueError as error:
        raise ValueError(f"{KEEP_VARIABLE}: {error}") from None


def sizes_at_start(plan: Plan, world_size: int) -> Plan:
    """A plan with the sizes that it starts with; where its total is open, with one sample a rank, to be checked."""
    if plan.leaves_total_open:
        return plan.with_total(_equal_sizes(plan, world_size, world_size))
    return plan.with_batch(starting_batch(plan, world_size))


def _equal_sizes(plan: Plan, total: int, world_size: int) -> Any:
    closed = plan.with_automatic(Automatic(total, plan.automatic.rebalance_every, plan.automatic.dead_band))
    return starting_batch(closed, world_size)


class RunTotal:
    """The total of one accelerator's global batches.

    Args:
        accelerator: with its plan.
        unmodified: whether the script asked for accelerate's own class, and knows nothing of a plan.
        kept: whether the script is meant for the plan's total all the same.
    """

    def __init__(self, accelerator: LSHDPAccelerator, unmodified: bool, kept: bool) -> None:
        self._reference = weakref.ref(accelerator)  # which holds this: it is to be freed when it is dropped
        self._said_by_script = accelerator.plan.leaves_total_open
        self._checks_script = (
            unmodified and not kept and not self._said_by_script and accelerator.plan.batch is not None
        )
        self._settled = not (self._checks_script or self._said_by_script)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_reference": self._reference()}  # a pickle of an accelerator has no weak references

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _reference=weakref.ref(state["_reference"]))

    @property
    def _accelerator(self) -> LSHDPAccelerator:
        return self._reference()

    @property
    def follows_script(self) -> bool:
        """Whether each loader has global batches of its own batch size x ranks, in the plan's proportions."""
        return self._said_by_script or self._checks_script

    def leave_to_trainer(self) -> None:
        """A Trainer drives the accelerator, which asks for the plan's total before it computes anything from it."""
        if self._checks_script:
            self._checks_script, self._settled = False, True

    def settle(self, total: int) -> None:
        """Gives a plan without a total this one, and lets the run find the sizes from now on."""
        accelerator = self._accelerator
        if not accelerator.plan.leaves_total_open:
            return
        batch = _equal_sizes(accelerator.plan, total, accelerator.num_processes)
        accelerator.plan = accelerator.plan.with_total(batch)
        accelerator._sizing = AutomaticSizes(accelerator.plan, accelerator.device)
        accelerator._sizing.join(accelerator._loader_context.training_passes)
        self._settled = True
        logger.info(f"global batches have {total} samples, the script's; the run finds how to divide them")

    def settle_like(self, saved: Plan) -> None:
        """Gives a plan without a total that of a checkpoint, if a prepared loader still makes it."""
        accelerator = self._accelerator
        if not accelerator.plan.leaves_total_open or saved.automatic is None or saved.batch is None:
            return
        totals = {
            script_total(loader._source, accelerator.num_processes) for loader in accelerator._positioned_loaders()
        }
        if saved.total_batch_size in totals:
            self.settle(saved.total_batch_size)

    def before_backward(self, place: MicroBatchPlace | None) -> None:
        """Settles what is open in the first backward of a batch of a prepared loader (collective until then).

        Raises:
            RuntimeError: on all ranks, if the plan's global batches are not those that the script assumes.
        """
        if self._settled:
            return
        own = None if place is None else place.cut.total
        told = all_objects(own)
        totals = {total for total in told if total is not None}
        if not totals:
            return
        if len(totals) > 1:
            raise RuntimeError(
                f"found first backwards of global batches of {told} samples on the ranks, expected the same on all of"
                " them: they train on different loaders. Let all ranks do the same steps"
            )
        (total,) = totals
        if self._said_by_script:
            self.settle(total)
            return
        raise_on_all_ranks(self._mistake(total))
        self._settled = True

    def _mistake(self, total: int) -> str | None:
        """What the script's total and the plan's have against each other."""
        accelerator = self._accelerator
        plan, world = accelerator.plan, accelerator.num_processes
        planned, split = plan.total_batch_size, accelerator.split_batches
        if total == planned and not plan.has_accumulation:
            return None
        assumed = f"{total} samples ({'split_batches' if split else f'batch size x {world} ranks'})"
        if total == planned:
            found = f"found a plan that accumulates {plan.micro_batches} (micro-batch size, accumulation steps)"
        else:
            found = f"found a plan of global batches of {planned} samples, and a script whose batches make {total}"
        fitting = []
        if total != planned and not plan.has_accumulation and (split or planned % world == 0):
            fitting.append(f"give the script the batch size {planned if split else planned // world}")
        fitting.append(f"plan for the script (accelerate-lshdp plan --total {total} --no-accumulation)")
        fitting.append(
            "or, if its steps and schedule are meant for the plan, keep the plan's total (accelerate-lshdp launch"
            f" --keep-plan-total, or {KEEP_VARIABLE}=1)"
        )
        return (
            f"{found}, expected one micro-batch a rank and global batches of {assumed}: the script computes its steps"
            f" and learning rates for these, and would train for another time and at other rates. {_joined(fitting)}"
        )


def _joined(choices: list[str]) -> str:
    text = ", ".join(choices)
    return text[0].upper() + text[1:]
