"""Saving and loading the state of a run, and models for use elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from accelerate.utils.constants import SAFE_WEIGHTS_NAME
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from accelerate_lshdp.accelerator.accumulation_windows import AccumulationWindows
from accelerate_lshdp.accelerator.checkpoint_hooks import run_load_hooks, run_save_hooks
from accelerate_lshdp.accelerator.losses.parts import restore_findings
from accelerate_lshdp.accelerator.ranks_in_step import NOT_IN_STEP, RankStep
from accelerate_lshdp.checkpoint.numbers import drop_oldest, next_number, numbered
from accelerate_lshdp.checkpoint.run_state import (
    LoadedCheckpoint,
    NodeLayout,
    TrainingObjects,
    load_checkpoint,
    load_models,
    save_checkpoint,
    save_model_file,
    stream_full_state,
)
from accelerate_lshdp.data.loader import EVALUATION
from accelerate_lshdp.data.position import check_state
from accelerate_lshdp.data.prepare import HeterogeneousDataLoader
from accelerate_lshdp.documents.plan import Plan
from accelerate_lshdp.engine.wire.reduction import GradientReduction
from accelerate_lshdp.runtime.agreement import raise_on_all_ranks
from accelerate_lshdp.runtime.object_exchange import all_objects, errors_on_all_ranks


if TYPE_CHECKING:
    from accelerate import Accelerator

    _Base = Accelerator
else:
    _Base = object

logger = get_logger(__name__)


class Checkpointing(_Base):
    """The part of ``LSHDPAccelerator`` that saves and loads.

    Attributes:
        completed_steps: optimizer steps done, in this run and those it continues.
        samples_seen: samples of the global batches of these steps.
    """

    completed_steps: int = 0
    samples_seen: int = 0

    @property
    def node_layout(self) -> NodeLayout:
        return NodeLayout(
            rank=self.process_index,
            world_size=self.num_processes,
            node=self.topology.node,
            num_nodes=self.topology.num_nodes,
            local_rank=self.topology.local_rank,
            device=self.device,
        )

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **unknown: Any
    ) -> str:
        """Writes a checkpoint that is complete on every node (collective).

        Tensors are in safetensors, everything else in JSON. The folder gets its final name when it is complete on all
        nodes; an older one of that name is replaced as a whole. Any number of ranks, under any plan and strategy, can
        continue from it.

        Hooks of ``register_save_state_pre_hook`` are called before anything is written; what they write into the
        folder that they get becomes a part of this node's checkpoint. A model whose state dict they take out of
        their list is not saved. Under strategies that shard a model, the state dicts are full on one rank of each
        node, which holds all models at once for that, and empty on the others.

        Args:
            output_dir: the checkpoint's folder, on each node; may be left out with automatic checkpoint naming.
            safe_serialization: has to stay True, there is no other format.

        Returns:
            The folder.

        Raises:
            RuntimeError: on all ranks, if a rank cannot write, or is between two micro-batches of a step.
            ValueError: arguments that have no meaning here.
        """
        if not safe_serialization or unknown:
            raise ValueError(
                f"save_state got safe_serialization={safe_serialization} and {sorted(unknown)}; checkpoints are "
                "always safetensors and JSON, and there is nothing else to choose"
            )
        raise_on_all_ranks(self._why_not_now())
        steps = f"{self._rank_step.optimizer_steps}"
        self.check_agreement(steps, "how many steps their optimizers have made", NOT_IN_STEP)
        named = self.project_configuration.automatic_checkpoint_naming
        folder = numbered(self._numbered_folder(), self.save_iteration) if named else output_dir
        raise_on_all_ranks(self._taken(folder) if named else None)
        if folder is None:
            raise ValueError("save_state needs an output_dir, unless automatic_checkpoint_naming is on")
        self._share_statistics()  # a forward without a backward may have changed them since the last step
        objects = self._training_objects()
        objects.extra_tensors = {
            f"{name}/{key}": tensor
            for name, reduction in self._reductions().items()
            for key, tensor in reduction.state_dict().items()
        }
        save_checkpoint(
            folder,
            objects,
            self.node_layout,
            plan_digest=self.plan_digest,
            step=self.completed_steps,
            samples_seen=self.samples_seen,
            seed=self._loader_context.seed,
            trust_checkpoint=self.trust_checkpoint,
            before_writing=self._run_save_hooks if self._save_model_state_pre_hook else None,
        )
        self._unstepped.saved(optimizer.optimizer for optimizer in self._optimizers)
        limit = self.project_configuration.total_limit
        if named and limit is not None and self.topology.local_rank == 0:
            self._drop_oldest(limit)
        self.project_configuration.iteration += 1
        return str(folder)

    def _drop_oldest(self, limit: int) -> None:
        """Says it if old checkpoints stay: the new one is complete, so that is no reason to end the run."""
        try:
            drop_oldest(self._numbered_folder(), limit)
        except OSError as error:
            logger.warning(
                f"an old checkpoint could not be removed: found {error}, expected at most {limit} (total_limit) in "
                f"{self._numbered_folder()}. The new one is complete, and the next save tries again: let this user "
                "write there, or remove the old ones by hand",
                main_process_only=False,
            )

    def _why_not_now(self) -> str | None:
        """What a checkpoint of this moment would lose: gradients, which it does not hold."""
        if self._tracker.in_window:
            return (
                "save_state was called between two micro-batches of a step, whose gradients are in no checkpoint; "
                "call it after the optimizer step (if accelerator.sync_gradients)"
            )
        if self._unstepped.would_be_lost(optimizer.optimizer for optimizer in self._optimizers):
            return (
                "save_state was called between backward and the optimizer's step, whose gradients are in no "
                "checkpoint; call it after optimizer.step(), or drop the gradients before by model.zero_grad() "
                "(those of a loop that was left in the middle of an accumulated step, say; there, "
                "optimizer.zero_grad() does nothing)"
            )
        return None

    def load_state(
        self, input_dir: str | os.PathLike[str] | None = None, load_kwargs: dict | None = None, **unknown: Any
    ) -> LoadedCheckpoint:
        """Continues from the newest checkpoint that is complete on some node (collective).

        Under the same plan and number of ranks the run goes on bit for bit as if it had not stopped; under another
        plan, strategy or number of ranks with the same remaining samples. Loaders get their position back:
        ``skip_first_batches(loader)`` without a number goes on there.

        Gradients and the step that they are of are forgotten, so all ranks may go on from here after an error that all
        have caught. In a loop over a loader, call it between two steps.

        Hooks of ``register_load_state_pre_hook`` are called before anything is restored; a model that they take out of
        their list is not restored.

        Args:
            input_dir: a checkpoint or a folder of checkpoints; may be left out with automatic checkpoint naming.
            load_kwargs: has to be empty.

        Returns:
            What the checkpoint says: step, samples seen, whether the plan is the same.

        Raises:
            RuntimeError: on all ranks, if there is no complete checkpoint on any node or it does not fit this run.
            ValueError: arguments that have no meaning here.
        """
        if load_kwargs or unknown:
            raise ValueError(
                f"load_state got {sorted({**(load_kwargs or {}), **unknown})}, which have no meaning here"
            )
        if input_dir is None and not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError("load_state needs an input_dir, unless automatic_checkpoint_naming is on")
        objects = self._training_objects()
        loaded = load_checkpoint(
            self._numbered_folder() if input_dir is None else input_dir,
            objects,
            self.node_layout,
            plan_digest=self.plan_digest,
            trust_checkpoint=self.trust_checkpoint,
            check_document=self._accepts,
            check_run=self._fits,
            before_reading=self._run_load_hooks if self._load_model_state_pre_hook else None,
        )
        with errors_on_all_ranks(f"continuing from checkpoint {loaded.path}"):
            for prepared in self._prepared:
                prepared.parameters_loaded()
                prepared.drop_gradients()  # of other parameters; there were none when the checkpoint was saved
            for loader, state in zip(self._positioned_loaders(), loaded.loaders, strict=True):
                loader.load_state_dict(state)
            self._move_schedules(loaded)
            self.completed_steps, self.samples_seen = loaded.step, loaded.samples_seen
            self._forget_step()
            self.step = loaded.extra.get("accelerate_step", 0)
            restore_findings(self.loss_findings, loaded.extra.get("losses"))
            self._restore_sizes(loaded)
            self._restore_reductions(loaded)
        self._continue_numbers()
        return loaded

    def _forget_step(self) -> None:
        """Forgets the step that ranks were in, whose gradients are dropped.

        After an error that was caught they may have made different steps, and would be out of step for ever.
        """
        self._unstepped.clear()
        self._windows = AccumulationWindows()
        self._rank_step = RankStep()
        self._tracker.problem = None
        self._out_of_step = None

    def _run_save_hooks(self, folder: str) -> frozenset[int]:
        weights = [self.get_state_dict(model, unwrap=False) for model in self._models]
        return run_save_hooks(self._save_model_state_pre_hook.values(), self._models, weights, folder)

    def _run_load_hooks(self, folder: str) -> frozenset[int]:
        return run_load_hooks(self._load_model_state_pre_hook.values(), self._models, folder)

    def load_models(self, input_dir: str | os.PathLike[str]) -> None:
        """Gives the prepared models the parameters and buffers of a checkpoint, and changes nothing else (collective).

        Raises:
            RuntimeError: on all ranks, if there is no complete checkpoint on any node or its models are others.
        """
        load_models(input_dir, [self.unwrap_model(model) for model in self._models], self.node_layout)
        for prepared in self._prepared:
            prepared.parameters_loaded()

    def _restore_sizes(self, loaded: LoadedCheckpoint) -> None:
        """Goes on with the sizes, and what was learned of the ranks, if the checkpoint is of a run like this one."""
        state = loaded.extra.get("automatic_sizes")
        self.run_total.settle_like(Plan.from_dict(loaded.extra["plan"]))
        if self._sizing is None or state is None:
            return
        try:
            self._sizing.load_state_dict(state)
        except ValueError as error:
            logger.warning(f"automatic batch sizes start anew, from {self.plan.batch_sizes}: {error}")
            return
        self.plan = self.plan.with_batch(self._sizing.batch)

    def _reductions(self) -> dict[str, GradientReduction]:
        return {
            f"reduction_{model}_{number}": reduction
            for model, prepared in enumerate(self._prepared)
            for number, reduction in enumerate(prepared.reductions)
        }

    def _restore_reductions(self, loaded: LoadedCheckpoint) -> None:
        """Goes on with the rounding errors that this rank kept; under another plan nobody has them."""
        if self.plan.communication.is_lossy and self.num_processes > 1 and not loaded.same_plan:
            logger.warning(
                f"the checkpoint was saved under another plan: what {self.plan.communication.dtype} keeps from step "
                "to step (rounding errors, warm start) starts anew"
            )
        for name, reduction in self._reductions().items():
            prefix = f"{name}/"
            mine = {key: tensor for key, tensor in loaded.extra_tensors.items() if key.startswith(prefix)}
            reduction.load_state_dict({key.removeprefix(prefix): tensor for key, tensor in mine.items()})

    def _training_objects(self) -> TrainingObjects:
        return TrainingObjects(
            models=[self.unwrap_model(model) for model in self._models],
            optimizers=[optimizer.optimizer for optimizer in self._optimizers],
            schedulers=list(self._schedulers),
            scaler=self.scaler,
            loaders=[loader.state_dict() for loader in self._positioned_loaders()],
            custom=list(self._custom_objects),
            extra={
                "plan": self.plan.to_dict(),
                "accelerate_step": self.step,
                "gradient_accumulation_steps": self.gradient_accumulation_steps,
                "automatic_sizes": None if self._sizing is None else self._sizing.state_dict(),
                "losses": self.loss_findings,
            },
        )

    def _positioned_loaders(self) -> list[Any]:
        """Ours, and those that keep a position of their own although stock accelerate divides their batches."""
        loaders = [
            loader
            for loader in self._dataloaders
            if type(loader) is HeterogeneousDataLoader or getattr(loader, "use_stateful_dataloader", False)
        ]
        return [loader for loader in loaders if getattr(loader, "purpose", None) != EVALUATION]

    def _accepts(self, loaders: list[dict], extra: dict) -> None:
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
        for index, (loader, saved) in enumerate(zip(self._positioned_loaders(), loaders, strict=False)):
            try:
                _check_position(loader, saved)
            except ValueError as error:
                raise ValueError(f"loaders[{index}]: {error}") from error

    def _fits(self, loaders: list[dict], extra: dict) -> None:
        """Raises if the positions of a checkpoint are of other loaders than this run has."""
        mine = self._positioned_loaders()
        if len(mine) != len(loaders):
            raise ValueError(
                f"the checkpoint has positions of {len(loaders)} loaders, but {len(mine)} are prepared; "
                "prepare the same loaders, in the same order, as the run that saved it"
            )
        for loader, saved in zip(mine, loaders, strict=True):
            if type(loader) is HeterogeneousDataLoader:
                loader.check_fits(saved)

    def _move_schedules(self, loaded: LoadedCheckpoint) -> None:
        """accelerate steps a scheduler once a rank, so its position means another step under another world size."""
        if loaded.world_size == self.num_processes or self.split_batches:
            return
        stepped_by_ranks = [scheduler.scheduler for scheduler in self._schedulers if scheduler.step_with_optimizer]
        for scheduler in stepped_by_ranks:
            if isinstance(scheduler, LambdaLR):  # its rates depend on the position alone, as of most of transformers
                scheduler.last_epoch = scheduler.last_epoch * self.num_processes // loaded.world_size
                scheduler._last_lr = scheduler.get_lr()
                for group, rate in zip(scheduler.optimizer.param_groups, scheduler._last_lr, strict=True):
                    group["lr"] = rate
        if not all(isinstance(scheduler, LambdaLR) for scheduler in stepped_by_ranks):
            logger.warning(
                f"the checkpoint was saved by {loaded.world_size} ranks, this run has {self.num_processes}: a "
                "scheduler is stepped once a rank in every optimizer step, so it goes on at another place of its "
                "schedule. Use step_scheduler_with_optimizer=False and call scheduler.step() once a step to be "
                "independent of that"
            )

    def _numbered_folder(self) -> Path:
        return Path(self.project_dir or ".") / "checkpoints"

    def _taken(self, folder: Path) -> str | None:
        """What is wrong with a number that a checkpoint has on this node already; nothing is ever replaced by it."""
        if not os.path.lexists(folder):
            return None
        return (
            f"save_state found {folder}, expected a number that is free. To continue that run, call load_state first: "
            "numbers then go on after the largest one. A new run needs a project_dir of its own, or a larger "
            "accelerator.project_configuration.iteration"
        )

    def _continue_numbers(self) -> None:
        """The next automatic checkpoint gets a larger number than any that some node has (collective)."""
        if self.project_configuration.automatic_checkpoint_naming:
            largest = max(all_objects(next_number(self._numbered_folder())))
            self.project_configuration.iteration = max(self.project_configuration.iteration, largest)

    # Models for use elsewhere

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """The full, unsharded state on the CPU of one rank a node; empty on the other ranks of sharded strategies."""
        if not self.policies.is_sharded:
            return super().get_state_dict(model, unwrap)
        wanted = self.topology.local_rank == 0
        state = dict(stream_full_state(self.unwrap_model(model), wanted))
        return state if wanted else {}

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Writes weights that plain ``from_pretrained`` loads (collective), on the main process.

        With ``ProjectConfiguration(save_on_each_node=True)`` every node writes its own. A model of at most
        ``max_shard_size`` is written tensor by tensor, without a full copy in memory.
        """
        model = self.unwrap_model(model)
        # Parameters on the meta device are offloaded by accelerate's own hooks, which know where they are; or lost.
        elsewhere = any(tensor.is_meta for tensor in model.parameters())
        if not safe_serialization or elsewhere or _bytes_of(model) > _parse_size(max_shard_size):
            return super().save_model(model, save_directory, max_shard_size, safe_serialization)
        on_each_node = self.project_configuration.save_on_each_node
        writes = self.is_local_main_process if on_each_node else self.is_main_process
        save_model_file(os.path.join(save_directory, SAFE_WEIGHTS_NAME), model, self.node_layout, writes)


def _check_position(loader: Any, saved: dict[str, Any]) -> None:
    """Raises ValueError if `saved` is no position that a loader of this kind writes."""
    if type(loader) is HeterogeneousDataLoader:
        check_state(saved)
        return
    for name in (name for name, value in loader.state_dict().items() if type(value) is int):  # torchdata's own
        found = saved.get(name, 0)
        if type(found) is not int or found < 0:
            raise ValueError(f"{name}: found {found!r:.60}, expected a whole number")


def _bytes_of(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in [*model.parameters(), *model.buffers()])


def _parse_size(size: int | str) -> int:
    if isinstance(size, int):
        return size
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    unit = size[-2:].upper()
    if unit not in units:
        raise ValueError(f"max_shard_size={size!r} should be a number of bytes, or like '5GB'")
    return int(float(size[:-2]) * units[unit])
