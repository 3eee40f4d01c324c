# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Strict readers of JSON and YAML files: from bytes to plain values, or one `PlanError` that says where.

Plain values are objects with string keys, lists, strings, booleans, null, finite floats and integers of 64 bits,
nested at most `DEEPEST_NESTING` levels. Everything else is an error that says what was found, where, and what was
expected: repeated keys, tags, recursive aliases, integers of thousands of digits, text that is not UTF-8.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate_lshdp.documents.value_checks import PlanError, at_key, describe, located


if TYPE_CHECKING:
    import yaml

# Deep enough for any curve or certificate. A cyclic or hostile document stops here, not at the interpreter's recursion
# limit, which would raise in the middle of a parser.
DEEPEST_NESTING = 64
#: A results file of a large benchmark has some megabytes, a file that a person wrote some kilobytes.
MOST_BYTES = 1 << 28
#: PyYAML takes seconds for a megabyte, and a few aliases can stand for any number of values.
MOST_YAML_CHARACTERS, MOST_YAML_VALUES = 1 << 20, 100_000
_TOO_DEEP = f"found more than {DEEPEST_NESTING} levels of nesting, expected fewer. Flatten it."
_PLAIN_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")}
_MERGE_TAG = "tag:yaml.org,2002:merge"


class _RepeatedKeys(dict[str, Any]):
    """A JSON object in which some key appeared more than once; plain `json` would keep the last value silently."""

    def __init__(self, pairs: list[tuple[str, Any]], repeated: str) -> None:
        super().__init__(pairs)
        self.repeated = repeated


def read_text(path: str | os.PathLike[str], what: str = "plan") -> str:
    """The text of a file that a user wrote (UTF-8, with or without a byte order mark).

    Args:
        path: the file.
        what: what it should be, for error messages.

    Raises:
        PlanError: it does not exist, is a directory, cannot be read, is far too large or is not UTF-8.
    """
    try:
        path = Path(path)
        # Before reading: a wrong path may name a disk image, which must not fill the memory.
        if path.stat().st_size > MOST_BYTES:
            raise PlanError(f"found {path.stat().st_size} bytes, expected a {what}, which has far less. Correct it.")
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise PlanError(f"found no such file, expected a {what}. Correct the path, or save a {what} there.") from None
    except IsADirectoryError:
        raise PlanError(f"found a directory, expected a {what} file. Give the path of the file in it.") from None
    except UnicodeDecodeError as error:
        raise PlanError(
            f"found bytes that are not UTF-8 (at offset {error.start}), expected a {what}. Save it as UTF-8 text."
        ) from None
    except PlanError:
        raise  # a ValueError itself, which the next clause would catch
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise PlanError(f"cannot read it ({error}), expected a {what}. Give a file that can be read.") from None


def read_yaml(path: str | os.PathLike[str], what: str) -> Any:
    """The plain values in a YAML file.

    Raises:
        PlanError: as `read_text` and `parse_yaml`, with the path as its source.
    """
    with located(source=os.fspath(path)):
        return parse_yaml(read_text(path, what), what)


def parse_json(text: str, what: str = "plan") -> Any:
    """The JSON value in `text`. Repeated keys and NaN are kept for `require_json`, which can say where they are.

    Raises:
        PlanError: `text` is empty or is not JSON.
    """
    if not text.strip():
        raise PlanError('found nothing, expected a JSON object such as {"version": 1, "strategy": "lsdp"}.')

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                return _RepeatedKeys(pairs, key)
            seen.add(key)
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=build)
    except json.JSONDecodeError as error:
        said = f"{error.msg}, line {error.lineno} column {error.colno}"
        raise PlanError(f"found text that is not JSON ({said}), expected a {what}. Correct it.") from None
    except RecursionError:
        raise PlanError(_TOO_DEEP) from None
    except ValueError:  # CPython reads no integer of more than a few thousand digits
        raise PlanError(
            "found an integer with thousands of digits, expected numbers that fit 64 bits. Correct it."
        ) from None


def parse_yaml(text: str, what: str) -> Any:
    """The plain values in a YAML document.

    Anchors, aliases and merge keys may be used, as long as they stand for a finite number of values. What looks like a
    date is a string.

    Raises:
        PlanError: `text` is empty, is not YAML, or holds something that is not plain; it says where.
    """
    import yaml

    if not text.strip():
        raise PlanError(f"found nothing, expected a {what}. Write one.")
    if len(text) > MOST_YAML_CHARACTERS:
        raise PlanError(f"found {len(text)} characters, expected a {what}, which has far less. Correct it.")
    # Three passes, each safe after the one before: the graph of nodes, with a limit of depth; its size with all
    # aliases written out, which may grow exponentially; then the values.
    loader = None
    try:
        loader = _strict_loader()(text)
        node = loader.get_single_node()
        if node is None:
            raise PlanError(f"found nothing but comments, expected a {what}. Write one.")
        _require_finite(node, {}, set())
        value = _plain(node, loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f", line {mark.line + 1} column {mark.column + 1}"
        said = error.problem or error.context or "no reason is known"
        raise PlanError(f"found text that is not YAML ({said[:200]}{where}), expected a {what}. Correct it.") from None
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, PlanError):
            raise
        said = " ".join(str(error).split())[:200]
        raise PlanError(f"found text that is not YAML ({said}), expected a {what}. Correct it.") from None
    finally:
        if loader is not None:
            loader.dispose()  # breaks the reference cycles of the parser's state
    require_json(value)
    return value


