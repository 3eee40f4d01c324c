# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A backward that adds exact zeros: it has to run, because other ranks wait for its collectives.

A loss of no element (a mean over an empty mask) is 0/0. Multiplying it with 0, or replacing it by 0, does not make its
gradient 0: its own backward multiplies the zero that arrives with an infinity. So what arrives at the parameters is
replaced, after everything else that has a say in it and before it is added to what earlier micro-batches gave.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from accelerate_lshdp.engine.prepared import PreparedModel


@contextlib.contextmanager
def gradients_of_zero(models: Iterable[PreparedModel]) -> Iterator[None]:
    """Makes backwards inside the block add exact zeros to the gradients of these models, also in place of NaN."""
    # Hooks of tensors run before the gradient is added to .grad, and in the order of their registration: this one
    # comes after those of the script.
    leaves = {id(leaf): leaf for model in models for leaf in model.gradient_leaves() if leaf.requires_grad}
    handles = [leaf.register_hook(torch.zeros_like) for leaf in leaves.values()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
