# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Strategies on FSDP2 without what older torch lacks: it is taken away, and the engine does it itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from exactness import full, prepared
from test_model_shapes import Branching, Points, branching_reference, train_branching
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from training_cases import relative_error

from accelerate_lshdp import LSDPPlugin, Plan
from accelerate_lshdp.engine.stores.fsdp2.versions import forget_iteration, param_groups


NEWER = ("reset_iter_state",)


@contextmanager
def older_torch() -> Iterator[None]:
    kept = {name: getattr(FSDPModule, name) for name in NEWER if hasattr(FSDPModule, name)}
    for name in kept:
        delattr(FSDPModule, name)
    try:
        yield
    finally:
        for name, method in kept.items():
            setattr(FSDPModule, name, method)


def train_with_older_torch(strategy: str) -> tuple[dict, bool]:
    with older_torch():
        return train_branching(strategy, False, "collectives")


@pytest.mark.parametrize("strategy", ["fsdp", "zero2", "group_sharding"])
def test_unused_parameters_are_reduced(workers, strategy: str) -> None:
    expected = branching_reference(skip_block=False)
    for parameters, unused_has_gradient in workers(2).run(train_with_older_torch, strategy, nodes=(2,)):
        assert relative_error(parameters, expected) <= 1e-12
        assert not unused_has_gradient


def train_accumulating(strategy: str) -> bool:
    """bf16 gradients of two micro-batches, which are added up in fp32, beside a parameter that has none."""
    plan = Plan.from_batch_sizes([(4, 2), (2, 2)], strategy=strategy, intra_node="collectives")
    plugin = LSDPPlugin(mixed_precision="bf16")
    accelerator, model, optimizer, loader = prepared(plan, Branching(), Points(), plugin=plugin)
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            inputs = batch["inputs"].float()
            accelerator.backward(model(inputs, accelerator.process_index == 0, False).square().mean())
            if accelerator.sync_gradients:
                gradients = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
                break
    arrived = all(gradient.isfinite().all() and gradient.any() for gradient in gradients.values())
    return arrived and {name for name, _ in model.named_parameters() if "never" not in name} == set(gradients)


@pytest.mark.parametrize("strategy", ["fsdp", "zero2", "group_sharding"])
def test_unused_parameters_beside_gradients_that_are_added_up_in_another_precision(workers, strategy: str) -> None:
    assert workers(2).run(train_accumulating, strategy, nodes=(2,)) == [True, True]


class Interrupted(Exception):
    pass


def interrupt_forward(module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
    raise Interrupted


def interrupt_backward(module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
    def interrupt(gradient: torch.Tensor) -> None:
        raise Interrupted

    output.register_hook(interrupt)


def train_after_interruptions(strategy: str, interrupt: Callable) -> dict:
    """The same steps as `train_branching`, with a try before each of them that is given up half-way."""
    with older_torch():
        plan = Plan.from_batch_sizes([4, 2], strategy=strategy, intra_node="collectives")
        accelerator, model, optimizer, loader = prepared(plan, Branching().double(), Points())
        model.train()
        for batch in loader:

            def loss() -> torch.Tensor:
                return model(batch["inputs"], accelerator.process_index == 0, False).square().mean()  # noqa: B023

            in_the_middle = model.blocks[1][1].register_forward_hook(interrupt)
            with pytest.raises(Interrupted):
                accelerator.backward(loss())
            in_the_middle.remove()
            if interrupt is interrupt_forward:  # what a profile does when memory is used up
                assert not all(isinstance(parameter, DTensor) for parameter in model.parameters())
                forget_iteration(model)
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
            optimizer.zero_grad()
            accelerator.backward(loss())
            optimizer.step()
            optimizer.zero_grad()
        return {name: full(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize("interrupt", [interrupt_forward, interrupt_backward])
@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_what_was_given_up_leaves_nothing_behind(workers, strategy: str, interrupt: Callable) -> None:
    expected = branching_reference(skip_block=False)
    for parameters in workers(2).run(train_after_interruptions, strategy, interrupt, nodes=(2,)):
        assert relative_error(parameters, expected) <= 1e-12


def test_a_module_without_parameters_of_its_own_has_no_group() -> None:
    group = object()
    states = [(SimpleNamespace(_fsdp_param_group=None), []), (SimpleNamespace(_fsdp_param_group=group), [group])]
    states.append((SimpleNamespace(_fsdp_param_groups=[group, group]), [group, group]))
    for state, groups in states:
        assert param_groups(mock.Mock(_get_fsdp_state=lambda state=state: state)) == groups
