# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The report as a single HTML file without scripts, which contains all pictures."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from importlib.resources import files

from accelerate_lshdp import __version__
from accelerate_lshdp.comparing.report.comparison import Group, describe_fastest, group_cases
from accelerate_lshdp.comparing.report.gallery import Picture, missing_library
from accelerate_lshdp.comparing.report.provenance import describe_provenance, format_config
from accelerate_lshdp.comparing.report.results import Results
from accelerate_lshdp.comparing.report.tables import DETAIL_LEGEND, STEP_LEGEND, detail_table, limits_table, step_table


_TEMPLATE = "report.html.jinja"


def render_page(results: Results, pictures: Sequence[Picture]) -> str:
    """The HTML text of the report. Everything that comes from the results is escaped.

    Args:
        results: the results of a benchmark.
        pictures: the return value of `draw_pictures` for them.
    """
    from jinja2 import Environment, StrictUndefined

    # autoescape: names and errors come from files and may hold markup. StrictUndefined: a misspelt name in the
    # template is an error, not an empty string.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files(__package__).joinpath(_TEMPLATE).read_text(encoding="utf-8"))
    groups = group_cases(results)
    tables = [detail_table(group, network) for group in groups for network in group.networks]
    return template.render(
        version=__version__,
        setting=describe_provenance(results),
        summary=[(group.title, _summary(group)) for group in groups],
        step_tables=[step_table(group, network) for group in groups for network in group.networks],
        step_legend=STEP_LEGEND,
        limits=limits_table(results) if results.limits else None,
        broken=[limit.name for limit in results.limits if not limit.holds],
        pictures=[(picture, _data_uri(picture)) for picture in pictures],
        no_pictures=missing_library(),
        # Where all cases failed there are no details; the step table has the errors.
        detail_tables=[table for table in tables if table.rows],
        detail_legend=DETAIL_LEGEND,
        config=format_config(results.config),
    )


def _summary(group: Group) -> list[str]:
    sentences = [describe_fastest(group, network) for network in group.networks]
    return [sentence for sentence in sentences if sentence is not None]


def _data_uri(picture: Picture) -> str | None:
    """The picture as a data URI; None if it was not drawn."""
    if picture.path is None:
        return None
    return f"data:image/png;base64,{base64.b64encode(picture.path.read_bytes()).decode('ascii')}"
