# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Finds a transformers configuration by name, folder or file, and the model class that it trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn


if TYPE_CHECKING:
    from transformers import PretrainedConfig


#: Well-known configurations that need no download: (model type, what differs from its defaults).
KNOWN_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2-medium": ("gpt2", {"n_embd": 1024, "n_layer": 24, "n_head": 16}),
    "gpt2-large": ("gpt2", {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
    "gpt2-xl": ("gpt2", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "bert-base-uncased": ("bert", {}),
    "vit-14m": (
        "vit",
        {
            "hidden_size": 384,
            "intermediate_size": 1536,
            "num_hidden_layers": 8,
            "num_attention_heads": 6,
            "image_size": 64,
            "patch_size": 8,
        },
    ),
    "vit-base-patch16": ("vit", {}),
    **{
        f"vit-large-patch{patch}": (
            "vit",
            {
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "patch_size": patch,
            },
        )
        for patch in (16, 32)
    },
}
#: Tasks that are tried, in this order, for configurations that name no architecture.
_TASKS = ("ForImageClassification", "ForSeq2SeqLM", "ForMaskedLM", "ForCausalLM", "ForSequenceClassification")


def load_config(source: str) -> PretrainedConfig:
    """The transformers configuration of a model.

    Args:
        source: a key of `KNOWN_CONFIGS`, a JSON file, a folder with a ``config.json``, or a name on the Hugging Face
            Hub.

    Raises:
        ValueError: nothing there can be read as a configuration; it says what was tried.
    """
    from transformers import AutoConfig

    # Known names first: they work without a network, and a folder of the same name can be given as ./name.
    if source in KNOWN_CONFIGS:
        kind, changes = KNOWN_CONFIGS[source]
        return AutoConfig.for_model(kind, **changes)
    path = Path(source)
    if path.is_file():
        return _read_config(path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"found no config.json in {path}, expected the folder of a transformers model")
        return _read_config(path / "config.json")
    # What looks like a path is not sent to the Hub: its error would not be about the path.
    if path.suffix == ".json" or source.startswith((".", "/", "~")):
        raise ValueError(f"found no file or folder {source}, expected a configuration: correct the path")
    try:
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{source}: not a file, not a folder, none of {', '.join(KNOWN_CONFIGS)}, and the Hugging Face Hub gave no"
            f" configuration ({reason}). Download its config.json and give its path"
        ) from error


def _read_config(path: Path) -> PretrainedConfig:
    from transformers import AutoConfig

    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # RecursionError: of deep nesting
        raise ValueError(f"{path}: found no JSON document ({error}), expected a transformers configuration") from error
    if not isinstance(document, dict) or not isinstance(document.get("model_type"), str):
        raise ValueError(f'{path}: found no "model_type", expected one such as "gpt2": it says what the model is')
    try:
        return AutoConfig.for_model(**document)
    except Exception as error:  # the checks of transformers raise errors of many kinds
        raise ValueError(f"{path}: transformers cannot make a configuration of it: {error}") from error


def model_class_of(config: PretrainedConfig) -> type[nn.Module]:
    """The class to train: the architecture that the configuration names, else the first task that the type has.

    Raises:
        ValueError: there is none.
    """
    import transformers

    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    for task in _TASKS:
        mapping = getattr(transformers, f"AutoModel{task}")._model_mapping
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise ValueError(
        f'found model type "{config.model_type}" without a class for any of {", ".join(_TASKS)}, expected'
        ' "architectures" in the configuration to name the class to train'
    )
