# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Parameters that FSDP2 shards over ranks: all of a model, or some units of it.

``fully_shard`` shards each unit over a one-dimensional mesh: the world, or this node's ranks. Where nodes hold copies,
the shard's gradient is summed between nodes by our own reduction, started from FSDP2's all-reduce hook while the
backward goes on (on gloo FSDP2's built-in two-dimensional mesh blocks the backward at every unit). Units of one model
may be of several kinds; what is in other stores is ignored here.

All collectives sum; the loss carries each rank's weight. So FSDP2 is told to divide by 1 and to use sums only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from accelerate_lshdp.engine.loading import require_same_names
from accelerate_lshdp.engine.module_state import is_noop_conversion, parameters_of
from accelerate_lshdp.engine.store import Store, StoreContext
from accelerate_lshdp.engine.stores.fsdp2.kind import UnitKind
from accelerate_lshdp.engine.stores.fsdp2.limits import guard_methods, refuse_double_backward, refuse_shards_in_files
from accelerate_lshdp.engine.stores.fsdp2.outputs import Completion, explain_not_gathered, watch_outputs
from accelerate_lshdp.engine.stores.fsdp2.plain_parameters import PlainParameters, without_shards
from accelerate_lshdp.engine.stores.fsdp2.sharding import shard_units
from accelerate_lshdp.engine.stores.fsdp2.streams import used_on_this_stream
from accelerate_lshdp.engine.stores.fsdp2.unit import Unit, collect_units, root_first, sharded_like
from accelerate_lshdp.engine.stores.fsdp2.unsummed_gradients import ZeroGrad, drop_unsummed, holds_unsummed
from accelerate_lshdp.engine.stores.fsdp2.versions import forget_iteration, param_groups, reduce_unused_parameters
from accelerate_lshdp.engine.wire.reduction import OrderedReductions
from accelerate_lshdp.runtime.profiler_labels import label


class Fsdp2Store(Store):
    """Parameters that FSDP2 shards over ranks.

    Args:
        context: of the model, in host memory or on its device, identical on all ranks; it is changed in place.
        units: groups of modules that are gathered together (``choose_units``), and how each group is kept.
        root: how what is in no unit is kept.
        elsewhere: parameters that are in other stores.
        device: where the forward runs.
        prefetch: number of units gathered ahead on devices with streams.
    """

    loads_together = True
    # Whole parameters would need a collective, and as much memory on every rank as sharding has saved.
    can_be_closed = False
    can_be_completed = False  # FSDP2 gathers and scatters a unit in the middle of autograd

    def __init__(
        self,
        context: StoreContext,
        units: Sequence[tuple[tuple[nn.Module, ...], UnitKind]],
        root: UnitKind,
        *,
        elsewhere: Collection[nn.Parameter] = (),
        device: torch.device,
        prefetch: int = 1,
    ) -> None:
        super().__init__(context)
        module = context.module
        self._device = device
        others = set(elsewhere)
        own = [parameter for parameter in parameters_of(module) if parameter not in others]
        ignored = without_shards(own)
        # FSDP2 moves what it manages; what it is told to ignore stays where it is, which may be host memory.
        for parameter in ignored:
            parameter.data = parameter.data.to(device)
        self._kinds = {id(member): kind for members, kind in units for member in members} | {id(module): root}
        shard_units(module, units, root, prefetch, others.union(ignored))
        self._units = collect_units(module, self._kinds)
        #: Units of which groups of ranks keep copies; the others are summed by FSDP2 alone.
        self._replicated = [unit for unit in self._units if unit.kind.is_replicated]
        self._plain = PlainParameters([p for p in ignored if p.requires_grad], context.clock)
        self._parameters = [p for unit in self._units for p in unit.parameters] + self._plain.parameters
        self._frozen = [*self._frozen_copies(), *(p for p in ignored if not p.requires_grad)]
        # Kinds that are replicated are so over the same ranks, and have one reduction.
        reduction = next((unit.kind.reduction for unit in self._replicated), None)
        self._reductions = (
            OrderedReductions(reduction, context.clock, len(self._replicated)) if reduction is not None else None
        )
        self._configure(device)
        self._completion = Completion(module)
        refuse_double_backward(module)
        guard_methods(module)
        for handle in refuse_shards_in_files(module):
            self.context.attachments.add(handle)
        # In the instance, so that other models of the same class keep torch's own.
        vars(module)["zero_grad"] = ZeroGrad(module)
        self._synchronise = False
        self._overlaps = True
        self._forwards: Counter[int] = Counter()  # of each unit's modules since the last backward
        self._ran: set[int] = set()  # modules of units that had a forward since the last backward
        self._skipped: set[int] = set()  # units that had none before the current backward
        self._substitutes: dict[int, torch.Tensor] = {}  # buffers of units that did not run, kept alive until the end
        self._holds_local = False  # whether .grad is this node's own, not yet summed between nodes
        self._earlier: list[tuple[nn.Parameter, torch.Tensor]] = []  # gradients that were final already

    def trainable_parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def skips_conversion(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        if is_noop_conversion(convert, self.module, self._device):
            return True
        raise RuntimeError(
            "found a prepared model that is to be moved or converted (.to(), .cpu(), .half(), ...). Its parameters "
            "are sharded over the ranks and stay where prepare() put them: convert the model before prepare(), or "
            "take its weights with accelerator.get_state_dict(model) and load them into another model"
        )

    def refuse_copy(self) -> None:
        raise RuntimeError(
            "found a prepared model that is to be pickled. This rank has only its shards of the parameters: save it "
            "with accelerator.save_model or save_state, or save what accelerator.get_state_dict(model) gives"
        )

    def gradient_leaves(self) -> Iterator[torch.Tensor]:
        for module in self._fsdp_modules():
            for group in param_groups(module):
                gathered = [getattr(fsdp_param, "_unsharded_param", None) for fsdp_param in group.fsdp_params]
                yield from (whole for whole in gathered if whole is not None)  # there is none before a first forward
        yield from self._plain.parameters

    def gathered_parameters(self) -> dict[int, nn.Parameter]:
        pairs = (pair for unit in self._units for pair in zip(unit.fsdp_params, unit.parameters, strict=True))
        gathered = ((getattr(fsdp_param, "_unsharded_param", None), parameter) for fsdp_param, parameter in pairs)
        return {id(whole): parameter for whole, parameter in gathered if whole is not None}

    def explain(self, error: BaseException) -> None:
        explain_not_gathered(error)

    # Setting up

    def _fsdp_modules(self) -> list[FSDPModule]:
        return [module for module in self.module.modules() if isinstance(module, FSDPModule)]

    def _frozen_copies(self) -> list[nn.Parameter]:
        """The frozen parameters of which groups of ranks keep copies."""
        managed = [
            fsdp_param.sharded_param
            for module in self._fsdp_modules()
            if self._kinds[id(module)].is_replicated
            for group in param_groups(module)
            for fsdp_param in group.fsdp_params
        ]
        return [parameter for parameter in managed if not parameter.requires_grad]

    def _configure(self, device: torch.device) -> None:
        # One by one: these setters of FSDP2 do not reach the modules inside. Its own division would use PREMUL_SUM,
        # which gloo refuses; weights are in the loss, so nothing is to be divided. The gradients of a rank that shards
        # with no other one are not summed, and with a factor FSDP2 would divide them into new memory.
        for module in self._fsdp_modules():
            kind = self._kinds[id(module)]
            if kind.mesh.size() > 1:
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                module.set_custom_all_gather(kind.all_gather)
                module.set_custom_reduce_scatter(kind.reduce_scatter)
        for module in {id(module._get_fsdp_state()): module for module in self._fsdp_modules()}.values():
            watch_outputs(module)
        # A parameter that this rank did not use still takes part: other ranks send its gradient.
        reduce_unused_parameters(self.module)
        # One stream for all units: what travels between nodes overlaps with the backward, not with itself.
        stream = torch.get_device_module(device).Stream() if device.type != "cpu" else None
        if self._reductions is not None:
            for number, unit in enumerate(self._replicated):
                unit.module.set_all_reduce_hook(self._reduce_hook(number, unit), stream=stream)
        for unit in self._units:
            for member in unit.module._get_fsdp_state()._modules:
                member.register_forward_pre_hook(self._usage_hook(unit))
                member.register_forward_pre_hook(root_first(self.module), prepend=True)
        first = len(self._parameters) - len(self._plain.parameters)
        for index, parameter in enumerate(self._plain.parameters, first):
            parameter.register_post_accumulate_grad_hook(self._use_hook(index))

    def _use_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        # Of the state alone: a cycle through a hook of autograd would never be collected.
        state, index = self.context.state, self.context.first + index
        return lambda _: state.mark_used(index)

    def _usage_hook(self, unit: Unit):  # noqa: ANN202 - a closure for torch
        """Watches the gathered parameters, which exist from the first forward on, for gradients."""
        watched: set[int] = set()

        def before_forward(module: nn.Module, args: tuple) -> None:
            self.context.state.check_heap()
            if not self.context.state.in_backward:
                self._ran.add(id(module))  # without gradients too: reentrant checkpointing brings them in the backward
                if torch.is_grad_enabled():
                    self._forwards[id(module)] += 1
            if len(watched) == len(unit.indices):
                return
            for index, fsdp_param in zip(unit.indices, unit.fsdp_params, strict=True):
                whole = getattr(fsdp_param, "_unsharded_param", None)
                if index not in watched and whole is not None and whole.requires_grad:
                    watched.add(index)
                    whole.register_post_accumulate_grad_hook(self._use_hook(index))

        return before_forward

    # One backward

    def begin(self, synchronise: bool) -> None:
        if self._reductions is not None and any(p.requires_grad for p in self._frozen):
            raise RuntimeError(
                "found parameters unfrozen that were frozen when the model was prepared, so their gradients have no "
                "place in what is summed over nodes. Unfreeze them before prepare(); freezing is possible later, too"
            )
        self._synchronise = synchronise
        self._completion.backward_begins()
        self._plain.begin()
        # Before autograd: reductions of a backward that failed may still write to .grad, whose memory they have.
        if self._reductions is not None:
            self._reductions.begin()
        # FSDP2 reduces a unit once for each of its forwards and adds to .grad in between, which must not happen while
        # a reduction between nodes is under way: with several forwards everything is summed on the node first.
        self._overlaps = max(self._forwards.values(), default=0) <= 1
        self._forwards.clear()
        if self._ran:  # else this is another backward through the same forward
            ran = [{id(member) for member in unit.module._get_fsdp_state()._modules} for unit in self._replicated]
            self._skipped = {number for number, members in enumerate(ran) if not members & self._ran}
            self._ran.clear()
        if all(parameter.grad is None for unit in self._replicated for parameter in unit.parameters):
            self._earlier.clear()  # zero_grad has dropped what these were to be added to
        for module in self._fsdp_modules():
            kind = self._kinds[id(module)]
            if not kind.is_replicated:
                # Unsynchronised gradients stay whole on each rank: anything less would have to travel between nodes.
                module.set_requires_gradient_sync(synchronise, recurse=False)
                if kind.policies.gather_once_a_step:
                    module.set_reshard_after_backward(synchronise, recurse=False)
        if synchronise and self._holds_local:
            if self._overlaps:
                self._set_aside_local()
        elif not self._holds_local:
            self._set_aside_final()

    def _set_aside_local(self) -> None:
        """Takes this node's own sums out of ``.grad``, to be added to each unit's buffer before it travels."""
        for unit in self._replicated:
            offset = 0
            for parameter, size in unit.layout():
                if parameter.grad is not None:
                    unit.local.append((offset, parameter.grad.to_local()))
                    parameter.grad = None
                offset += size
        self._holds_local = False

    def _set_aside_final(self) -> None:
        """Takes gradients of an earlier, synchronised backward out of ``.grad``: they must not be summed again."""
        # FSDP2 adds to those of world-sharded units itself, after its reduce-scatter.
        for parameter in (parameter for unit in self._replicated for parameter in unit.parameters):
            if parameter.grad is not None:
                self._earlier.append((parameter, parameter.grad))
                parameter.grad = None

    def _reduce_hook(self, number: int, unit: Unit):  # noqa: ANN202 - a closure for FSDP2
        gradient_dtype = unit.parameters[0].dtype

        def reduce_between_nodes(buffer: torch.Tensor) -> None:
            used_on_this_stream(buffer)
            if not (self._synchronise and self._overlaps):
                return
            self._add_local(unit, buffer)
            if buffer.device.type == "cpu" and buffer.dtype == gradient_dtype:
                self._reductions.ready(number, buffer, unit.shapes())
            else:
                # FSDP2 reads the buffer right after this hook, on this stream: to cast it or to copy it to the host.
                # So it cannot wait for its turn, and what other ranks send before it has to go before it here, too.
                for skipped in sorted(self._skipped & set(range(number)) - self._substitutes.keys()):
                    self._substitutes[skipped] = self._make_substitute(self._replicated[skipped])
                    shapes = self._replicated[skipped].shapes()
                    self._reductions.reduce_now(skipped, self._substitutes[skipped], shapes)
                self._reductions.reduce_now(number, buffer, unit.shapes())

        return reduce_between_nodes

    def _add_local(self, unit: Unit, buffer: torch.Tensor) -> None:
        for offset, gradient in unit.local:
            used_on_this_stream(gradient)  # it is dropped below, when the sum may not have been taken yet
            buffer[offset : offset + gradient.numel()].add_(gradient.to(buffer.device).reshape(-1))
        unit.local.clear()

    def deliver(self) -> None:
        self._completion.complete(self.context.state.reached)
        if not self._synchronise or self._reductions is None:
            return
        # With several forwards FSDP2 has added all of them up in .grad by now: the node's sums travel as they are.
        if not self._overlaps:
            self._set_aside_local()
        # Other ranks wait for the buffers of all units, also of those that this rank's forward left out.
        for number in self._reductions.missing():
            self._substitutes[number] = self._make_substitute(self._replicated[number])
            self._reductions.ready(number, self._substitutes[number], self._replicated[number].shapes())

    def finish(self) -> None:
        # A collective of the world, at the same place on all ranks: after all of them have started all reductions.
        self._plain.finish(self._synchronise)
        # Over the world FSDP2's reduce-scatter has summed everything; nothing travels between replicas.
        if not self._replicated:
            self._synchronise = False
            return
        if not self._synchronise:
            self._holds_local = True
            return
        self._synchronise = False
        if self._reductions is not None:
            self._reductions.finish()
            for number, buffer in self._substitutes.items():
                self._take_gradients(self._replicated[number], buffer)
            self._substitutes.clear()
        else:
            for unit in self._replicated:
                self._deliver_local(unit)
        self._holds_local = False
        self._give_back_final()

    def _give_back_final(self) -> None:
        for parameter, gradient in self._earlier:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._earlier.clear()

    def _make_substitute(self, unit: Unit) -> torch.Tensor:
        """Makes this rank's part of the gradient of a unit that its forward did not run: zeros, and what was local."""
        dtype = unit.kind.policies.precision.reduce_dtype or unit.parameters[0].dtype
        buffer = torch.zeros(sum(size for _, size in unit.layout()), dtype=dtype, device=self._device)
        self._add_local(unit, buffer)
        return buffer

    def _take_gradients(self, unit: Unit, buffer: torch.Tensor) -> None:
        """Gives a unit's parameters their gradients from its reduced buffer, as FSDP2 does for units that ran."""
        # Pieces are padded; a rank's own shard may be shorter. They are copied, not kept as views of the buffer, which
        # is in the precision of the reduction and on the device.
        pieces = buffer.split([size for _, size in unit.layout()])
        for (parameter, _), piece in zip(unit.layout(), pieces, strict=True):
            local = parameter.to_local()
            piece = piece[: local.numel()].view(local.shape)
            parameter.grad = sharded_like(parameter, piece.to(local.device, local.dtype))

    def _deliver_local(self, unit: Unit) -> None:
        """Adds gradients of earlier micro-batches back to ``.grad``, as no reduction between nodes has taken them."""
        offset = 0
        local = dict(unit.local)
        for parameter, size in unit.layout():
            if offset in local:
                earlier = sharded_like(parameter, local[offset])
                parameter.grad = earlier if parameter.grad is None else parameter.grad + earlier
            offset += size
        unit.local.clear()

    # Over the world, gradients that were not synchronised are whole, and FSDP2's until they are: not in .grad.

    def holds_gradients(self, among: Collection[int] | None = None) -> bool:
        return any(self._unsummed(among)) or super().holds_gradients(among)

    def has_gradients(self) -> bool:
        return any(self._unsummed()) or super().has_gradients()

    def drop_unsummed(self, parameters: Collection[int] | None = None) -> None:
        for fsdp_param in self._unsummed(parameters):
            drop_unsummed(fsdp_param)

    def _unsummed(self, among: Collection[int] | None = None) -> Iterator[FSDPParam]:
        """The parameters, among those with these ids, of which FSDP2 holds a gradient of this rank alone."""
        if not self.context.state.local.held:
            return
        for unit in (unit for unit in self._units if not unit.kind.is_replicated):
            for fsdp_param, parameter in zip(unit.fsdp_params, unit.parameters, strict=True):
                if holds_unsummed(fsdp_param) and (among is None or id(parameter) in among):
                    yield fsdp_param

    def drop_gradients(self) -> None:
        self.drop_unsummed()
        super().drop_gradients()
        self._holds_local = False
        self._plain.abandon()
        self._earlier.clear()
        for unit in self._units:
            unit.local.clear()

    def before_step(self, stepping: Collection[int] | None = None) -> None:
        with label("before_optimizer_step"):
            self._drop_gathered()

    def loading_begins(self, state: dict[str, Any]) -> None:
        # Compared first, while nothing has changed: all ranks raise, and none has loaded a part.
        require_same_names(state)
        self._drop_gathered()

    def parameters_loaded(self) -> None:
        self._drop_gathered()

    def _drop_gathered(self) -> None:
        """Drops gathered parameters that a forward without a backward (metrics) has left.

        FSDP2 would use them in the next forward, though the shards may have changed since.
        """
        for module in self._fsdp_modules():
            module.reshard()

    def cancel(self) -> None:
        self._completion.complete(reached=False)
        self._plain.cancel()
        if self._synchronise and any(unit.local for unit in self._replicated):
            for unit in self._replicated:
                self._deliver_local(unit)
            self._holds_local = True
        elif not self._holds_local:
            self._give_back_final()
        self._synchronise = False

    def abandon(self) -> None:
        self._synchronise = self._holds_local = False
        self._plain.abandon()
        self._earlier.clear()
        self._substitutes.clear()
        for unit in self._units:
            unit.local.clear()
        if self._reductions is not None:
            self._reductions.reset()
        if self.module._get_fsdp_state()._is_root is None:
            return  # it never had a forward, and FSDP2 has no state to reset before that
        # After the reductions above were given up, which keep their buffers alive: this frees the rest.
        forget_iteration(self.module)
        # What FSDP2 forgets to reset: the whole gradients of units that the backward did not complete.
        for module in self._fsdp_modules():
            for group in param_groups(module):
                for fsdp_param in group.fsdp_params:
                    drop_unsummed(fsdp_param)
