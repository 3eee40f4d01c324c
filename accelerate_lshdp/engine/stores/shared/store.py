# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""One copy of the parameters a node, in memory that its ranks share: ``lsdp`` and ``group_sharding`` on CPUs.

On a CPU host memory is device memory, so nothing has to be gathered: every rank computes with the parameters where
they are. Gradients exist once a node, too (`reduction`). Each bucket of parameters belongs to one rank of the
node, which alone updates it and holds its optimizer state.

Parameters stay whole tensors, and an optimizer sees one rank's whole parameters: so it may be any that treats
parameters one by one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate_lshdp.engine.loading import follow_loading
from accelerate_lshdp.engine.module_state import would_stay
from accelerate_lshdp.engine.prepared import PreparedModel
from accelerate_lshdp.engine.stores.shared.memory import Layout, NodeMemory
from accelerate_lshdp.engine.stores.shared.parameter_watch import ParameterWatch
from accelerate_lshdp.engine.stores.shared.reduction import NodeReduction, SharedBucket
from accelerate_lshdp.engine.stores.shared.table import Meeting, NodeTable
from accelerate_lshdp.engine.wire.buckets import fill_buckets, owners
from accelerate_lshdp.engine.wire.reduction import GradientReduction
from accelerate_lshdp.runtime.cpu_binding import one_rank_can_use_the_node
from accelerate_lshdp.runtime.option_advice import option_advice
from accelerate_lshdp.runtime.topology import Topology
from accelerate_lshdp.runtime.wait_clock import WaitClock


@dataclass(frozen=True, slots=True)
class NodeOwnership:
    """Which rank of the node updates a parameter.

    Attributes:
        index: of the parameter among the trainable ones.
        owner: its global rank.
        owned: whether that is this rank.
        group: the ranks of this node.
        reduction: connects the ranks of the node.
    """

    index: int
    owner: int
    owned: bool
    group: dist.ProcessGroup
    reduction: NodeReduction

    @staticmethod
    def of(parameter: torch.Tensor) -> NodeOwnership | None:
        """None for a parameter that every rank updates itself."""
        return getattr(parameter, "_lshdp_node_ownership", None)

    def __reduce__(self) -> tuple:
        """A pickled parameter is nobody's: it is read as None, without this package."""
        return type(None), ()


