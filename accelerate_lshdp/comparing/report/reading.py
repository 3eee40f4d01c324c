# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Strict reading of ``results.json``: unknown keys, wrong types and contradictions are errors that say where."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate_lshdp.comparing.report.results import Results, ResultsError
from accelerate_lshdp.documents.strict_reading import parse_json, require_json
from accelerate_lshdp.documents.value_checks import PlanError, describe


RESULTS_FILE = "results.json"
RESULTS_VERSION = 1
RESULTS_KIND = "benchmark"


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
        return Results.read({key: value for key, value in document.items() if key not in ("version", "kind")})


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
