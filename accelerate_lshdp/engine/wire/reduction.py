# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""How gradients travel: the interface of a reduction between ranks, and FSDP2's two collectives for gloo.

A new format is one more class behind ``GradientReduction``, registered by `wire_format` in a file of its own, and one
more row of ``documents.wire_format``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from accelerate_lshdp.documents.plan_sections import Communication
from accelerate_lshdp.engine.wire.host_exchange import exchange_in_pairs, gather_in_ring
from accelerate_lshdp.runtime.profiler_labels import label
from accelerate_lshdp.runtime.wait_clock import WaitClock


# torch 2.13 renamed both and warns of the old names on every rank.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class PendingReduction(ABC):
    """A reduction of one buffer that has been started and not been waited for."""

    @abstractmethod
    def is_done(self) -> bool:
        """Whether ``wait`` would return at once."""

    @abstractmethod
    def wait(self) -> None:
        """Blocks until the buffer holds the sum. On CUDA only the current stream is blocked."""


#: Reductions by the name of their format.
REDUCTIONS: dict[str, type[GradientReduction]] = {}


def wire_format(name: str) -> Callable[[type[GradientReduction]], type[GradientReduction]]:
    """Registers a reduction as that of a format, one of ``documents.wire_format.WIRE_FORMATS``."""

    def register(reduction: type[GradientReduction]) -> type[GradientReduction]:
        reduction.name = name
        REDUCTIONS[name] = reduction
        return reduction

    return register


