# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""One copy of parameters a node, in memory that its ranks share: ``lsdp`` and ``group_sharding`` on CPUs, and units in
the stores ``node`` and ``host`` under ``osdp``.

On a CPU host memory is device memory, so nothing has to be gathered: every rank computes with the parameters where
they are. Gradients exist once a node, too (`reduction`). Each bucket of parameters belongs to one rank of the
node, which alone updates it and holds its optimizer state.

Parameters stay whole tensors, and an optimizer sees one rank's whole parameters: so it may be any that treats
parameters one by one.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate_lshdp.documents.bucket_sizes import WAITING_BUCKETS
from accelerate_lshdp.engine.module_state import is_noop_conversion, parameters_of
from accelerate_lshdp.engine.store import Store, StoreContext
from accelerate_lshdp.engine.stores.shared.bucket import GradientSource
from accelerate_lshdp.engine.stores.shared.memory import Layout, NodeMemory, require_on_all_ranks
from accelerate_lshdp.engine.stores.shared.node_buckets import NodeBuckets
from accelerate_lshdp.engine.stores.shared.ownership import NodeOwnership
from accelerate_lshdp.engine.stores.shared.parameter_watch import ParameterWatch, refuses_changes, sampled_places
from accelerate_lshdp.engine.stores.shared.pieces import BucketLayout
from accelerate_lshdp.engine.stores.shared.reduction import NodeReduction
from accelerate_lshdp.engine.stores.shared.sliced_layout import lay_out_slices
from accelerate_lshdp.engine.stores.shared.table import BarrierPurpose
from accelerate_lshdp.engine.stores.sliced.choice import SlicedChoice
from accelerate_lshdp.engine.wire.reduction import GradientReduction
from accelerate_lshdp.runtime.option_advice import option_advice
from accelerate_lshdp.runtime.profiler_labels import label
from accelerate_lshdp.runtime.topology import Topology


