# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The YAML file of a benchmark, strictly read: what it may say stands in docs/commands.md."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate_lshdp.benchmarking.cases import EQUAL, FULL_PRECISION, PLAN, Case
from accelerate_lshdp.benchmarking.limits import Deviation, Limit, Ratio, WallSeconds
from accelerate_lshdp.documents.cluster import ClusterDescription, NetworkDescription, NodeDescription
from accelerate_lshdp.documents.strategy import STRATEGIES
from accelerate_lshdp.documents.strict_reading import read_yaml
from accelerate_lshdp.documents.value_checks import (
    PlanError,
    at_key,
    describe,
    located,
    require_boolean,
    require_choice,
    require_integer,
    require_list,
    require_name,
    require_number,
    require_object,
)
from accelerate_lshdp.documents.wire_format import WIRE_FORMATS


MODEL_KINDS = ("vit", "gpt2")
FORMATS = tuple(WIRE_FORMATS)
#: Figures of a case that limits may compare; the least is the best.
COMPARED = ("step_seconds", "peak_pss_bytes", "peak_rank_bytes", "bytes_between_nodes")
_REQUIRED = ("clusters", "networks", "models", "total_batch_size", "strategies")


class ConfigError(ValueError):
    """A benchmark's YAML file that cannot be read or is malformed; it says where."""


@dataclass(frozen=True)
class BenchmarkConfig:
    """What is trained, where, and how it is measured. Every strategy is trained on every network, cluster and model.

    Args:
        clusters: the nodes of each, by name.
        networks: by the name that results have them under.
        models: by name: ``kind`` and the arguments of its transformers configuration.
        total_batch_size: samples in a global batch.
        cases: what is compared.
        interleaved: all cases are open at once in the same processes and take turns, so that what else the machine
            does hits all of them; else each has fresh processes of its own.
        rounds: turns that every case gets.
        steps: steps of a turn that count.
        uncounted_steps: steps at the beginning of each turn that do not: caches are cold, ranks arrive one by one.
        turn_seconds: a turn of a slow case ends after these, with at least one counted step.
        memory: whether peak memory is measured, in fresh processes for each case.
        profile_seconds: budget of the profiling run that plans and predictions are made from; 0: none.
        threads: of every rank's computation.
        learning_rate: of AdamW.
        seed: of the weights and of the order of the samples.
        step_timeout_seconds: a step that takes longer has failed.
        limits: what has to hold.
        document: the file's contents.

    Raises:
        ConfigError: the parts do not fit each other.
    """

    clusters: Mapping[str, tuple[NodeDescription, ...]]
    networks: Mapping[str, NetworkDescription]
    models: Mapping[str, Mapping[str, Any]]
    total_batch_size: int
    cases: tuple[Case, ...]
    interleaved: bool = True
    rounds: int = 3
    steps: int = 3
    uncounted_steps: int = 1
    turn_seconds: float = 12.0
    memory: bool = False
    profile_seconds: float = 40.0
    threads: int = 1
    learning_rate: float = 1e-4
    seed: int = 0
    step_timeout_seconds: float = 60.0
    limits: tuple[Limit, ...] = ()
    document: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        with _config_errors():
            self._check_cases()
            self._check_limits()

    def _check_cases(self) -> None:
        seen: set[str] = set()
        for index, case in enumerate(self.cases):
            where = f"strategies[{index}]"
            if case.label in seen:
                raise PlanError(f'found "{case.label}" twice, expected it once. Remove one of them.', path=where)
            seen.add(case.label)
            if case.batch_sizes == PLAN and self.profile_seconds == 0:
                raise PlanError(
                    f'"{case.label}" trains with planned batch sizes, which need a profile, but profile_seconds is 0.'
                    " Raise profile_seconds, or give batch_sizes.",
                    path=where,
                )
            for name, nodes in self.clusters.items():
                self._check_sizes(case, sum(node.ranks for node in nodes), name, where)

    def _check_sizes(self, case: Case, ranks: int, cluster: str, where: str) -> None:
        if self.total_batch_size < ranks:
            raise PlanError(
                f'found {self.total_batch_size}, expected at least {ranks}, one sample for each rank of "{cluster}".',
                path="total_batch_size",
            )
        if case.batch_sizes == EQUAL:
            if self.total_batch_size % ranks and case.is_peer:
                raise PlanError(
                    f'found {self.total_batch_size} samples for the {ranks} ranks of "{cluster}", expected a multiple:'
                    f" plain PyTorch ({case.strategy}) has to train with equal batches.",
                    path="total_batch_size",
                )
        elif case.is_peer:
            raise PlanError(
                f"plain PyTorch ({case.strategy}) trains with equal batches. Remove batch_sizes.", path=where
            )
        elif case.batch_sizes != PLAN and (
            len(case.batch_sizes) != ranks or sum(case.batch_sizes) != self.total_batch_size
        ):
            raise PlanError(
                f'found {list(case.batch_sizes)}, expected {ranks} sizes (the ranks of "{cluster}") with the sum'
                f" {self.total_batch_size} (total_batch_size).",
                path=f"{where}.batch_sizes",
            )

    def _check_limits(self) -> None:
        labels = [case.label for case in self.cases]
        for index, limit in enumerate(self.limits):
            if isinstance(limit.of, Ratio):
                where = f"limits[{index}].ratio"
                for label in (*limit.of.numerator, *limit.of.denominator):
                    require_choice(label, where, labels)
                require_choice(limit.of.network, where, list(self.networks))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> BenchmarkConfig:
        """The configuration in a YAML file.

        Raises:
            ConfigError: the file is missing, is not YAML, or holds something wrong; it says where.
        """
        with _config_errors(os.fspath(path)):
            if not Path(path).is_file():
                raise PlanError("cannot be read: found no such file, expected a benchmark. Correct the path.")
            return cls._from_document(read_yaml(path, "benchmark"))

    @classmethod
    def from_dict(cls, document: object) -> BenchmarkConfig:
        """The configuration in a file's layout. Raises ConfigError as `load`."""
        with _config_errors():
            return cls._from_document(document)

    @classmethod
    def _from_document(cls, document: object) -> BenchmarkConfig:
        sections = require_object(document, required=_REQUIRED, optional=(*_SETTINGS, "limits"))
        for name, check in _SETTINGS.items():
            if name in sections:
                check(sections[name], name)
        require_integer(sections["total_batch_size"], "total_batch_size", least=1)
        return cls(
            clusters={
                name: _read_cluster(cluster, at_key("clusters", name))
                for name, cluster in _entries(sections["clusters"], "clusters")
            },
            networks=_read_networks(sections["networks"]),
            models={
                name: _read_model(model, at_key("models", name))
                for name, model in _entries(sections["models"], "models")
            },
            total_batch_size=sections["total_batch_size"],
            cases=tuple(
                _read_case(entry, f"strategies[{index}]")
                for index, entry in enumerate(require_list(sections["strategies"], "strategies", "case"))
            ),
            limits=tuple(
                _read_limit(entry, f"limits[{index}]")
                for index, entry in enumerate(_optional_list(sections.get("limits"), "limits", "limit"))
            ),
            document=sections,
            **{name: sections[name] for name in _SETTINGS if name in sections},
        )


