# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Names on the Hugging Face Hub, and what to tell the user when one cannot be loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


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
