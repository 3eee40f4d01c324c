# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Records: dataclasses whose fields say what a document may hold. One reader and one set of checks serve all of them.

A field of a `Record` is declared with `entry` and a `Value`, which checks what Python code gives for it, reads what a
document says, and writes it back:

    @dataclass(frozen=True, slots=True)
    class Node(Record):
        ranks: int = entry(integer(least=1))
        address: str | None = entry(optional(name("a host name or address")), default=None)

    Node.read({"ranks": 0})     # PlanError: ranks: found 0, expected an integer from 1 to 2147483648. ...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar

from accelerate_lshdp.documents.strict_reading import require_json
from accelerate_lshdp.documents.value_checks import (
    LARGEST_BATCH,
    PlanError,
    describe,
    located,
    require_boolean,
    require_choice,
    require_integer,
    require_list,
    require_name,
    require_number,
    require_object,
    require_sections,
)


#: Upper limit of integers that count bytes or parameters, not samples.
LARGEST_COUNT = 2**63 - 1

_Record = TypeVar("_Record", bound="Record")
_Member = TypeVar("_Member", bound=Enum)


def _unchanged(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Value:
    """How one field is checked, read and written.

    Args:
        accept: (value, path) -> the value as the record keeps it. Raises PlanError for a value that is impossible.
        read: the same for a plain value of a document. None: `accept`.
        write: the plain value of what the record keeps.
    """

    accept: Callable[[Any, str], Any]
    read: Callable[[Any, str], Any] | None = None
    write: Callable[[Any], Any] = _unchanged

    def from_document(self, value: object, path: str) -> Any:
        """What the record keeps for a plain value of a document. Raises PlanError with `path`."""
        return (self.read or self.accept)(value, path)


def entry(value: Value, *, default: Any = dataclasses.MISSING, omit: bool = False, **field: Any) -> Any:
    """A dataclass field that is checked by `value`.

    Args:
        value: how it is checked, read and written.
        default: a document may leave out what has a default.
        omit: it is not written where it is None; else it is written as null.
        **field: further arguments of `dataclasses.field`.
    """
    return dataclasses.field(default=default, metadata={"value": value, "omit": omit}, **field)


class Record:
    """A value with checked fields. A subclass is a frozen dataclass, and may check several fields together."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for field, value in _entries(type(self)):
            # The dataclass is frozen, so values are put into their final types past its own __setattr__.
            object.__setattr__(self, field.name, value.accept(getattr(self, field.name), field.name))
        self._check_together()

    def _check_together(self) -> None:
        """Checks several fields together. Raises PlanError. A hook, as `super` fails in dataclasses with slots."""

    @classmethod
    def read(cls: type[_Record], document: object) -> _Record:
        """The record that a part of a document describes.

        Raises:
            PlanError: unknown or missing keys, wrong types, impossible values; its path begins inside the part.
        """
        return cls(**cls._read_entries(document))

    @classmethod
    def _read_entries(
        cls, document: object, *, also: Sequence[str] = (), without: Sequence[str] = ()
    ) -> dict[str, Any]:
        """The fields that a document gives, by name.

        Args:
            document: an object with a key for each field.
            also: further keys that it must have.
            without: fields that have no key of their own.
        """
        entries = [(field, value) for field, value in _entries(cls) if field.name not in without]
        required = [field.name for field, _ in entries if field.default is dataclasses.MISSING]
        optional = [field.name for field, _ in entries if field.default is not dataclasses.MISSING]
        section = require_object(document, required=[*also, *required], optional=optional)
        return {
            field.name: value.from_document(section[field.name], field.name)
            for field, value in entries
            if field.name in section
        }

    def to_dict(self) -> dict[str, Any]:
        """The plain values that `read` reads."""
        return {
            field.name: value.write(getattr(self, field.name))
            for field, value in _entries(type(self))
            if not (field.metadata["omit"] and getattr(self, field.name) is None)
        }


@cache
def _entries(kind: type[Record]) -> tuple[tuple[dataclasses.Field[Any], Value], ...]:
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    return tuple((field, field.metadata["value"]) for field in fields if "value" in field.metadata)


# Values


def integer(least: int = 0, most: int = LARGEST_BATCH) -> Value:
    """An int, not a bool, in [least, most]."""

    def accept(value: Any, path: str) -> int:
        require_integer(value, path, least=least, most=most)
        return value

    return Value(accept)


def number(*, positive: bool = False) -> Value:
    """A finite number, above 0 if `positive`, else at least 0; kept as a float."""

    def accept(value: Any, path: str) -> float:
        require_number(value, path, positive=positive)
        # 0 and 0.0 are written differently in JSON, but are the same setting and must have one digest.
        return float(value)

    return Value(accept)


def real(value: Any, path: str) -> float:
    """A number of either sign; readers have refused NaN and infinity. Raises PlanError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise PlanError(f"found {describe(value)}, expected a number.", path=path)
    return value


def _accept_boolean(value: Any, path: str) -> bool:
    require_boolean(value, path)
    return value


def _accept_string(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise PlanError(f"found {describe(value)}, expected a string.", path=path)
    return value


def _accept_object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PlanError(f"found {describe(value)}, expected an object. Write one, or leave it out.", path=path)
    require_json(value, path)
    # A copy: a caller that goes on changing its dictionary must not change a record that was checked.
    return deepcopy(value)


BOOLEAN = Value(_accept_boolean)
#: Any plain values under any keys.
OBJECT = Value(_accept_object, write=deepcopy)
REAL = Value(real)
STRING = Value(_accept_string)


def name(what: str) -> Value:
    """A string that is not blank; `what` it should be, for error messages."""

    def accept(value: Any, path: str) -> str:
        require_name(value, path, what)
        return value

    return Value(accept)


def choice(choices: Iterable[str]) -> Value:
    """One of several strings."""
    choices = tuple(choices)

    def accept(value: Any, path: str) -> str:
        require_choice(value, path, choices)
        return value

    return Value(accept)


def member(kind: type[_Member]) -> Value:
    """A member of an enumeration whose values are strings."""

    def accept(value: Any, path: str) -> _Member:
        require_choice(value, path, [str(each.value) for each in kind])
        return kind(value)

    return Value(accept, write=lambda kept: kept.value)


def optional(value: Value, *, null: bool = True) -> Value:
    """`value` or None. A document may say null, or if `null` is false only leave the key out."""

    def accept(found: Any, path: str) -> Any:
        return None if found is None else value.accept(found, path)

    def read(found: Any, path: str) -> Any:
        return None if found is None and null else value.from_document(found, path)

    return Value(accept, read, lambda kept: None if kept is None else value.write(kept))


def record(kind: type[_Record]) -> Value:
    """A record of its own: an object of a document."""

    def accept(value: Any, path: str) -> _Record:
        if not isinstance(value, kind):
            raise PlanError(f"found {describe(value)}, expected a {kind.__name__}.", path=path)
        return value

    def read(value: Any, path: str) -> _Record:
        with located(path):
            return kind.read(value)

    return Value(accept, read, lambda kept: kept.to_dict())


def records(kind: type[_Record], what: str) -> Value:
    """A tuple of at least one record; `what` one of them describes, for error messages."""
    one = record(kind)

    def read(value: Any, path: str) -> tuple[_Record, ...]:
        found = require_list(value, path, what)
        return tuple(one.from_document(item, f"{path}[{index}]") for index, item in enumerate(found))

    return Value(lambda value, path: require_sections(value, path, kind), read, lambda kept: [*map(one.write, kept)])


def several(value: Value) -> Value:
    """A tuple of any number of values, none included: a list of a document."""

    def items(found: Any, path: str) -> Iterator[tuple[Any, str]]:
        if not isinstance(found, (list, tuple)):
            raise PlanError(f"found {describe(found)}, expected a list. Measure again.", path=path)
        return ((item, f"{path}[{index}]") for index, item in enumerate(found))

    return Value(
        lambda found, path: tuple(value.accept(item, where) for item, where in items(found, path)),
        lambda found, path: tuple(value.from_document(item, where) for item, where in items(found, path)),
        lambda kept: [*map(value.write, kept)],
    )
