"""Saving and loading the state of a run, and models for use elsewhere."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from accelerate.utils.constants import SAFE_WEIGHTS_NAME
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from accelerate_lshdp.data import HeterogeneousDataLoader
from accelerate_lshdp.data_loader import EVALUATION
from accelerate_lshdp.engine.agreement import raise_together
from accelerate_lshdp.engine.checkpoint import (
    LoadedCheckpoint,
    NodeLayout,
    TrainingObjects,
    load_checkpoint,
    load_models,
    save_checkpoint,
    save_model_file,
    stream_full_state,
)
from accelerate_lshdp.engine.collectives import GradientReduction
from accelerate_lshdp.plan import Plan


if TYPE_CHECKING:
    from accelerate import Accelerator

    _Base = Accelerator
else:
    _Base = object

logger = get_logger(__name__)
_NUMBERED = re.compile(r"checkpoint_(\d+)")


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
        within = "save_state was called between two micro-batches of a step, whose gradients are in no checkpoint; "
        within += "call it after the optimizer step (if accelerator.sync_gradients)"
        raise_together(within if self._tracker.within_window else None)
        named = self.project_configuration.automatic_checkpoint_naming
        folder = self._numbered_folder() / f"checkpoint_{self.save_iteration}" if named else output_dir
        if folder is None:
            raise ValueError("save_state needs an output_dir, unless automatic_checkpoint_naming is on")
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
        )
        for hook in self._save_model_state_pre_hook.values():
            hook(self._models, [], str(folder))
        if named:
            self._drop_oldest()
        self.project_configuration.iteration += 1
        return str(folder)

    def load_state(
        self, input_dir: str | os.PathLike[str] | None = None, load_kwargs: dict | None = None, **unknown: Any
    ) -> LoadedCheckpoint:
        """Continues from the newest checkpoint that is complete on some node (collective).

        Under the same plan and number of ranks the run goes on bit for bit as if it had not stopped; under another
        plan, strategy or number of ranks with the same remaining samples. Loaders get their position back:
        ``skip_first_batches(loader)`` without a number goes on there.

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
        )
        for prepared in self._prepared:
            prepared.parameters_loaded()
        self._restore_loaders(loaded)
        self._move_schedules(loaded)
        self.completed_steps, self.samples_seen = loaded.step, loaded.samples_seen
        self.step = int(loaded.extra.get("accelerate_step", 0))
        self._restore_sizes(loaded)
        self._restore_reductions(loaded)
        for hook in self._load_model_state_pre_hook.values():
            hook(self._models, loaded.path)
        return loaded

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
            },
        )

    def _positioned_loaders(self) -> list[HeterogeneousDataLoader]:
        loaders = [loader for loader in self._dataloaders if type(loader) is HeterogeneousDataLoader]
        return [loader for loader in loaders if loader.purpose != EVALUATION]

    def _restore_loaders(self, loaded: LoadedCheckpoint) -> None:
        loaders = self._positioned_loaders()
        if len(loaders) != len(loaded.loaders):
            raise RuntimeError(
                f"the checkpoint has positions of {len(loaded.loaders)} loaders, but {len(loaders)} are prepared; "
                "prepare the same loaders, in the same order, as the run that saved it"
            )
        for loader, state in zip(loaders, loaded.loaders, strict=True):
            loader.load_state_dict(state)

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

    def _drop_oldest(self) -> None:
        """Keeps ``total_limit`` numbered checkpoints on this node, once the newest is complete."""
        limit = self.project_configuration.total_limit
        if limit is None or self.topology.local_rank != 0:
            return
        numbered = [
            (int(match[1]), path)
            for path in self._numbered_folder().iterdir()
            if (match := _NUMBERED.fullmatch(path.name))
        ]
        for _, path in sorted(numbered)[:-limit]:
            try:
                shutil.rmtree(path)
            except FileNotFoundError:
                logger.debug(f"{path} was removed by another node that shares the folder")

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
        if not safe_serialization or _bytes_of(model) > _parse_size(max_shard_size):
            return super().save_model(model, save_directory, max_shard_size, safe_serialization)
        on_each_node = self.project_configuration.save_on_each_node
        writes = self.is_local_main_process if on_each_node else self.is_main_process
        if writes:
            os.makedirs(save_directory, exist_ok=True)
        save_model_file(os.path.join(save_directory, SAFE_WEIGHTS_NAME), model, self.node_layout, writes)


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