def require_json(value: object, path: str = "", depth: int = 0) -> None:
    """Raises PlanError for the first part of `value` that JSON cannot carry unchanged: NaN, tuples, repeated keys."""
    if depth > DEEPEST_NESTING:
        raise PlanError(_TOO_DEEP, path=path)
    if isinstance(value, _RepeatedKeys):
        raise PlanError(
            f"found the key {json.dumps(value.repeated)} twice in one object, expected it once. Remove one of them.",
            path=path,
        )
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise PlanError(f"found the key {describe(key)}, expected keys that are strings.", path=path)
            require_json(item, at_key(path, key), depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            require_json(item, f"{path}[{index}]", depth + 1)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise PlanError(f"found {describe(value)}, expected a finite number. Measure or plan again.", path=path)
    elif isinstance(value, int) and value.bit_length() > 64:
        raise PlanError(f"found {describe(value)}, expected one that fits 64 bits. Use a float.", path=path)
    elif value is not None and not isinstance(value, (str, int)):
        raise PlanError(
            f"found {describe(value)}, expected an object, list, string, number, boolean or null. Convert it.",
            path=path,
        )


def _strict_loader() -> type[yaml.SafeLoader]:
    """PyYAML's safe loader, with a limit of nesting and without timestamps; a function, as yaml is imported late."""
    import yaml

    class StrictLoader(yaml.SafeLoader):
        depth = 0
        # Dates stay the strings that they are: no file has a date where one is meant.
        yaml_implicit_resolvers = {
            first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.depth > DEEPEST_NESTING:
                raise PlanError(_TOO_DEEP)
            self.depth += 1
            try:
                return super().compose_node(parent, index)
            finally:
                self.depth -= 1

    return StrictLoader


def _require_finite(node: yaml.Node, counted: dict[yaml.Node, int], open_nodes: set[yaml.Node]) -> int:
    """The number of values that a node stands for with all aliases written out.

    Args:
        node: the node.
        counted: results for nodes that were visited, so that shared ones are visited once.
        open_nodes: the nodes that contain this one.

    Raises:
        PlanError: the number is not finite, or above `MOST_YAML_VALUES`.
    """
    if node in open_nodes:
        raise PlanError(
            f"found an alias within what it stands for ({_place(node)}), expected values that end. Write it out."
        )
    if node in counted or isinstance(node.value, str):
        return counted.get(node, 1)
    open_nodes.add(node)
    parts = [part for item in node.value for part in (item if isinstance(item, tuple) else (item,))]
    counted[node] = 1 + sum(_require_finite(part, counted, open_nodes) for part in parts)
    open_nodes.discard(node)
    if counted[node] > MOST_YAML_VALUES:
        raise PlanError(f"found aliases for more than {MOST_YAML_VALUES} values, expected fewer. Write less.")
    return counted[node]


def _plain(node: yaml.Node, loader: yaml.SafeLoader, path: str = "", depth: int = 0) -> Any:
    """The plain value of a YAML node.

    Raises:
        PlanError: the node is not plain; it says the JSON path and the line.
    """
    import yaml

    if node.tag not in _PLAIN_TAGS:
        known = node.tag.replace("tag:yaml.org,2002:", "!!")
        raise PlanError(
            f"found the tag {known[:60]} ({_place(node)}), expected plain numbers, strings, lists and tables. Remove"
            " the tag.",
            path=path,
        )
    if depth > DEEPEST_NESTING:  # aliases inside aliases are deeper than what was composed
        raise PlanError(_TOO_DEEP, path=path)
    kind = node.tag.rpartition(":")[2]
    if isinstance(node, yaml.ScalarNode) and kind not in ("seq", "map"):
        try:
            return loader.construct_object(node)
        except (ValueError, KeyError, ArithmeticError):  # such as !!int x, and integers of thousands of digits
            shown = describe(node.value)
            raise PlanError(
                f"found {shown} ({_place(node)}), expected a value of YAML's type {kind}.", path=path
            ) from None
    if isinstance(node, yaml.SequenceNode) and kind == "seq":
        return [_plain(item, loader, f"{path}[{index}]", depth + 1) for index, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode) or kind != "map":
        raise PlanError(
            f"found the tag !!{kind} at something else ({_place(node)}), expected none. Remove it.", path=path
        )
    values: dict[str, Any] = {}
    merged: dict[str, Any] = {}
    for key_node, value_node in node.value:
        if key_node.tag == _MERGE_TAG:
            # YAML 1.1: of several tables the first one wins, and the object's own keys win over all of them.
            for found in _merged(value_node, loader, path, depth):
                merged = {**found, **merged}
            continue
        key = _plain(key_node, loader, path, depth + 1)
        where = _place(key_node)
        if not isinstance(key, str):
            raise PlanError(
                f"found the key {describe(key)} ({where}), expected keys that are strings. Quote it.", path=path
            )
        if key in values:
            raise PlanError(
                f"found the key {key[:60]!r} twice ({where}), expected it once. Remove one of them.",
                path=path,
            )
        values[key] = _plain(value_node, loader, at_key(path, key), depth + 1)
    return {**merged, **values}


def _merged(node: yaml.Node, loader: yaml.SafeLoader, path: str, depth: int) -> list[Mapping[str, Any]]:
    """The tables that a merge key names, the one that wins first."""
    value = _plain(node, loader, at_key(path, "<<"), depth + 1)
    tables = value if isinstance(value, list) else [value]
    for table in tables:
        if not isinstance(table, dict):
            raise PlanError(
                f"found {describe(table)} ({_place(node)}), expected a table to merge. Remove it.",
                path=at_key(path, "<<"),
            )
    return tables


def _place(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}"