def _integer_from(least: int) -> Any:
    return lambda value, path: require_integer(value, path, least=least)


def _number_from(positive: bool) -> Any:
    return lambda value, path: require_number(value, path, positive=positive)


_SETTINGS = {
    "interleaved": require_boolean,
    "rounds": _integer_from(1),
    "steps": _integer_from(1),
    "uncounted_steps": _integer_from(0),
    "turn_seconds": _number_from(positive=True),
    "memory": require_boolean,
    "profile_seconds": _number_from(positive=False),
    "threads": _integer_from(1),
    "learning_rate": _number_from(positive=True),
    "seed": _integer_from(0),
    "step_timeout_seconds": _number_from(positive=True),
}


def _entries(value: object, path: str) -> Iterator[tuple[str, object]]:
    if not isinstance(value, dict) or not value:
        raise PlanError(f"found {describe(value)}, expected an object with one entry for each name.", path=path)
    for name in value:
        require_name(name, path, "names that are words")
    return iter(value.items())


def _optional_list(value: object, path: str, what: str) -> list[Any]:
    return [] if value is None or value == [] else require_list(value, path, what)


def _read_networks(value: object) -> dict[str, NetworkDescription]:
    networks = {}
    for index, entry in enumerate(require_list(value, "networks", "network")):
        where = f"networks[{index}]"
        section = {"rate": entry} if isinstance(entry, str) else entry
        section = require_object(section, where, required=("rate",), optional=("delay",))
        with _described(where):
            network = ClusterDescription.from_dict({"nodes": [{"cpu": 1}], "network": section}).network
        name = ", ".join(str(part) for part in section.values())
        if name in networks:
            raise PlanError(f'found "{name}" twice, expected it once. Remove one of them.', path=where)
        networks[name] = network
    return networks


