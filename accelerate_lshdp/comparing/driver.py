# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`Comparison`: trains every case with one model on some nodes, in turns, and measures it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from accelerate_lshdp.comparing.batch_sizes import micro_batches_of, plan_micro_batches
from accelerate_lshdp.comparing.cases import AUTO, EQUAL, PLAN, Case, equal_sizes, has_units
from accelerate_lshdp.comparing.config import ComparisonConfig
from accelerate_lshdp.comparing.formula_bytes import formula_bytes
from accelerate_lshdp.comparing.launch import ENGINE, PLAIN_DDP, PLAIN_FSDP2, Launch
from accelerate_lshdp.comparing.measurement import Measurement
from accelerate_lshdp.comparing.placements import PlacedModel
from accelerate_lshdp.comparing.rank_processes import RankError
from accelerate_lshdp.documents.network import LinkCost
from accelerate_lshdp.documents.placement import ModelPlacement
from accelerate_lshdp.documents.profile import Profile
from accelerate_lshdp.documents.strategy import Strategy
from accelerate_lshdp.planning import PlanningError
from accelerate_lshdp.planning.cost.cluster_model import ModelSize


START_SECONDS = 180.0
BUILD_SECONDS = 180.0
#: Optimizer states are there after the first step, so peaks come early.
MEMORY_STEPS = 3


