# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Restores the objects of a run from the files of a checkpoint: everything is checked before anything changes."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate_lshdp.checkpoint import optimizer as checkpoint_optimizer
from accelerate_lshdp.checkpoint.contents import EXTRA, TrainingObjects, buffer_path, rank_path
from accelerate_lshdp.checkpoint.model import ModelTensors
from accelerate_lshdp.checkpoint.optimizer import check_shape, compare_names
from accelerate_lshdp.checkpoint.shards import copy_into, laid_out_like, local_region
from accelerate_lshdp.checkpoint.tensors import SafetensorsReader, StoredTensors
from accelerate_lshdp.checkpoint.typed_json import NotPlainError, decode, encode, tensor_paths
from accelerate_lshdp.runtime.object_exchange import NodeLayout


class SavedModels:
    """An opened checkpoint whose models have been compared with those of this run.

    Args:
        folder: a complete checkpoint on this node.
        models: what will be restored.

    Raises:
        ValueError: saying what of the checkpoint does not fit the models.
    """

    def __init__(self, folder: Path, models: list[nn.Module]) -> None:
        self.folder = folder
        self.document = json.loads((folder / "training.json").read_bytes())
        # What `apply` does, in this order. Checks only add to it, so that a checkpoint that does not fit on one rank
        # leaves the objects of all ranks as they were.
        self._steps: list[Callable[[], None]] = []
        self._shared = StoredTensors(SafetensorsReader(folder / "training.safetensors"))
        self._check_count("models", len(models))
        self._models = [ModelTensors.of(model) for model in models]
        for index, (model, saved) in enumerate(zip(self._models, self.document["models"], strict=True)):
            self._check_model(index, model, saved)

    def apply(self) -> None:
        """Restores the objects in place."""
        for step in self._steps:
            step()

    def _value(self, key: str) -> Any:
        return decode(self.document[key], self._shared)

    def _check_count(self, key: str, current: int) -> None:
        saved = len(self.document[key])
        if saved != current:
            what = "registered objects" if key == "custom" else key
            raise ValueError(
                f"the checkpoint holds {saved} {what}, this run has {current}; prepare and register the same "
                "objects, in the same order, before loading"
                + (", and the hooks that saved models themselves" if key == "models" and saved < current else "")
            )

    def _check_model(self, index: int, model: ModelTensors, saved: dict[str, Any]) -> None:
        reader = SafetensorsReader(self.folder / f"model_{index}.safetensors")
        stored_as = {**{name: name for name in reader.names}, **saved["aliases"]}
        known_as = {**{name: name for name in model.tensors}, **model.aliases}
        compare_names(f"parameters and buffers of model {index}", set(stored_as), set(known_as))
        # Names that are one tensor here must be one tensor there: else one of two values would be lost silently.
        sources: dict[str, str] = {}
        for name, first in known_as.items():
            if sources.setdefault(first, stored_as[name]) != stored_as[name]:
                raise ValueError(f"model {index}: {name!r} and {first!r} are tied in this run, not in the checkpoint")
        for name, tensor in model.tensors.items():
            entry = reader.entry(sources[name])
            check_shape(f"model {index}: {name!r}", entry.shape, tensor)
            if entry.dtype != tensor.dtype:
                raise ValueError(
                    f"model {index}: {name!r} is {entry.dtype} in the checkpoint and {tensor.dtype} in this run; "
                    "convert the model before it is prepared"
                )
            # Read when it is applied, and this rank's part alone: the whole model need not fit into one rank's memory.
            region = local_region(tensor) if isinstance(tensor, DTensor) else None
            self._steps.append(
                lambda tensor=tensor, region=region, entry=entry: copy_into(tensor, reader.read(entry.name, region))
            )
        compare_names(f"modules of model {index} with extra state", set(saved["extra_state"]), set(model.modules))
        # Bound as defaults: a closure would see the last module of the loop.
        for name, state in decode(saved["extra_state"], self._shared).items():
            self._steps.append(lambda module=model.modules[name], state=state: module.set_extra_state(state))


