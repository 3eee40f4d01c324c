# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Checks that the documents of a checkpoint are what a save writes; checksums only tell that they were not damaged.

It is called before a checkpoint is chosen, so that one with wrong contents is passed over for an older one. Nothing
here knows the run that loads: documents that are well formed, but of another model, are an error of `restore`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from accelerate_lshdp.checkpoint import rng as checkpoint_rng
from accelerate_lshdp.checkpoint.manifest import Manifest
from accelerate_lshdp.checkpoint.tensors import SafetensorsReader, StoredTensors
from accelerate_lshdp.checkpoint.typed_json import decode


TRAINING = "training.json"
_TENSORS = ("training.safetensors", "random_states.safetensors", "rank_tensors.safetensors")
_SECTIONS = ("models", "schedulers", "scaler", "loaders", "extra", "custom", "optimizers", "random_states")
#: Checks loaders and extra values, which belong to the caller of save and load; raises what it finds wrong.
DocumentCheck = Callable[[list[dict], dict], None]


def find_content_error(folder: Path, manifest: Manifest, check_document: DocumentCheck | None = None) -> str | None:
    """The first thing in a checkpoint's documents that no save writes, with its place; None if there is nothing.

    Args:
        folder: of a checkpoint whose files have the checksums of its manifest.
        manifest: its manifest.
        check_document: checks loaders and extra values.
    """
    # A checksum can be right and the contents wrong: of a file edited by hand with its manifest, or of a faulty
    # release.
    try:
        _Contents(folder, manifest).check(check_document)
    except Exception as error:  # wrong contents can lead to any error, and this checkpoint is of no use then
        said = str(error) if isinstance(error, ValueError) else f"found what no save writes ({error!r:.200})"
        return f"{folder / TRAINING} has the right checksum, but wrong contents: {said}"
    return None