class Comparison:
    """All cases with one model on some nodes.

    Args:
        config: what is trained and how it is measured.
        cluster: name of the nodes in results.
        nodes: ranks of each node.
        model: name of the model in the configuration.
        launch: starts the processes of the kinds that it is given.
        say: tells whoever waits what is going on.
        networks: bits per second of the networks, by name; None: they are not known.
    """

    #: What ends a case, and all cases that need the same processes; anything else is a mistake of the driver.
    failures: tuple[type[Exception], ...] = (RankError, PlanningError, ValueError)

    def __init__(
        self,
        config: ComparisonConfig,
        cluster: str,
        nodes: Sequence[int],
        model: str,
        launch: Callable[[Sequence[str]], AbstractContextManager[Launch]],
        say: Callable[[str], None],
        networks: Mapping[str, float | None],
    ) -> None:
        self.config = config
        self.model = config.models[model]
        self._launch = launch
        self._say = say
        self._profile: Profile | None = None
        #: Of all gradients of the model, by format.
        self._wire_bytes: dict[str, float] = {}
        self._size: ModelSize | None = None
        self._nodes = tuple(nodes)
        self._placed: PlacedModel | None = None  # the model, whose units are placed on the nodes
        self._ranks = sum(nodes)
        self.networks = tuple(networks)
        self.measurements = [
            Measurement(cluster, model, name, bits_per_second, nodes, config.total_batch_size, case)
            for name, bits_per_second in networks.items()
            for case in config.cases
        ]

    def run(self) -> list[Measurement]:
        """Measures everything. A case that fails has its error; what it took with it has the same."""
        kinds = tuple(dict.fromkeys([ENGINE, *map(kind_of, self.measurements)]))
        if self.config.interleaved:
            with self._noting_failures(self.measurements), self._built(kinds) as launch:
                self._learn(launch)
                for network in self.networks:
                    self._measure_in_turns(launch, network)
        else:
            with self._noting_failures(self.measurements), self._built(self._learning_kinds(kinds)) as launch:
                self._learn(launch)
        if self.config.memory or not self.config.interleaved:
            for case in self.config.cases:
                self._measure_alone([m for m in self.measurements if m.case == case and m.error is None])
        return self.measurements

    # What a laboratory does otherwise

    def _learning_kinds(self, kinds: Sequence[str]) -> tuple[str, ...]:
        """The kinds whose processes `_learn` needs."""
        return (ENGINE,)

    def _build_options(self, launch: Launch) -> dict[str, Any]:
        """Arguments of the ranks' `build` that only some launches have."""
        return {"several_clocks": launch.several_clocks}

    def _learn(self, launch: Launch) -> None:
        """Learns the formats' bytes; and if a case has planned batch sizes, profiles the ranks."""
        names = sorted({case.communication_dtype for case in self.config.cases})
        self._wire_bytes = launch.call("wire_bytes", timeout=BUILD_SECONDS, names=names)[0]
        if self.config.profile_seconds and any(c.batch_sizes == PLAN or c.is_planned for c in self.config.cases):
            self._prepare_profile(launch)
            needed = max(equal_sizes(self.config.total_batch_size, self._ranks))
            self._profile = Profile.from_dict(self._run_profile(launch, needed))

    def _plan(self, case: Case, network: str) -> list[tuple[int, int]]:
        """(size, accumulation steps) of each rank, planned for a case. Raises PlanningError, ValueError."""
        if self._profile is None:
            raise ValueError("found no profile of the ranks, expected one for planned batch sizes: profiling failed")
        share = self._wire_bytes[case.communication_dtype] / self._size.gradient_bytes
        measured = self._profile.network
        all_reduce = None if measured is None else measured.all_reduce
        return plan_micro_batches(
            self._profile, self.config.total_batch_size, all_reduce, share, self._profile.shard_groups()
        )

    def _plan_placement(self, case: Case, micro_batches: Sequence[tuple[int, int]], network: str) -> ModelPlacement:
        """The placement that is planned for a case. Raises PlanningError, ValueError."""
        if self._profile is None:
            raise ValueError("found no profile of the ranks, expected one for a planned placement: profiling failed")
        link = LinkCost(0.0, 0.0)
        if self._profile.network is not None and len(self._nodes) > 1:
            times = self._profile.network.all_reduce
            link = LinkCost.from_all_reduce(times.latency_seconds, times.seconds_per_byte, self._nodes)
        streams = any(node.device != "cpu" for node in self._profile.cluster.nodes)
        # What ranks of a node send each other was measured in the same all-reduce, and is not told apart.
        profiles = self._profile.rank_profiles()
        return self._placed.plan(case.memory_limit, micro_batches, profiles, link, link, streams=streams)

    def _on_network(self, launch: Launch, network: str) -> AbstractContextManager[None]:
        """In the block the ranks have the speeds and the network at which they are measured."""
        return nullcontext()

    def _check_speed(self, launch: Launch, *measurements: Measurement) -> None:
        """Called in the processes of a case, or of two between their turns, before and after each turn."""

    def _predict(self, measurement: Measurement) -> None:
        """Called after the last turn of a case."""

    # Processes and what is known of them

    @contextmanager
    def _built(self, kinds: Sequence[str]) -> Iterator[Launch]:
        """Processes that have built what all cases need."""
        self._say("starting the processes")
        with self._launch(kinds) as launch:
            for kind in kinds:
                told = launch.call(
                    "build",
                    kind=kind,
                    timeout=START_SECONDS,
                    model=self.model,
                    seed=self.config.seed,
                    learning_rate=self.config.learning_rate,
                    timeout_seconds=2 * self.config.step_timeout_seconds,
                    **self._build_options(launch),
                )
                self._check_samples([rank["samples"] for rank in told])
            units = told[0]["units"]
            self._size = ModelSize(4 * told[0]["parameters"], 4 * told[0]["parameters"], tuple(units.values()))
            self._placed = PlacedModel(self._nodes, tuple(units), self._size)
            for measurement in self.measurements:
                measurement.parameters = told[0]["parameters"]
            yield launch

    @staticmethod
    def _check_samples(digests: Sequence[str]) -> None:
        """Checks that all ranks have the same data, which may come with Python or a library. Raises ValueError."""
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                raise ValueError(
                    f"found other data on rank {rank} than on rank 0, expected the same on all nodes. Use the same"
                    " versions of Python and scikit-learn there"
                )

    def _prepare_profile(self, launch: Launch) -> None:
        """Builds what is profiled."""
        self._say(f"profiling the ranks for {self.config.profile_seconds:g} s")
        launch.call("prepare_profile", timeout=BUILD_SECONDS)

    def _run_profile(self, launch: Launch, needed_batch: int = 1) -> dict[str, Any]:
        """One profiling run, at the speeds that the ranks have now; returns the profile as JSON values.

        Args:
            needed_batch: a micro-batch that is measured whatever time that takes.
        """
        seconds, total = self.config.profile_seconds, self.config.total_batch_size
        # The largest that any case may train: equal sizes, or what the other ranks leave of the global batch.
        largest = max(equal_sizes(total, self._ranks))
        if any(case.batch_sizes != EQUAL for case in self.config.cases):
            largest = total - self._ranks + 1
        return launch.call(
            "profile",
            timeout=BUILD_SECONDS + 5 * seconds,
            seconds=seconds,
            max_batch=largest,
            needed_batch=needed_batch,
            total=total,
        )[0]

    # Measuring

    def _measure_in_turns(self, launch: Launch, network: str) -> None:
        """Rounds over all cases on one network; each round begins with another case."""
        cases = [m for m in self.measurements if m.network == network]
        self._say(f"{network}: preparing {len(cases)} cases")
        for measurement in cases:
            self._attempt(launch, measurement, lambda m: self._begin(launch, m))
        for measurement in self._measure_rounds(launch, network, cases):
            self._attempt(launch, measurement, lambda m: self._end(launch, m))

    def _measure_rounds(self, launch: Launch, network: str, cases: list[Measurement]) -> list[Measurement]:
        """All rounds over cases that have begun; returns the measurements whose trainings are to be ended."""
        with self._on_network(launch, network):
            for turn in range(self.config.rounds):
                self._say(f"{network}: round {turn + 1} of {self.config.rounds}")
                first = turn * len(cases) // self.config.rounds
                self._take_turns(launch, cases[first:] + cases[:first])
        for measurement in cases:
            self._predict(measurement)
        return cases

    def _measure_alone(self, measurements: Sequence[Measurement]) -> None:
        """One case in fresh processes: its memory, and if cases do not take turns, its speed."""
        if not measurements:
            return
        self._say(f"{measurements[0].case.label}: in fresh processes")
        kind = kind_of(measurements[0])
        with self._noting_failures(measurements), self._built((kind,)) as launch:
            meter = launch.memory_meter() if self.config.memory else None
            with meter or nullcontext():
                for measurement in measurements if not self.config.interleaved else measurements[:1]:
                    self._begin(launch, measurement)
                    if self.config.interleaved:
                        self._train(launch, measurement, MEMORY_STEPS)
                    else:
                        with self._on_network(launch, measurement.network):
                            self._take_turns(launch, [measurement] * self.config.rounds)
                        self._predict(measurement)
                        self._attempt(launch, measurement, lambda m: self._end(launch, m))
            if meter is not None:
                peaks = launch.call("peak_bytes", kind=kind)
                for measurement in measurements:
                    measurement.peak_pss_bytes = meter.peak_bytes
                    measurement.peak_rank_bytes = peaks

    def _begin(self, launch: Launch, measurement: Measurement) -> None:
        case = measurement.case
        if measurement.micro_batches is None:
            measurement.micro_batches = micro_batches_of(
                case, measurement.total_batch_size, self._ranks, lambda: self._plan(case, measurement.network)
            )
            if case.batch_sizes == PLAN and (hint := self._profile.time_hint(measurement.micro_batches)) is not None:
                self._say(f"{measurement.name}: {hint} (profile_seconds)")
            most = max(steps for _, steps in measurement.micro_batches)
            wire_bytes = self._wire_bytes[case.communication_dtype]
            self._place_units(measurement)
            placements = None if measurement.placement is None else self._placed.placements(measurement.placement)
            measurement.formula_bytes = formula_bytes(
                case, measurement.nodes, self._size, most, wire_bytes, placements
            )
        launch.call(
            "begin",
            kind=kind_of(measurement),
            timeout=BUILD_SECONDS,
            name=measurement.name,
            strategy=case.strategy if case.is_peer else str(self._strategy_of(measurement)),
            is_peer=case.is_peer,
            communication_dtype=case.communication_dtype,
            micro_batches=measurement.micro_batches,
            ranks_per_node=measurement.nodes[0],
            automatic=case.batch_sizes == AUTO,
            placement=None if measurement.placement is None else measurement.placement.to_dict(),
        )

    def _place_units(self, measurement: Measurement) -> None:
        """Notes where a case keeps the model's units, and what memory that counts."""
        case = measurement.case
        measurement.placement = case.known_placement
        if case.is_planned:
            measurement.placement = self._plan_placement(case, measurement.micro_batches, measurement.network)
            self._say(f"{measurement.name}: {measurement.placement}")
        measurement.memory_share = self._placed.memory_share(case, measurement.placement)

    @staticmethod
    def _strategy_of(measurement: Measurement) -> Strategy:
        """The strategy of the plan with which a case trains."""
        return measurement.case.engine_strategy if measurement.placement is None else Strategy.OSDP

    def _take_turns(self, launch: Launch, measurements: Sequence[Measurement]) -> None:
        """A turn of each, with the speed checked before and after it; one that fails takes no more."""
        last: Measurement | None = None

        def take(measurement: Measurement) -> None:
            self._check_speed(launch, measurement, *([] if last is None else [last]))
            self._take_turn(launch, measurement)

        for measurement in measurements:
            if last is not None and kind_of(last) != kind_of(measurement):  # other processes may be tuned otherwise
                self._attempt(launch, last, lambda m: self._check_speed(launch, m))
                last = None
            self._attempt(launch, measurement, take)
            last = measurement if measurement.error is None else last
        if last is not None:
            self._attempt(launch, last, lambda m: self._check_speed(launch, m))

    def _take_turn(self, launch: Launch, measurement: Measurement) -> None:
        """Some steps that do not count, then those that do, as many as there is time for."""
        steps = self.config.steps
        automatic = measurement.case.batch_sizes == AUTO
        if automatic and not measurement.turns:
            measurement.trained(self._train(launch, measurement, self.config.learning_steps))
        if self.config.uncounted_steps:
            spent = measurement.trained(self._train(launch, measurement, self.config.uncounted_steps))
            left = self.config.turn_seconds - sum(spent)
            steps = max(1, min(steps, round(left / spent[-1])))
        before = launch.sent_between_nodes(), launch.sent_inside_nodes()
        trained = self._train(launch, measurement, steps)
        sent = _difference(before, (launch.sent_between_nodes(), launch.sent_inside_nodes()))
        measurement.add_turn(trained, *sent)
        if automatic:
            sizes = launch.call("batch_sizes", kind=kind_of(measurement), name=measurement.name)[0]
            measurement.micro_batches = [(size, 1) for size in sizes]

    def _train(self, launch: Launch, measurement: Measurement, steps: int) -> Any:
        timeout = 30 + self.config.step_timeout_seconds * steps
        return launch.call("train", kind=kind_of(measurement), timeout=timeout, name=measurement.name, steps=steps)

    def _end(self, launch: Launch, measurement: Measurement) -> None:
        self._note_statistics(launch, measurement)
        launch.call("end", kind=kind_of(measurement), name=measurement.name)

    def _note_statistics(self, launch: Launch, measurement: Measurement) -> None:
        kind = kind_of(measurement)
        measurement.statistics = launch.call("statistics", kind=kind, name=measurement.name)[0]
        measurement.timeline = launch.call("timeline", kind=kind, name=measurement.name)

    # Failures

    def _attempt(self, launch: Launch, measurement: Measurement, work: Callable[[Measurement], None]) -> None:
        """Does a part of a case unless it has failed; others go on where the processes can."""
        if measurement.error is not None:
            return
        try:
            work(measurement)
        except self.failures as error:
            measurement.error = _summary(error)
            self._say(f"{measurement.name} failed: {error}")
            if isinstance(error, RankError):
                if not error.ranks_usable:
                    raise
                launch.call("forget_groups", kind=kind_of(measurement))

    @contextmanager
    def _noting_failures(self, measurements: Sequence[Measurement]) -> Iterator[None]:
        """What ends the block becomes the error of all cases that had not finished."""
        try:
            yield
        except self.failures as error:
            self._say(f"the processes are lost: {error}")
            for measurement in measurements:
                if measurement.error is None and (measurement.timeline is None or not self.config.interleaved):
                    measurement.error = f"the processes were lost before it had finished: {_summary(error)}"


def kind_of(measurement: Measurement) -> str:
    """The kind whose processes train a case."""
    case = measurement.case
    return ENGINE if not case.is_peer else PLAIN_FSDP2 if has_units(case.strategy) else PLAIN_DDP


def _summary(error: Exception) -> str:
    return error.summary if isinstance(error, RankError) else str(error)


def _difference(before: Sequence[Any], after: Sequence[Any]) -> list[list[int] | None]:
    return [
        None if one is None else [late - early for early, late in zip(one, other, strict=True)]
        for one, other in zip(before, after, strict=True)
    ]