class SavedTraining(SavedModels):
    """An opened checkpoint whose contents have been compared with the objects of this run.

    Args:
        folder: a complete checkpoint on this node.
        objects: what will be restored.
        layout: the place of this rank.
        same_plan: whether tensors of single ranks are restored, too.
        trust_checkpoint: whether pickles may be read. A pickle can run any code.

    Raises:
        ValueError: saying what of the checkpoint does not fit the objects.
        PermissionError: for a pickle without `trust_checkpoint`.
    """

    def __init__(
        self, folder: Path, objects: TrainingObjects, layout: NodeLayout, same_plan: bool, trust_checkpoint: bool
    ) -> None:
        restored = [model for index, model in enumerate(objects.models) if index not in objects.left_out]
        super().__init__(folder, restored)
        self._ranks = SafetensorsReader(folder / "rank_tensors.safetensors")
        for key in ("optimizers", "schedulers", "custom"):
            self._check_count(key, len(getattr(objects, key)))
        # Models that hooks restore are named, too: optimizers have state of their parameters.
        everything = [ModelTensors.of(model) for model in objects.models]
        names = checkpoint_optimizer.parameter_names([model.parameters for model in everything])
        for index, (optimizer, saved) in enumerate(zip(objects.optimizers, self.document["optimizers"], strict=True)):
            reader = SafetensorsReader(folder / f"optimizer_{index}.safetensors")
            self._steps.append(checkpoint_optimizer.check(optimizer, names, saved, reader).apply)
        for index, (scheduler, state) in enumerate(zip(objects.schedulers, self._value("schedulers"), strict=True)):
            # Schedulers take whatever they are given, so another kind of state would show steps later.
            now = scheduler.state_dict()
            if isinstance(state, dict) != isinstance(now, dict):
                raise ValueError(
                    f"the state of scheduler {index} is a {type(state).__name__} in the checkpoint and a "
                    f"{type(now).__name__} in this run; prepare the same schedulers, in the same order"
                )
            self._steps.append(lambda scheduler=scheduler, state=state: scheduler.load_state_dict(state))
        self._check_scaler(objects.scaler)
        for index, (thing, saved) in enumerate(zip(objects.custom, self.document["custom"], strict=True)):
            state = self._custom_state(index, thing, saved, trust_checkpoint)
            self._steps.append(lambda thing=thing, state=state: thing.load_state_dict(state))
        self.loaders: list[dict] = self._value("loaders")
        self.extra: dict = self._value("extra")
        self.extra_tensors: dict[str, torch.Tensor] = {}
        if same_plan:
            self._check_rank_tensors(self._models, objects.extra_tensors, layout.rank)

    def random_state(self, rank: int) -> dict[str, Any]:
        """The states of the random number generators of `rank`, as `rng.capture` has returned them."""
        reader = StoredTensors(SafetensorsReader(self.folder / "random_states.safetensors"))
        return decode(self.document["random_states"][rank], reader)

    def _check_scaler(self, scaler: Any | None) -> None:
        state = self._value("scaler")
        if (scaler is None) != (state is None):
            has, lacks = ("checkpoint", "run") if scaler is None else ("run", "checkpoint")
            warnings.warn(f"the {has} has a gradient scaler, the {lacks} none: no state is restored", stacklevel=2)
        elif scaler is not None:
            self._steps.append(lambda: scaler.load_state_dict(state))

    def _custom_state(self, index: int, thing: Any, saved: dict[str, Any], trust_checkpoint: bool) -> Any:
        if "pickle" in saved:
            if not trust_checkpoint:
                raise PermissionError(
                    f"registered object {index} ({saved['type']}) was saved with pickle, which can run any code when "
                    "it is read; pass trust_checkpoint=True if you trust everyone who can write the checkpoint"
                )
            return pickle.loads((self.folder / saved["pickle"]).read_bytes())
        # The object's present state says where its tensors belong (a device, shards of a mesh); the document knows
        # values only, as the run may have another strategy now.
        paths = tensor_paths(saved["state"])
        now: dict[str, torch.Tensor] = {}
        if paths:
            try:
                encode(thing.state_dict(), f"custom_{index}", now)
            except NotPlainError:  # then it tells nothing about where its tensors live
                now = {}
        return decode(saved["state"], {path: self._placed(path, now.get(path)) for path in paths})

    def _placed(self, path: str, now: torch.Tensor | None) -> torch.Tensor:
        """A stored tensor sharded and on the device as the object has it now; whole and on the CPU if it has none."""
        if not isinstance(now, DTensor):
            value = self._shared[path]
            return value if now is None else value.to(now.device)
        check_shape(path, self._shared.reader.entry(path).shape, now)
        return laid_out_like(now, self._shared.reader.read(path, local_region(now)))

    def _check_rank_tensors(self, models: list[ModelTensors], extra: dict[str, torch.Tensor], rank: int) -> None:
        for index, model in enumerate(models):
            for name, buffer in model.buffers.items():
                path = rank_path(rank, buffer_path(index, name))
                if path in self._ranks.names:
                    self._steps.append(lambda path=path, buffer=buffer: copy_into(buffer, self._ranks.read(path)))
        # Copies: these are returned to the caller, and the reader's tensors may share pages of the file.
        prefix = rank_path(rank, EXTRA)
        for path in sorted(self._ranks.names):
            if path.startswith(prefix):
                name = path.removeprefix(prefix)
                value = self._ranks.read(path).clone()
                self.extra_tensors[name] = value
                if name in extra:
                    check_shape(f"the tensor {name!r} of rank {rank}", tuple(value.shape), extra[name])
                    self._steps.append(lambda target=extra[name], value=value: copy_into(target, value))