def _read_cluster(value: object, path: str) -> tuple[NodeDescription, ...]:
    section = require_object(value, path, required=("nodes",))
    with _described(path):
        return ClusterDescription.from_dict({"nodes": section["nodes"], "network": {"rate": "1 Gb/s"}}).nodes


def _read_model(value: object, path: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise PlanError(f'found {describe(value)}, expected an object with the key "kind" and others.', path=path)
    require_choice(value.get("kind"), f"{path}.kind", MODEL_KINDS)
    return value


def _read_case(entry: object, path: str) -> Case:
    section = (
        {"strategy": entry}
        if isinstance(entry, str)
        else require_object(entry, path, required=("strategy",), optional=("batch_sizes",))
    )
    require_name(section["strategy"], path, "a strategy, such as lshdp or lshdp:bf16")
    strategy, given, communication_dtype = section["strategy"].partition(":")
    require_choice(strategy, path, STRATEGIES)
    if given:
        require_choice(communication_dtype, path, FORMATS)
    sizes = section.get("batch_sizes")
    if isinstance(sizes, list):
        for index, size in enumerate(sizes):
            require_integer(size, f"{path}.batch_sizes[{index}]", least=1)
        sizes = tuple(sizes)
    elif "batch_sizes" in section:
        require_choice(sizes, f"{path}.batch_sizes", (EQUAL, PLAN))
    case = Case(strategy, communication_dtype or FULL_PRECISION, sizes)
    if case.is_peer and given:
        raise PlanError(f'found "{section["strategy"]}", expected "{strategy}": plain PyTorch sends fp32.', path=path)
    return case


def _read_limit(entry: object, path: str) -> Limit:
    kinds = ("ratio", "error", "wall_seconds")
    section = require_object(entry, path, required=("name",), optional=("figure", *kinds, "at_most"))
    require_name(section["name"], f"{path}.name", "a name")
    given = [kind for kind in kinds if kind in section]
    if len(given) != 1:
        raise PlanError(f"found {given or 'none'} of {', '.join(kinds)}, expected one of them.", path=path)
    if "figure" in section and given != ["ratio"]:
        raise PlanError('found "figure", which only a ratio has. Remove it.', path=path)
    if given == ["wall_seconds"]:
        require_number(section["wall_seconds"], f"{path}.wall_seconds", positive=True)
        if "at_most" in section:
            raise PlanError('found "at_most" beside wall_seconds, which is the limit itself. Remove it.', path=path)
        return Limit(section["name"], WallSeconds(), section["wall_seconds"])
    require_number(section.get("at_most"), f"{path}.at_most", positive=True)
    if given == ["ratio"]:
        return Limit(section["name"], _read_ratio(section, path), section["at_most"])
    require_choice(section["error"], f"{path}.error", tuple(_DEVIATIONS))
    return Limit(section["name"], _DEVIATIONS[section["error"]], section["at_most"])


_DEVIATIONS = {
    "prediction median": Deviation("predicted_seconds", "step_seconds", middle=True),
    "prediction largest": Deviation("predicted_seconds", "step_seconds", middle=False),
    "bytes largest": Deviation("bytes_between_nodes", "formula_bytes", middle=False),
}


def _read_ratio(section: Mapping[str, Any], path: str) -> Ratio:
    parts = section["ratio"]
    if not isinstance(parts, list) or len(parts) != 3:
        raise PlanError(
            f"found {describe(parts)}, expected [label, other label, network]; for the best of several, a list of"
            " labels.",
            path=f"{path}.ratio",
        )
    figure = section.get("figure", COMPARED[0])
    require_choice(figure, f"{path}.figure", COMPARED)
    labels = [tuple(part) if isinstance(part, list) else (part,) for part in parts[:2]]
    return Ratio(labels[0], labels[1], parts[2], figure)


@contextmanager
def _described(path: str) -> Iterator[None]:
    """Says where in the file a description of nodes or links is wrong."""
    try:
        yield
    except PlanError:
        raise
    except ValueError as error:
        raise PlanError(str(error), path=path) from None


@contextmanager
def _config_errors(source: str | None = None) -> Iterator[None]:
    try:
        with located(source=source):
            yield
    except PlanError as error:
        raise ConfigError(str(error)) from None
    except ConfigError as error:  # of parts that do not fit each other, which know of no file
        raise ConfigError(f"{source}: {error}" if source else str(error)) from None
