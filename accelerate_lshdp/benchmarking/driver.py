# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Trains every case of a benchmark on one cluster with one model, and measures it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import mean
from typing import Any

from accelerate_lshdp.benchmarking.cases import FULL_PRECISION, PLAN, equal_sizes
from accelerate_lshdp.benchmarking.config import BenchmarkConfig
from accelerate_lshdp.benchmarking.formula_bytes import formula_bytes
from accelerate_lshdp.benchmarking.launches import ENGINE, PLAIN_DDP, PLAIN_FSDP2, Launch
from accelerate_lshdp.benchmarking.measurement import Measurement
from accelerate_lshdp.benchmarking.memory_meter import MemoryMeter
from accelerate_lshdp.benchmarking.planned import (
    Format,
    Knowledge,
    Overheads,
    has_units,
    micro_batches_of,
    read_formats,
)
from accelerate_lshdp.benchmarking.rank_processes import RankError
from accelerate_lshdp.benchmarking.speed_check import Speed, speed_of
from accelerate_lshdp.documents.profile import Profile
from accelerate_lshdp.documents.profile_sections import read_network
from accelerate_lshdp.emulated_cluster import ClusterError
from accelerate_lshdp.planning import PlanningError
from accelerate_lshdp.planning.cost.cluster_model import ModelSize


START_SECONDS = 180.0
BUILD_SECONDS = 180.0
NETWORK_SECONDS = 4.0
#: Optimizer states are there after the first step, so peaks come early.
MEMORY_STEPS = 3
#: What ends a case, and all cases that need the same processes; anything else is a mistake of the driver.
_FAILURES = (RankError, ClusterError, PlanningError, ValueError)


