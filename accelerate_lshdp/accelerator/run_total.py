# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""How many samples the global batches of a run have: what the plan says, held against what the script assumes.

A script that does not know this package computes its steps, epochs and schedules for global batches of its own batch
size x ranks. Under the shim a loop of its own therefore gets just these, cut as the plan says: a plan of another
total, or one that accumulates, is refused at the first backward. A plan without a total takes it from there.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from accelerate_lshdp.accelerator.automatic_sizes import starting_batch
from accelerate_lshdp.accelerator.plugin import parse_flag
from accelerate_lshdp.data.place import MicroBatchPlace
from accelerate_lshdp.documents.plan import Automatic, Batch, Plan
from accelerate_lshdp.runtime.agreement import raise_on_all_ranks
from accelerate_lshdp.runtime.object_exchange import all_objects


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
        return plan.with_total(equal_sizes(plan, world_size, world_size))
    return plan.with_batch(starting_batch(plan, world_size))


def equal_sizes(plan: Plan, total: int, world_size: int) -> Batch:
    """An equal split of a total that an automatic plan leaves open."""
    closed = plan.with_automatic(Automatic(total, plan.automatic.rebalance_every, plan.automatic.dead_band))
    return starting_batch(closed, world_size)


class RunTotal:
    """The total of one run's global batches, as far as the plan or the script has settled it.

    Args:
        plan: of the run, as it starts.
        unmodified: whether the script asked for accelerate's own class, and knows nothing of a plan.
        kept: whether the script is meant for the plan's total all the same.
        split_batches: whether the batch size of the script's loaders is that of all ranks together.
    """

    def __init__(self, plan: Plan, *, unmodified: bool, kept: bool, split_batches: bool) -> None:
        self._split_batches = split_batches
        self._said_by_script = plan.leaves_total_open
        self._checks_script = unmodified and not kept and not self._said_by_script and plan.batch is not None
        self._settled = not (self._checks_script or self._said_by_script)

    @property
    def follows_script(self) -> bool:
        """Whether each loader has global batches of its own batch size x ranks, in the plan's proportions."""
        return self._said_by_script or self._checks_script

    def leave_to_trainer(self) -> None:
        """A Trainer drives the run, and asks for the plan's total before it computes anything from it."""
        if self._checks_script:
            self._checks_script, self._settled = False, True

    def settle(self) -> None:
        """The plan has a total by now."""
        self._settled = True

    def before_backward(
        self, place: MicroBatchPlace | None, plan: Plan, world_size: int, collective_begins: Callable[[], None]
    ) -> int | None:
        """Checks the first backward of a batch of a prepared loader against the plan (collective until then).

        Args:
            place: of its batch; None: it is of no prepared loader.
            plan: of the run.
            world_size: number of ranks.
            collective_begins: called before all ranks are asked.

        Returns:
            The script's total, if the plan leaves it open.

        Raises:
            RuntimeError: on all ranks, if the plan's global batches are not those that the script assumes.
        """
        if self._settled:
            return None
        collective_begins()
        own = None if place is None else place.cut.total
        of_ranks = all_objects(own)
        totals = {total for total in of_ranks if total is not None}
        if not totals:
            return None
        if len(totals) > 1:
            raise RuntimeError(
                f"found first backwards of global batches of {of_ranks} samples on the ranks, expected the same on all"
                " of them: they train on different loaders. Let all ranks do the same steps"
            )
        (total,) = totals
        if self._said_by_script:
            return total
        raise_on_all_ranks(self._mistake(total, plan, world_size))
        self._settled = True
        return None

    def _mistake(self, total: int, plan: Plan, world: int) -> str | None:
        """What the script's total and the plan's have against each other."""
        planned, split = plan.total_batch_size, self._split_batches
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