class NodeSharedModel(PreparedModel):
    """A model whose parameters and gradients lie in shared memory (collective to make).

    Args:
        module: the model on the CPU, identical on all ranks; its parameters are moved.
        topology: nodes and ranks; nodes may have different numbers of ranks.
        node_group: the ranks of this node.
        reduction_of: what sums gradients over some ranks, given these; called with the same ranks in the same order by
            all ranks.
        clock: counts the time spent waiting.
        bucket_bytes: of a bucket of gradients; None: chosen from the model's size and
            `ranks_per_reduction`.
        ranks_per_reduction: ranks that sum a bucket, one a node.
        timeout_seconds: how long to wait for another rank of the node.

    Raises:
        NodeMemoryError: on all ranks, if the ranks of a node cannot share memory.
    """

    def __init__(
        self,
        module: nn.Module,
        topology: Topology,
        node_group: dist.ProcessGroup,
        reduction_of: Callable[[tuple[int, ...]], GradientReduction | None],
        clock: WaitClock,
        *,
        bucket_bytes: int | None,
        ranks_per_reduction: int,
        timeout_seconds: float,
    ) -> None:
        super().__init__(module, clock)
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._layout = fill_buckets(self._parameters, bucket_bytes, ranks_per_reduction)
        self._bucket_of = {index: number for number, bucket in enumerate(self._layout) for index in bucket}
        self._gradients: list[torch.Tensor | None] = [None] * len(self._parameters)
        self._fresh = [True] * len(self._parameters)
        self._before: list[torch.Tensor | None] = []  # .grad when the backward began
        self._earlier: dict[int, torch.Tensor] = {}  # owned gradients that were final already
        self._delivered: set[int] = set()
        self._filled: list[set[int]] = [set() for _ in self._layout]
        self._holds_local = self._synchronise = False
        self._versions: dict[int, int] = {}  # what in-place changes of gradients count up
        self._share(topology, node_group, reduction_of, timeout_seconds)
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(self._hook(index))
        follow_loading(self)

    def trainable_parameters(self) -> list[nn.Parameter]:
        return self._parameters

    # Setting up

    def _share(
        self,
        topology: Topology,
        node_group: dist.ProcessGroup,
        reduction_of: Callable[[tuple[int, ...]], GradientReduction | None],
        timeout_seconds: float,
    ) -> None:
        layout = Layout()
        everything = list(self.module.parameters())  # frozen ones, too: each exists once a node
        places = [layout.place(p.numel() * p.dtype.itemsize) for p in everything]
        parameter_bytes = layout.bytes
        members = [[self._parameters[index] for index in bucket] for bucket in self._layout]
        sizes = [sum(p.numel() * p.dtype.itemsize for p in bucket) for bucket in members]
        buffers = [layout.place(size) for size in sizes]
        table = NodeTable(len(topology.node_groups[topology.node]), len(sizes), len(self._parameters), layout)
        memory = NodeMemory.create(topology, layout.bytes)
        table.map(memory)
        with torch.no_grad():
            views = [memory.tensor(place, p.shape, p.dtype) for p, place in zip(everything, places, strict=True)]
            if topology.local_rank == 0:
                for parameter, view in zip(everything, views, strict=True):
                    view.copy_(parameter)
        dist.barrier()
        for parameter, view in zip(everything, views, strict=True):
            parameter.data = view
        self._watch = ParameterWatch(everything, memory.tensor(0, (parameter_bytes // 4,), torch.int32))
        by_node = [owners(sizes, len(ranks)) for ranks in topology.node_groups]
        # Every rank asks for all groups: making one is collective.
        reductions: dict[tuple[int, ...], GradientReduction | None] = {}
        buckets = []
        for number, (bucket, size, place) in enumerate(zip(members, sizes, buffers, strict=True)):
            ranks = tuple(group[by_node[node][number]] for node, group in enumerate(topology.node_groups))
            if ranks not in reductions:
                reductions[ranks] = reduction_of(ranks)
            dtype = bucket[0].dtype
            buffer = memory.tensor(place, (size // dtype.itemsize,), dtype)
            pieces = buffer.split([p.numel() for p in bucket])
            shaped = [piece.view(p.shape) for piece, p in zip(pieces, bucket, strict=True)]
            owner = by_node[topology.node][number]
            mine = reductions[ranks] if owner == topology.local_rank else None
            buckets.append(SharedBucket(buffer, shaped, owner, mine))
        self._buckets = buckets
        self._views = {
            index: view
            for indices, bucket in zip(self._layout, buckets, strict=True)
            for index, view in zip(indices, bucket.views, strict=True)
        }
        self._reduction = NodeReduction(
            memory, table, buckets, self.clock, timeout_seconds, in_step=one_rank_can_use_the_node
        )
        weakref.finalize(self, self._reduction.close)
        node_ranks = topology.node_groups[topology.node]
        for index, parameter in enumerate(self._parameters):
            owner = node_ranks[buckets[self._bucket_of[index]].owner]
            parameter._lshdp_node_ownership = NodeOwnership(
                index, owner, owner == topology.rank, node_group, self._reduction
            )

    def _owns(self, index: int) -> bool:
        return NodeOwnership.of(self._parameters[index]).owned

    def _hook(self, index: int):  # noqa: ANN202 - a closure for autograd
        reference = weakref.ref(self)

        def gradient_is_ready(parameter: torch.Tensor) -> None:
            prepared = reference()
            if prepared is None:
                return
            prepared.mark_used(index)
            if prepared.in_backward:
                prepared._take(index, parameter)

        return gradient_is_ready

    def forward_begins(self) -> None:
        super().forward_begins()
        if not torch.compiler.is_compiling():  # traced: the next backward checks
            self._watch.check()

    def keeps(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        # torch copies even where nothing changes ("cpu" to "cpu:0"), out of the memory that the ranks share.
        return would_stay(convert, self.module, torch.device("cpu"))

    # One backward

    def begin_backward(self, synchronise: bool) -> None:
        self.forget_cleared()
        self._watch.check()
        self.in_backward, self.took_part = True, False
        self._synchronise = synchronise
        self._delivered.clear()
        for filled in self._filled:
            filled.clear()
        if not self._holds_local:
            self._earlier.clear()
        self._before = [parameter.grad for parameter in self._parameters]
        for index, gradient in enumerate(self._before):
            in_place = gradient is not None and gradient.data_ptr() == self._views[index].data_ptr()
            if gradient is None:
                self._earlier.pop(index, None)  # the script has dropped what this was to be added to
            if self._holds_local and gradient is not None and not in_place:
                raise RuntimeError(
                    f"found a new tensor in .grad of a parameter of shape {tuple(gradient.shape)} between "
                    "micro-batches of one step. Gradients are not whole before the last micro-batch: change them "
                    f"after it, or use {option_advice('intra_node', 'collectives')}"
                )
            self._fresh[index] = not (in_place and self._holds_local)
            if gradient is not None and self._fresh[index] and self._owns(index):
                # Final already, or the user's own: it must not be summed again.
                self._earlier[index] = gradient.clone() if in_place else gradient
            self._parameters[index].grad = None
        self._reduction.begin()

    def _take(self, index: int, parameter: torch.Tensor) -> None:
        """Takes a gradient that autograd has produced; hands its bucket in when that was the last one of it."""
        number = self._bucket_of[index]
        if number in self._delivered:
            raise RuntimeError(
                f"gradient buffer {number} became ready twice in one backward. A unit that takes part in a backward "
                "more than once (several forwards before one backward, reentrant checkpointing) is not supported: use "
                "one accelerator.backward for each forward, and checkpointing with use_reentrant=False"
            )
        known = self._gradients[index]
        self._gradients[index] = parameter.grad if known is None else known.add_(parameter.grad)
        parameter.grad = None
        self._filled[number].add(index)
        self._deliver_in_order()

    def _deliver_in_order(self, all_of_them: bool = False) -> None:
        """Hands in complete buckets, in the order that all ranks keep."""
        while len(self._delivered) < len(self._layout):
            number = len(self._delivered)
            indices = self._layout[number]
            if not all_of_them and len(self._filled[number]) < len(indices):
                return
            self._delivered.add(number)
            gradients = [self._gradients[index] for index in indices]
            for index in indices:
                self._gradients[index] = None
            self._reduction.ready(number, gradients, [self._fresh[index] for index in indices], self._synchronise)
            if self._synchronise and not all_of_them:
                self._reduction.keep_step(number)

    def deliver_backward(self) -> None:
        self._deliver_in_order(all_of_them=True)  # parameters that this rank did not use

    def finish_backward(self) -> None:
        self.in_backward = False
        self._reduction.finish(self._synchronise, self._add_earlier)
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad:
                parameter.grad = self._views[index]
        self._holds_local = not self._synchronise
        if self._synchronise:
            self._earlier.clear()
        self._versions = {i: p.grad._version for i, p in enumerate(self._parameters) if p.grad is not None}
        self._synchronise = False

    def _add_earlier(self, number: int) -> None:
        for index in self._layout[number]:
            if index in self._earlier:
                self._views[index].add_(self._earlier[index])

    def cancel_backward(self) -> None:
        self.in_backward = self._synchronise = False
        for parameter, gradient in zip(self._parameters, self._before, strict=True):
            parameter.grad = gradient
        if not self._holds_local:
            self._earlier.clear()

    def abandon_backward(self) -> None:
        self.in_backward = self._synchronise = self._holds_local = False
        self._reduction.abandon()
        self._gradients = [None] * len(self._parameters)
        self._earlier.clear()
        self._versions.clear()
        for parameter in self._parameters:
            parameter.grad = None

    def drop_gradients(self) -> None:
        super().drop_gradients()
        self._holds_local = False
        self._earlier.clear()
        self._versions.clear()

    # The optimizer's step

    def before_step(self) -> None:
        """Waits until all ranks of the node are about to update their parameters (collective over the node)."""
        super().before_step()
        for index, version in self._versions.items():
            found = self._parameters[index].grad
            in_place = found is not None and found.data_ptr() == self._views[index].data_ptr()
            if in_place and found._version != version:
                raise RuntimeError(
                    "found gradients changed in place outside accelerator.clip_grad_norm_ and clip_grad_value_. The "
                    "ranks of a node share them, so each change would be made once a rank. Clip with the "
                    "accelerator, assign a new tensor to .grad, or use "
                    f"{option_advice('intra_node', 'collectives')}"
                )
        self._watch.check()
        # Until here ranks may compute with the parameters as they were.
        self._reduction.barrier(Meeting.STEP_BEGINS)

    def after_step(self) -> None:
        """Waits until all ranks of the node have updated their parameters (collective over the node)."""
        self._reduction.barrier(Meeting.STEP_ENDS)
        self._watch.note()

    def loading_begins(self, state: dict[str, Any]) -> None:
        """Waits until all ranks of the node are about to set the parameters to the same values (collective).

        Until then others may compute with the parameters as they are, or read them.
        """
        self._reduction.barrier(Meeting.LOADING)

    def parameters_loaded(self) -> None:
        self._watch.forget()

    def collective_begins(self) -> None:
        self._reduction.collective_begins()


def hide_what_others_update(optimizer: torch.optim.Optimizer) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Takes the gradients of parameters that another rank of the node updates away, so that the optimizer skips them.

    Returns:
        What to give back after the step.
    """
    hidden = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            ownership = NodeOwnership.of(parameter)
            if ownership is not None and not ownership.owned and parameter.grad is not None:
                hidden.append((parameter, parameter.grad))
                parameter.grad = None
    return hidden


def check_optimizer(optimizer: torch.optim.Optimizer, new: Iterable[torch.Tensor]) -> str | None:
    """What to tell about an optimizer that is to update parameters of a node part by part, or None.

    Args:
        optimizer: may have been checked before; since then each rank has made state of the parameters it updates.
        new: parameters that it was not checked with.

    Raises:
        ValueError: it treats all parameters as one, or has already stepped.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shared = [parameter for parameter in parameters if NodeOwnership.of(parameter) is not None]
    if not shared:
        return None
    unchecked = {id(parameter) for parameter in new}
    states = [optimizer.state[p] for p in shared if id(p) in unchecked and p in optimizer.state]
    if any(state and state.get("step") != 0 for state in states):  # some have a state from the beginning
        raise ValueError(
            "the optimizer has already stepped (it holds state of parameters that another rank will update); call "
            "prepare() before the first step, and load_state() after it to continue a run"
        )
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            f"{name} treats all parameters as one vector, but each rank of a node updates some of them only; use "
            "another optimizer, or strategy ddp"
        )
    if not type(optimizer).__module__.startswith(("torch.optim", "transformers.")):
        return (
            f"each rank of a node updates some of the parameters: {name} has to treat them one by one. One that "
            f"takes norms or sums over all of them needs strategy ddp or {option_advice('intra_node', 'collectives')}"
        )
    return None
