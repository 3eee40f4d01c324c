# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The YAML file of a benchmark on emulated nodes: that of a comparison, with clusters, networks and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from accelerate_lshdp.comparing.config import ComparisonConfig, named_entries
from accelerate_lshdp.documents.cluster import Link, Node
from accelerate_lshdp.documents.cluster_file import read_link, read_nodes
from accelerate_lshdp.documents.value_checks import (
    PlanError,
    at_key,
    describe,
    require_choice,
    require_list,
    require_name,
    require_number,
    require_object,
)
from laboratory.limits import Deviation, Limit, Ratio


#: Figures of a case that limits may compare; the least is the best.
COMPARED = ("step_seconds", "peak_pss_bytes", "peak_rank_bytes", "bytes_between_nodes")


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(ComparisonConfig):
    """A comparison on emulated nodes. Every strategy is trained on every network, cluster and model.

    Args:
        clusters: the nodes of each, by name.
        networks: by the name that results have them under.
        limits: what has to hold.
        later: the same nodes with the cores that they have in a second part, while trainings go on; by name, for those
            that have one.

    Raises:
        ConfigError: the parts do not fit each other.
    """

    REQUIRED: ClassVar[tuple[str, ...]] = ("clusters", "networks", *ComparisonConfig.REQUIRED)
    OPTIONAL: ClassVar[tuple[str, ...]] = ("limits",)

    clusters: Mapping[str, tuple[Node, ...]]
    networks: Mapping[str, Link]
    limits: tuple[Limit, ...] = ()
    later: Mapping[str, tuple[Node, ...]] = field(default_factory=dict)
    # An emulated node has a part of a core for all of its ranks.
    threads: int = 1

    def _check(self) -> None:
        super()._check()
        for name, nodes in self.clusters.items():
            self.check_nodes([node.ranks for node in nodes], name)
        for name in self.later:
            if not self.interleaved or not self.profile_seconds:
                raise PlanError(
                    "found later without interleaved or without profile_seconds, expected both: trainings go on, and"
                    " ranks are profiled again. Remove it.",
                    path=f"{at_key('clusters', name)}.later",
                )
        self._check_limits()

    def _check_limits(self) -> None:
        labels = [case.label for case in self.cases]
        for index, limit in enumerate(self.limits):
            if isinstance(limit.of, Ratio):
                where = f"limits[{index}].ratio"
                for label in (*limit.of.numerator, *limit.of.denominator):
                    require_choice(label, where, labels)
                require_choice(limit.of.network, where, list(self.networks))

    @classmethod
    def _read_sections(cls, sections: Mapping[str, Any]) -> dict[str, Any]:
        clusters = {
            name: _read_cluster(cluster, at_key("clusters", name))
            for name, cluster in named_entries(sections["clusters"], "clusters")
        }
        return {
            **super()._read_sections(sections),
            "clusters": {name: nodes for name, (nodes, _) in clusters.items()},
            "later": {name: later for name, (_, later) in clusters.items() if later is not None},
            "networks": _read_networks(sections["networks"]),
            "limits": tuple(
                _read_limit(entry, f"limits[{index}]")
                for index, entry in enumerate(_optional_list(sections.get("limits"), "limits", "limit"))
            ),
        }


def _optional_list(value: object, path: str, what: str) -> list[Any]:
    return [] if value is None or value == [] else require_list(value, path, what)


def _read_networks(value: object) -> dict[str, Link]:
    networks = {}
    for index, entry in enumerate(require_list(value, "networks", "network")):
        where = f"networks[{index}]"
        section = {"rate": entry} if isinstance(entry, str) else entry
        link = read_link(section, where)
        name = ", ".join(str(part) for part in section.values())
        if name in networks:
            raise PlanError(f'found "{name}" twice, expected it once. Remove one of them.', path=where)
        networks[name] = link
    return networks


def _read_cluster(value: object, path: str) -> tuple[tuple[Node, ...], tuple[Node, ...] | None]:
    section = require_object(value, path, required=("nodes",), optional=("later",))
    nodes = read_nodes(section["nodes"], f"{path}.nodes")
    for index, node in enumerate(nodes):
        if node.cores is None:
            raise PlanError(
                "found a node without cpu, expected the cores that it has. Add it.", path=f"{path}.nodes[{index}]"
            )
    if "later" not in section:
        return nodes, None
    later = require_list(section["later"], f"{path}.later", "number of cores, one for each node")
    if len(later) != len(nodes):
        raise PlanError(
            f"found cores of {len(later)} nodes, expected them for each of {len(nodes)}. Correct the list.",
            path=f"{path}.later",
        )
    for index, cores in enumerate(later):
        require_number(cores, f"{path}.later[{index}]", positive=True)
    return nodes, tuple(replace(node, cores=float(cores)) for node, cores in zip(nodes, later, strict=True))


def _read_limit(entry: object, path: str) -> Limit:
    kinds = ("ratio", "error")
    section = require_object(entry, path, required=("name", "at_most"), optional=("figure", "within_memory", *kinds))
    require_name(section["name"], f"{path}.name", "a name")
    given = [kind for kind in kinds if kind in section]
    if len(given) != 1:
        raise PlanError(f"found {given or 'none'} of {', '.join(kinds)}, expected one of them.", path=path)
    for key in ("figure", "within_memory"):
        if key in section and given != ["ratio"]:
            raise PlanError(f'found "{key}", which only a ratio has. Remove it.', path=path)
    if "within_memory" in section:
        require_number(section["within_memory"], f"{path}.within_memory", positive=True)
    require_number(section["at_most"], f"{path}.at_most", positive=True)
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
    return Ratio(labels[0], labels[1], parts[2], figure, section.get("within_memory"))
