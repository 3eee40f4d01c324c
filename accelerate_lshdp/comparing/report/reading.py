# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Strict reading of ``results.json``: unknown keys, wrong types and contradictions are errors that say where."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from accelerate_lshdp.comparing.report.results import Case, Event, Limit, LossPoint, Machine, Results, ResultsError
from accelerate_lshdp.documents.strict_reading import parse_json, require_json
from accelerate_lshdp.documents.value_checks import (
    PlanError,
    at_key,
    describe,
    located,
    require_boolean,
    require_choice,
    require_integer,
    require_name,
    require_number,
    require_object,
)


RESULTS_FILE = "results.json"
RESULTS_VERSION = 1
RESULTS_KIND = "benchmark"
EVENT_NAMES = ("data", "forward", "backward", "wait", "optimizer")
_LARGEST_COUNT = 2**63 - 1
_NAMES = ("cluster", "model", "network", "strategy", "communication_dtype", "label")
# Fields that every case has that did not fail; the others may be null, as not every process can measure them.
_ALWAYS_MEASURED = ("batch_sizes", "step_seconds", "samples_per_second", "spread", "round_seconds")
_PER_RANK = ("compute_seconds", "wait_seconds", "optimizer_seconds")
_PER_NODE = ("bytes_between_nodes", "formula_bytes", "bytes_inside_nodes")
_SINGLE = ("step_seconds", "spread", "samples_per_second", "idle_fraction", "predicted_seconds", "slowdown")
_CASE_KEYS = (
    *_NAMES,
    *("parameters", "bits_per_second", "is_peer", "nodes", "total_batch_size", "batch_sizes", "round_seconds"),
    *(*_SINGLE, *_PER_RANK, *_PER_NODE, "peak_pss_bytes", "peak_rank_bytes", "losses", "timeline", "error"),
)
_Item = TypeVar("_Item")


