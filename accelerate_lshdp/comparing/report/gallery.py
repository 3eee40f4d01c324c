# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""All pictures of a report: one file for each kind of picture, cluster and model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from accelerate_lshdp.comparing.report.bars import draw_bytes, draw_efficiency, draw_memory, draw_throughput
from accelerate_lshdp.comparing.report.comparison import group_cases
from accelerate_lshdp.comparing.report.loss_curves import draw_losses
from accelerate_lshdp.comparing.report.results import Results
from accelerate_lshdp.comparing.report.style import Missing
from accelerate_lshdp.comparing.report.timeline import draw_timeline


_LONGEST_NAME = 80  # characters; file systems allow 255 bytes
_KINDS = {
    "Throughput": draw_throughput,
    "Scaling efficiency": draw_efficiency,
    "Memory of a node": draw_memory,
    "Bytes between nodes": draw_bytes,
    "Timeline of a step": draw_timeline,
    "Loss against time": draw_losses,
}


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture in a report.

    Args:
        title: kind of picture, model and cluster.
        caption: description of the picture and its measurement, or the reason why there is none.
        path: the PNG file; None if it was not drawn.
    """

    title: str
    caption: str
    path: Path | None


def missing_library() -> str | None:
    """One line about the library to install for pictures; None if nothing is missing."""
    if find_spec("matplotlib") is None:
        return "no pictures: matplotlib is not installed; pip install 'accelerate-lshdp[pictures]'"
    return None


def draw_pictures(results: Results, folder: Path) -> list[Picture]:
    """Draws all pictures for which the results have figures into a folder.

    Returns:
        All pictures of the first cluster and model, then those of the next; without matplotlib none.
    """
    if missing_library() is not None:
        return []
    pictures, names = [], set()
    for group in group_cases(results):
        # Different names of clusters or models may become one name of a file.
        ending = _unused(_file_name(f"{group.model}_{group.cluster}"), names)
        for name, draw in _KINDS.items():
            drawing = draw(group)
            # The reason takes the picture's place in the report, so that its reader does not look for it.
            title = f"{name}, {group.title}"
            if isinstance(drawing, Missing):
                pictures.append(Picture(title, f"not drawn: {drawing.reason}", None))
                continue
            path = folder / f"{_file_name(name)}_{ending}.png"
            drawing.save(path)
            pictures.append(Picture(title, drawing.caption, path))
    return pictures


def _file_name(text: str) -> str:
    """A text as part of a file name: lower case, everything but letters, digits, dot, plus and minus replaced."""
    return re.sub(r"[^a-z0-9.+-]+", "_", text.lower()).strip("_.")[:_LONGEST_NAME] or "model"


def _unused(name: str, names: set[str]) -> str:
    """A name that is not in `names` yet: `name`, or with a number at its end; it is added to `names`."""
    number, found = 1, name
    while found in names:
        number += 1
        found = f"{name}_{number}"
    names.add(found)
    return found
