# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The contents of a checkpoint: its files, and the tensors and values that each is made of.

| file | holds |
|---|---|
| ``model_0.safetensors`` | full parameters and persistent buffers under their module names; tied ones once |
| ``optimizer_0.safetensors`` | full optimizer state, as ``training.json`` assigns it to parameters |
| ``training.json`` | aliases of tied parameters, optimizers, schedulers, scaler, loaders, registered objects, extra |
| ``training.safetensors`` | the tensors of those values |
| ``random_states.safetensors`` | the generators of all ranks |
| ``rank_tensors.safetensors`` | tensors that belong to one rank: ``extra_tensors``, and buffers where ranks differ |
| ``custom_0.pickle`` | a registered object that is more than JSON and tensors; only with ``trust_checkpoint`` |
"""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate_lshdp.checkpoint import optimizer as checkpoint_optimizer
from accelerate_lshdp.checkpoint import owned_optimizer as checkpoint_owned
from accelerate_lshdp.checkpoint import rng as checkpoint_rng
from accelerate_lshdp.checkpoint.model import ModelTensors
from accelerate_lshdp.checkpoint.owned_optimizer import DescribedOptimizer
from accelerate_lshdp.checkpoint.stream import TensorSource
from accelerate_lshdp.checkpoint.tensors import TensorEntry
from accelerate_lshdp.checkpoint.typed_json import NotPlainError, encode
from accelerate_lshdp.runtime.object_exchange import (
    NodeLayout,
    all_objects,
    as_bytes,
    errors_on_all_ranks,
    object_from,
)


@dataclass
class TrainingObjects:
    """The objects of a run that a checkpoint saves and restores.

    Attributes:
        models: prepared or plain; parameters are tensors or DTensors.
        optimizers: torch optimizers over parameters of `models`.
        schedulers: with `state_dict` and `load_state_dict`.
        scaler: the gradient scaler of fp16, or None.
        loaders: position of each data loader, as JSON; given and returned.
        custom: registered objects with `state_dict` and `load_state_dict`; rank 0's state is saved.
        extra: values of the run, as JSON; rank 0's are saved.
        extra_tensors: tensors of this rank alone, such as error feedback.
        left_out: indices of models that are neither saved nor restored here: hooks of the script do it. The others
            count from 0 in a checkpoint.
        values: by id of a buffer, another value that is saved for it.
    """

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    scaler: Any | None = None
    loaders: list[dict] = field(default_factory=list)
    custom: list[Any] = field(default_factory=list)
    extra: dict = field(default_factory=dict)
    extra_tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    left_out: frozenset[int] = frozenset()
    values: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class Contents:
    """The contents that every node writes: tensors by file, and whole small files."""

    tensors: dict[str, list[TensorSource]]
    files: dict[str, bytes]


#: Prefix of `extra_tensors` below `rank_path`. Part of the file format, as are the names that the two functions make.
EXTRA = "extra/"


def rank_path(rank: int, name: str) -> str:
    """Name in ``rank_tensors.safetensors`` of a tensor of one rank."""
    return f"rank_{rank}/{name}"


def buffer_path(model: int, name: str) -> str:
    """Name of a buffer below `rank_path`."""
    return f"buffers/model_{model}/{name}"


def collect(
    objects: TrainingObjects, layout: NodeLayout, trust_checkpoint: bool, *, keeps_random_numbers: bool = True
) -> Contents:
    """Describes all that is to be saved, the same on all ranks (collective). Nothing is copied or gathered yet.

    Collectives are outside of the blocks that may fail: an error on one rank is raised on all before the next one.

    Args:
        objects: of this rank.
        layout: the place of this rank.
        trust_checkpoint: allows pickle for registered objects that are more than JSON and tensors.
        keeps_random_numbers: whether the generators of this process are saved, in which it is like no other one.

    Raises:
        RuntimeError: on all ranks, if something cannot be saved or ranks have different models or optimizers.
    """
    # Before anything of the script is called: its state_dict methods may draw random numbers.
    random_state = checkpoint_rng.capture(layout.device) if keeps_random_numbers else checkpoint_rng.unused()
    with errors_on_all_ranks("collecting what is to be saved"):
        own = _OwnContents.of(objects, trust_checkpoint)
    # State that other ranks of the node own; collective, so it stands between the blocks.
    described = checkpoint_owned.merge_owned_state(objects.optimizers, own.optimizers, own.names)
    with errors_on_all_ranks("collecting what is to be saved"):
        own.add_optimizers(described)
        mine = own.describe(objects.extra_tensors, random_state)
    descriptions: list[_RankDescription] = all_objects(mine)
    with errors_on_all_ranks("comparing what ranks are to save"):
        _check_same(descriptions)
    # Values and order of rank 0, where ranks may differ: from here on all ranks stream the same list of tensors, each
    # of them by a collective.
    document, pickles, entries = object_from(0, (own.document, own.pickles, own.shared_entries()))
    with errors_on_all_ranks("collecting what is to be saved"):
        shared_sources = [_shared_source(entry, sharded, own.shared) for entry, sharded in entries]
    random_tensors: dict[str, torch.Tensor] = {}
    states = [description.random_state for description in descriptions]
    document["random_states"] = encode(states, "random_states", random_tensors)
    differing = [
        path
        for path in descriptions[0].buffers
        if len({description.buffers[path] for description in descriptions}) > 1
    ]
    tensors = {
        **_with_buffers_of_rank_0(own.tensors, differing),
        "training.safetensors": shared_sources,
        "random_states.safetensors": [TensorSource.of(*item) for item in random_tensors.items()],
        "rank_tensors.safetensors": [
            *_buffer_sources({path: own.buffers[path] for path in differing}, layout),
            *_extra_sources([description.extra for description in descriptions], objects.extra_tensors, layout),
        ],
    }
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    return Contents(tensors, {"training.json": text.encode(), **pickles})


@dataclass
class _OwnContents:
    """What this rank would save, found without a collective.

    Args:
        names: of all parameters; they count all models, since optimizers hold those of models that hooks save, too.
        tensors: by file.
        buffers: of the models that are saved, by `buffer_path`.
        optimizers: in the order of the script.
        document: the contents of ``training.json``.
        shared: tensors in the document.
        pickles: whole files.
    """

    names: dict[int, str]
    tensors: dict[str, list[TensorSource]]
    buffers: dict[str, torch.Tensor]
    optimizers: list[DescribedOptimizer]
    document: dict[str, Any]
    shared: dict[str, torch.Tensor]
    pickles: dict[str, bytes]

    @classmethod
    def of(cls, objects: TrainingObjects, trust_checkpoint: bool) -> _OwnContents:
        """Calls the state_dict methods of all objects. Raises what they raise, and for what cannot be saved."""
        everything = [ModelTensors.of(model) for model in objects.models]
        for model in everything:
            model.tensors = {name: objects.values.get(id(each), each) for name, each in model.tensors.items()}
        names = checkpoint_optimizer.parameter_names([model.parameters for model in everything])
        # Files count the models that are saved here.
        models = [model for index, model in enumerate(everything) if index not in objects.left_out]
        shared: dict[str, torch.Tensor] = {}
        pickles: dict[str, bytes] = {}
        document: dict[str, Any] = {
            "models": [
                {"aliases": model.aliases, "extra_state": encode(model.extra_state, f"model_{index}", shared)}
                for index, model in enumerate(models)
            ]
        }
        if objects.left_out:
            document["left_out"] = sorted(objects.left_out)
        optimizers = []
        for index, optimizer in enumerate(objects.optimizers):
            found, tensors = checkpoint_optimizer.describe(optimizer, names, f"optimizer_{index}")
            optimizers.append(DescribedOptimizer(found, [TensorSource.of(*item) for item in tensors.items()]))
        plain = {
            "schedulers": [scheduler.state_dict() for scheduler in objects.schedulers],
            "scaler": None if objects.scaler is None else objects.scaler.state_dict(),
            "loaders": objects.loaders,
            "extra": objects.extra,
        }
        document |= {name: encode(state, name, shared) for name, state in plain.items()}
        document["custom"] = [
            _describe_custom(index, thing, trust_checkpoint, shared, pickles)
            for index, thing in enumerate(objects.custom)
        ]
        tensors = {
            f"model_{index}.safetensors": [TensorSource.of(*item) for item in model.tensors.items()]
            for index, model in enumerate(models)
        }
        buffers = {
            buffer_path(index, name): buffer
            for index, model in enumerate(models)
            for name, buffer in model.buffers.items()
        }
        return cls(names, tensors, buffers, optimizers, document, shared, pickles)

    def add_optimizers(self, described: Sequence[DescribedOptimizer]) -> None:
        """Adds the optimizers with the state that other ranks of the node own."""
        self.document["optimizers"] = [optimizer.document for optimizer in described]
        # By name: the groups of an optimizer that was made from a set have another order in each process, and all
        # ranks have to stream the tensors in the same one.
        self.tensors |= {
            f"optimizer_{index}.safetensors": sorted(optimizer.sources, key=lambda source: source.entry.name)
            for index, optimizer in enumerate(described)
        }

    def describe(self, extra: Mapping[str, torch.Tensor], random_state: dict[str, Any]) -> _RankDescription:
        """What other ranks compare with theirs."""
        return _RankDescription(
            own={file: [source.entry for source in sources] for file, sources in self.tensors.items()},
            # Checksums are enough to find the buffers that differ between ranks; those alone are saved rank by rank.
            buffers={
                path: zlib.crc32(as_bytes(buffer.cpu()).numpy())
                for path, buffer in self.buffers.items()
                if not isinstance(buffer, DTensor)
            },
            extra=[TensorSource.of(*item).entry for item in extra.items()],
            random_state=random_state,
        )

    def shared_entries(self) -> list[tuple[TensorEntry, bool]]:
        """The tensors in the document, each with whether it is sharded."""
        return [(TensorSource.of(*item).entry, isinstance(item[1], DTensor)) for item in self.shared.items()]


@dataclass(frozen=True)
class _RankDescription:
    """What one rank would save: equal on all ranks (`own`), compared by CRC-32 (`buffers`), and its own (the rest)."""

    own: dict[str, list[TensorEntry]]
    buffers: dict[str, int]
    extra: list[TensorEntry]
    random_state: dict[str, Any]


def _describe_custom(
    index: int, thing: Any, trust_checkpoint: bool, shared: dict[str, torch.Tensor], pickles: dict[str, bytes]
) -> dict[str, Any]:
    # Tensors are collected apart: where encoding fails halfway, none of them may be left among those to be saved.
    state = thing.state_dict()
    kind = f"{type(thing).__module__}.{type(thing).__qualname__}"
    tensors: dict[str, torch.Tensor] = {}
    try:
        encoded = encode(state, f"custom_{index}", tensors)
    except NotPlainError as error:
        if not trust_checkpoint:
            raise NotPlainError(
                f"the state_dict of registered object {index} ({kind}) cannot be saved without pickle: {error}. "
                "Return JSON values and tensors, or pass trust_checkpoint=True if you trust all who can write there"
            ) from error
        pickles[f"custom_{index}.pickle"] = pickle.dumps(state)
        return {"type": kind, "pickle": f"custom_{index}.pickle"}
    shared.update(tensors)
    return {"type": kind, "state": encoded}


def _check_same(descriptions: Sequence[_RankDescription]) -> None:
    """Raises ValueError if a rank's models or optimizers have other tensors than rank 0's, or in another order."""
    # The order, too: tensors are gathered one after the other, and collectives are matched by their order alone.
    for rank, description in enumerate(descriptions):
        if description.own.keys() != descriptions[0].own.keys():
            raise ValueError(
                f"rank 0 would write {sorted(descriptions[0].own)}, rank {rank} would write {sorted(description.own)}"
            )
        for file, entries in description.own.items():
            if entries != descriptions[0].own[file]:
                differing = set(entries) ^ set(descriptions[0].own[file])
                first = min(differing, key=lambda entry: entry.name, default=None)
                what = "their order" if first is None else f"{first.name!r} ({first.dtype}, {list(first.shape)})"
                raise ValueError(f"{file}: ranks 0 and {rank} differ in {what}; they need the same model and state")


def _shared_source(entry: TensorEntry, sharded: bool, shared: dict[str, torch.Tensor]) -> TensorSource:
    # A plain tensor is rank 0's, whatever this rank has under the name; a sharded one needs the shards of all.
    if not sharded:
        return TensorSource(entry, shared.get(entry.name), rank=0)
    mine = shared.get(entry.name)
    if not isinstance(mine, DTensor) or tuple(mine.shape) != entry.shape:
        raise ValueError(f"{entry.name!r} is sharded on rank 0, but this rank has no shard of it")
    return TensorSource(entry, mine)


def _with_buffers_of_rank_0(
    files: dict[str, list[TensorSource]], differing: Sequence[str]
) -> dict[str, list[TensorSource]]:
    """`files` with one value for buffers that differ between ranks, such as running means of local batches."""
    # A tensor has one value in the model's file; the values of all ranks are in rank_tensors.safetensors beside it.
    chosen = set(differing)
    result = {}
    for file, sources in files.items():
        folder = f"buffers/{file.removesuffix('.safetensors')}/"
        result[file] = [
            replace(source, rank=0) if folder + source.entry.name in chosen else source for source in sources
        ]
    return result


def _buffer_sources(buffers: dict[str, torch.Tensor], layout: NodeLayout) -> list[TensorSource]:
    """Sources of every rank's own values of `buffers`, so that the same run goes on with what each rank had."""
    return [
        TensorSource.of(rank_path(rank, path), buffer, rank)
        for rank in range(layout.world_size)
        for path, buffer in buffers.items()
    ]


def _extra_sources(
    descriptions: Sequence[Sequence[TensorEntry]], mine: dict[str, torch.Tensor], layout: NodeLayout
) -> list[TensorSource]:
    return [
        TensorSource(
            replace(entry, name=rank_path(rank, f"{EXTRA}{entry.name}")),
            mine[entry.name] if rank == layout.rank else None,
            rank,
        )
        for rank, entries in enumerate(descriptions)
        for entry in entries
    ]