class GradientReduction(ABC):
    """Sums flat gradient buffers over a group of ranks, started during the backward and finished after it.

    Contract: all ranks of the group start the same buffers in the same order, and wait for them in that order;
    ``start`` returns at once; the buffer must not be touched until ``wait`` has returned; then it holds bit-identical
    values on all ranks of the group.

    Args:
        group: the ranks that sum.

    Attributes:
        name: of the format, in messages.
        takes_two_messages: whether it needs a second group of the same ranks.
        scatter_dtype: what a reduce-scatter of a world-sharded strategy sends in it; None: the gradients' own.
            A format that is ``between_nodes_only`` sends none.
        to_scatter_dtype: converts gradients to it; torch's conversion, which rounds, unless a format has its own.
    """

    name: str
    takes_two_messages = False
    scatter_dtype: torch.dtype | None = None
    to_scatter_dtype: Callable[[torch.Tensor, torch.dtype], torch.Tensor] = staticmethod(torch.Tensor.to)

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    @classmethod
    def make(
        cls, communication: Communication, group: dist.ProcessGroup, second_group: dist.ProcessGroup | None
    ) -> GradientReduction:
        """The reduction of a format with its options (collective over the ranks of ``group``)."""
        return cls(group)

    @classmethod
    def wire_bytes(cls, communication: Communication, buffer: torch.Tensor, shapes: Sequence[torch.Size]) -> int:
        """Bytes of the all-reduce that sends as much as is sent for a buffer, after exact first steps."""
        return buffer.numel() * buffer.element_size()

    def make_buffers(self, members: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Makes the buffers in which a model's gradients are started, before the first one (collective).

        Args:
            members: of each buffer, in the order of their indices: the parameters whose gradients lie in it one after
                the other.

        Returns:
            1-D, zeros.
        """
        return [
            torch.zeros(sum(p.numel() for p in of_one), dtype=of_one[0].dtype, device=of_one[0].device)
            for of_one in members
        ]

    def abandon(self) -> None:
        """Says that a backward failed in which its sums were to be made; does not wait for other ranks."""
        return

    def close(self) -> None:
        """Ends what serves it in threads of its own; no rank waits for another one."""
        return

    @abstractmethod
    def start(self, buffer: torch.Tensor, index: int, shapes: Sequence[torch.Size]) -> PendingReduction:
        """Starts summing ``buffer`` in place.

        Args:
            buffer: 1-D, floating point.
            index: which buffer it is, the same one in every step: what a lossy format keeps from step to step, it
                keeps by this index.
            shapes: of the tensors that lie in the buffer one after the other.
        """

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What this rank keeps from step to step, for a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Goes on with what ``state_dict`` gave on this rank; an empty one starts anew."""
        if state:
            raise ValueError(f"found a state of {sorted(state)}, expected none: {type(self).__name__} keeps nothing")


class PendingWork(PendingReduction):
    """One collective of torch, and what is to be done when it has ended.

    Args:
        work: the collective; it keeps the tensors alive that it sends from.
        after: called by ``wait``, in the thread that waits.
    """

    def __init__(self, work: dist.Work, after: Callable[[], None] | None = None) -> None:
        self.work = work
        self.after = after

    def is_done(self) -> bool:
        return self.work.is_completed()

    def wait(self) -> None:
        self.work.wait()
        # On the stream that has just been made to wait (CUDA), so that it reads what the collective has written.
        if self.after is not None:
            self.after()


@wire_format("fp32")
class ExactReduction(GradientReduction):
    """All-reduce in the buffer's own precision."""

    def start(self, buffer: torch.Tensor, index: int, shapes: Sequence[torch.Size]) -> PendingReduction:
        return PendingWork(dist.all_reduce(buffer, group=self.group, async_op=True))


class OrderedReductions:
    """Starts reductions in the same fixed order on all ranks, whatever order the gradients become ready in.

    Ranks may skip a part of the model (a branch not taken), so the order of readiness can differ between ranks.
    Collectives have no names: those of a group are matched by the order in which each rank starts them, so different
    orders would add up different buffers, or hang where their sizes differ.

    Args:
        reduction: sums one buffer.
        clock: counts the time spent waiting.
        count: number of buffers; they are started in the order of their indices.
    """

    def __init__(self, reduction: GradientReduction, clock: WaitClock, count: int) -> None:
        self.reduction = reduction
        self.clock = clock
        self.count = count
        self._ready: dict[int, tuple[torch.Tensor, Sequence[torch.Size]]] = {}
        self._pending: list[PendingReduction] = []
        self._given_up: list[PendingReduction] = []  # of a backward that failed; they still write to their buffers
        self._reduced: set[int] = set()  # out of order, by `reduce_now`
        self._next = 0  # the first buffer that has not been started

    def begin(self) -> None:
        """Begins a backward: waits for the reductions of an earlier one that failed, which still fill buffers."""
        # Not in `reset`, where the backward failed: other ranks may never start their part, and the error that this
        # rank has to show would be hidden by a hang. A script that trains on has caught the error on all ranks.
        if self._given_up:
            with self.clock.waiting():
                for pending in self._given_up:
                    pending.wait()
            self._given_up.clear()

    def ready(self, index: int, buffer: torch.Tensor, shapes: Sequence[torch.Size]) -> None:
        """Says that buffer ``index`` may be reduced; starts it and its successors as far as the order allows.

        Args:
            index: of the buffer, counted from 0 in the order of starting.
            buffer: 1-D; it must not be touched before ``finish`` has returned.
            shapes: of the tensors in it.

        Raises:
            RuntimeError: the buffer was ready before in this backward.
        """
        self._check_first_time(index)
        self._ready[index] = buffer, shapes
        self._start_in_order()

    def reduce_now(self, index: int, buffer: torch.Tensor, shapes: Sequence[torch.Size]) -> None:
        """Reduces a buffer whose sum is needed at once, out of order (on CUDA only the current stream waits).

        The arguments and errors are those of ``ready``. All ranks have to call it for the same buffers in the same
        order.
        """
        self._check_first_time(index)
        self._reduced.add(index)
        with label("all_reduce"), self.clock.waiting():
            self.reduction.start(buffer, index, shapes).wait()
        self._start_in_order()

    def _check_first_time(self, index: int) -> None:
        if index < self._next or index in self._ready or index in self._reduced:
            raise RuntimeError(
                f"gradient buffer {index} became ready twice in one backward. A unit that takes part in a backward "
                "more than once (several forwards before one backward, reentrant checkpointing) is not supported: use "
                "one accelerator.backward for each forward, and checkpointing with use_reentrant=False"
            )

    def _start_in_order(self) -> None:
        while self._next in self._ready or self._next in self._reduced:
            if self._next in self._ready:
                buffer, shapes = self._ready.pop(self._next)
                with label("all_reduce"):
                    self._pending.append(self.reduction.start(buffer, self._next, shapes))
            self._next += 1

    def missing(self) -> list[int]:
        """The indices of the buffers that this rank has not delivered in this backward."""
        return [i for i in range(self._next, self.count) if i not in self._ready and i not in self._reduced]

    def finish(self) -> None:
        """Waits until every buffer holds its sum.

        Raises:
            RuntimeError: a buffer was never delivered, so other ranks wait for it.
        """
        if self.missing():
            raise RuntimeError(f"gradient buffers {self.missing()} were never delivered")
        try:
            with self.clock.waiting():
                for pending in self._pending:
                    pending.wait()
            self._pending.clear()
        finally:
            # After an error `_pending` still has what was not waited for, and `reset` takes it over for `begin`.
            self.reset()

    def reset(self) -> None:
        """Forgets the buffers of this backward, which is over or has failed; does not wait for other ranks."""
        self._ready.clear()
        self._given_up += self._pending
        self._pending.clear()
        self._reduced.clear()
        self._next = 0


class TimedAllGather(AllGather):
    """FSDP2's all-gather of a unit's parameters, with the seconds that it blocks counted.

    On gloo it is a ring of messages into the output, synchronous, whatever ``async_op`` asks for.

    Args:
        clock: counts them.
    """

    def __init__(self, clock: WaitClock) -> None:
        self.clock = clock

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        if output_tensor.device.type == "cpu":
            own = (parts := output_tensor.view(group.size(), -1))[group.rank()]
            if own.data_ptr() != input_tensor.data_ptr():  # FSDP2 gives a view of the output
                own.copy_(input_tensor)
            self.fill(parts.unbind(), group)
            return None
        with label("all_gather"), self.clock.waiting():
            return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)

    def fill(self, parts: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        """Gathers into tensors that need not lie side by side; on devices only the current stream waits.

        Args:
            parts: of the group's ranks, of the same size; this rank has its own.
            group: the ranks that gather.
        """
        with label("all_gather"), self.clock.waiting():
            if parts[0].device.type == "cpu":
                gather_in_ring(parts, group)
            else:
                # NCCL's all-gather of a list first gathers into memory of its own. Its all-to-all does not, and sends
                # as much.
                dist.all_to_all(list(parts), [parts[group.rank()]] * group.size(), group=group)


class TimedReduceScatter(ReduceScatter):
    """FSDP2's reduce-scatter of a unit's gradients, with the seconds that it blocks counted.

    On gloo it is an all-to-all and a local sum.

    gloo implements reduce-scatter as an all-reduce and a slice, which sends twice the bytes: 2(N-1)/N * S instead of
    (N-1)/N * S.

    Args:
        clock: counts the seconds that it blocks.
        dtype: precision on the wire (None: that of the gradients); the sum is taken in the gradients' precision.
        convert: makes ``dtype`` of the gradients.
    """

    def __init__(
        self,
        clock: WaitClock,
        *,
        dtype: torch.dtype | None = None,
        convert: Callable[[torch.Tensor, torch.dtype], torch.Tensor] = torch.Tensor.to,
    ) -> None:
        self.clock = clock
        self.dtype = dtype
        self.convert = convert
        self._received: torch.Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"gradients are summed (their weights are in the loss), but FSDP2 asked for {op}")
        if async_op:
            raise ValueError("an asynchronous reduce-scatter is not supported; FSDP2 does not use one")
        compress = self.dtype is not None and self.dtype != input_tensor.dtype
        with label("reduce_scatter"):
            with self.clock.waiting():
                if input_tensor.device.type != "cpu" and not compress:
                    return _reduce_scatter(output_tensor, input_tensor, op=op, group=group)
                sent = self.convert(input_tensor, self.dtype) if compress else input_tensor
                # Both ways end, for this stream, before `received` is read below and before this returns: FSDP2 reuses
                # the input for the next unit.
                if sent.device.type == "cpu":
                    received = self._scratch(sent)
                    exchange_in_pairs(received, sent, group)
                else:
                    received = torch.empty_like(sent)
                    dist.all_to_all_single(received, sent, group=group)
            # A reduction by the backend would add up in the precision of the wire; here the terms alone are converted.
            # Ranks are added in their order, so a run gives the same bits every time.
            parts = received.view(group.size(), -1)
            torch.sum(parts, dim=0, dtype=output_tensor.dtype, out=output_tensor)
        return None

    def _scratch(self, like: torch.Tensor) -> torch.Tensor:
        """Memory of the host that is used for every unit: new memory would cost more time than a message in it."""
        if self._received is None or self._received.dtype != like.dtype or self._received.numel() < like.numel():
            self._received = None  # before the larger one is made
            self._received = torch.empty_like(like)
        return self._received[: like.numel()]
