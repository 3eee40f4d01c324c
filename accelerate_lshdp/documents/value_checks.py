# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Checks of single values in documents, each of which returns or raises a `PlanError` with the value's JSON path.

An error says where the value stands ("batch.ranks[1].micro_batch_size"), what was found there, what was expected and
what to do. The checks know nothing of plans, profiles or results. `strict_reading` makes the values.
"""

from __future__ import annotations

import difflib
import json
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar


# Far above any real batch, and small enough that products and sums of a few of them stay in 64 bits.
LARGEST_BATCH = 2**31

_Section = TypeVar("_Section")


class PlanError(ValueError):
    """A plan that is malformed, or that does not fit the run.

    Args:
        message: what was found, what was expected and what to do.
        path: where in the plan, as a JSON path such as "batch.ranks[1].micro_batch_size"; empty for the whole plan.
        source: the file or environment variable that the plan came from, if any.
    """

    def __init__(self, message: str, *, path: str = "", source: str | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.source = source

    @property
    def message(self) -> str:
        return self.args[0]

    def __str__(self) -> str:
        return ": ".join(part for part in (self.source, self.path, self.message) if part)


@contextmanager
def located(path: str = "", source: str | None = None) -> Iterator[None]:
    """Prefixes the path of a `PlanError` raised in the block with `path`, and gives it `source` if it has none."""
    try:
        yield
    except PlanError as error:
        # From the first cause: a traceback should not list one PlanError for every level of nesting.
        raise PlanError(error.message, path=join(path, error.path), source=error.source or source) from error.__cause__


def join(parent: str, child: str) -> str:
    """The JSON path `child` inside the object or list at `parent`."""
    return parent + child if not parent or not child or child.startswith("[") else f"{parent}.{child}"


def at_key(parent: str, key: str) -> str:
    """The JSON path of the value under `key` of the object at `parent`."""
    # Keys come from the user's file: a long one must not hide the rest of the message.
    key = key if len(key) <= 60 else key[:57] + "..."
    return join(parent, key if key.isidentifier() else f"[{json.dumps(key)}]")


def describe(value: object) -> str:
    """A value as an error message shows it: its JSON form, shortened, and its kind where that may be the mistake."""
    if value is None:
        return "null"
    # Before int: bool is a subclass of it, and `true` is what the file says.
    if isinstance(value, bool):
        return f"{str(value).lower()} (a boolean)"
    if isinstance(value, int):
        # Python refuses to print integers of more than a few thousand digits.
        return str(value) if value.bit_length() <= 128 else f"an integer of {value.bit_length()} bits"
    if isinstance(value, float):
        return f"{float(value)!r} (a float)" if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return f"{json.dumps(value if len(value) <= 60 else value[:57] + '...')} (a string)"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return f"a {kind} of {len(value)}" if value else f"an empty {kind}"
    return f"a Python {type(value).__name__}"


def nearest(word: object, choices: Iterable[str]) -> str:
    """' Did you mean "..."?' for the choice that looks most like `word`, or nothing where none does."""
    if not isinstance(word, str):
        return ""
    # Below a similarity of 0.5 suggestions are more often wrong than right.
    close = difflib.get_close_matches(word.lower(), list(choices), n=1, cutoff=0.5)
    return f' Did you mean "{close[0]}"?' if close else ""


def plain_integer(value: object) -> object:
    """NumPy and torch integers as int, so that an array of sizes can be given as it is; anything else unchanged."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return value
    try:
        return operator.index(value)
    except TypeError:  # arrays and floating tensors have __index__ too; the field's own check names them
        return value


def require_integer(value: object, path: str, *, least: int, most: int = LARGEST_BATCH) -> None:
    """Raises PlanError unless `value` is an int (not a bool) in [least, most]."""
    # bool is a subclass of int: without the first test `true` would pass for 1.
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise PlanError(
            f"found {describe(value)}, expected an integer from {least} to {most}. Correct this value.", path=path
        )


def require_boolean(value: object, path: str) -> None:
    """Raises PlanError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise PlanError(f"found {describe(value)}, expected true or false. Correct this value.", path=path)


def require_number(value: object, path: str, *, positive: bool) -> None:
    """Raises PlanError unless `value` is a finite number, > 0 if `positive`, else >= 0."""
    expected = f"a finite number {'above' if positive else 'of at least'} 0"
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not (0 < value if positive else 0 <= value) or not value <= 1e300:
        raise PlanError(f"found {describe(value)}, expected {expected}. Correct this value.", path=path)


def require_name(value: object, path: str, what: str) -> None:
    """Raises PlanError unless `value` is a string that is not blank."""
    if not isinstance(value, str) or not value.strip():
        raise PlanError(f"found {describe(value)}, expected {what}. Fill it in, or leave the key out.", path=path)


def require_choice(value: object, path: str, choices: Iterable[str]) -> None:
    """Raises PlanError, with the nearest choice, unless `value` is one of the strings `choices`."""
    choices = list(choices)
    if not isinstance(value, str) or value not in choices:
        listed = ", ".join(f'"{choice}"' for choice in choices)
        raise PlanError(
            f"found {describe(value)}, expected one of {listed}.{nearest(value, choices) or ' Choose one of them.'}",
            path=path,
        )


def require_list(value: object, path: str, what: str) -> list[Any]:
    """Returns `value`; raises PlanError unless it is a list with at least one entry."""
    if not isinstance(value, list) or not value:
        raise PlanError(
            f"found {describe(value)}, expected a list with one entry for each {what}. Write one.", path=path
        )
    return value


def require_sections(value: object, path: str, kind: type[_Section]) -> tuple[_Section, ...]:
    """Returns `value` as a tuple; raises PlanError unless it is a tuple or list of at least one `kind`."""
    if not isinstance(value, (tuple, list)) or not value or not all(isinstance(item, kind) for item in value):
        raise PlanError(
            f"found {describe(value)}, expected a tuple with at least one {kind.__name__} and nothing else.", path=path
        )
    return tuple(value)


def require_object(
    value: object, path: str = "", *, required: Iterable[str] = (), optional: Iterable[str] = ()
) -> dict[str, Any]:
    """Returns `value`; raises PlanError unless it is an object with all of `required` and at most `optional` more."""
    required, optional = list(required), list(optional)
    known = [*required, *optional]
    listed = ", ".join(f'"{key}"' for key in known)
    if not isinstance(value, dict):
        raise PlanError(
            f"found {describe(value)}, expected an object with keys out of {listed}. Write one.", path=path
        )
    # Unknown keys first: a misspelt key is both unknown and missing, and the hint belongs to what was written.
    for key in value:
        if key not in known:
            hint = nearest(key, known) or " Remove it."
            raise PlanError(f"found an unknown key, expected only {listed}.{hint}", path=at_key(path, str(key)))
    for key in required:
        if key not in value:
            raise PlanError(f'found nothing under this key, expected a value. Add "{key}".', path=at_key(path, key))
    return value


def require_version(document: object, version: int) -> None:
    """Raises PlanError if `document` has another version.

    Readers call it before all other checks, as a file of another version may break any of them.
    """
    if not isinstance(document, dict) or "version" not in document:
        return  # `require_object` says what is missing
    found = document["version"]
    if isinstance(found, bool) or not isinstance(found, int) or found != version:
        raise PlanError(
            f"found {describe(found)}, expected {version}, the version that this accelerate_lshdp reads. Write the"
            " plan again, or install the accelerate_lshdp that wrote it.",
            path="version",
        )
