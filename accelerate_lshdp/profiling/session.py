# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""``profile_ranks``: one profiling run of all ranks, from a user's model, data and optimizer to a `Profile`."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from accelerate_lshdp.documents.cluster import Cluster, Node
from accelerate_lshdp.documents.curves import TimeCurve
from accelerate_lshdp.documents.profile import Profile
from accelerate_lshdp.documents.profile_sections import HostRates, MeasuredRank, Network, ProfiledScript
from accelerate_lshdp.documents.unit_sizes import ModelUnits
from accelerate_lshdp.engine.module_state import parameters_of
from accelerate_lshdp.engine.policies import ShardingPolicies, resolve_policies
from accelerate_lshdp.planning import PlanningError, plan_fixed_total
from accelerate_lshdp.profiling.host_rates import host_rates_of
from accelerate_lshdp.profiling.memory import MemoryMeter, meter_of, process_bytes
from accelerate_lshdp.profiling.network import measure_network
from accelerate_lshdp.profiling.noise import seconds_without_noise
from accelerate_lshdp.profiling.options import ProfilingOptions
from accelerate_lshdp.profiling.rank_notices import RankNotices
from accelerate_lshdp.profiling.rank_session import MeasurementContext, OtherRankFailed, RankSession
from accelerate_lshdp.profiling.readiness import RecordingReduction
from accelerate_lshdp.profiling.rehearsal import LEAST_STEPS, Rehearsal, ShardReduction, make_sender, plan_rehearsal
from accelerate_lshdp.profiling.rehearsed_rank import RehearsedRank
from accelerate_lshdp.profiling.single_rank import SingleRankTrainer
from accelerate_lshdp.profiling.subject import Samples, Subject
from accelerate_lshdp.profiling.unit_sizes import units_of
from accelerate_lshdp.runtime.agreement import raise_on_all_ranks
from accelerate_lshdp.runtime.cpu_cores import cpu_quota
from accelerate_lshdp.runtime.topology import Topology


if TYPE_CHECKING:
    from accelerate_lshdp.profiling.process import ProfiledProcess

#: Fractions of the run's seconds at which each phase has to end; steps are rehearsed in the rest.
_CURVES_END, _STEPS_END, _NETWORK_END = 0.55, 0.65, 0.73
#: Fractions of the run's seconds that rehearsals and the network get even if earlier phases took too long.
_LEAST_LOAD, _LEAST_NETWORK = 0.1, 0.05
#: Each rehearsal of a plan may lead to another plan. Two plans that lead to each other are equally good.
_MOST_PLANS = 3

_Result = TypeVar("_Result")


def profile_ranks(
    subject: Subject,
    options: ProfilingOptions,
    accelerator: ProfiledProcess,
    on_progress: Callable[[str, float, float], None] | None = None,
    *,
    meter: Callable[[torch.device], MemoryMeter | None] = meter_of,
    clock: Callable[[], float] = time.perf_counter,
) -> Profile:
    """Measures the seconds and bytes of all ranks, all at the same time (collective).

    The subject cannot be used afterwards: its model is sharded and trained on a few samples.

    Args:
        subject: the user's objects, not prepared.
        options: how to measure; only ``memory_limit_bytes`` may differ between ranks.
        accelerator: gives nodes, ranks, device and precision. Its own strategy and batch sizes are not used.
        on_progress: called with the name of the phase, the seconds spent in it and those that it may take.
        meter: returns the memory meter of a device.
        clock: seconds, monotonic.

    Returns:
        The same profile on all ranks.

    Raises:
        RuntimeError: on all ranks, if anything failed on any of them; it names the rank and the cause.
        ValueError: on all ranks, if nodes have different types of devices.
    """
    run = _Run(subject, options, accelerator, on_progress or (lambda phase, done, total: None), meter, clock)
    return run.profile()


