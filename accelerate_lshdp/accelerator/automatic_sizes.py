# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Automatic batch sizes in a run: what steps took goes to the `Rebalancer`, its decisions go to the loaders.

Every rank does the same with the same numbers. They travel with the reports that ranks exchange in each step anyway,
so a decision needs no communication of its own, and all ranks come to it at the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from accelerate.logging import get_logger

from accelerate_lshdp.accelerator.device_memory import DeviceMemory
from accelerate_lshdp.data.cut import GlobalBatchCut, largest_remainder
from accelerate_lshdp.data.place import MicroBatchPlace
from accelerate_lshdp.data.prepare import HeterogeneousDataLoader
from accelerate_lshdp.documents.plan import Batch, Plan, PlanError, RankBatch
from accelerate_lshdp.documents.profile import read_profiles
from accelerate_lshdp.planning.online.rebalancing import Decision, Rebalancer
from accelerate_lshdp.planning.proofs.digest import profiles_sha256
from accelerate_lshdp.runtime.elastic_rank import elastic_rank
from accelerate_lshdp.runtime.step_exchange import RankReport


logger = get_logger(__name__)


def starting_batch(plan: Plan, world_size: int) -> Batch:
    """The sizes that an automatic plan with a total starts with: its last known ones, else an equal split.

    Raises:
        PlanError: there are more ranks than samples.
    """
    if plan.batch is not None:
        return plan.batch
    total = plan.automatic.total
    if total < world_size:
        raise PlanError(
            f"found a global batch of {total} samples for {world_size} ranks, expected at least one sample a rank."
            " Raise the total, or launch fewer ranks.",
            path="automatic.total",
            source=plan.source,
        )
    sizes = largest_remainder(total, (1,) * world_size)
    return Batch(tuple(RankBatch(rank, size) for rank, size in enumerate(sizes)))


