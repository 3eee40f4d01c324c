# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Whether a model can be trained under the plan, before it is placed."""

from __future__ import annotations

from accelerate.logging import get_logger
from accelerate.utils import DynamoBackend
from torch import nn

from accelerate_lshdp.accelerator.plugin import BatchNormMode
from accelerate_lshdp.accelerator.session import Session
from accelerate_lshdp.runtime.option_advice import option_advice


logger = get_logger(__name__)


def checked(session: Session, model: nn.Module, dynamo_backend: DynamoBackend) -> nn.Module:
    """The model, ready to be placed (collective).

    Raises:
        RuntimeError: on all ranks, if it cannot be trained under the strategy; of one rank alone the error itself.
    """
    error: Exception | None = None
    try:
        if session.policies.casts_itself and dynamo_backend != DynamoBackend.NO:
            raise ValueError(
                f"dynamo_backend={dynamo_backend.value} is not supported with strategy {session.strategy}; leave it "
                + ("out" if session.topology.mixes_devices else "out, or use strategy ddp")
            )
        model = _with_settled_batch_norms(session, model)
        session.engine.require_placeable(model)
    except ValueError as found:
        error = found
    session.raise_everywhere(error)
    return model


def _with_settled_batch_norms(session: Session, model: nn.Module) -> nn.Module:
    """The model, with batch norms that may be trained with the plan's batches.

    Raises:
        ValueError: it has some whose statistics would depend on how the batch is divided.
    """
    plan = session.plan
    batches = plan.batch.ranks if plan.batch is not None else ()
    unequal = len({rank.micro_batch_size for rank in batches}) > 1 or plan.has_accumulation
    unequal = unequal or plan.automatic is not None
    norms = [name for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    mode = session.options.batch_norm
    if not norms or not unequal or session.world_size == 1:
        return model
    if mode is BatchNormMode.LOCAL:
        logger.warning(f"{len(norms)} batch norms normalise over each rank's own, unequal micro-batch")
        return model
    if mode is BatchNormMode.SYNC and session.device.type == "cuda" and not plan.has_accumulation:
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    raise ValueError(
        f"the model has batch normalisation ({norms[0]} and {len(norms) - 1} more); its statistics depend on how "
        "the batch is divided, so unequal batches do not give the gradient of the global batch. Replace it (by "
        "group or layer normalisation), or accept statistics of each rank's own micro-batch with "
        f"{option_advice('batch_norm', 'local')}; 'sync' works on CUDA without accumulation"
    )