class _Run:
    """One profiling run as this rank sees it. A phase that fails on any rank ends the run on all ranks."""

    def __init__(
        self,
        subject: Subject,
        options: ProfilingOptions,
        accelerator: ProfiledProcess,
        on_progress: Callable[[str, float, float], None],
        meter: Callable[[torch.device], MemoryMeter | None],
        clock: Callable[[], float],
    ) -> None:
        self._subject = subject
        self._options = options
        self._accelerator = accelerator
        self._on_progress = on_progress
        self._world_size = accelerator.num_processes
        accelerator.check_agreement(repr(replace(options, memory_limit_bytes=None)), "how to profile")
        if accelerator.topology.mixes_devices:
            raise ValueError(
                f"found nodes with devices of types {', '.join(accelerator.topology.device_types)}, expected one: "
                "profiles do not know yet how these wait for each other. Write the batch sizes into the plan, or let "
                'the run find them (batch_sizes="auto")'
            )
        self._notices = RankNotices(self._world_size)
        # Clocks of the ranks start together, so that phases end at about the same time everywhere.
        accelerator.wait_for_everyone()
        self._clock = clock
        self._began = clock()
        self._phase_name, self._phase_began, self._phase_ends = "", 0.0, 0.0
        self._meter = meter(accelerator.device)
        self._process_bytes: int | None = None

    def profile(self) -> Profile:
        """Goes through all phases (collective)."""
        # The sender's process groups need all ranks, so they are made before a phase in which one may fail.
        recorder = self._make_recorder()
        self._sender = self._make_sender()
        self._samples = self._run_phase(
            "building the model", _CURVES_END, lambda: Samples(self._subject.train_dataloader)
        )
        script = self._run_phase("building the model", _CURVES_END, self._describe)
        units = self._run_phase("building the model", _CURVES_END, self._measure_units)
        units = self._gather(units)[0]
        trainer = self._run_phase("building the model", _CURVES_END, lambda: self._make_trainer(recorder))
        session = self._run_phase("building the model", _CURVES_END, lambda: self._build(trainer, recorder))
        # A phase ends on all ranks at once, so all begin to measure at the same time.
        curves = self._run_phase("measuring micro-batches", _CURVES_END, lambda: self._measure_curves(session))
        measured, bucket_bytes = self._run_phase(
            "measuring buckets and the optimizer", _STEPS_END, lambda: self._measure_steps(session, *curves)
        )
        # Ranks with other buckets (another version of the model's code, say) would hang in the network phase.
        self._accelerator.check_agreement(str(bucket_bytes), "the buckets of gradients")
        network = self._run_phase("measuring the network", _NETWORK_END, lambda: self._measure_network(bucket_bytes))
        everyone = self._gather(measured)
        profile = Profile(
            strategy=self._options.strategy,
            subject=script,
            cluster=Cluster(tuple(Node(size, device=trainer.device.type) for size in self._topology.node_sizes)),
            ranks=tuple(everyone),
            bucket_bytes=tuple(bucket_bytes),
            network=network,
            measured_seconds=self._spent(),
            versions={"torch": torch.__version__},
            units=units,
        )
        profile = self._run_phase("rehearsing steps of all ranks", 1.0, lambda: self._rehearse(session, profile))
        profile = replace(profile, measured_seconds=max(self._gather(self._spent())))
        if self._sender is not None:
            self._sender.close()
            self._sender = None  # gloo's threads end with the last reference
        return profile

    @property
    def _topology(self) -> Topology:
        return self._accelerator.topology

    # Phases

    def _run_phase(self, name: str, ends: float, work: Callable[[], _Result]) -> _Result:
        """Runs this rank's part of a phase; raises on all ranks if it fails on any (collective).

        Args:
            name: of the phase, for progress.
            ends: fraction of the run's seconds at which it has to end.
            work: the rank's part.
        """
        self._phase_name = name
        self._phase_began, self._phase_ends = self._spent(), ends * self._options.seconds
        error: BaseException | None = None
        result = None
        try:
            self._report_progress()
            result = work()
            self._report_progress(finished=True)
        except OtherRankFailed:
            pass  # that rank says what happened
        except (Exception, SystemExit) as found:  # user code may call sys.exit
            error = found
            # Ranks that still measure stop at their next measurement instead of finishing a phase for nothing.
            self._notices.post("failure")
        raise_on_all_ranks(error)
        return result

    def _spent(self) -> float:
        return self._clock() - self._began

    def _remaining(self) -> float:
        return self._phase_ends - self._spent()

    def _report_progress(self, finished: bool = False) -> None:
        total = max(0.0, self._phase_ends - self._phase_began)
        self._on_progress(
            self._phase_name, total if finished else min(total, self._spent() - self._phase_began), total
        )

    # What this rank does in them

    def _make_recorder(self) -> RecordingReduction | None:
        if self._world_size == 1:
            return None
        return RecordingReduction(dist.group.WORLD, self._accelerator.lsdp_plugin.communication, self._clock)

    def _describe(self) -> ProfiledScript:
        parameters = list(parameters_of(self._subject.model))
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if not trained:
            raise ValueError("found a model without trainable parameters, expected some: there is nothing to measure")
        gradient_bytes = sum(parameter.numel() * parameter.dtype.itemsize for parameter in trained)
        if self._meter is not None:
            self._process_bytes = process_bytes(self._meter, self._subject.model, self._accelerator.device)
        # The worker of the command adds the script, which this run does not know.
        return ProfiledScript(None, (), sum(parameter.numel() for parameter in parameters), gradient_bytes)

    def _measure_units(self) -> ModelUnits | None:
        if self._accelerator.process_index:
            return None  # one rank is enough: all have the same model
        return units_of(self._subject, self._samples, self._accelerator, self._options.units)

    def _make_trainer(self, recorder: RecordingReduction | None) -> SingleRankTrainer:
        return SingleRankTrainer(
            self._accelerator,
            self._options.strategy,
            units=self._options.units,
            bucket_megabytes=self._options.bucket_megabytes or self._accelerator.lsdp_plugin.bucket_megabytes,
            reducing_ranks=len(self._policies().replica_groups[0]),
            reduction=recorder,
            clock=self._clock,
        )

    def _build(self, trainer: SingleRankTrainer, recorder: RecordingReduction | None) -> RankSession:
        trainer.build(self._subject)
        context = MeasurementContext(
            self._remaining,
            self._others_measure,
            another_failed=lambda: self._notices.posted_by_any("failure"),
            on_measurement=self._report_progress,
            clock=self._clock,
        )
        session = RankSession(trainer, self._samples, self._meter, recorder, context)
        session.warm_up()
        return session

    def _others_measure(self) -> bool:
        self._notices.post("quiet")
        return not self._notices.posted_by_all("quiet")

    def _measure_curves(self, session: RankSession) -> tuple[Any, ...]:
        limit = self._options.memory_limit_bytes
        if self._meter is None:
            if limit is not None:
                raise ValueError(
                    f"found memory_limit_bytes={limit}, but nothing measures the memory of {self._accelerator.device};"
                    " leave it out, and give max_batch instead"
                )
        elif limit is None:
            limit = self._meter.default_limit(self._topology.node_sizes[self._topology.node])
        found = session.find(self._options.max_batch, self._options.needed_batch, limit)
        return limit, found, session.memory(found), session.repeat(found)

    def _measure_steps(self, session: RankSession, *curves: Any) -> tuple[MeasuredRank, list[int]]:
        limit, found, memory, repeats = curves
        seconds = seconds_without_noise(repeats)
        accumulation_overhead_seconds = session.accumulation_overhead(seconds)
        optimizer_seconds, ready, bucket_bytes = session.full_steps(seconds)
        rank = MeasuredRank(
            rank=self._accelerator.process_index,
            time=TimeCurve(tuple(seconds), tuple(seconds.values())),
            spread=tuple(measured.spread for measured in repeats.values()),
            max_micro_batch_size=max(seconds),
            limited_by=found.limited_by,
            device=device_name(self._accelerator.device),
            optimizer_seconds=optimizer_seconds,
            memory=memory,
            memory_limit_bytes=limit,
            bucket_ready=tuple(ready),
            accumulation_overhead_seconds=accumulation_overhead_seconds,
            process_bytes=self._process_bytes,
            host=self._measure_host(),
        )
        return rank, bucket_bytes

    def _measure_host(self) -> HostRates | None:
        process = self._accelerator
        return host_rates_of(process.device, self._subject.model, process.mixed_precision, clock=self._clock)

    def _rehearse(self, session: RankSession, profile: Profile) -> Profile:
        """The profile, corrected by rehearsed steps of all ranks together."""
        if self._sender is None:
            return profile
        alone = profile.ranks[self._accelerator.process_index]
        rank = RehearsedRank(alone, self._limited_cores())
        seconds = max(self._remaining_on_all_ranks(), _LEAST_LOAD * self._options.seconds)
        sizes = self._planned_sizes(profile)
        if sizes is None:
            rehearsal = plan_rehearsal([rank.time for rank in profile.ranks], seconds)[alone.rank]
            steps = self._gather(session.rehearse(rehearsal, self._sender))
            return self._with_ranks(profile, rank.learn(steps))
        # What a rehearsal shows changes the plan, and another plan may be slowed by other ranks: repeated until a plan
        # comes up again.
        rehearsed: set[tuple[int, ...]] = set()
        while sizes is not None and sizes not in rehearsed and len(rehearsed) < _MOST_PLANS:
            if rehearsed and self._remaining_on_all_ranks() <= 0:
                break
            rehearsed.add(sizes)
            steps = self._gather(session.rehearse(Rehearsal(sizes[alone.rank], LEAST_STEPS), self._sender))
            profile = self._with_ranks(profile, rank.learn(steps))
            sizes = self._planned_sizes(profile)
        return profile

    def _limited_cores(self) -> float | None:
        """CPU seconds per second of this rank, where a control group limits them below its threads; else None."""
        # CPU seconds do not go with a clock of another kind.
        is_timed = self._accelerator.device.type == "cpu" and self._clock is time.perf_counter
        quota = cpu_quota() if is_timed else None
        if quota is None:
            return None
        cores = quota / self._topology.node_sizes[self._topology.node]
        return cores if cores <= torch.get_num_threads() else None

    def _planned_sizes(self, profile: Profile) -> tuple[int, ...] | None:
        """Micro-batch sizes of the plan for `total_batch_size`, one a rank; None: no total, or no plan for it."""
        if self._options.total_batch_size is None:
            return None
        try:
            planned = plan_fixed_total(
                profile.rank_profiles(),
                self._options.total_batch_size,
                bucket_seconds=profile.bucket_seconds(),
                shard_groups=profile.shard_groups(),
            )
        except PlanningError:  # it needs accumulation, or other limits than those of this run
            return None
        return tuple(planned.batch_sizes)

    def _with_ranks(self, profile: Profile, learned: MeasuredRank) -> Profile:
        """The profile with this rank's entry and those that the other ranks have learned (collective)."""
        return replace(profile, ranks=tuple(self._gather(learned)))

    def _remaining_on_all_ranks(self) -> float:
        """Seconds left of the phase: the least of all ranks, so that all decide alike (collective)."""
        return min(self._gather(self._remaining()))

    def _make_sender(self) -> ShardReduction | None:
        if self._world_size == 1:
            return None
        communication = self._accelerator.lsdp_plugin.communication
        rank = self._accelerator.process_index
        return make_sender(self._policies(), rank, communication, self._raise_if_another_failed)

    def _policies(self) -> ShardingPolicies:
        """The sharding of a real run of all ranks."""
        return resolve_policies(
            self._options.strategy,
            self._topology,
            device_type=self._accelerator.device.type,
            intra_node=self._accelerator.lsdp_plugin.intra_node,
        )

    def _raise_if_another_failed(self) -> None:
        if self._notices.posted_by_any("failure"):
            raise OtherRankFailed

    def _measure_network(self, bucket_bytes: list[int]) -> Network | None:
        if self._world_size == 1:
            return None
        seconds = max(self._remaining_on_all_ranks(), _LEAST_NETWORK * self._options.seconds)
        return measure_network(
            self._topology,
            self._accelerator.device,
            bucket_bytes,
            min(seconds, (_NETWORK_END - _STEPS_END) * self._options.seconds),
            clock=self._clock,
            on_progress=lambda spent: self._report_progress(),
        )

    def _gather(self, value: _Result) -> list[_Result]:
        everyone: list[Any] = [value] * self._world_size
        if self._world_size > 1:
            dist.all_gather_object(everyone, value)
        return everyone


def device_name(device: torch.device) -> str:
    """The product name of a GPU, or of this machine's processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        try:
            lines = Path("/proc/cpuinfo").read_text().splitlines()
        except OSError:
            lines = []
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return next(filter(None, names), platform.processor() or platform.machine() or "cpu")
    return device.type
