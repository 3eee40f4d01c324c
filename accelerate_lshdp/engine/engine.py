# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`Engine`: the models that one process trains together, from where they are placed to the optimizer's step."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate_lshdp.engine.placement import Placement
from accelerate_lshdp.engine.policies import Mechanism, ShardingPolicies
from accelerate_lshdp.engine.prepared import PreparedModel
from accelerate_lshdp.engine.shared_parameters import refuse_shared_parameters
from accelerate_lshdp.engine.step_groups import StepGroups
from accelerate_lshdp.engine.stores.fsdp2.limits import (
    check_sharded_optimizer,
    refuse_sparse_gradients,
    shards_of_state,
)
from accelerate_lshdp.engine.stores.shared.ownership import (
    check_optimizer,
    hide_unowned_gradients,
    refuse_divided_state,
)
from accelerate_lshdp.engine.wire.reduction import GradientReduction
from accelerate_lshdp.runtime.cpu_binding import apply_thread_share
from accelerate_lshdp.runtime.cpu_memory import give_back_freed_memory, keep_freed_memory
from accelerate_lshdp.runtime.heap_bound import heap_bound
from accelerate_lshdp.runtime.topology import Topology
from accelerate_lshdp.runtime.wait_clock import WaitClock


class Engine:
    """The models of one process, placed as one strategy says, and what optimizers need of them.

    Args:
        placement: puts a model where the strategy says.

    Attributes:
        models: those that are trained, in the order in which they were placed, the same on all ranks.
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.models: list[PreparedModel] = []
        self._replaced: dict[int, tuple[weakref.ref, nn.Parameter]] = {}  # by id of what the script had
        self._hidden: list[tuple[nn.Parameter, torch.Tensor]] = []  # gradients that another rank of the node uses
        self._step_groups: StepGroups | None = None  # of the optimizer that is stepping

    @property
    def policies(self) -> ShardingPolicies:
        return self.placement.policies

    @property
    def topology(self) -> Topology:
        return self.placement.topology

    @property
    def clock(self) -> WaitClock:
        """Seconds blocked in communication."""
        return self.placement.clock

    @property
    def loss_multiplier(self) -> float:
        """What a loss is multiplied with beside its share of the global batch."""
        return self.models[0].loss_multiplier if self.models else 1.0

    # Models

    def require_placeable(self, model: nn.Module) -> None:
        """Checks a model before it is placed.

        Raises:
            ValueError: the strategy cannot train it, or it shares parameters with one that is trained already.
        """
        if self.topology.world_size > 1 or self.policies.mechanism is not Mechanism.REPLICATED:
            refuse_sparse_gradients(model)
        refuse_shared_parameters(
            model,
            self.models,
            self._replaced,
            frozen_too=self.policies.mechanism is not Mechanism.REPLICATED,
        )
        self.placement.require_placeable(model)

    def place(self, model: nn.Module, before: dict[str, nn.Parameter]) -> PreparedModel:
        """Places a model and trains it from now on (collective).

        Args:
            model: see `Placement.place`.
            before: its parameters by name, as optimizers of the script may have them.
        """
        prepared = self.placement.place(model, model_index=len(self.models))
        after = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in before.items():
            if name in after and after[name] is not parameter:
                # Weakly: an optimizer that still has to follow keeps it; nothing else should keep a full copy alive.
                self._replaced[id(parameter)] = (weakref.ref(parameter), after[name])
        self.models.append(prepared)
        if self.placement.device.type == "cpu":
            is_told = keep_freed_memory(gathers=self.policies.is_sharded)
            # What a model was made of before its parameters moved to shared memory would stay for the whole run.
            give_back_freed_memory()
            prepared.state.heap = heap_bound() if is_told else None
        elif self.policies.is_offloaded:
            apply_thread_share()  # optimizers step on the host
        return prepared

    def take_back(self, prepared: PreparedModel, evaluation_mode: bool) -> PreparedModel | None:
        """Trains a model again that was placed before; None: it is to be placed anew.

        One that another engine placed is this one's from now on, if that is possible. That engine may have trained it
        in an earlier stage of the script, and may be gone.

        Raises:
            ValueError: it is not possible.
        """
        if prepared.clock is self.clock:
            prepared.is_released = False
            if prepared not in self.models:
                self.models.append(prepared)
            return prepared
        if not prepared.can_step_locally and not (prepared.is_released and prepared.can_be_closed):
            raise ValueError(
                "found a model that another accelerator of this process prepared, which has divided its parameters "
                "among ranks, or lets those of a node share them: only that one can train it. Use one accelerator for "
                "all stages of the script, or call free_memory() of the first one if the ranks of a node share the "
                "parameters, or prepare a new model with the weights of this one (accelerator.get_state_dict)"
            )
        if evaluation_mode:
            return prepared
        prepared.close()
        self.models = [other for other in self.models if other.module is not prepared.module]
        return None

    def release(self) -> None:
        """Forgets all models. They stay as they are until this engine or another one takes them."""
        for prepared in self.models:
            prepared.is_released = True
        self.models.clear()
        self._replaced.clear()

    def close(self) -> None:
        """Gives all models back to the script, as they were before they were placed (see `PreparedModel.close`)."""
        models = list(self.models)
        self.release()
        for prepared in models:
            prepared.close()

    @property
    def reductions(self) -> dict[str, GradientReduction]:
        """What sums gradients between ranks, by names for checkpoints."""
        return {
            f"reduction_{model}_{number}": reduction
            for model, prepared in enumerate(self.models)
            for number, reduction in enumerate(prepared.reductions)
        }

    def states(self) -> dict[str, torch.Tensor]:
        """What this rank's stores need beside parameters, by names for checkpoints."""
        return {
            f"store_{model}_{number}/{key}": tensor
            for model, prepared in enumerate(self.models)
            for number, store in enumerate(prepared.stores)
            for key, tensor in store.state().items()
        }

    def load_states(self, states: dict[str, torch.Tensor]) -> None:
        """Takes what `states` has returned; others are passed over."""
        for model, prepared in enumerate(self.models):
            for number, store in enumerate(prepared.stores):
                prefix = f"store_{model}_{number}/"
                mine = {key: tensor for key, tensor in states.items() if key.startswith(prefix)}
                store.load_state({key.removeprefix(prefix): tensor for key, tensor in mine.items()})

    def collective_begins(self) -> None:
        """Says that this rank calls something in which all ranks take part."""
        for prepared in self.models:
            prepared.collective_begins()

    def share_statistics(self) -> None:
        """Shares those of all models' normalisations, whichever of them a rank's loss depends on (collective)."""
        if self.topology.world_size > 1:
            for prepared in self.models:
                prepared.statistics.broadcast()

    def give_up_failed_steps(self) -> None:
        """Lets parameters be read again after a step that has failed, as a checkpoint is about to replace them."""
        for prepared in self.models:
            for store in prepared.stores:
                store.give_up_failed_step()

    def parameters_loaded(self) -> None:
        """Says that all ranks have set all parameters to those of a checkpoint."""
        for prepared in self.models:
            prepared.parameters_loaded()

    # Optimizers

    def take_optimizer(self, optimizer: torch.optim.Optimizer, new: Iterable[torch.Tensor]) -> str | None:
        """Gives an optimizer the parameters as they have been placed, and checks that it can update them.

        Args:
            optimizer: it may have been checked, and have stepped, before.
            new: parameters that it has not been checked with.

        Returns:
            What its user should know.

        Raises:
            ValueError: it cannot update them.
        """
        refuse_divided_state(optimizer)
        self._follow_parameters(optimizer)
        check_sharded_optimizer(optimizer)
        return check_optimizer(optimizer, new)

    def _follow_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives the optimizer the sharded parameters in place of those they were made from."""
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                replaced = self._replaced.get(id(parameter))
                if replaced is None or replaced[0]() is not parameter:
                    continue
                state = optimizer.state.get(parameter)
                if state and state.get("step") == 0:  # some have a state from the beginning
                    optimizer.state[replaced[1]] = shards_of_state(optimizer.state.pop(parameter), replaced[1])
                elif state:
                    raise ValueError(
                        "the optimizer has already stepped (it holds state for unsharded parameters); call prepare() "
                        "before the first step, and load_state() after it to continue a run"
                    )
                group["params"][index] = replaced[1]

    def of_one_rank(self, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        """The parameters of an optimizer that have a gradient of this rank only, in the order of its groups."""
        summed = {id(p) for prepared in self.models for p in prepared.trainable_parameters()}
        own = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        # FSDP2 itself sums what was unfrozen later of units that all ranks share.
        world = self.topology.world_size
        return [
            p for p in own if id(p) not in summed and not (isinstance(p, DTensor) and p.device_mesh.size() == world)
        ]

    def before_step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Says that an optimizer is about to change parameters.

        Args:
            optimizer: None: one of all parameters.

        Raises:
            RuntimeError: gradients are not those of the global batch.
        """
        stepping = None if optimizer is None else {id(p) for group in optimizer.param_groups for p in group["params"]}
        for prepared in self.models:
            prepared.before_step(stepping)

    def hide_gradients_of_others(self, optimizer: torch.optim.Optimizer, may_be_late: bool = True) -> None:
        """Hides the gradients of parameters from an optimizer that it is not to step, until `after_step`.

        Another rank of the node steps them, or a store does so later.

        Args:
            optimizer: about to step.
            may_be_late: whether nothing of the script looks at the step before `after_step`.
        """
        self._hidden += hide_unowned_gradients(optimizer)
        for prepared in self.models if may_be_late else ():
            for parameter in prepared.postpone_step(optimizer):
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None

    def step_begins(self, optimizer: torch.optim.Optimizer, *, is_unseen: bool = True) -> None:
        """Prepares an optimizer's groups for its step, before it looks at them; undone when the step is over.

        Args:
            optimizer: about to step.
            is_unseen: whether nothing of the script looks at its groups before `after_step`.
        """
        # The one before may have failed, of which torch says nothing. By now its gradients may be of the past.
        self._hidden = []
        self.step_is_over()
        self._step_groups = StepGroups(optimizer, may_bound_memory=is_unseen)

    def step_is_over(self) -> None:
        """Says that an optimizer has stepped, or has failed to: its groups and gradients are whole again."""
        self._restore_optimizer()
        for prepared in self.models:
            prepared.step_is_over()

    def _restore_optimizer(self) -> None:
        if self._step_groups is not None:
            self._step_groups.restore()
            self._step_groups = None
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []

    def after_step(self) -> None:
        """Says that an optimizer has changed parameters (collective where ranks share them)."""
        self._restore_optimizer()
        for prepared in self.models:
            prepared.after_step()

    def as_stepped(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Parameters as optimizers have them, whose gradients are those of a step.

        Args:
            parameters: as the script finds them in its models: after a forward some have gathered ones.
        """
        stepped: dict[int, nn.Parameter] = {}
        for prepared in self.models:
            for store in prepared.stores:
                stepped.update(store.gathered_parameters())
        return [stepped.get(id(parameter), parameter) for parameter in parameters]

    def drop_unsummed(self, parameters: Collection[int]) -> None:
        """Drops the gradients of parameters that are not in ``.grad`` yet; the script has dropped what is there.

        Args:
            parameters: ids of them.
        """
        for prepared in self.models:
            if prepared.local.held:
                prepared.drop_unsummed(parameters)
