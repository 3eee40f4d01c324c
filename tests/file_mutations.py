# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Valid JSON and YAML documents damaged as people, editors and disks damage them; the same for every run."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import yaml


class Raw(str):
    """A value that is written as these characters, without quotes: what no Python value stands for."""


_NUMBERS = (0, -1, 1, 2, 3, 7, 0.5, -0.5, 1e-300, 1e308, 2**31, 2**53, 2**63, 2**64, 10**12, 10**400)
_STRINGS = (
    "",
    " ",
    "2",
    "-1",
    "x",
    "NO",
    "null",
    "true",
    "1e400 TiB",
    "9e999 Gb/s",
    "0 s",
    "ä\u2028\u0000",
    "y" * 5000,
)
_CONTAINERS = ([], {}, [[]], [None], {"a": 1}, {"": None}, [1, 2, 3], ["x", {"y": [0.5]}])
_ANY = (None, True, False, *_NUMBERS, *_STRINGS, *_CONTAINERS)
_HUGE = "9" * 6000
_RAW_JSON = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    _HUGE,
    "[" * 70 + "]" * 70,
    "[" * 20000,
    '{"a":1,"a":2}',
    "'x'",
    "",
)
_RAW_YAML = (
    ".nan",
    ".inf",
    _HUGE,
    "0x" + "f" * 6000,
    "[" * 70 + "]" * 70,
    "[" * 20000,
    "{a: " * 300,
    "{a: 1, a: 2}",
    "{[1, 2]: 3}",
    "{{a: 1}: 3}",
    "{1: 2}",
    "!!python/object/apply:os.getcwd []",
    "!!python/name:os.system",
    "!mine 3",
    "!!binary aGFsbG8=",
    "!!binary x",
    "!!set {a, b}",
    "!!omap [a: 1]",
    "!!int x",
    "!!float x",
    "!!bool x",
    "!!timestamp x",
    "!!map 3",
    "!!seq 3",
    "2024-02-30",
    "2024-01-31",
    "2024-01-31 10:00:00 +99:99",
    "1:30",
    "010",
    "*nowhere",
    "&a [*a]",
    "&a [x, x, x, x, x, x, x, x, x]",
    "&x {<<: *x}",
    "{<<: 3}",
    "{<<: [1, 2]}",
    "no",
    "~",
    "=",
    "<<",
    "|",
    "% x",
    "@",
    "'",
    "\t",
)
_BYTES = (
    b"\x00",
    b"\xff",
    b"\xef\xbb\xbf",
    b"\n",
    b"\t",
    b"{",
    b"}",
    b"[",
    b"]",
    b":",
    b",",
    b'"',
    b"-",
    b"&",
    b"*",
    b"!",
    b"9",
)


def json_text(document: Any) -> str:
    """The document as JSON, `Raw` values as they stand."""
    return _with_raw(document, lambda plain: json.dumps(plain, indent=1), json.dumps)


def yaml_text(document: Any) -> str:
    """The document as YAML, `Raw` values as they stand."""

    def write(plain: Any) -> str:
        return yaml.safe_dump(plain, sort_keys=False, default_flow_style=False, width=10**9)

    return _with_raw(document, write, str)


def mutate(document: Any, write: Callable[[Any], str], seed: str) -> bytes:
    """A damaged file: one to three changes of values, of keys, or of the bytes."""
    dice = random.Random(seed)
    if dice.random() < 0.25:
        return _damage_bytes(write(document).encode(), dice)
    changed = copy.deepcopy(document)
    raw = _RAW_JSON if write is json_text else _RAW_YAML
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        changed = _change(changed, dice, raw)
    return write(changed).encode("utf-8", "surrogatepass")


def _change(document: Any, dice: random.Random, raw: tuple[str, ...]) -> Any:
    places = _places(document)
    if not places:
        return _value(dice, raw, document)
    parent, key = dice.choice(places)
    action = dice.choice(
        ("value", "value", "value", "value", "near", "remove", "rename", "add", "other place", "wrap")
    )
    if action == "value":
        parent[key] = _value(dice, raw, document)
    elif action == "near":
        parent[key] = _near(parent[key], dice)
    elif action == "remove":
        del parent[key]
    elif action == "rename" and isinstance(parent, dict):
        parent[dice.choice(("x", f"{key}s", str(key).upper(), ""))] = parent.pop(key)
    elif action == "add" and isinstance(parent, dict):
        parent[dice.choice(("x", "version", "ranks", "__class__"))] = _value(dice, raw, document)
    elif action == "add" and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(dice.choice((parent[key], _value(dice, raw, document)))))
    elif action == "other place":
        source, name = dice.choice(places)
        parent[key] = copy.deepcopy(source[name])
    else:
        parent[key] = dice.choice(([parent[key]], {"a": parent[key]}, str(parent[key])))
    return document if dice.random() < 0.98 else _value(dice, raw, document)


def _value(dice: random.Random, raw: tuple[str, ...], document: Any) -> Any:
    return Raw(dice.choice(raw)) if dice.random() < 0.4 else copy.deepcopy(dice.choice(_ANY))


def _near(value: Any, dice: random.Random) -> Any:
    """Something that a person could have meant."""
    if isinstance(value, bool):
        return dice.choice((str(value), int(value), not value))
    if isinstance(value, (int, float)):
        return dice.choice((str(value), float(value), -value, value + 1, [value], f"{value} GB", value * 10))
    if isinstance(value, str):
        return dice.choice((value.upper(), f" {value} ", value[:-1], [value], {value: None}, f"{value}\n{value}"))
    if isinstance(value, list):
        return dice.choice((value[:-1], value * 2, value[::-1], dict.fromkeys(map(str, value))))
    return dice.choice((list(value), None, {})) if isinstance(value, dict) else 0


def _places(document: Any) -> list[tuple[Any, Any]]:
    """Every (container, key or index) in a document, all depths alike."""
    if not isinstance(document, (dict, list)):
        return []
    items = list(document.items()) if isinstance(document, dict) else list(enumerate(document))
    return [place for key, value in items for place in ((document, key), *_places(value))]


def _damage_bytes(data: bytes, dice: random.Random) -> bytes:
    for _ in range(dice.choice((1, 1, 2, 5))):
        start = dice.randrange(len(data) + 1)
        end = min(len(data), start + dice.choice((1, 1, 5, 50)))
        action = dice.choice(("remove", "insert", "flip", "cut", "double", "space"))
        if action == "remove":
            data = data[:start] + data[end:]
        elif action == "insert":
            data = data[:start] + dice.choice(_BYTES) * dice.choice((1, 1, 3)) + data[start:]
        elif action == "flip" and start < len(data):
            data = data[:start] + bytes([data[start] ^ 1 << dice.randrange(8)]) + data[start + 1 :]
        elif action == "cut":
            data = data[:start]
        elif action == "double":
            data = data[:end] + data[start:]
        else:
            data = data[:start] + b" " * dice.choice((1, 2, 4)) + data[start:]
    return data


def _with_raw(document: Any, write: Callable[[Any], str], quote: Callable[[str], str]) -> str:
    raw: list[str] = []

    def replaced(value: Any) -> Any:
        if isinstance(value, Raw):
            raw.append(str(value))
            return f"RAW{len(raw) - 1}VALUE"
        if isinstance(value, dict):
            return {str(key): replaced(item) for key, item in value.items()}
        return [replaced(item) for item in value] if isinstance(value, list) else value

    text = write(replaced(document))
    for index, characters in enumerate(raw):
        text = text.replace(quote(f"RAW{index}VALUE"), characters)
    return text
