# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`ClusterBenchmark`: a comparison on an emulated cluster, whose steps are predicted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from statistics import mean
from typing import Any

from accelerate_lshdp.comparing.cases import FULL_PRECISION, PLAN, Case, equal_sizes
from accelerate_lshdp.comparing.driver import BUILD_SECONDS, Comparison, kind_of
from accelerate_lshdp.comparing.launch import ENGINE, PLAIN_FSDP2
from accelerate_lshdp.comparing.measurement import Measurement
from accelerate_lshdp.documents.placement import ModelPlacement
from accelerate_lshdp.documents.profile import Profile
from accelerate_lshdp.documents.profile_sections import Network
from laboratory.config import BenchmarkConfig
from laboratory.emulated_cluster import ClusterError
from laboratory.launches import LaboratoryLaunch
from laboratory.planned import ClusterMeasurements, Format, Overheads, read_formats
from laboratory.speed_check import Speed, speed_of


NETWORK_SECONDS = 4.0


class ClusterBenchmark(Comparison):
    """All cases on one emulated cluster with one model.

    Args:
        config: of the benchmark.
        cluster, model: names in it.
        launch: starts the processes of the kinds that it is given.
        say: tells whoever waits what is going on.
    """

    failures = (*Comparison.failures, ClusterError)

    def __init__(
        self,
        config: BenchmarkConfig,
        cluster: str,
        model: str,
        launch: Callable[[Sequence[str]], AbstractContextManager[LaboratoryLaunch]],
        say: Callable[[str], None],
    ) -> None:
        nodes = [node.ranks for node in config.clusters[cluster]]
        networks = {name: network.bandwidth_bits_per_second for name, network in config.networks.items()}
        super().__init__(config, cluster, nodes, model, launch, say, networks)
        self._cluster = cluster
        self._measured: ClusterMeasurements | None = None
        self._formats: dict[str, Format] = {}
        # Of each case on each network, what the ranks told when their speed was checked before and after its turns.
        self._checks: dict[str, list[Any]] = defaultdict(list)

    def _learning_kinds(self, kinds: Sequence[str]) -> tuple[str, ...]:
        # Without a profile there is nothing to predict.
        learned_of = tuple(kind for kind in kinds if kind in (ENGINE, PLAIN_FSDP2))
        return learned_of if self.config.profile_seconds else (ENGINE,)

    def _build_options(self, launch: LaboratoryLaunch) -> dict[str, Any]:
        return {"emulated": launch.sleeps}

    def _on_network(self, launch: LaboratoryLaunch, network: str) -> AbstractContextManager[None]:
        return launch.as_described(self.config.networks[network])

    def _plan(self, case: Case, network: str) -> list[tuple[int, int]]:
        if self._measured is None:
            raise ValueError("found no profile of the ranks, expected one for planned batch sizes: profiling failed")
        return self._measured.batches(case, self.config.total_batch_size, network)

    def _plan_placement(self, case: Case, micro_batches: Sequence[tuple[int, int]], network: str) -> ModelPlacement:
        if self._measured is None:
            raise ValueError("found no profile of the ranks, expected one for a planned placement: profiling failed")
        return self._measured.plan_placement(self._placed, case.memory_limit, micro_batches, network)

    # What is known before training

    def _measure_formats(self, launch: LaboratoryLaunch) -> None:
        """What the formats send and take; CPU seconds are the same at any speed."""
        names = sorted({FULL_PRECISION, *(case.communication_dtype for case in self.config.cases)})
        told = launch.call("measure_formats", timeout=BUILD_SECONDS, names=names)
        self._formats = read_formats(told, launch.node_sizes)
        self._wire_bytes = {name: format.wire_bytes for name, format in self._formats.items()}

    def _learn(self, launch: LaboratoryLaunch) -> None:
        """Profiles the ranks on the first network, and measures every other one."""
        predicts = bool(self.config.profile_seconds)
        # What the C library has kept of freed memory decides whether a unit is gathered into new memory. So this is
        # measured where nothing was done before, if each case has fresh processes, else after what comes before cases.
        overheads = self._measure_overheads(launch) if predicts and not self.config.interleaved else {}
        self._measure_formats(launch)
        if not predicts:
            return
        measured: dict[str, Any] = {}
        delays: dict[str, float] = {}
        for name, network in self.config.networks.items():
            if not measured:
                profile = self._profile_on(launch, name)
            with launch.as_described(network):
                if not measured:
                    measured[name] = profile["network"]
                else:
                    told = launch.call("measure_network", timeout=BUILD_SECONDS, seconds=NETWORK_SECONDS)
                    measured[name] = told[0]
                if len(launch.nodes) > 1:
                    delays[name] = mean(launch.call("measure_message_delay", timeout=BUILD_SECONDS))
        self._profile = Profile.from_dict(profile)
        overheads = overheads or self._measure_overheads(launch)
        self._measured = ClusterMeasurements(
            nodes=launch.nodes,
            profile=self._profile,
            networks={name: (self.config.networks[name], Network.read(network)) for name, network in measured.items()},
            model=self._size,
            formats=self._formats,
            shared_memory=launch.call("uses_shared_memory")[0],
            overheads=overheads[ENGINE],
            message_delay_seconds=delays,
            emulated_by_sleeping=launch.sleeps,
            plain_overheads=overheads.get(PLAIN_FSDP2, Overheads()),
        )

    def _profile_on(self, launch: LaboratoryLaunch, network: str) -> dict[str, Any]:
        """Profiles the ranks on a network, at the speeds that their nodes have on it."""
        self._prepare_profile(launch)
        with launch.as_described(self.config.networks[network]):
            # Cases with equal batches are to be predicted, too.
            return self._run_profile(launch, max(equal_sizes(self.config.total_batch_size, self._ranks)))

    # A second part, in which nodes have other speeds

    def _measure_rounds(self, launch: LaboratoryLaunch, network: str, cases: list[Measurement]) -> list[Measurement]:
        """As `Comparison._measure_rounds`; where nodes change their speed later, then at those, too.

        Trainings go on, but those with planned sizes, which are planned anew.
        """
        measured = super()._measure_rounds(launch, network, cases)
        nodes = self.config.later.get(self._cluster)
        if nodes is None or self._measured is None:
            return measured
        self._say(f"{network}: nodes have {', '.join(f'{node.cores:g}' for node in nodes)} cores from now on")
        known, described = self._measured, launch.nodes
        launch.nodes = list(nodes)
        self._profile = Profile.from_dict(self._profile_on(launch, network))
        self._measured = replace(known, nodes=nodes, profile=self._profile)
        later = [self._second_part(case) for case in cases]
        for before, after in zip(cases, later, strict=True):
            self._checks.pop(before.name, None)
            self._attempt(launch, before, lambda m: self._note_statistics(launch, m))
            if after.case.batch_sizes == PLAN:
                after.micro_batches = None
                self._attempt(launch, after, lambda m: self._begin_anew(launch, m))
        self.measurements += later
        super()._measure_rounds(launch, network, later)
        self._measured, launch.nodes = known, described
        return later

    @staticmethod
    def _second_part(before: Measurement) -> Measurement:
        """The measurement of the same training at the nodes' later speeds."""
        return Measurement(
            f"{before.cluster}_later",
            before.model,
            before.network,
            before.bits_per_second,
            before.nodes,
            before.total_batch_size,
            before.case,
            parameters=before.parameters,
            micro_batches=before.micro_batches,
            placement=before.placement,
            memory_share=before.memory_share,
            formula_bytes=before.formula_bytes,
            error=before.error,
        )

    def _begin_anew(self, launch: LaboratoryLaunch, measurement: Measurement) -> None:
        launch.call("end", kind=kind_of(measurement), name=measurement.name)
        self._begin(launch, measurement)

    def _measure_overheads(self, launch: LaboratoryLaunch) -> dict[str, Overheads]:
        """By the kind of processes, of the engine's and of those of plain FSDP2."""
        found = {}
        for kind in (kind for kind in (ENGINE, PLAIN_FSDP2) if kind in launch.kinds):
            told = launch.call(
                "measure_overheads",
                kind=kind,
                timeout=BUILD_SECONDS,
                is_peer=kind != ENGINE,
                node_sizes=list(launch.node_sizes),
            )
            found[kind] = Overheads(**{name: mean(rank[name] for rank in told) for name in told[0]})
        return found

    def _check_speed(self, launch: LaboratoryLaunch, *measurements: Measurement) -> None:
        """How fast the ranks are at present, in the processes of a case, or of two between their turns.

        Not where memory is measured meanwhile: the model that it trains would count.
        """
        if self._measured is None or (self.config.memory and not self.config.interleaved):
            return
        sizes, _ = self._check_micro_batches()
        kind = kind_of(measurements[0])
        told = launch.call("check_speed", kind=kind, timeout=BUILD_SECONDS, sizes=sizes, is_peer=kind != ENGINE)
        for measurement in measurements:
            self._checks[measurement.name].append(told)

    def _check_micro_batches(self) -> tuple[list[int], list[float]]:
        planned = any(case.batch_sizes == PLAN for case in self.config.cases)
        return self._measured.check_micro_batches(self.config.total_batch_size, planned=planned)

    def _predict(self, measurement: Measurement) -> None:
        """The step at the speed that the ranks had around the case's turns; where none was checked, as profiled.

        Plain PyTorch's optimizer is known from checks only: without them its cases are not predicted.
        """
        if self._measured is None or measurement.error is not None:
            return
        _, expected = self._check_micro_batches()
        checks = self._checks[measurement.name]
        if not checks and measurement.case.is_peer:
            return
        speed = Speed((1.0,) * self._ranks, (0.0,) * self._ranks, (0.0,) * self._ranks)
        if checks:
            speed = speed_of(checks, self._checks_among(measurement), expected, measurement.nodes)
        measurement.slowdown = speed.slowdown if checks else None
        placements = None if measurement.placement is None else self._placed.placements(measurement.placement)
        try:
            measurement.predicted_seconds = self._measured.predicted_seconds(
                measurement.case, measurement.micro_batches, measurement.network, speed, placements
            )
        except ValueError as error:  # sizes that the file gives may be larger than those that were measured
            self._say(f"{measurement.name} is not predicted: {error}")

    def _checks_among(self, measurement: Measurement) -> list[Any]:
        """All checks on the case's network in the processes in which it trained."""
        if not self.config.interleaved:
            return self._checks[measurement.name]
        place = (measurement.network, kind_of(measurement))
        alike = [m for m in self.measurements if (m.network, kind_of(m)) == place]
        # One between the turns of two cases is both's.
        return list({id(check): check for m in alike for check in self._checks[m.name]}.values())
