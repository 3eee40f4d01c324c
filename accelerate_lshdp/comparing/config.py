# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The YAML file of a comparison, strictly read: what it may say stands in docs/commands.md."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from accelerate_lshdp.comparing.cases import AUTO, EQUAL, FULL_PRECISION, PLAN, Case, uniform_placement
from accelerate_lshdp.documents.placement import ModelPlacement
from accelerate_lshdp.documents.records import BOOLEAN, integer, number
from accelerate_lshdp.documents.strategy import STRATEGIES, Strategy
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
#: Keys of a file whose nodes are emulated on one machine, which the laboratory of a checkout does.
EMULATION_KEYS = ("clusters", "networks", "limits")
_Config = TypeVar("_Config", bound="ComparisonConfig")


class ConfigError(ValueError):
    """A comparison's YAML file that cannot be read or is malformed; it says where."""


@dataclass(frozen=True, kw_only=True)
class ComparisonConfig:
    """What is trained and how it is measured. Every strategy is trained with every model.

    Args:
        models: by name: ``kind`` and the arguments of its transformers configuration.
        total_batch_size: samples in a global batch.
        cases: what is compared.
        interleaved: all cases are open at once in the same processes and take turns, so that what else the machine
            does hits all of them; else each has fresh processes of its own.
        rounds: turns that every case gets.
        steps: steps of a turn that count.
        uncounted_steps: steps at the beginning of each turn that do not: caches are cold, ranks arrive one by one.
        learning_steps: steps before the first turn of a case that finds its batch sizes itself.
        turn_seconds: a turn of a slow case ends after these, with at least one counted step.
        memory: whether peak memory is measured, in fresh processes for each case.
        profile_seconds: budget of the profiling run that plans are made from; 0: none.
        threads: of every rank's computation; None: the cores of its node / the ranks there.
        learning_rate: of AdamW.
        seed: of the weights and of the order of the samples.
        step_timeout_seconds: a step that takes longer has failed.
        document: the file's contents.

    Raises:
        ConfigError: the parts do not fit each other.
    """

    REQUIRED: ClassVar[tuple[str, ...]] = ("models", "total_batch_size", "strategies")
    OPTIONAL: ClassVar[tuple[str, ...]] = ()

    models: Mapping[str, Mapping[str, Any]]
    total_batch_size: int
    cases: tuple[Case, ...]
    interleaved: bool = True
    rounds: int = 3
    steps: int = 3
    uncounted_steps: int = 1
    learning_steps: int = 30
    turn_seconds: float = 12.0
    memory: bool = False
    profile_seconds: float = 40.0
    threads: int | None = None
    learning_rate: float = 1e-4
    seed: int = 0
    step_timeout_seconds: float = 60.0
    document: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        with config_errors():
            self._check()

    def _check(self) -> None:
        """Checks that the parts fit each other. Raises PlanError."""
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
            if case.is_planned and self.profile_seconds == 0:
                raise PlanError(
                    f'"{case.label}" trains with a planned placement, which needs a profile, but profile_seconds is 0.'
                    " Raise profile_seconds, or write the placement.",
                    path=where,
                )

    def check_nodes(self, nodes: Sequence[int], cluster: str) -> None:
        """Checks that the global batch and all cases fit the nodes.

        Args:
            nodes: ranks of each node.
            cluster: name of these nodes, for the message.

        Raises:
            ConfigError: they do not.
        """
        with config_errors():
            for index, case in enumerate(self.cases):
                where = f"strategies[{index}]"
                self._check_sizes(case, sum(nodes), cluster, where)
                if case.strategy == "torch_hsdp" and len(set(nodes)) > 1:
                    raise PlanError(
                        f'found torch_hsdp on "{cluster}" with {list(nodes)} ranks a node, expected as many on every'
                        " node: its device mesh is a rectangle. Remove this strategy.",
                        path=where,
                    )

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
        elif case.batch_sizes not in (PLAN, AUTO) and (
            len(case.batch_sizes) != ranks or sum(case.batch_sizes) != self.total_batch_size
        ):
            raise PlanError(
                f'found {list(case.batch_sizes)}, expected {ranks} sizes (the ranks of "{cluster}") with the sum'
                f" {self.total_batch_size} (total_batch_size).",
                path=f"{where}.batch_sizes",
            )

    @classmethod
    def load(cls: type[_Config], path: str | os.PathLike[str]) -> _Config:
        """The configuration in a YAML file.

        Raises:
            ConfigError: the file is missing, is not YAML, or holds something wrong; it says where.
        """
        with config_errors(os.fspath(path)):
            return cls._from_document(_read_file(path))

    @classmethod
    def from_dict(cls: type[_Config], document: object) -> _Config:
        """The configuration in a file's layout. Raises ConfigError as `load`."""
        with config_errors():
            return cls._from_document(document)

    @classmethod
    def _from_document(cls: type[_Config], document: object) -> _Config:
        sections = require_object(document, required=cls.REQUIRED, optional=(*_SETTINGS, *cls.OPTIONAL))
        return cls(**cls._read_sections(sections), document=sections)

    @classmethod
    def _read_sections(cls, sections: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of this class from a file's sections. Raises PlanError."""
        require_integer(sections["total_batch_size"], "total_batch_size", least=1)
        return {
            "models": {
                name: _read_model(model, at_key("models", name))
                for name, model in named_entries(sections["models"], "models")
            },
            "total_batch_size": sections["total_batch_size"],
            "cases": tuple(
                _read_case(entry, f"strategies[{index}]")
                for index, entry in enumerate(require_list(sections["strategies"], "strategies", "case"))
            ),
            **{
                name: value.from_document(sections[name], name)
                for name, value in _SETTINGS.items()
                if name in sections
            },
        }


def asks_for_emulation(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """The keys of a file that only emulated nodes have; none: it is meant for real nodes.

    Raises:
        ConfigError: the file is missing or is not YAML.
    """
    with config_errors(os.fspath(path)):
        document = _read_file(path)
    return tuple(key for key in EMULATION_KEYS if isinstance(document, dict) and key in document)


def _read_file(path: str | os.PathLike[str]) -> object:
    if not Path(path).is_file():
        raise PlanError("cannot be read: found no such file, expected a benchmark. Correct the path.")
    return read_yaml(path, "benchmark")


_SETTINGS = {
    "interleaved": BOOLEAN,
    "rounds": integer(least=1),
    "steps": integer(least=1),
    "uncounted_steps": integer(),
    "learning_steps": integer(least=1),
    "turn_seconds": number(positive=True),
    "memory": BOOLEAN,
    "profile_seconds": number(),
    "threads": integer(least=1),
    "learning_rate": number(positive=True),
    "seed": integer(),
    "step_timeout_seconds": number(positive=True),
}


def named_entries(value: object, path: str) -> Iterator[tuple[str, object]]:
    """The (name, value) pairs of a table whose keys the user chooses. Raises PlanError."""
    if not isinstance(value, dict) or not value:
        raise PlanError(f"found {describe(value)}, expected an object with one entry for each name.", path=path)
    for name in value:
        require_name(name, path, "names that are words")
    return iter(value.items())


def _read_model(value: object, path: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise PlanError(f'found {describe(value)}, expected an object with the key "kind" and others.', path=path)
    require_choice(value.get("kind"), f"{path}.kind", MODEL_KINDS)
    return value


def _read_case(entry: object, path: str) -> Case:
    section = (
        {"strategy": entry}
        if isinstance(entry, str)
        else require_object(
            entry, path, required=("strategy",), optional=("batch_sizes", "placement", "memory_limit", "checkpoint")
        )
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
        require_choice(sizes, f"{path}.batch_sizes", (EQUAL, PLAN, AUTO))
    case = Case(strategy, communication_dtype or FULL_PRECISION, sizes, **_read_units(section, strategy, path))
    if case.is_peer and given:
        raise PlanError(f'found "{section["strategy"]}", expected "{strategy}": plain PyTorch sends fp32.', path=path)
    if sizes == AUTO and (case.placement is not None or case.checkpoint):
        raise PlanError(
            "found batch_sizes auto with a placement or checkpoint, expected sizes that are known when units are"
            " placed. Remove one of them.",
            path=path,
        )
    return case


def _read_units(section: Mapping[str, Any], strategy: str, path: str) -> dict[str, Any]:
    """The fields of a case that say how its units are kept. Raises PlanError."""
    placement, limit = section.get("placement"), section.get("memory_limit")
    if placement is not None and strategy != Strategy.OSDP:
        raise PlanError(
            f'found a placement with strategy "{strategy}", expected "{Strategy.OSDP}", the one strategy whose units'
            " differ. Write that, or remove the placement.",
            path=f"{path}.placement",
        )
    if (placement == AUTO) is not ("memory_limit" in section):
        raise PlanError(
            "expected placement auto and memory_limit together, the share of lsdp's memory that it is planned for."
            " Write both, or neither.",
            path=path,
        )
    if limit is not None:
        require_number(limit, f"{path}.memory_limit", positive=True)
    if placement is not None and placement != AUTO:
        with located(f"{path}.placement"):
            placement = ModelPlacement.read(placement)
    require_boolean(section.get("checkpoint", False), f"{path}.checkpoint")
    checkpoint = section.get("checkpoint", False)
    kept_as = Case(strategy).engine_strategy
    if checkpoint and (kept_as is None or uniform_placement(kept_as, checkpoint=True) is None):
        raise PlanError(
            f'found checkpoint with strategy "{strategy}", expected one that a store of single units stands for:'
            " plain PyTorch and strategies that offload FSDP2 have none, and a placement says itself which units"
            " recompute. Remove it.",
            path=f"{path}.checkpoint",
        )
    return {"placement": placement, "memory_limit": limit, "checkpoint": checkpoint}


@contextmanager
def config_errors(source: str | None = None) -> Iterator[None]:
    """Turns each PlanError in the block into a `ConfigError` whose message begins with `source`."""
    try:
        with located(source=source):
            yield
    except PlanError as error:
        raise ConfigError(str(error)) from None
    except ConfigError as error:  # of parts that do not fit each other, which know of no file
        raise ConfigError(f"{source}: {error}" if source else str(error)) from None
