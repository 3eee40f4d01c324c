# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What cannot be right in a Trainer's arguments with unequal batches, told before the first step.

Engines that place parameters themselves (DeepSpeed, FSDP, Megatron-LM) are refused when the accelerator is made
(``other_engines.refuse_other_engines``), samplers that shard by rank when their loader is prepared
(``data.sampler_checks``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from accelerate.logging import get_logger

from accelerate_lshdp.accelerator.accelerator import LSHDPAccelerator
from accelerate_lshdp.data.weighting import LossWeighting


if TYPE_CHECKING:
    from torch.utils.data import DataLoader
    from transformers import Trainer

logger = get_logger(__name__)


def check_arguments(trainer: Trainer) -> None:
    """Refuses a Trainer whose arguments contradict the plan or cannot give the result of one process.

    Args:
        trainer: with its ``args`` and ``accelerator``; its model is looked at if it has one already.

    Raises:
        ValueError: on all ranks, naming everything that was found.
    """
    found = list(_mistakes(trainer))
    if found:
        text = found[0] if len(found) == 1 else "".join(f"\n  - {mistake}" for mistake in found)
        raise ValueError(f"{type(trainer).__name__} cannot train with LSHDP: {text}")


def warn_of_weighting(trainer: Trainer) -> None:
    """Says that a choice of ``loss_weighting`` has no effect."""
    chosen = trainer.accelerator.lsdp_plugin.loss_weighting
    if chosen is not LossWeighting.AUTO:
        logger.warning(
            f"loss_weighting={str(chosen)!r} has no effect in a Trainer, which finds on the first batches what its "
            "loss is a mean over and weights it by that. Leave it out (LSDPPlugin, LSDP_LOSS_WEIGHTING)"
        )


def check_train_loader(trainer: Trainer, loader: DataLoader) -> None:
    """Refuses a training loader that does not know the plan's batch sizes, such as that of an own method.

    Args:
        trainer: with an ``LSHDPAccelerator``.
        loader: what its ``get_train_dataloader`` returned.

    Raises:
        ValueError: the plan has batch sizes, and the loader was not prepared by the accelerator.
    """
    from accelerate_lshdp.data.loader import HeterogeneousDataLoader

    if _divides(trainer.accelerator) and not isinstance(loader, HeterogeneousDataLoader):
        raise ValueError(
            f"{type(trainer).__name__}.get_train_dataloader returned a {type(loader).__name__} that was not prepared, "
            "so it has its own batch size on every rank instead of the plan's. Return "
            "self.accelerator.prepare(loader), with a loader that reads the whole dataset (no DistributedSampler)"
        )


def _divides(accelerator: LSHDPAccelerator) -> bool:
    """Whether the plan has batch sizes, or leaves them to the run."""
    return accelerator.plan.batch is not None or accelerator.plan.automatic is not None


def _mistakes(trainer: Trainer) -> Iterator[str]:
    args, accelerator = trainer.args, trainer.accelerator
    if not isinstance(accelerator, LSHDPAccelerator):
        yield (
            f"found an accelerator of class {type(accelerator).__name__}, expected accelerate_lshdp.LSHDPAccelerator. "
            "Let the Trainer create accelerate.Accelerator, or derive your class from LSHDPAccelerator"
        )
        return
    planned, several = _divides(accelerator), accelerator.num_processes > 1
    if planned and args.accelerator_config.dispatch_batches:
        yield (
            "found accelerator_config dispatch_batches=True, but a batch that the main process reads and splits is "
            "split equally, not by the plan. Set dispatch_batches to False: every rank then reads its own part"
        )
    if several and not args.average_tokens_across_devices:
        yield (
            "found average_tokens_across_devices=False, with which every rank divides its loss by its own number of "
            "tokens and the gradient is not that of the global batch. Leave the argument at its default, True"
        )
    if (planned or several) and args.train_sampling_strategy == "batch_rebalance":
        yield (
            "found train_sampling_strategy='batch_rebalance', which divides batches among the ranks itself, for ranks "
            "of equal speed. Use 'group_by_length', 'random' or 'sequential': the plan's batch sizes balance the ranks"
        )
    if args.auto_find_batch_size and (planned or several):
        yield (
            "found auto_find_batch_size=True, but "
            + ("the batch sizes are the plan's" if planned else "a rank that tries again leaves the others waiting")
            + ". Leave it out, and give sizes that fit in a plan (accelerate-lshdp profile measures what fits)"
        )
    if args.n_gpu > 1:
        yield (
            f"found {args.n_gpu} GPUs in one process, which the Trainer would use by torch.nn.DataParallel. Start one "
            "process a GPU, or make one GPU visible (CUDA_VISIBLE_DEVICES=0)"
        )
    # A placement that is not found yet may shard.
    is_sharded = accelerator.policies.is_sharded or accelerator.session.finds_placement
    if args.save_only_model and args.load_best_model_at_end and is_sharded:
        yield (
            "found save_only_model=True with load_best_model_at_end=True, but the shards of strategy "
            f"{accelerator.strategy} are loaded from the state that save_only_model leaves out. Leave one of them "
            "out, or use strategy ddp"
        )
    yield from _mistakes_of_callbacks(trainer)
    yield from _mistakes_of_model(trainer)


def _mistakes_of_callbacks(trainer: Trainer) -> Iterator[str]:
    from accelerate_lshdp.trainer.callback import LSHDPCallback

    plan = trainer.accelerator.plan
    for callback in trainer.callback_handler.callbacks:
        given = callback.plan if isinstance(callback, LSHDPCallback) else None
        if given is not None and given.leaves_placement_open and plan.placement is not None:
            given = given.with_placement(plan.placement)  # which an earlier training has found
        if given is not None and given.digest() != plan.digest():
            yield (
                f"found a plan in LSHDPCallback (strategy {given.strategy}, batch sizes {given.batch_sizes}) other "
                f"than the accelerator's (strategy {plan.strategy}, batch sizes {plan.batch_sizes}), which the "
                "Trainer had already or was given itself. Give the plan in one place, and create the callback before "
                "the Trainer"
            )


def _mistakes_of_model(trainer: Trainer) -> Iterator[str]:
    model = getattr(trainer, "model", None)
    if getattr(model, "is_distributed_loading_by_transformers", False) or (getattr(model, "tp_size", None) or 1) > 1:
        yield (
            "found a model that from_pretrained has divided among the ranks itself (tp_plan or distributed_config). "
            "Load it without: the plan's strategy places the parameters"
        )
    devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1:
        yield (
            f"found a model spread over the devices {', '.join(sorted(devices))} (device_map). Load it without "
            "device_map: every rank has one device, and the plan's strategy places the parameters"
        )