class SharedStore(Store):
    """Parameters and gradients in memory that the ranks of a node share (collective to make).

    Args:
        context: of the model, which is on the CPU, identical on all ranks.
        parameters: those that are shared, frozen ones too; they are moved. None: all of the model.
        topology: nodes and ranks; nodes may have different numbers of ranks.
        node_group: the ranks of this node.
        reduction_of: what sums gradients over some ranks, given these; called with the same ranks in the same order by
            all ranks.
        bucket_bytes: bytes of a bucket of gradients; None: chosen from the model's size and ``reducing_ranks``.
        reducing_ranks: number of ranks, one a node, that sum a bucket between nodes.
        timeout_seconds: how long to wait for another rank of the node.
        waits_in_backward: whether a rank that is ahead waits in its backward for the ranks of its node that add their
            gradients before it; else it keeps its own until the end, in host memory. Not where other stores have
            collectives in the backward: a rank that waits in one of them for this rank may be the one that this rank
            waits for, if their forwards have not used the same parameters. Nor, whatever this says, in a backward of
            several models.
        in_slices: weights whose gradients other nodes, or this one, have in slices.

    Raises:
        NodeMemoryError: on all ranks, if the ranks of a node cannot share memory.
    """

    loads_together = True

    def __init__(
        self,
        context: StoreContext,
        topology: Topology,
        node_group: dist.ProcessGroup,
        reduction_of: Callable[[tuple[int, ...]], GradientReduction | None],
        *,
        parameters: Sequence[nn.Parameter] | None = None,
        bucket_bytes: int | None,
        reducing_ranks: int,
        timeout_seconds: float,
        waits_in_backward: bool = True,
        in_slices: Sequence[SlicedChoice] = (),
    ) -> None:
        super().__init__(context)
        self._waits_in_backward = waits_in_backward
        self._everything = list(parameters_of(context.module) if parameters is None else parameters)
        self._parameters = [p for p in self._everything if p.requires_grad]
        chosen = {id(choice.parameter): choice for choice in in_slices}
        trained = {i: chosen[id(p)] for i, p in enumerate(self._parameters) if id(p) in chosen}
        buckets, self._sliced_pieces = lay_out_slices(self._parameters, trained, bucket_bytes, reducing_ranks)
        self._pieces, self._layout = buckets.pieces, buckets.buckets
        self._bucket_of = {piece: number for number, bucket in enumerate(self._layout) for piece in bucket}
        self._gradients: list[torch.Tensor | None] = [None] * len(self._pieces)
        self._fresh = [True] * len(self._parameters)
        self._before: list[torch.Tensor | None] = []  # .grad when the backward began
        self._earlier: dict[int, torch.Tensor] = {}  # owned gradients that were final already
        self._delivered: set[int] = set()
        self._filled: list[set[int]] = [set() for _ in self._layout]
        self._awaited = [sum(self._pieces[piece].ends for piece in bucket) for bucket in self._layout]
        self._holds_local = self._synchronise = False
        # What tells of changes of gradients in place: torch's counters, and some values, as .data counts nothing.
        self._versions: dict[int, int] = {}
        self._samples: torch.Tensor | None = None
        self._changes = 0
        self._share(topology, node_group, reduction_of, buckets, timeout_seconds)
        for index, leaf in self._make_leaves().items():
            context.attachments.add(leaf.register_post_accumulate_grad_hook(self._hook(index)))
        hook = refuses_changes(self._watch, self._reduction)
        for module in context.module.modules():  # after those of streamed parameters, which wait for a step
            context.attachments.add(module.register_state_dict_pre_hook(hook))

    def trainable_parameters(self) -> list[nn.Parameter]:
        return self._parameters

    # Setting up

    def _share(
        self,
        topology: Topology,
        node_group: dist.ProcessGroup,
        reduction_of: Callable[[tuple[int, ...]], GradientReduction | None],
        laid_out: BucketLayout,
        timeout_seconds: float,
    ) -> None:
        # One mapping for everything: parameters, then gradients, then the table. All ranks of the node compute the
        # same places from the same model, so no addresses have to be exchanged.
        layout = Layout()
        everything = self._everything  # frozen ones, too: each exists once a node
        places = self._place_parameters(layout)
        parameter_bytes = layout.bytes
        made = NodeBuckets(
            topology,
            [[self._piece_of_parameter(piece) for piece in bucket] for bucket in self._layout],
            layout,
            numbers=len(self._parameters),
            parts=self._stepped_parts(),
            owned_with=laid_out.owned_with,
            again=laid_out.again,
        )
        self._place_beside(layout, topology)
        memory = NodeMemory.create(topology, layout.bytes)
        with torch.no_grad():
            views = [memory.tensor(place, p.shape, p.dtype) for p, place in zip(everything, places, strict=True)]
            if topology.local_rank == 0:
                for parameter, view in zip(everything, views, strict=True):
                    view.copy_(parameter)
        source = self._take_memory(memory, views, topology)
        # The first rank has filled the memory before others compute with it; until then it holds zeros.
        if topology.world_size > 1:
            dist.barrier()
        # `.data` instead of new parameters: the script's optimizer and tied modules hold these objects.
        for parameter, view in zip(everything, views, strict=True):
            parameter.data = view
        self._watch = ParameterWatch(everything, memory.tensor(0, (parameter_bytes // 4,), torch.int32))
        buckets = made.map(memory, reduction_of)
        self._views: dict[int, torch.Tensor] = {}
        for number, (pieces, bucket) in enumerate(zip(self._layout, buckets, strict=True)):
            for piece, view in zip((self._pieces[each] for each in pieces), bucket.views, strict=True):
                if piece.parameter in self._views:
                    continue
                if piece.rows is not None:  # the first of several, which lie one after the other
                    parameter = self._parameters[piece.parameter]
                    view = memory.tensor(made.places[number], parameter.shape, parameter.dtype)
                self._views[piece.parameter] = view
        self._words = memory.tensor(0, (layout.bytes // 4,), torch.int32)
        self._places, _ = sampled_places([self._views[index] for index in range(len(self._parameters))], self._words)
        self._reduction = NodeReduction(memory, made.table, buckets, self.clock, timeout_seconds, source)
        # The thread holds the reduction, not the model: when the model is dropped, the thread ends.
        weakref.finalize(self, self._reduction.close)
        self.context.attachments.at_removal(functools.partial(_leave, memory, everything))
        node_ranks = topology.node_groups[topology.node]
        bucket_of = {self._pieces[piece].parameter: buckets[number] for piece, number in self._bucket_of.items()}
        for index, parameter in enumerate(self._parameters):
            owner = node_ranks[bucket_of[index].owner]
            parameter._lshdp_node_ownership = NodeOwnership(
                index, owner, owner == topology.rank, node_group, self._reduction
            )

    def _piece_of_parameter(self, piece: int) -> torch.Tensor:
        return self._pieces[piece].of(self._parameters[self._pieces[piece].parameter].detach())

    # What differs where the forward does not compute with the parameters in the memory of the node

    def _place_parameters(self, layout: Layout) -> list[int]:
        """Reserves places for all parameters, and nothing else; in the order of ``_everything``."""
        return [layout.place(parameter.numel() * parameter.dtype.itemsize) for parameter in self._everything]

    def _stepped_parts(self) -> int:
        """The number of parts of the model that are stepped one after the other; 0: all together."""
        return 0

    def _place_beside(self, layout: Layout, topology: Topology) -> None:
        """Reserves places for what else the ranks of the node share."""
        return

    def _take_memory(self, memory: NodeMemory, masters: Sequence[torch.Tensor], topology: Topology) -> GradientSource:
        """Prepares the memory (collective); where it is made, ``masters`` have the values of the parameters.

        Returns:
            How gradients come into the memory.
        """
        if topology.mixes_devices:
            # Ranks with devices tell here whether they could register their node's memory, and all take part.
            require_on_all_ranks(None, topology)
        return GradientSource()

    def _make_leaves(self) -> dict[int, torch.Tensor]:
        """The tensors that the forward computes with and autograd gives a gradient, by trainable parameter."""
        return dict(enumerate(self._parameters))

    def close(self) -> None:
        self._reduction.close()

    def _owns(self, index: int) -> bool:
        return NodeOwnership.of(self._parameters[index]).owned

    def _hook(self, index: int):  # noqa: ANN202 - a closure for autograd
        reference = weakref.ref(self)  # a cycle through a hook of autograd would never be collected

        def gradient_is_ready(parameter: torch.Tensor) -> None:
            store = reference()
            if store is None:
                return
            store.context.mark_used(index)
            if store.context.state.in_backward:
                store._take(index, parameter)

        return gradient_is_ready

    def forward_begins(self) -> None:
        if not torch.compiler.is_compiling():  # traced: the next backward checks
            self._watch.check()

    def skips_conversion(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        # torch copies even where nothing changes ("cpu" to "cpu:0"), out of the memory that the ranks share.
        return is_noop_conversion(convert, self.module, torch.device("cpu"))

    # One backward

    def begin(self, synchronise: bool) -> None:
        self._watch.check()
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
            # Autograd makes tensors of its own then, which the thread adds; it never writes to the shared ones.
            self._parameters[index].grad = None
        # Last: once all ranks have come here, the first one may overwrite the shared gradients that were cloned above.
        # Ranks with several models ask each other after autograd which of them take part, before they hand in what
        # their losses have left out. A rank that waited for that inside autograd would not answer.
        waits = self._waits_in_backward and self.context.state.is_alone
        self._begin_reduction(waits)

    def _begin_reduction(self, waits: bool) -> None:
        """Begins a backward in which this rank may wait for others (``waits``), or must not."""
        self._reduction.begin(WAITING_BUCKETS if waits else None)

    def _take(self, index: int, parameter: torch.Tensor) -> None:
        """Takes a gradient that autograd has produced, and hands in its bucket if that was the last one missing."""
        new = self._new_gradient(index, parameter.grad)
        # So that autograd does not add to a tensor that the thread may be reading by now.
        parameter.grad = None
        if index not in self._sliced_pieces:
            self._take_piece(index, new)
            return
        for piece in self._sliced_pieces[index].last:
            self._take_piece(piece, self._pieces[piece].of(new))

    def _take_piece(self, piece: int, gradient: torch.Tensor) -> None:
        number = self._bucket_of[piece]
        if number in self._delivered:
            raise RuntimeError(
                f"gradient buffer {number} became ready twice in one backward. A unit that takes part in a backward "
                "more than once (several forwards before one backward, reentrant checkpointing) is not supported: use "
                "one accelerator.backward for each forward, and checkpointing with use_reentrant=False"
            )
        known = self._gradients[piece]
        self._gradients[piece] = gradient if known is None else known.add_(gradient)
        self._filled[number].add(piece)
        self._deliver_in_order()

    def _deliver_in_order(self, all_of_them: bool = False) -> None:
        """Hands in complete buckets, in the order that all ranks keep."""
        while len(self._delivered) < len(self._layout):
            number = len(self._delivered)
            pieces = self._layout[number]
            if all_of_them:
                self._complete(number)
            elif not self._is_complete(number):
                return
            self._delivered.add(number)
            # From here on they belong to the thread, and are freed when it has added them.
            gradients = [self._gradients[piece] for piece in pieces]
            for piece in pieces:
                self._gradients[piece] = None
            self._hand_in(number, pieces, gradients)

    def _is_complete(self, number: int) -> bool:
        """Whether nothing of this backward is still to come for a bucket."""
        # By number, as it is asked for each gradient. Whole gradients come once, and end theirs.
        return len(self._filled[number]) >= self._awaited[number]

    def _complete(self, number: int) -> None:
        """Called before a bucket is handed in at the end of a backward, whatever is missing in it."""
        return

    def _new_gradient(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """What autograd's gradient adds to a parameter's."""
        return gradient

    def _hand_in(self, number: int, pieces: Sequence[int], gradients: list[torch.Tensor | None]) -> None:
        """Hands in this rank's part of a bucket: its gradients of these pieces."""
        fresh = [piece.starts and self._fresh[piece.parameter] for piece in (self._pieces[each] for each in pieces)]
        self._reduction.ready(number, gradients, fresh, self._synchronise)

    def deliver(self) -> None:
        self._deliver_in_order(all_of_them=True)  # parameters that this rank did not use

    def finish(self) -> None:
        # Owners add their earlier gradients when the sum over all nodes is there, before others may read the bucket.
        self._reduction.finish(self._synchronise, self._add_earlier)
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad:
                parameter.grad = self._views[index]
        self._holds_local = not self._synchronise
        # Before the last micro-batch of a step other ranks of the node may still be adding theirs.
        self._samples = self._words[self._places] if self._synchronise else None
        self._changes = self._reduction.changes
        if self._synchronise:
            self._earlier.clear()
        self._note_versions()
        self._synchronise = False
        self._before = []

    def _note_versions(self) -> None:
        self._versions = {i: p.grad._version for i, p in enumerate(self._parameters) if p.grad is not None}

    def _add_earlier(self, number: int) -> None:
        for piece in (self._pieces[each] for each in self._layout[number]):
            if piece.ends and piece.parameter in self._earlier:
                piece.of(self._views[piece.parameter]).add_(piece.of(self._earlier[piece.parameter]))

    def cancel(self) -> None:
        self._synchronise = False
        for parameter, gradient in zip(self._parameters, self._before, strict=True):
            parameter.grad = gradient
        self._before = []
        if not self._holds_local:
            self._earlier.clear()

    def abandon(self) -> None:
        self._synchronise = self._holds_local = False
        self._before = []
        self._reduction.abandon()
        self._gradients = [None] * len(self._pieces)
        self._earlier.clear()
        self._versions.clear()
        self._samples = None
        for parameter in self._parameters:
            parameter.grad = None

    def drop_gradients(self) -> None:
        super().drop_gradients()
        self._holds_local = False
        self._earlier.clear()
        self._versions.clear()
        self._samples = None

    # The optimizer's step

    def before_step(self, stepping: Collection[int] | None = None) -> None:
        """Waits until all ranks of the node are about to update their parameters (collective over the node)."""
        if self._are_changed_in_place():
            raise RuntimeError(
                "found gradients changed in place outside accelerator.clip_grad_norm_ and clip_grad_value_. The "
                "ranks of a node share them, so each change would be made once a rank. Clip with the "
                f"accelerator, assign a new tensor to .grad, or use {option_advice('intra_node', 'collectives')}"
            )
        self._watch.check()
        # Until here ranks may compute with the parameters as they were.
        with label("before_optimizer_step"):
            self._reduction.barrier(BarrierPurpose.STEP_BEGINS)

    def _are_changed_in_place(self) -> bool:
        """Whether the script has changed the node's gradients since the last backward; clipping is not counted."""
        for index, version in self._versions.items():
            found = self._parameters[index].grad
            if found is not None and found.data_ptr() == self._views[index].data_ptr() and found._version != version:
                return True
        # The accelerator clips through .data, which the counters do not count, and no sample is taken after it.
        if self._samples is None or self._reduction.changes != self._changes:
            return False
        # As integers: NaN, which differs from itself, is no change.
        return not torch.equal(self._words[self._places], self._samples)

    def after_step(self) -> None:
        """Waits until all ranks of the node have updated their parameters (collective over the node)."""
        # The next forward reads what all ranks have updated; and what they have updated is noted, not half of it.
        with label("after_optimizer_step"):
            self._reduction.barrier(BarrierPurpose.STEP_ENDS)
        self._samples = None
        self._watch.note()

    def loading_begins(self, state: dict[str, Any]) -> None:
        """Waits until all ranks of the node are about to set the parameters to the same values (collective).

        Until then others may compute with the parameters as they are, or read them.
        """
        self._reduction.barrier(BarrierPurpose.LOADING)

    def parameters_loaded(self) -> None:
        self._watch.forget()

    def give_up_failed_step(self) -> None:
        self._watch.forget()

    def collective_begins(self) -> None:
        if self._watch.is_changed_here():
            self._reduction.publish_change()
        self._reduction.collective_begins()


def _leave(memory: NodeMemory, parameters: Sequence[nn.Parameter]) -> None:
    """Gives this rank parameters and gradients of its own, with the values that those in the node's memory have."""
    # The script may have put tensors of its own in their place.
    moved = [p for p in parameters if memory.holds(p)]
    reduced = [p for p in parameters if p.grad is not None and memory.holds(p.grad)]
    own = iter(memory.own_copy([*(p.data for p in moved), *(p.grad for p in reduced)]))
    for parameter in moved:
        parameter.data = next(own)
    for parameter in reduced:
        parameter.grad = next(own)
    for parameter in parameters:
        vars(parameter).pop("_lshdp_node_ownership", None)