class AutomaticSizes:
    """The batch sizes of a run that finds them itself.

    Args:
        plan: an automatic plan with the sizes to start with.
        device: where the forward runs; its memory limits the sizes.
        most_samples: the largest micro-batch of this rank for which its memory was planned; None: any.

    Raises:
        ValueError: the plan's profile cannot be read, or is of other ranks.
    """

    def __init__(self, plan: Plan, device: torch.device, most_samples: int | None = None) -> None:
        self._most_samples = most_samples
        profiles = None if plan.profile is None else read_profiles(plan.profile)
        if profiles is not None and len(profiles) != plan.world_size:
            raise PlanError(
                f"found curves of {len(profiles)} ranks, expected {plan.world_size}, one a rank. Profile these ranks,"
                " or remove the section.",
                path="profile",
                source=plan.source,
            )
        self.rebalancer = Rebalancer(
            [entry.micro_batch_size for entry in plan.batch.ranks],
            rebalance_every=plan.automatic.rebalance_every,
            dead_band=plan.automatic.dead_band,
            profiles=profiles,
        )
        self.curves = None if profiles is None else profiles_sha256(profiles)[:16]
        """A digest of the measured curves, which all ranks must have alike to decide alike."""
        self._total = plan.batch.total
        self._accumulation_steps = plan.batch.ranks[0].accumulation_steps
        self._memory = DeviceMemory(device)
        self._passes: list[HeterogeneousDataLoader] = []  # twice, if a loader has two passes in progress
        self._to_switch = False  # whether the passes in progress do not have the sizes that were decided last
        self._began_pass = False  # since the last report
        self._trained: list[MicroBatchPlace] = []
        self._reports: Sequence[RankReport] | None = None
        rank = elastic_rank()
        # Ranks of one machine may have different devices.
        self._machines = None if rank is None else _numbered(rank.machines)
        self._known: dict[str, Any] = {}
        self._forget_seconds()

    def _forget_seconds(self) -> None:
        ranks = len(self.rebalancer.batch_sizes)
        self._compute, self._fixed = [0.0] * ranks, [0.0] * ranks

    @property
    def batch(self) -> Batch:
        """The sizes that were decided last."""
        sizes = enumerate(self.rebalancer.batch_sizes)
        return Batch(tuple(RankBatch(rank, size, self._accumulation_steps) for rank, size in sizes))

    # What the loaders say

    def begin_pass(
        self, loader: HeterogeneousDataLoader, is_waiting: Callable[[HeterogeneousDataLoader], bool]
    ) -> None:
        """A training pass over a loader begins; `is_waiting`: whether a loader's last batch was not trained on yet."""
        # A pass beside it may be read together with it (`zip`), and have its old sizes for some batches.
        other = next((other for other in reversed(self._passes) if other is not loader), None)
        if other is not None:
            loader.follow_sizes(other, with_last=is_waiting(other))
        self._passes.append(loader)
        self._began_pass = True

    def join(self, loaders: Sequence[HeterogeneousDataLoader]) -> None:
        """Training passes over these loaders are in progress already, with the sizes to start with."""
        self._passes = list(loaders)

    def end_pass(self, loader: HeterogeneousDataLoader) -> None:
        """It has ended."""
        self._passes.remove(loader)

    # What a step says

    def global_batch_trained(self, place: MicroBatchPlace) -> None:
        """This rank has trained its last micro-batch of a global batch."""
        self._trained.append(place)

    @property
    def trained_sizes(self) -> list[list[int]]:
        """The sizes of all ranks in the global batches that this rank has trained since the last step."""
        return [list(place.cut.sizes) for place in self._trained]

    def complete(self, report: RankReport) -> RankReport:
        """This rank's report, with what the decision needs beside times."""
        self._began_pass = False
        own = max((place.samples for place in self._trained), default=0)
        ahead = max((loader.read_ahead for loader in self._passes), default=0)
        if self._trained and self._trained[-1].tokens is not None:
            # Counting tokens takes a whole step from the loader at once; the script may do that before the switch.
            ahead += self._trained[-1].accumulation_steps - 1
        largest = self._memory.largest_micro_batch(own)  # 0: not known
        if self._most_samples is not None:
            largest = min(largest or self._most_samples, self._most_samples)
        return report._replace(
            read_ahead=ahead,
            largest_micro_batch=largest,
            sizes_checksum=crc32(str(self.trained_sizes).encode()),
        )

    def take_reports(self, reports: Sequence[RankReport]) -> bool:
        """What all ranks report for the current step. Returns whether all of them trained with the same sizes."""
        self._reports = reports
        return len({report.sizes_checksum for report in reports}) == 1

    def step_ended(self) -> Decision | None:
        """An optimizer has stepped: takes the step into account, and switches the loaders if that changes the sizes.

        Steps of which a rank has no time (forwards that the accelerator did not see) teach nothing. What a second
        optimizer takes for batches that a first one has stepped for counts with the next batches.

        Returns:
            What was decided, the same on all ranks.
        """
        trained, self._trained = self._trained, []
        reports, self._reports = self._reports, None
        if reports is None:
            return None
        decision = self._observe(trained, reports)
        self._to_switch |= decision is not None
        # What a rank has read of a pass that began after the reports is not among them: that waits for the next step.
        if self._to_switch and not self._began_pass:
            self._to_switch = False
            ahead = max(report.read_ahead for report in reports)
            # Passes that are read together must go on together; else the next ones have the new sizes.
            if all(loader.can_switch for loader in self._passes):
                for loader in self._passes:
                    loader.switch_sizes(self.batch.ranks, ahead)
        return decision

    def _observe(self, trained: Sequence[MicroBatchPlace], reports: Sequence[RankReport]) -> Decision | None:
        for rank, report in enumerate(reports):
            self._compute[rank] += report.compute_seconds + report.data_seconds
            self._fixed[rank] += report.optimizer_seconds
        if not trained:
            return None
        compute, fixed = self._compute, self._fixed
        self._forget_seconds()
        unseen = [rank for rank, report in enumerate(reports) if report.compute_seconds <= 0]
        if unseen:
            logger.warning_once(
                f"automatic batch sizes learn nothing from a step of which ranks {unseen} have no time: call the "
                "prepared model itself, in training mode, not its forward or a part of it"
            )
        cut = _only_cut(trained)
        # A second loader may have global batches of another size, divided alike.
        if cut is None or cut.total != self._total or unseen:
            return None
        micro_batches = len(trained) * self._accumulation_steps
        return self.rebalancer.observe(
            [size // self._accumulation_steps for size in cut.sizes],
            [seconds / micro_batches for seconds in compute],
            [seconds / micro_batches for seconds in fixed],
            [report.largest_micro_batch or None for report in reports],
        )

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What was learned and decided, as JSON values."""
        return self.rebalancer.state_dict()

    def of_machines(self) -> dict[str, Any]:
        """What was learned of each machine of an elastic run, those that have left it included, as JSON values."""
        if self._machines is None:
            return {}
        return self._known | dict(zip(self._machines, self.rebalancer.learned(), strict=True))

    def recall(self, known: Mapping[str, Any]) -> None:
        """Goes on with what `of_machines` has said, of the machines that are there now.

        Raises:
            ValueError: it is malformed.
        """
        self._known = dict(known)
        self.rebalancer.go_on_with([self._known.get(machine) for machine in self._machines or ()])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with what a run of as many ranks and as large a global batch had learned.

        Raises:
            ValueError: it is of another run, or malformed.
        """
        self.rebalancer.load_state_dict(state)


def _numbered(machines: Sequence[str]) -> list[str]:
    """The name of each rank's machine with its number there."""
    return [f"{machine} {machines[:rank].count(machine)}" for rank, machine in enumerate(machines)]


def _only_cut(trained: Sequence[MicroBatchPlace]) -> GlobalBatchCut | None:
    """The sizes of all global batches of a step; None if they differ or one was short, which says little of speed."""
    cuts = {place.cut for place in trained}
    if len(cuts) != 1 or any(place.total_samples < place.cut.total for place in trained):
        return None
    return cuts.pop()