class ClusterBenchmark:
    """All cases on one cluster with one model.

    Args:
        config: of the benchmark.
        cluster, model: names in it.
        launch: starts the processes of the crews that it is given.
        say: tells whoever waits what is going on.
    """

    def __init__(
        self,
        config: BenchmarkConfig,
        cluster: str,
        model: str,
        launch: Callable[[Sequence[str]], AbstractContextManager[Launch]],
        say: Callable[[str], None],
    ) -> None:
        self.config = config
        self.model = config.models[model]
        self._launch = launch
        self._say = say
        self._knowledge: Knowledge | None = None
        self._formats: dict[str, Format] = {}
        # Of each case on each network, what the ranks told when their speed was checked before and after its turns.
        self._checks: dict[str, list[Any]] = defaultdict(list)
        self._size: ModelSize | None = None
        nodes = [node.ranks for node in config.clusters[cluster]]
        self._ranks = sum(nodes)
        self.measurements = [
            Measurement(cluster, model, name, network.bits_per_second, nodes, config.total_batch_size, case)
            for name, network in config.networks.items()
            for case in config.cases
        ]

    def run(self) -> list[Measurement]:
        """Measures everything. A case that fails has its error; what it took with it has the same."""
        crews = tuple(dict.fromkeys([ENGINE, *map(_crew, self.measurements)]))
        learned_of = tuple(crew for crew in crews if crew in (ENGINE, PLAIN_FSDP2))
        if self.config.interleaved:
            with self._noting_failures(self.measurements), self._built(crews) as launch:
                self._learn(launch)
                for network in self.config.networks:
                    self._measure_in_turns(launch, network)
        else:
            with self._noting_failures(self.measurements):
                # Without a profile there is nothing to predict.
                with self._built(learned_of if self.config.profile_seconds else (ENGINE,)) as launch:
                    self._learn(launch)
        if self.config.memory or not self.config.interleaved:
            for case in self.config.cases:
                self._measure_alone([m for m in self.measurements if m.case == case and m.error is None])
        return self.measurements

    # Processes and what is known of them

    @contextmanager
    def _built(self, crews: Sequence[str]) -> Iterator[Launch]:
        """Processes that have built what all cases need."""
        self._say("starting the processes")
        with self._launch(crews) as launch:
            for crew in crews:
                told = launch.call(
                    "build",
                    crew=crew,
                    timeout=START_SECONDS,
                    model=self.model,
                    seed=self.config.seed,
                    learning_rate=self.config.learning_rate,
                    emulated=launch.sleeps,
                    timeout_seconds=2 * self.config.step_timeout_seconds,
                )[0]
            self._size = ModelSize(4 * told["parameters"], 4 * told["parameters"], told["unit_bytes"])
            for measurement in self.measurements:
                measurement.parameters = told["parameters"]
            yield launch

    def _measure_formats(self, launch: Launch) -> None:
        """What the formats send and take; CPU seconds are the same at any speed."""
        names = sorted({FULL_PRECISION, *(case.communication_dtype for case in self.config.cases)})
        told = launch.call("measure_formats", timeout=BUILD_SECONDS, names=names)
        self._formats = read_formats(told, launch.node_sizes)

    def _learn(self, launch: Launch) -> None:
        """Profiles the ranks on the first network, and measures every other one."""
        self._measure_formats(launch)
        seconds = self.config.profile_seconds
        if not seconds:
            return
        self._say(f"profiling the ranks for {seconds:g} s")
        launch.call("prepare_profile", timeout=BUILD_SECONDS)
        measured: dict[str, Any] = {}
        delays: dict[str, float] = {}
        for name, network in self.config.networks.items():
            with launch.as_described(network):
                if not measured:
                    most = self.config.total_batch_size - self._ranks + 1
                    total = self.config.total_batch_size
                    needed = max(equal_sizes(total, self._ranks))  # cases with equal batches are to be predicted
                    told = launch.call(
                        "profile",
                        timeout=BUILD_SECONDS + 5 * seconds,
                        seconds=seconds,
                        max_batch=most,
                        needed_batch=needed,
                        total=total,
                    )
                    profile = told[0]
                    measured[name] = profile["network"]
                else:
                    told = launch.call("measure_network", timeout=BUILD_SECONDS, seconds=NETWORK_SECONDS)
                    measured[name] = told[0]
                if len(launch.nodes) > 1:
                    delays[name] = mean(launch.call("measure_message_delay", timeout=BUILD_SECONDS))
        self._knowledge = Knowledge(
            nodes=launch.nodes,
            profile=Profile.from_dict(profile),
            networks={name: (self.config.networks[name], read_network(network)) for name, network in measured.items()},
            model=self._size,
            formats=self._formats,
            shared_memory=launch.call("uses_shared_memory")[0],
            overheads=self._measure_overheads(launch, ENGINE),
            message_delay_seconds=delays,
            emulated_by_sleeping=launch.sleeps,
            plain_overheads=(
                self._measure_overheads(launch, PLAIN_FSDP2) if PLAIN_FSDP2 in launch.crews else Overheads()
            ),
        )

    def _measure_overheads(self, launch: Launch, crew: str) -> Overheads:
        told = launch.call(
            "measure_overheads",
            crew=crew,
            timeout=BUILD_SECONDS,
            is_peer=crew != ENGINE,
            node_sizes=list(launch.node_sizes),
        )
        return Overheads(**{name: mean(rank[name] for rank in told) for name in told[0]})

    def _check_speed(self, launch: Launch, *measurements: Measurement) -> None:
        """How fast the ranks are at present, in the processes of a case, or of two between their turns.

        Not where memory is measured meanwhile: the model that it trains would count.
        """
        if self._knowledge is None or (self.config.memory and not self.config.interleaved):
            return
        sizes, _ = self._check_micro_batches()
        crew = _crew(measurements[0])
        told = launch.call("check_speed", crew=crew, timeout=BUILD_SECONDS, sizes=sizes, is_peer=crew != ENGINE)
        for measurement in measurements:
            self._checks[measurement.name].append(told)

    def _check_micro_batches(self) -> tuple[list[int], list[float]]:
        planned = any(case.batch_sizes == PLAN for case in self.config.cases)
        return self._knowledge.check_micro_batches(self.config.total_batch_size, planned=planned)

    # Measuring

    def _measure_in_turns(self, launch: Launch, network: str) -> None:
        """Rounds over all cases on one network; each round begins with another case."""
        cases = [m for m in self.measurements if m.network == network]
        self._say(f"{network}: preparing {len(cases)} cases")
        for measurement in cases:
            self._attempt(launch, measurement, lambda m: self._begin(launch, m))
        with launch.as_described(self.config.networks[network]):
            for turn in range(self.config.rounds):
                self._say(f"{network}: round {turn + 1} of {self.config.rounds}")
                first = turn * len(cases) // self.config.rounds
                self._take_turns(launch, cases[first:] + cases[:first])
        for measurement in cases:
            self._predict(measurement)
            self._attempt(launch, measurement, lambda m: self._end(launch, m))

    def _measure_alone(self, measurements: Sequence[Measurement]) -> None:
        """One case in fresh processes: its memory, and if cases do not take turns, its speed."""
        if not measurements:
            return
        self._say(f"{measurements[0].case.label}: in fresh processes")
        crew = _crew(measurements[0])
        with self._noting_failures(measurements), self._built((crew,)) as launch:
            meter = MemoryMeter(launch.memory_bytes) if self.config.memory else None
            with meter or nullcontext():
                for measurement in measurements if not self.config.interleaved else measurements[:1]:
                    self._begin(launch, measurement)
                    if self.config.interleaved:
                        self._train(launch, measurement, MEMORY_STEPS)
                    else:
                        with launch.as_described(self.config.networks[measurement.network]):
                            self._take_turns(launch, [measurement] * self.config.rounds)
                        self._predict(measurement)
                        self._attempt(launch, measurement, lambda m: self._end(launch, m))
            if meter is not None:
                peaks = launch.call("peak_bytes", crew=crew)
                for measurement in measurements:
                    measurement.peak_pss_bytes = meter.peak_bytes
                    measurement.peak_rank_bytes = peaks

    def _begin(self, launch: Launch, measurement: Measurement) -> None:
        case = measurement.case
        if measurement.micro_batches is None:
            measurement.micro_batches = micro_batches_of(
                case, measurement.total_batch_size, self._ranks, self._knowledge, measurement.network
            )
            most = max(steps for _, steps in measurement.micro_batches)
            wire_bytes = self._formats[case.communication_dtype].wire_bytes
            measurement.formula_bytes = formula_bytes(case, measurement.nodes, self._size, most, wire_bytes)
        launch.call(
            "begin",
            crew=_crew(measurement),
            timeout=BUILD_SECONDS,
            name=measurement.name,
            strategy=case.strategy if case.is_peer else str(case.engine_strategy),
            is_peer=case.is_peer,
            communication_dtype=case.communication_dtype,
            micro_batches=measurement.micro_batches,
            ranks_per_node=measurement.nodes[0],
        )

    def _predict(self, measurement: Measurement) -> None:
        """The step at the speed that the ranks had around the case's turns; where none was checked, as profiled.

        Plain PyTorch's optimizer is known from checks only: without them its cases are not predicted.
        """
        if self._knowledge is None or measurement.error is not None:
            return
        _, expected = self._check_micro_batches()
        checks = self._checks[measurement.name]
        if not checks and measurement.case.is_peer:
            return
        speed = Speed((1.0,) * self._ranks, (0.0,) * self._ranks, (0.0,) * self._ranks)
        if checks:
            speed = speed_of(checks, self._checks_among(measurement), expected, measurement.nodes)
        measurement.slowdown = speed.slowdown if checks else None
        try:
            measurement.predicted_seconds = self._knowledge.predicted_seconds(
                measurement.case, measurement.micro_batches, measurement.network, speed
            )
        except ValueError as error:  # sizes that the file gives may be larger than those that were measured
            self._say(f"{measurement.name} is not predicted: {error}")

    def _checks_among(self, measurement: Measurement) -> list[Any]:
        """All checks on the case's network in the processes in which it trained."""
        if not self.config.interleaved:
            return self._checks[measurement.name]
        place = (measurement.network, _crew(measurement))
        alike = [m for m in self.measurements if (m.network, _crew(m)) == place]
        # One between the turns of two cases is both's.
        return list({id(check): check for m in alike for check in self._checks[m.name]}.values())

    def _take_turns(self, launch: Launch, measurements: Sequence[Measurement]) -> None:
        """A turn of each, with the speed checked before and after it; one that fails takes no more."""
        last: Measurement | None = None

        def take(measurement: Measurement) -> None:
            self._check_speed(launch, measurement, *([] if last is None else [last]))
            self._take_turn(launch, measurement)

        for measurement in measurements:
            if last is not None and _crew(last) != _crew(measurement):  # other processes may be tuned otherwise
                self._attempt(launch, last, lambda m: self._check_speed(launch, m))
                last = None
            self._attempt(launch, measurement, take)
            last = measurement if measurement.error is None else last
        if last is not None:
            self._attempt(launch, last, lambda m: self._check_speed(launch, m))

    def _take_turn(self, launch: Launch, measurement: Measurement) -> None:
        """Some steps that do not count, then those that do, as many as there is time for."""
        steps = self.config.steps
        if self.config.uncounted_steps:
            spent = measurement.trained(self._train(launch, measurement, self.config.uncounted_steps))
            left = self.config.turn_seconds - sum(spent)
            steps = max(1, min(steps, round(left / spent[-1])))
        before = launch.sent_between_nodes(), launch.sent_inside_nodes()
        trained = self._train(launch, measurement, steps)
        sent = _difference(before, (launch.sent_between_nodes(), launch.sent_inside_nodes()))
        measurement.add_turn(trained, *sent)

    def _train(self, launch: Launch, measurement: Measurement, steps: int) -> Any:
        timeout = 30 + self.config.step_timeout_seconds * steps
        return launch.call("train", crew=_crew(measurement), timeout=timeout, name=measurement.name, steps=steps)

    def _end(self, launch: Launch, measurement: Measurement) -> None:
        crew = _crew(measurement)
        measurement.statistics = launch.call("statistics", crew=crew, name=measurement.name)[0]
        measurement.timeline = launch.call("timeline", crew=crew, name=measurement.name)
        launch.call("end", crew=crew, name=measurement.name)

    # Failures

    def _attempt(self, launch: Launch, measurement: Measurement, work: Callable[[Measurement], None]) -> None:
        """Does a part of a case unless it has failed; others go on where the processes can."""
        if measurement.error is not None:
            return
        try:
            work(measurement)
        except _FAILURES as error:
            measurement.error = _summary(error)
            self._say(f"{measurement.name} failed: {error}")
            if isinstance(error, RankError):
                if not error.ranks_usable:
                    raise
                launch.call("forget_groups", crew=_crew(measurement))

    @contextmanager
    def _noting_failures(self, measurements: Sequence[Measurement]) -> Iterator[None]:
        """What ends the block becomes the error of all cases that had not finished."""
        try:
            yield
        except _FAILURES as error:
            self._say(f"the processes are lost: {error}")
            for measurement in measurements:
                if measurement.error is None and (measurement.timeline is None or not self.config.interleaved):
                    measurement.error = f"the processes were lost before it had finished: {_summary(error)}"


def _crew(measurement: Measurement) -> str:
    case = measurement.case
    return ENGINE if not case.is_peer else PLAIN_FSDP2 if has_units(case) else PLAIN_DDP


def _summary(error: Exception) -> str:
    return error.summary if isinstance(error, RankError) else str(error)


def _difference(before: Sequence[Any], after: Sequence[Any]) -> list[list[int] | None]:
    return [
        None if one is None else [late - early for early, late in zip(one, other, strict=True)]
        for one, other in zip(before, after, strict=True)
    ]
