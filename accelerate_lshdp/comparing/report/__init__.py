# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Tables, pictures and an HTML page from the results of `accelerate-lshdp bench`. Needs no torch."""

from __future__ import annotations

from accelerate_lshdp.comparing.report.gallery import missing_library
from accelerate_lshdp.comparing.report.reading import load_results, read_results
from accelerate_lshdp.comparing.report.results import ResultsError
from accelerate_lshdp.comparing.report.terminal import print_results
from accelerate_lshdp.comparing.report.writing import write_report


__all__ = ["ResultsError", "load_results", "missing_library", "print_results", "read_results", "write_report"]
