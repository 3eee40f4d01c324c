# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Batch normalisation in micro-batches of unequal ranks: running statistics of rank 0, and batches of one value."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from accelerate_lshdp.engine.module_state import exclude_hooks_from_pickles
from accelerate_lshdp.runtime.groups import carried
from accelerate_lshdp.runtime.wait_clock import WaitClock


class RunningStatistics:
    """The running statistics of a model's normalisations, which each rank computes from its own micro-batches.

    In training these statistics are written only. Evaluations and checkpoints use those of rank 0, as with torch's
    DDP, which broadcasts them before every forward; once a step is enough for that.

    Args:
        module: the model.
        clock: counts the time spent waiting.
    """

    def __init__(self, module: nn.Module, clock: WaitClock) -> None:
        self._norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
        self._clock = clock

    @torch.no_grad()
    def broadcast(self) -> None:
        """Copies the statistics of rank 0 to all ranks (collective, if the model has any)."""
        # The same list on all ranks, as they have the same model: either all of them broadcast, or none does.
        statistics = [buffer for norm in self._norms for buffer in norm.buffers(recurse=False)]
        if not statistics:
            return
        # As bytes: counts of batches are integers. In one message: a network takes as long for a small one.
        pieces = [buffer.reshape(-1).view(torch.uint8) for buffer in statistics]
        message = carried(torch.cat(pieces))
        with self._clock.waiting():
            dist.broadcast(message, src=0)
        for buffer, piece in zip(statistics, message.split([len(piece) for piece in pieces]), strict=True):
            buffer.copy_(piece.clone().view(buffer.dtype).view(buffer.shape))  # a clone is aligned for every dtype


class _SingleValues:
    """Lets one batch normalisation take a micro-batch of one value per channel, where others are larger.

    Such a micro-batch is a rank's share of the last, short global batch, or the sample that a rank without a share
    repeats. It has no variance, so torch refuses it; accelerate's own loaders fill it up with samples of the epoch's
    beginning. Here every sample counts once, so it is normalised with the running statistics and leaves them alone.
    """

    def __init__(self, others_are_larger: Callable[[], bool], say: Callable[[str], None]) -> None:
        # By the sizes that all ranks know, not by what this one has had: a run may be resumed at the short batch.
        self._others_are_larger = others_are_larger
        self._say = say
        self._switched = False

    def before(self, norm: nn.modules.batchnorm._BatchNorm, inputs: tuple) -> None:
        """Forward pre-hook: puts the normalisation in evaluation mode for a micro-batch of one value per channel."""
        shape = inputs[0].shape if inputs and isinstance(inputs[0], torch.Tensor) else ()
        if not norm.training or len(shape) < 2:
            return
        if shape[0] * math.prod(shape[2:]) == 1 and norm.running_mean is not None and self._others_are_larger():
            # Of this module alone: eval() of a block would switch its dropout off, too.
            self._switched, norm.training = True, False
            self._say(
                "a micro-batch has one value per channel for batch normalisation, which has no variance: it is "
                "normalised with the running statistics, as in an evaluation. drop_last=True in the loader avoids it "
                "in the last, short global batch; where it is a rank's share of every one, give the rank 2 samples"
            )

    def after(self, norm: nn.modules.batchnorm._BatchNorm, inputs: tuple, output: object) -> None:
        """Forward hook: puts the normalisation back in training mode, if ``before`` has changed that."""
        if self._switched:
            self._switched, norm.training = False, True


def allow_single_values(
    module: nn.Module, others_are_larger: Callable[[], bool], say: Callable[[str], None]
) -> list[RemovableHandle]:
    """Lets a model's batch normalisations take the micro-batches of a short global batch.

    Args:
        module: the model.
        others_are_larger: tells whether a rank has micro-batches of more than one sample in a full global batch.
        say: tells the user when a single value was taken.

    Returns:
        The handles of its hooks.
    """
    handles = []
    for norm in module.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm) and not isinstance(norm, nn.SyncBatchNorm):
            hook = _SingleValues(others_are_larger, say)
            handles.append(norm.register_forward_pre_hook(hook.before))
            handles.append(norm.register_forward_hook(hook.after, always_call=True))  # also when the forward fails
            exclude_hooks_from_pickles(norm)
    return handles
