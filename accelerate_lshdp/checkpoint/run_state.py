# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Saves and loads a run: one format for all strategies, complete on every node, never half-written.

The format is described in `contents` (files), `typed_json` (values) and `folder` (the folder and its manifest). No
pickle is read or written without `trust_checkpoint`.
"""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from accelerate_lshdp.checkpoint import rng as checkpoint_rng
from accelerate_lshdp.checkpoint.contents import Contents, TrainingObjects, collect
from accelerate_lshdp.checkpoint.folder import (
    MANIFEST,
    Manifest,
    check_replaceable,
    commit,
    hook_folder,
    move_hook_files,
    newest_generation,
    remove_leftovers,
    write_file,
)
from accelerate_lshdp.checkpoint.model import stream_full_state
from accelerate_lshdp.checkpoint.restore import SavedModels, SavedTraining
from accelerate_lshdp.checkpoint.stream import WrittenFile, save_model_file, stream_to_file
from accelerate_lshdp.checkpoint.transfer import (
    bring_to_all_nodes,
    elect_writer,
    enter_partial_folder,
    find_newest,
    warn_of,
)
from accelerate_lshdp.checkpoint.validation import DocumentCheck
from accelerate_lshdp.runtime.object_exchange import (
    Attempt,
    NodeLayout,
    all_objects,
    errors_on_all_ranks,
    object_from,
    raise_failure_on_all_ranks,
)
from accelerate_lshdp.runtime.profiler_labels import label


__all__ = [
    "LoadedCheckpoint",
    "NodeLayout",
    "TrainingObjects",
    "load_checkpoint",
    "load_models",
    "newest_checkpoint",
    "newest_checkpoint_everywhere",
    "save_checkpoint",
    "save_model_file",
    "stream_full_state",
]


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The values of a checkpoint that are returned, beside the objects that were restored in place.

    Attributes:
        path: where this node has it.
        loaders: position of each data loader, as it was given.
        extra: as it was given on rank 0.
        extra_tensors: this rank's, on the CPU; empty unless `same_plan`.
        step: optimizer steps done.
        samples_seen: samples of the global batches of these steps.
        seed: of the run that saved.
        world_size: ranks of the run that saved.
        same_plan: whether it was saved under the same plan on as many ranks.
        rng_restored: whether every generator of this rank goes on where it stopped; otherwise they have been seeded
            from (seed, rank, samples seen).
    """

    path: str
    loaders: list[dict]
    extra: dict
    extra_tensors: dict[str, torch.Tensor]
    step: int
    samples_seen: int
    seed: int
    world_size: int
    same_plan: bool
    rng_restored: bool