class _Contents:
    """The documents of one checkpoint."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        for name in (TRAINING, *_TENSORS):
            _require(name in manifest.files, "", f"no {name}", "it among the files of the manifest")
        self.document = _mapping(json.loads((folder / TRAINING).read_bytes()), "")
        for key in _SECTIONS:
            _require(key in self.document, key, "nothing", "a value")
        self.shared = SafetensorsReader(folder / _TENSORS[0])
        self.random = SafetensorsReader(folder / _TENSORS[1])
        SafetensorsReader(folder / _TENSORS[2])  # opened only, which checks its header
        self.models: list[SafetensorsReader] = []
        self.aliases: list[Mapping[str, str]] = []
        self.left_out: set[int] = set()  # models that hooks of the script have saved, of which nothing is known here

    def check(self, check_document: DocumentCheck | None) -> None:
        """Checks section by section, and raises ValueError with the place of the first thing that is wrong."""
        # Models before optimizers, whose state is compared with the shapes of the models' parameters.
        for index in _sequence(self.document.get("left_out", []), "left_out"):
            _require(type(index) is int and index >= 0, "left_out", index, "the number of a model, counted from 0")
            self.left_out.add(index)
        for index, saved in enumerate(_sequence(self.document["models"], "models")):
            self._check_model(index, saved)
        for index, saved in enumerate(_sequence(self.document["optimizers"], "optimizers")):
            self._check_optimizer(f"optimizers[{index}]", self._file(f"optimizer_{index}.safetensors"), saved)
        self._decoded_list("schedulers")  # of any kind: a scheduler of the script's own says what its state is
        scaler = self._decoded(self.document["scaler"], "scaler", self.shared)
        _require(scaler is None or isinstance(scaler, dict), "scaler", scaler, "an object or null")
        for index, saved in enumerate(_sequence(self.document["custom"], "custom")):
            self._check_custom(f"custom[{index}]", saved)
        self._check_random_states()
        loaders = [_mapping(state, f"loaders[{i}]") for i, state in enumerate(self._decoded_list("loaders"))]
        extra = _mapping(self._decoded(self.document["extra"], "extra", self.shared), "extra")
        if check_document is not None:
            check_document(loaders, extra)

    def _check_model(self, index: int, saved: object) -> None:
        place = f"models[{index}]"
        saved = _mapping(saved, place, ("aliases", "extra_state"))
        reader = self._file(f"model_{index}.safetensors")
        aliases = _mapping(saved["aliases"], f"{place}.aliases")
        for name, first in aliases.items():
            known = isinstance(first, str) and first in reader.names and name not in reader.names
            _require(known, f"{place}.aliases", f"{name!r:.60}: {first!r:.60}", "another name of a stored tensor")
        _mapping(self._decoded(saved["extra_state"], f"{place}.extra_state", self.shared), f"{place}.extra_state")
        self.models.append(reader)
        self.aliases.append(aliases)

    def _check_optimizer(self, place: str, reader: SafetensorsReader, saved: object) -> None:
        saved = _mapping(saved, place, ("groups", "state", "other"))
        names: set[str] = set()
        for index, group in enumerate(_sequence(saved["groups"], f"{place}.groups")):
            here = f"{place}.groups[{index}]"
            group = _mapping(group, here, ("parameters", "options"))
            for name in _sequence(group["parameters"], f"{here}.parameters"):
                self._shape(name, f"{here}.parameters")
                _require(name not in names, f"{here}.parameters", f"{name!r:.60} twice", "it once")
                names.add(name)
            _mapping(self._decoded(group["options"], f"{here}.options", reader), f"{here}.options")
        for name, values in _mapping(saved["state"], f"{place}.state").items():
            here = f"{place}.state[{name!r:.60}]"
            _require(name in names, here, "it", "state of parameters of the groups")
            for key, value in _mapping(values, here).items():
                self._check_value(f"{here}.{key!s:.60}", name, value, reader)
        _mapping(self._decoded(saved["other"], f"{place}.other", reader), f"{place}.other")

    def _check_value(self, place: str, parameter: str, value: object, reader: SafetensorsReader) -> None:
        value = _mapping(value, place)
        if "tensor" not in value:
            _require("value" in value, place, sorted(value), "a value or a tensor")
            self._decoded(value["value"], place, reader)
            return
        name, like = value["tensor"], value.get("like_parameter")
        _require(isinstance(name, str) and name in reader.names, place, name, "the name of a stored tensor")
        _require(isinstance(like, bool), place, like, "like_parameter to be true or false")
        if like:
            shape, expected = reader.entry(name).shape, self._shape(parameter, place)
            if expected is not None:
                _require(shape == expected, place, f"shape {list(shape)}", f"{list(expected)}, the parameter's")

    def _shape(self, name: object, place: str) -> tuple[int, ...] | None:
        """The shape of the parameter that optimizers know as ``model_0.weight``; None if its model was left out."""
        # Optimizers number all models; files number those that were saved.
        if isinstance(name, str):
            if any(name.startswith(f"model_{index}.") for index in self.left_out):
                return None
            numbers = (number for number in itertools.count() if number not in self.left_out)
            for index, reader, aliases in zip(numbers, self.models, self.aliases, strict=False):
                plain = name.removeprefix(f"model_{index}.")
                if plain != name and aliases.get(plain, plain) in reader.names:
                    return reader.entry(aliases.get(plain, plain)).shape
        raise ValueError(f"{place}: found {name!r:.60}, expected the name of a parameter of a model")

    def _check_custom(self, place: str, saved: object) -> None:
        saved = _mapping(saved, place, ("type",))
        _require(isinstance(saved["type"], str), f"{place}.type", saved["type"], "the name of a class")
        if "pickle" in saved:
            name = saved["pickle"]
            known = isinstance(name, str) and name in self.manifest.files
            _require(known, f"{place}.pickle", name, "a file of the manifest")
        else:
            _require("state" in saved, place, sorted(saved), "a state or a pickle")
            self._decoded(saved["state"], f"{place}.state", self.shared)

    def _check_random_states(self) -> None:
        states = _sequence(self.document["random_states"], "random_states")
        ranks = self.manifest.world_size
        _require(len(states) == ranks, "random_states", len(states), f"{ranks}, one a rank")
        for index, state in enumerate(states):
            place = f"random_states[{index}]"
            try:
                found = _mapping(decode(state, StoredTensors(self.random)), place)
                checkpoint_rng.check(found)
            except Exception as error:
                raise ValueError(f"{place}: found no state of random number generators ({error!r:.200})") from error

    def _decoded_list(self, key: str) -> Sequence[Any]:
        return _sequence(self._decoded(self.document[key], key, self.shared), key)

    def _decoded(self, value: object, place: str, reader: SafetensorsReader) -> Any:
        try:
            return decode(value, _Named(reader))
        except Exception as error:
            raise ValueError(
                f"{place}: found what no save writes ({error!r:.200}), expected encoded values"
            ) from error

    def _file(self, name: str) -> SafetensorsReader:
        _require(name in self.manifest.files, "", f"no {name}", "it among the files of the manifest")
        return SafetensorsReader(self.folder / name)


class _Named(Mapping):
    """Mapping of the names in a file to small tensors: only the names are checked, and the values can be large."""

    def __init__(self, reader: SafetensorsReader) -> None:
        self._names = reader.names

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise ValueError(f"there is no tensor {name!r:.60}")
        return torch.zeros(1)

    def __iter__(self) -> Any:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _require(holds: bool, place: str, found: object, expected: str) -> None:
    if not holds:
        shown = found if isinstance(found, str) else repr(found)
        raise ValueError(f"{place}: found {shown[:120]}, expected {expected}" if place else f"found {shown[:120]}")


def _mapping(value: object, place: str, keys: Sequence[str] = ()) -> Mapping[str, Any]:
    _require(isinstance(value, dict), place or TRAINING, value, "an object")
    for key in keys:
        _require(key in value, f"{place}.{key}", "nothing", "a value")
    return value


def _sequence(value: object, place: str) -> Sequence[Any]:
    _require(isinstance(value, list), place, value, "a list")
    return value
