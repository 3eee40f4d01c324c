# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The names of the recipes' checkpoints: `<output_dir>/step_<optimizer steps done>`."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator


def checkpoint_path(output_dir: str, completed_steps: int) -> str:
    """Folder of the checkpoint written after `completed_steps` optimizer steps."""
    return str(Path(output_dir) / f"step_{completed_steps}")


def steps_of_checkpoint(path: str) -> int:
    """Number of optimizer steps done when the checkpoint in folder `path` was written.

    Raises:
        ValueError: the folder is not named as `checkpoint_path` names it.
    """
    name = Path(path).name
    steps = name.removeprefix("step_")
    if not name.startswith("step_") or not steps.isdecimal():
        raise ValueError(
            f"A checkpoint of this recipe is a folder named step_<number of optimizer steps>; found {path!r}. "
            "Pass such a folder, or 'latest'."
        )
    return int(steps)


def latest_checkpoint(accelerator: Accelerator, output_dir: str) -> str:
    """The newest checkpoint in `output_dir` on any node. Collective: call it on every rank.

    A node that joined later, or lost its disk, has none of its own and receives this one when it is loaded.

    Raises:
        FileNotFoundError: no node has a checkpoint in `output_dir`.
    """
    names = [path.name for path in Path(output_dir).glob("step_*") if path.name.removeprefix("step_").isdecimal()]
    newest_here = max((steps_of_checkpoint(name) for name in names), default=-1)
    newest = int(accelerator.gather(torch.tensor([newest_here], device=accelerator.device)).max())
    if newest < 0:
        raise FileNotFoundError(
            f"--resume_from_checkpoint latest: no node has a step_<number> folder in {output_dir}. Was the first run "
            "given --checkpointing_steps and the same --output_dir?"
        )
    return checkpoint_path(output_dir, newest)