def save_checkpoint(
    directory: str | os.PathLike,
    objects: TrainingObjects,
    layout: NodeLayout,
    *,
    plan_digest: str,
    step: int,
    samples_seen: int,
    seed: int,
    trust_checkpoint: bool = False,
    before_writing: Callable[[str], frozenset[int]] | None = None,
    has_states: bool = True,
    order: int | None = None,
    save_id: str | None = None,
    keeps_random_numbers: bool = True,
) -> None:
    """Writes a complete checkpoint on every node (collective).

    A tensor that is sharded over several nodes is gathered one at a time; of what is written here, no rank holds more
    than one full tensor. What `before_writing` needs is not counted: save hooks of a script get full models.
    `directory` is replaced as a whole once the new checkpoint is complete on all nodes; before that, it is untouched.

    Args:
        directory: the checkpoint's final name; the same or another path on each node.
        objects: what to save.
        layout: the place of this rank.
        plan_digest: identifies the plan; decides what may be restored rank by rank.
        step: optimizer steps done.
        samples_seen: samples of the global batches of these steps.
        seed: of the run.
        trust_checkpoint: allows pickle for registered objects that are more than JSON and tensors.
        before_writing: called on all ranks with an empty folder before anything is collected (collective); says which
            models are `left_out`. What it writes into the folder becomes a part of this node's checkpoint.
        has_states: whether `before_writing` has the states of the models on this rank, as on one of each node at
            least. Where others write files of the same names, theirs are dropped.
        order: by which the newest of several saves is known; None: after all that any node has there.
        save_id: of this save, 32 hexadecimal digits; None: a new one.
        keeps_random_numbers: whether the generators of all ranks are saved.

    Raises:
        RuntimeError: the same on all ranks, if anything cannot be saved or written on any of them. `directory` is then
            as it was before on every node, unless the message says that renaming failed.
    """
    # The real path: a rename would replace a symbolic link, and leave the checkpoint that it leads to.
    final = Path(os.path.realpath(directory))
    random_numbers = {"keeps_random_numbers": keeps_random_numbers}
    contents = None if before_writing else collect(objects, layout, trust_checkpoint, **random_numbers)
    elected = elect_writer(final, layout)
    # Errors are collected in `attempt` and raised on all ranks at the next barrier: a rank that has failed still takes
    # part in every collective on the way there.
    attempt = Attempt()
    with ExitStack() as stack:
        generation = 0
        # Leftovers go before this save makes a hidden folder of its own, and before its space is needed.
        if elected:
            attempt(lambda: check_replaceable(final))
            attempt(lambda: remove_leftovers(final.parent))
        if layout.is_writer:  # of all nodes: one that shares the folder may see late what another one wrote
            generation = attempt(lambda: newest_generation(final.parent)) or 0
        # Over all nodes, so that the order of saves is the same everywhere, also for a node that lacks some of them.
        generation = max(all_objects(generation)) + 1 if order is None else order
        # One identity on all nodes: by it nodes later find that they have the same checkpoint.
        save_id = object_from(0, save_id or uuid.uuid4().hex)
        folder = None
        if elected:
            folder = attempt(lambda: enter_partial_folder(stack, final, save_id))
        if before_writing:
            aside = hook_folder(final, save_id)
            if folder is not None:
                attempt(aside.mkdir)
        # Before hooks and gathers, which take long: a folder that cannot be written is told at once.
        raise_failure_on_all_ranks(f"preparing to write checkpoint {final}", attempt.error)
        if before_writing:
            # A folder of its own: many hooks save on every rank, and what they save of an empty state would replace
            # the model that another rank has written.
            mine = aside if has_states else hook_folder(final, save_id, layout.rank)
            if not has_states:
                attempt(lambda: mine.mkdir(parents=True))
            objects = replace(objects, left_out=before_writing(str(mine)))
            contents = collect(objects, layout, trust_checkpoint, **random_numbers)
            if folder is not None:
                attempt(lambda: move_hook_files(aside, {MANIFEST, *contents.tensors, *contents.files}))
        files = _write(contents, folder, layout, attempt)
        # Last: a folder with a manifest is complete.
        manifest = Manifest(save_id, generation, step, samples_seen, seed, layout.world_size, plan_digest, files)
        if folder is not None:
            attempt(lambda: write_file(folder / MANIFEST, manifest.to_json().encode()))
        # A barrier between writing and renaming: no node replaces its older checkpoint before the new one is complete
        # on all of them.
        raise_failure_on_all_ranks(f"writing checkpoint {final}", attempt.error)
        with errors_on_all_ranks(f"renaming checkpoint {final} to its final name"):
            if folder is not None:
                commit(folder, final, save_id)
    _warn_of_drift(all_objects(files if folder is not None else None), final, layout)


def load_checkpoint(
    directory: str | os.PathLike,
    objects: TrainingObjects,
    layout: NodeLayout,
    *,
    plan_digest: str,
    trust_checkpoint: bool = False,
    check_document: DocumentCheck | None = None,
    check_run: DocumentCheck | None = None,
    before_reading: Callable[[str], frozenset[int]] | None = None,
) -> LoadedCheckpoint:
    """Restores a run from the newest checkpoint that is complete on some node (collective).

    Nodes that lack it get it first. Then every rank reads its own part of each tensor from its node's files, whatever
    strategy and number of ranks it was saved under. Nothing is changed unless everything fits on all ranks.

    Args:
        directory: a checkpoint, or a folder of checkpoints.
        objects: restored in place; loaders and extra are returned.
        layout: the place of this rank.
        plan_digest: of the plan of this run.
        trust_checkpoint: allows reading pickles. A pickle can run any code.
        check_document: checks loaders and extra of a checkpoint before it is chosen, and raises what it finds wrong.
        check_run: checks on every rank, before anything is changed, whether loaders and extra of the chosen checkpoint
            are of a run like this one, and raises what is not.
        before_reading: called on all ranks with the checkpoint's folder (collective); says which models are
            `left_out`.

    Raises:
        RuntimeError: the same on all ranks, if there is no complete checkpoint or it does not fit this run.
    """
    # First on all nodes, so that every rank reads from its own node: nothing below sends tensors between nodes.
    path = _on_all_nodes(directory, layout, check_document)
    if before_reading:
        objects = replace(objects, left_out=before_reading(str(path)))
    with errors_on_all_ranks(f"loading checkpoint {path}"):
        manifest = Manifest.read(path)
        # Only then does each rank have the same part as before: its own generators, buffers and error feedback.
        same_plan = (manifest.plan_digest, manifest.world_size) == (plan_digest, layout.world_size)
        saved = SavedTraining(path, objects, layout, same_plan, trust_checkpoint)
        if check_run is not None:
            check_run(saved.loaders, saved.extra)
    # Two blocks, with a barrier between them: nothing is changed on any rank before all ranks have found that it fits.
    with errors_on_all_ranks(f"restoring checkpoint {path}"), label("checkpoint_read"):
        saved.apply()
        random_state = saved.random_state(layout.rank) if same_plan else None
        usable = random_state is not None and checkpoint_rng.fits(random_state, layout.device)
    # On all ranks or on none: restored and derived streams together could repeat each other's numbers.
    rng_restored = all(all_objects(usable))
    # Last, as restoring objects may draw numbers.
    with errors_on_all_ranks(f"restoring the random numbers of checkpoint {path}"):
        if rng_restored:
            checkpoint_rng.restore(random_state, layout.device)
        else:
            checkpoint_rng.derive(manifest.seed, layout.rank, manifest.samples_seen)
    return LoadedCheckpoint(
        path=str(path),
        loaders=saved.loaders,
        extra=saved.extra,
        extra_tensors=saved.extra_tensors,
        step=manifest.step,
        samples_seen=manifest.samples_seen,
        seed=manifest.seed,
        world_size=manifest.world_size,
        same_plan=same_plan,
        rng_restored=rng_restored,
    )


