# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints of a run: what a session and the script's prepared objects give them, and take from them again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.logging import get_logger
from torch.optim.lr_scheduler import LambdaLR

from accelerate_lshdp.accelerator import schedule_position
from accelerate_lshdp.accelerator.checkpoint_hooks import run_load_hooks, run_save_hooks
from accelerate_lshdp.accelerator.losses.parts import restore_findings
from accelerate_lshdp.accelerator.ranks_in_step import NOT_IN_STEP
from accelerate_lshdp.accelerator.session import Session
from accelerate_lshdp.checkpoint.numbers import drop_oldest, next_number, numbered
from accelerate_lshdp.checkpoint.run_state import (
    LoadedCheckpoint,
    NodeLayout,
    TrainingObjects,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from accelerate_lshdp.data.loader import EVALUATION
from accelerate_lshdp.data.position import check_state
from accelerate_lshdp.data.prepare import HeterogeneousDataLoader
from accelerate_lshdp.documents.plan import Plan
from accelerate_lshdp.engine.policies import Mechanism
from accelerate_lshdp.runtime.agreement import raise_on_all_ranks, tell_of_missing_ranks
from accelerate_lshdp.runtime.elastic_rank import elastic_rank
from accelerate_lshdp.runtime.object_exchange import all_objects, errors_on_all_ranks


logger = get_logger(__name__)

#: In checkpoints: that lossy formats took the sums of nodes. Before it was written there, each rank had errors of its
#: own under strategies that replicate, and its node's sum would be compressed with those of one of them.
_SUMS_INSIDE_NODES = "sums_inside_nodes"


def layout_of(session: Session) -> NodeLayout:
    """Where this process stands among the nodes."""
    topology = session.topology
    return NodeLayout(
        rank=session.rank,
        world_size=session.world_size,
        node=topology.node,
        num_nodes=topology.num_nodes,
        local_rank=topology.local_rank,
        device=session.device,
    )


def save_run(
    accelerator: Accelerator, session: Session, output_dir: str | os.PathLike[str] | None, trust_checkpoint: bool
) -> str:
    """Writes a checkpoint that is complete on every node (collective): see ``LSHDPAccelerator.save_state``."""
    configuration = accelerator.project_configuration
    tell_of_missing_ranks("save_state")
    raise_on_all_ranks(_why_not_now(session))
    steps = f"{session.rank_step.optimizer_steps}"
    session.check_agreement(steps, "how many steps their optimizers have made", NOT_IN_STEP)
    named = configuration.automatic_checkpoint_naming
    folder = numbered(_numbered_folder(accelerator), accelerator.save_iteration) if named else output_dir
    raise_on_all_ranks(_taken(folder) if named else None)
    if folder is None:
        raise ValueError("save_state needs an output_dir, unless automatic_checkpoint_naming is on")
    session.engine.share_statistics()  # a forward without a backward may have changed them since the last step
    objects = training_objects(accelerator, session)
    objects.extra_tensors = {
        f"{name}/{key}": tensor
        for name, reduction in session.engine.reductions.items()
        for key, tensor in reduction.state_dict().items()
    } | session.engine.states()

    def run_hooks(writing: str) -> frozenset[int]:
        weights = [accelerator.get_state_dict(model, unwrap=False) for model in accelerator._models]
        return run_save_hooks(accelerator._save_model_state_pre_hook.values(), accelerator._models, weights, writing)

    save_checkpoint(
        folder,
        objects,
        layout_of(session),
        plan_digest=session.plan_digest,
        step=session.completed_steps,
        samples_seen=session.samples_seen,
        seed=session.seed,
        trust_checkpoint=trust_checkpoint,
        before_writing=run_hooks if accelerator._save_model_state_pre_hook else None,
        has_states=session.topology.local_rank == 0 or not session.policies.is_sharded,
    )
    session.unstepped.saved(optimizer.optimizer for optimizer in session.optimizers)
    limit = configuration.total_limit
    if named and limit is not None and session.topology.local_rank == 0:
        _drop_oldest(_numbered_folder(accelerator), limit)
    configuration.iteration += 1
    return str(folder)


def load_run(
    accelerator: Accelerator, session: Session, input_dir: str | os.PathLike[str] | None, trust_checkpoint: bool
) -> LoadedCheckpoint:
    """Continues from the newest checkpoint that is complete on some node (collective): see ``load_state``."""
    loaders = positioned_loaders(accelerator)
    tell_of_missing_ranks("load_state")
    if session.keeper is not None and session.keeper.continues_run and not session.keeper.is_loaded:
        kept = session.keeper.bring(layout_of(session))
        if kept is None and _has_none(accelerator, session, input_dir):
            session.keeper.is_loaded = True
            logger.warning("no node has kept the state of the run, and there is no checkpoint: it begins again")
            return LoadedCheckpoint("", [], {}, {}, 0, 0, session.seed, session.world_size, False, False)
        input_dir = input_dir if kept is None else str(kept)
    session.engine.give_up_failed_steps()

    def run_hooks(reading: str) -> frozenset[int]:
        return run_load_hooks(accelerator._load_model_state_pre_hook.values(), accelerator._models, reading)

    loaded = load_checkpoint(
        _numbered_folder(accelerator) if input_dir is None else input_dir,
        training_objects(accelerator, session),
        layout_of(session),
        plan_digest=session.plan_digest,
        trust_checkpoint=trust_checkpoint,
        check_document=lambda positions, extra: _accepts(loaders, positions, extra),
        check_run=lambda positions, extra: _fits(loaders, positions),
        before_reading=run_hooks if accelerator._load_model_state_pre_hook else None,
    )
    with errors_on_all_ranks(f"continuing from checkpoint {loaded.path}"):
        session.engine.parameters_loaded()
        for prepared in session.engine.models:
            prepared.drop_gradients()  # of other parameters; there were none when the checkpoint was saved
        for loader, state in zip(loaders, loaded.loaders, strict=True):
            loader.load_state_dict(state)
        _move_schedules(accelerator, loaded)
        session.completed_steps, session.samples_seen = loaded.step, loaded.samples_seen
        session.forget_step()
        accelerator.step = loaded.extra.get("accelerate_step", 0)
        restore_findings(session.losses.findings, loaded.extra.get("losses"))
        _restore_sizes(session, loaded, loaders)
        _restore_reductions(session, loaded)
    _continue_numbers(accelerator)
    if session.keeper is not None:
        session.keeper.is_loaded = True
    return loaded


def _has_none(accelerator: Accelerator, session: Session, input_dir: str | os.PathLike[str] | None) -> bool:
    """Whether no node has a checkpoint where a script looks for it (collective)."""
    return newest_checkpoint(input_dir or _numbered_folder(accelerator), layout_of(session)) is None


def _why_not_now(session: Session) -> str | None:
    """What a checkpoint of this moment would lose: gradients, which it does not hold."""
    if session.tracker.in_window:
        return (
            "save_state was called between two micro-batches of a step, whose gradients are in no checkpoint; "
            "call it after the optimizer step (if accelerator.sync_gradients)"
        )
    if session.unstepped.would_be_lost(optimizer.optimizer for optimizer in session.optimizers):
        return (
            "save_state was called between backward and the optimizer's step, whose gradients are in no "
            "checkpoint; call it after optimizer.step(), or drop the gradients before by model.zero_grad() "
            "(those of a loop that was left in the middle of an accumulated step, say; there, "
            "optimizer.zero_grad() does nothing)"
        )
    return None


def _restore_sizes(session: Session, loaded: LoadedCheckpoint, loaders: list[Any]) -> None:
    """Goes on with the sizes, and what was learned of the ranks, if the checkpoint is of a run like this one."""
    state = loaded.extra.get("automatic_sizes")
    session.settle_total_like(Plan.from_dict(loaded.extra["plan"]), loaders)
    if session.sizing is None or state is None:
        return
    machines = loaded.extra.get("machines")
    try:
        if session.keeper is not None and machines:
            session.sizing.recall(machines)
        else:
            session.sizing.load_state_dict(state)
    except ValueError as error:
        logger.warning(f"automatic batch sizes start anew, from {session.plan.batch_sizes}: {error}")
        return
    session.take_sizes()


def _restore_reductions(session: Session, loaded: LoadedCheckpoint) -> None:
    """Goes on with the rounding errors that this rank kept; under another plan nobody has them."""
    session.engine.load_states(loaded.extra_tensors)
    communication = session.plan.communication
    if communication.is_lossy and session.world_size > 1 and not loaded.same_plan:
        logger.warning(
            f"the checkpoint was saved under another plan: what {communication.dtype} keeps from step "
            "to step (rounding errors, warm start) starts anew"
        )
    is_replicated = session.policies.mechanism is Mechanism.REPLICATED
    was_of_ranks = is_replicated and session.topology.world_size > session.topology.num_nodes
    if communication.is_lossy and was_of_ranks and not loaded.extra.get(_SUMS_INSIDE_NODES):
        if loaded.same_plan:
            logger.warning(
                f"the checkpoint was saved by a release under which each rank sent {communication.dtype}, and not the "
                "sum of its node: what was kept from step to step (rounding errors, warm start) starts anew"
            )
        return
    for name, reduction in session.engine.reductions.items():
        prefix = f"{name}/"
        mine = {key: tensor for key, tensor in loaded.extra_tensors.items() if key.startswith(prefix)}
        reduction.load_state_dict({key.removeprefix(prefix): tensor for key, tensor in mine.items()})


def training_objects(accelerator: Accelerator, session: Session) -> TrainingObjects:
    """The objects of a run that a checkpoint saves and restores, as they are now; without tensors of single ranks."""
    return TrainingObjects(
        models=[accelerator.unwrap_model(model) for model in accelerator._models],
        optimizers=[optimizer.optimizer for optimizer in session.optimizers],
        schedulers=list(accelerator._schedulers),
        scaler=accelerator.scaler,
        loaders=[loader.state_dict() for loader in positioned_loaders(accelerator)],
        custom=list(accelerator._custom_objects),
        extra={
            "plan": session.plan.to_dict(),
            "accelerate_step": accelerator.step,
            "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
            "automatic_sizes": None if session.sizing is None else session.sizing.state_dict(),
            "losses": session.losses.findings,
            _SUMS_INSIDE_NODES: True,
            **_of_elastic_run(accelerator, session),
        },
    )


def _of_elastic_run(accelerator: Accelerator, session: Session) -> dict[str, Any]:
    """What a run needs whose nodes come and go."""
    if session.keeper is None:
        return {}
    return {
        "machines": {} if session.sizing is None else session.sizing.of_machines(),
        "schedules": schedule_position.note(accelerator._schedulers, session.world_size),
    }


def positioned_loaders(accelerator: Accelerator) -> list[Any]:
    """Ours, and those that keep a position of their own although stock accelerate divides their batches."""
    loaders = [
        loader
        for loader in accelerator._dataloaders
        if type(loader) is HeterogeneousDataLoader or getattr(loader, "use_stateful_dataloader", False)
    ]
    return [loader for loader in loaders if getattr(loader, "purpose", None) != EVALUATION]


def _accepts(loaders: list[Any], positions: list[dict], extra: dict) -> None:
    """Raises if a checkpoint holds positions and values that no save writes: it is passed over then.

    Whether they are of a run like this one is asked by `_fits`.
    """
    step = extra.get("accelerate_step", 0)
    if type(step) is not int or step < 0:
        raise ValueError(f"extra.accelerate_step: found {step!r:.60}, expected a whole number")
    try:
        Plan.from_dict(extra.get("plan"))
    except ValueError as error:
        raise ValueError(f"extra.plan: {error}") from error
    restore_findings({}, extra.get("losses"))
    for index, (loader, saved) in enumerate(zip(loaders, positions, strict=False)):
        try:
            _check_position(loader, saved)
        except ValueError as error:
            raise ValueError(f"loaders[{index}]: {error}") from error


def _fits(loaders: list[Any], positions: list[dict]) -> None:
    """Raises if the positions of a checkpoint are of other loaders than this run has."""
    if len(loaders) != len(positions):
        raise ValueError(
            f"the checkpoint has positions of {len(positions)} loaders, but {len(loaders)} are prepared; "
            "prepare the same loaders, in the same order, as the run that saved it"
        )
    for loader, saved in zip(loaders, positions, strict=True):
        if type(loader) is HeterogeneousDataLoader:
            loader.check_fits(saved)


def _check_position(loader: Any, saved: dict[str, Any]) -> None:
    """Raises ValueError if `saved` is no position that a loader of this kind writes."""
    if type(loader) is HeterogeneousDataLoader:
        check_state(saved)
        return
    for name in (name for name, value in loader.state_dict().items() if type(value) is int):  # torchdata's own
        found = saved.get(name, 0)
        if type(found) is not int or found < 0:
            raise ValueError(f"{name}: found {found!r:.60}, expected a whole number")


def _move_schedules(accelerator: Accelerator, loaded: LoadedCheckpoint) -> None:
    """accelerate steps a scheduler once a rank, so its position means another step under another world size."""
    noted = loaded.extra.get("schedules")
    rank = elastic_rank()
    if rank is not None and rank.generation > 1 and noted is not None:  # of this run
        schedule_position.go_on(accelerator._schedulers, noted, accelerator.num_processes)
        return
    if loaded.world_size == accelerator.num_processes or accelerator.split_batches:
        return
    stepped_by_ranks = [scheduler.scheduler for scheduler in accelerator._schedulers if scheduler.step_with_optimizer]
    for scheduler in stepped_by_ranks:
        if isinstance(scheduler, LambdaLR):  # its rates depend on the position alone, as of most of transformers
            scheduler.last_epoch = scheduler.last_epoch * accelerator.num_processes // loaded.world_size
            scheduler._last_lr = scheduler.get_lr()
            for group, rate in zip(scheduler.optimizer.param_groups, scheduler._last_lr, strict=True):
                group["lr"] = rate
    if not all(isinstance(scheduler, LambdaLR) for scheduler in stepped_by_ranks):
        logger.warning(
            f"the checkpoint was saved by {loaded.world_size} ranks, this run has {accelerator.num_processes}: a "
            "scheduler is stepped once a rank in every optimizer step, so it goes on at another place of its "
            "schedule. Use step_scheduler_with_optimizer=False and call scheduler.step() once a step to be "
            "independent of that"
        )


def _numbered_folder(accelerator: Accelerator) -> Path:
    return Path(accelerator.project_dir or ".") / "checkpoints"


def _taken(folder: Path) -> str | None:
    """What is wrong with a number that a checkpoint has on this node already; nothing is ever replaced by it."""
    if not os.path.lexists(folder):
        return None
    return (
        f"save_state found {folder}, expected a number that is free. To continue that run, call load_state first: "
        "numbers then go on after the largest one. A new run needs a project_dir of its own, or a larger "
        "accelerator.project_configuration.iteration"
    )


def _drop_oldest(folder: Path, limit: int) -> None:
    """Says it if old checkpoints stay: the new one is complete, so that is no reason to end the run."""
    try:
        drop_oldest(folder, limit)
    except OSError as error:
        logger.warning(
            f"an old checkpoint could not be removed: found {error}, expected at most {limit} (total_limit) in "
            f"{folder}. The new one is complete, and the next save tries again: let this user "
            "write there, or remove the old ones by hand",
            main_process_only=False,
        )


def _continue_numbers(accelerator: Accelerator) -> None:
    """The next automatic checkpoint gets a larger number than any that some node has (collective)."""
    if accelerator.project_configuration.automatic_checkpoint_naming:
        largest = max(all_objects(next_number(_numbered_folder(accelerator))))
        accelerator.project_configuration.iteration = max(accelerator.project_configuration.iteration, largest)
