# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Names on the Hugging Face Hub, and what to tell the user when one cannot be loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AutoTokenizer


NO_MODEL = "train one from scratch with --model_config, or give a local folder as --model_name_or_path"


@contextmanager
def from_the_hub(what: str, without_the_hub: str) -> Iterator[None]:
    """Turn a failed download inside the block into one error that says what to do instead.

    Args:
        what: what is being loaded, e.g. `"the dataset cifar10"`.
        without_the_hub: what the user can do on a machine that cannot reach the Hub.

    Raises:
        ConnectionError: the name could not be loaded; it carries the reason that the Hugging Face library gave.
    """
    try:
        yield
    except OSError as error:  # all that datasets, transformers and huggingface_hub raise for the Hub derives from it
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConnectionError(
            f"Could not load {what} from the Hugging Face Hub or from its local cache ({reason}). Check the name and "
            f"the connection to huggingface.co. Without the Hub: {without_the_hub}."
        ) from error


def load_text_model(name_or_path: str, auto_class: Any, **options: Any) -> tuple[Any, Any]:
    """A model of text and its tokenizer, of the Hub or of a folder.

    Args:
        name_or_path: as `from_pretrained` takes it.
        auto_class: such as `AutoModelForCausalLM`.
        **options: what else its `from_pretrained` is given.
    """
    with from_the_hub(f"the model {name_or_path}", NO_MODEL):
        tokenizer = AutoTokenizer.from_pretrained(name_or_path)
        model = auto_class.from_pretrained(name_or_path, **options)
    # Resize only when necessary: the embedding may be larger than the vocabulary for speed.
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))
    return model, tokenizer