def load_models(directory: str | os.PathLike, models: list[nn.Module], layout: NodeLayout) -> None:
    """Restores the models alone, as `load_checkpoint` does with the whole run (collective).

    Raises:
        RuntimeError: the same on all ranks, if there is no complete checkpoint or its models are others.
    """
    path = _on_all_nodes(directory, layout)
    with errors_on_all_ranks(f"loading the models of checkpoint {path}"):
        saved = SavedModels(path, models)
    with errors_on_all_ranks(f"restoring the models of checkpoint {path}"):
        saved.apply()


def _on_all_nodes(
    directory: str | os.PathLike, layout: NodeLayout, check_document: DocumentCheck | None = None
) -> Path:
    root = Path(os.path.realpath(directory))
    newest, problems = find_newest(root, layout, check_document)
    if newest is None:
        found = "\n".join(problems) if problems else "no node has any"
        raise_failure_on_all_ranks(f"loading from {root}", f"there is no complete checkpoint there: {found}")
    warn_of(problems, newest, layout)
    return bring_to_all_nodes(newest, root, layout)


def newest_checkpoint_everywhere(directory: str | os.PathLike, layout: NodeLayout) -> str | None:
    """Brings the newest checkpoint that is complete on some node to all nodes (collective).

    Nodes may have different contents of one save, as where a script's own objects differ between ranks: those of one
    of them count.

    Args:
        directory: a checkpoint, or a folder of checkpoints.
        layout: the place of this rank.

    Returns:
        Where this node has it; None if no node has a complete one.
    """
    root = Path(os.path.realpath(directory))
    newest, problems = find_newest(root, layout, takes_any=True)
    if newest is None:
        return None
    warn_of(problems, newest, layout)
    return str(bring_to_all_nodes(newest, root, layout))


def newest_checkpoint(directory: str | os.PathLike, layout: NodeLayout) -> str | None:
    """Finds the path at which this node has, or will have after `load_checkpoint`, the newest complete checkpoint.

    It is collective.

    Args:
        directory: a checkpoint, or a folder of checkpoints.
        layout: the place of this rank.

    Returns:
        None if no node has a complete one.
    """
    root = Path(os.path.realpath(directory))
    newest, problems = find_newest(root, layout)
    if newest is None:
        return None
    warn_of(problems, newest, layout)
    return str(newest.final_path(root, layout))


def _write(contents: Contents, folder: Path | None, layout: NodeLayout, attempt: Attempt) -> dict[str, WrittenFile]:
    """Streams all files into `folder`, if this rank has one; failures are kept in `attempt` (collective)."""
    files: dict[str, WrittenFile] = {}
    with label("checkpoint_write"):
        for name, sources in contents.tensors.items():
            # A rank that does not write, or no longer does, still takes part in gathering every tensor.
            writes = folder is not None and attempt.error is None
            written, error = stream_to_file(folder / name if writes else name, sources, layout, writes)
            attempt.error = attempt.error or error
            if written is not None:
                files[name] = written
        if folder is not None:
            for name, data in contents.files.items():
                written = attempt(lambda name=name, data=data: write_file(folder / name, data))
                if written is not None:
                    files[name] = written
    return files


def _warn_of_drift(files: list[dict[str, WrittenFile] | None], final: Path, layout: NodeLayout) -> None:
    """Says on rank 0 if nodes wrote different values of what should be replicas."""
    # By checksums, which all nodes have anyway: replicas that have drifted apart show here for free.
    copies = [written for written in files if written is not None]
    drifted = [name for name in copies[0] if any(copy[name] != copies[0][name] for copy in copies)]
    if drifted and layout.rank == 0:
        warnings.warn(
            f"nodes wrote different contents of {', '.join(drifted)} in {final}: their replicas have drifted apart. "
            "Each node keeps its own; check that parameters were broadcast and that every step reduces all gradients",
            stacklevel=3,
        )