def load_results(folder: str | os.PathLike[str]) -> Results:
    """The results in a folder's ``results.json``.

    Raises:
        ResultsError: as `read_results`, and for a file that is missing, cannot be read or is not JSON.
    """
    # A common mistake is to give results.json itself: its message says what to give instead.
    path = Path(folder, RESULTS_FILE)
    expected = "expected what `accelerate-lshdp bench` wrote. Give the folder that was its --output-dir"
    if Path(folder).is_file():
        raise ResultsError(f"found the file {os.fspath(folder)}, expected the folder that holds {RESULTS_FILE}")
    try:
        document = parse_json(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ResultsError(f"{path}: found no such file, {expected}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ResultsError(f"{path}: found nothing that can be read ({error}), {expected}") from error
    except PlanError as error:
        # The reader's own expectation is that of a plan.
        found = error.message.split(", expected")[0]
        raise ResultsError(f"{path}: {found}, {expected}") from error
    return read_results(document, source=f"{path}: ")


def read_results(document: object, source: str = "") -> Results:
    """The results in a JSON document.

    Args:
        document: the contents of the file.
        source: the beginning of error messages, such as the path of the file.

    Raises:
        ResultsError: another kind or version, unknown or missing keys, wrong types, or values that contradict one
            another.
    """
    with _results_errors(source):
        _require_kind(document)
        require_json(document)
        keys = ("created", "command", "machine", "versions", "config", "wall_seconds", "cases", "limits")
        sections = require_object(document, required=("version", "kind", *keys))
        require_name(sections["created"], "created", "the time of the benchmark")
        _require_string(sections["command"], "command")
        require_number(sections["wall_seconds"], "wall_seconds", positive=False)
        for name in ("versions", "config"):
            if not isinstance(sections[name], dict):
                raise PlanError(f"found {describe(sections[name])}, expected an object.", path=name)
        for library, version in sections["versions"].items():
            require_name(version, at_key("versions", library), "a version")
        with located("machine"):
            machine = _read_machine(sections["machine"])
        cases = _read_list(sections["cases"], "cases", _read_case)
        _check_together(cases)
        return Results(
            machine=machine,
            cases=cases,
            limits=_read_list(sections["limits"], "limits", _read_limit),
            **{name: sections[name] for name in ("created", "command", "versions", "config", "wall_seconds")},
        )


@contextmanager
def _results_errors(source: str) -> Iterator[None]:
    """Turns each PlanError in the block into a `ResultsError` whose message begins with `source`."""
    try:
        yield
    except PlanError as error:
        raise ResultsError(f"{source}{error}") from error


def _require_kind(document: object) -> None:
    """Checks kind and version of a document; called first, as a wrong kind may break other checks."""
    if not isinstance(document, dict):
        raise PlanError(f"found {describe(document)}, expected an object that `accelerate-lshdp bench` wrote.")
    for key, expected in (("kind", RESULTS_KIND), ("version", RESULTS_VERSION)):
        found = document.get(key)
        # The types too, as True == 1.
        if type(found) is not type(expected) or found != expected:
            raise PlanError(
                f"found {describe(found)}, expected {json.dumps(expected)}: these are no results of a benchmark, or"
                " those of another version of accelerate_lshdp. Write them with `accelerate-lshdp bench`.",
                path=key,
            )


def _read_machine(document: object) -> Machine:
    keys = require_object(document, required=("cpu", "cores", "memory_bytes", "kernel"))
    for name in ("cpu", "kernel"):
        _require_string(keys[name], name)
    for name in ("cores", "memory_bytes"):
        require_integer(keys[name], name, least=1, most=_LARGEST_COUNT)
    return Machine(**keys)


def _read_limit(document: object) -> Limit:
    keys = require_object(document, required=("name", "value", "limit", "holds"))
    require_name(keys["name"], "name", "what has to hold")
    require_boolean(keys["holds"], "holds")
    # `value` is null where the case that it is about has failed.
    for name in ("value", "limit"):
        if name == "limit" or keys[name] is not None:
            _require_real(keys[name], name)
    if keys["value"] is None and keys["holds"]:
        raise PlanError("found null for a limit that holds, expected what was measured.", path="value")
    return Limit(**keys)


def _read_case(document: object) -> Case:
    keys = dict(require_object(document, required=_CASE_KEYS))
    for name in _NAMES:
        require_name(keys[name], name, "a name")
    require_integer(keys["parameters"], "parameters", least=0, most=_LARGEST_COUNT)  # 0: it failed before it was built
    require_integer(keys["total_batch_size"], "total_batch_size", least=1, most=_LARGEST_COUNT)
    if keys["bits_per_second"] is not None:  # of real nodes it is not known
        require_number(keys["bits_per_second"], "bits_per_second", positive=True)
    require_boolean(keys["is_peer"], "is_peer")
    keys["nodes"] = _read_integers(keys["nodes"], "nodes", least=1)
    if keys["error"] is not None:
        require_name(keys["error"], "error", "what went wrong, or null")
        _check_failed(keys)
    else:
        for name in (*_ALWAYS_MEASURED, "losses"):
            if keys[name] is None:
                raise PlanError('found null, expected a figure. A case without one says why under "error".', path=name)
    # Zero seconds or samples would divide by zero in tables and pictures; zero waits and errors are fine.
    for name in _SINGLE:
        if keys[name] is not None:
            require_number(keys[name], name, positive=name in ("step_seconds", "samples_per_second"))
    # From here on lists are checked against the numbers of ranks and nodes, so every picture may zip them.
    ranks, nodes = sum(keys["nodes"]), len(keys["nodes"])
    keys["batch_sizes"] = _read_optional(keys["batch_sizes"], "batch_sizes", _read_integers, ranks, "rank")
    # Samples per second are computed from the total, so sizes with another sum would make them wrong.
    if keys["batch_sizes"] is not None and sum(keys["batch_sizes"]) != keys["total_batch_size"]:
        raise PlanError(
            f"found sizes that sum to {sum(keys['batch_sizes'])}, expected total_batch_size,"
            f" {keys['total_batch_size']}.",
            path="batch_sizes",
        )
    for name in _PER_RANK:
        keys[name] = _read_optional(keys[name], name, _read_numbers, ranks, "rank")
    for name in _PER_NODE:
        keys[name] = _read_optional(keys[name], name, _read_numbers, nodes, "node")
    keys["peak_rank_bytes"] = _read_optional(keys["peak_rank_bytes"], "peak_rank_bytes", _read_integers, ranks, "rank")
    keys["peak_pss_bytes"] = _read_optional(keys["peak_pss_bytes"], "peak_pss_bytes", _read_integers, nodes, "node")
    keys["round_seconds"] = _read_optional(keys["round_seconds"], "round_seconds", _read_numbers)
    keys["losses"] = _read_list(keys["losses"] or [], "losses", _read_loss)
    keys["timeline"] = _read_optional(keys["timeline"], "timeline", _read_timeline, ranks, "rank")
    return Case(**keys)


def _check_failed(keys: dict[str, Any]) -> None:
    """Checks that a case with an error has no figures, which readers might take for a result."""
    figures = {*_ALWAYS_MEASURED, *_SINGLE, *_PER_RANK, *_PER_NODE, "peak_pss_bytes", "peak_rank_bytes", "timeline"}
    for name in sorted(figures | {"losses"}):
        if keys[name] not in (None, []) and name != "batch_sizes":
            raise PlanError(
                f"found {describe(keys[name])}, expected null, as the case has an error. Remove one of the two.",
                path=name,
            )
        keys[name] = keys[name] or None  # empty lists are as good as null


def _check_together(cases: tuple[Case, ...]) -> None:
    """Checks all cases together: no case stands twice, and a cluster has the same nodes in all of its cases."""
    seen, nodes = set(), {}
    for index, case in enumerate(cases):
        place = (case.cluster, case.model, case.network, case.label)
        if place in seen:
            raise PlanError(
                f"found {describe(case.label)} twice for one cluster, model and network, expected it once.",
                path=f"cases[{index}].label",
            )
        seen.add(place)
        if nodes.setdefault(case.cluster, case.nodes) != case.nodes:
            raise PlanError(
                f"found {list(case.nodes)}, expected {list(nodes[case.cluster])} as in other cases of the cluster"
                f" {describe(case.cluster)}.",
                path=f"cases[{index}].nodes",
            )


# ---- parts ----------------------------------------------------------------------------------------------------------


def _read_optional(
    value: object,
    path: str,
    read: Callable[[object, str], tuple[_Item, ...]],
    length: int | None = None,
    what: str = "",
) -> tuple[_Item, ...] | None:
    """A list that may be null, read by `read`, with one entry for each of `length` ranks or nodes."""
    if value is None:
        return None
    items = read(value, path)
    if length is not None and len(items) != length:
        raise PlanError(f"found {len(items)} entries, expected {length}, one a {what}.", path=path)
    return items


def _read_list(value: object, path: str, read: Callable[[object], _Item]) -> tuple[_Item, ...]:
    if not isinstance(value, list):
        raise PlanError(f"found {describe(value)}, expected a list.", path=path)
    items = []
    for index, entry in enumerate(value):
        with located(f"{path}[{index}]"):
            items.append(read(entry))
    return tuple(items)


def _read_integers(value: object, path: str, least: int = 0) -> tuple[int, ...]:
    def read(entry: object) -> int:
        require_integer(entry, "", least=least, most=_LARGEST_COUNT)
        return entry

    return _read_list(value, path, read)


def _read_numbers(value: object, path: str) -> tuple[float, ...]:
    def read(entry: object) -> float:
        require_number(entry, "", positive=False)
        return entry

    return _read_list(value, path, read)


def _read_loss(entry: object) -> LossPoint:
    if not isinstance(entry, list) or len(entry) != 3:
        raise PlanError(f"found {describe(entry)}, expected [seconds, step, loss].")
    seconds, step, loss = entry
    require_number(seconds, "[0]", positive=False)
    require_integer(step, "[1]", least=0, most=_LARGEST_COUNT)
    if loss is not None:
        _require_real(loss, "[2]")
    return LossPoint(seconds, step, loss)


def _read_timeline(value: object, path: str) -> tuple[tuple[Event, ...], ...]:
    return _read_list(value, path, lambda events: _read_list(events, "", _read_event))


def _read_event(document: object) -> Event:
    keys = require_object(document, required=("name", "begin", "end"))
    require_choice(keys["name"], "name", EVENT_NAMES)
    for name in ("begin", "end"):
        _require_real(keys[name], name)
    if keys["end"] < keys["begin"]:
        raise PlanError(f"found {keys['end']}, expected at least {keys['begin']}, where the event begins.", path="end")
    return Event(**keys)


def _require_real(value: object, path: str) -> None:
    """Raises PlanError unless `value` is a number, of either sign; `require_json` has refused NaN and infinity."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise PlanError(f"found {describe(value)}, expected a number.", path=path)


def _require_string(value: object, path: str) -> None:
    if not isinstance(value, str):
        raise PlanError(f"found {describe(value)}, expected a string.", path=path)
