# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""PowerSGD: the gradient of a matrix travels as two thin matrices (Vogels, Karimireddy and Jaggi, 2019, "PowerSGD:
practical low-rank gradient compression for distributed optimization", algorithm 1).

With M_w the gradient of an a x b matrix on rank w, plus what earlier steps left over there, a step is

    P = orthonormalise(sum over w of M_w Q)       first message, with everything that is not compressed
    Q = sum over w of M_w^T P                     second message; also where the next step starts (warm start)
    sum over w of M_w is taken for P Q^T          and M_w - P (M_w^T P)^T is kept (error feedback)

As gradients are sums here and ranks have unequal shares, each rank keeps the part of its own matrix outside P, not its
distance from a mean: these errors add up to that of the sum, and none of them grows without bound.

Vectors, and matrices with r (a + b) >= a b, travel exactly. Each rank sends 2 (N - 1) / N * 4 n bytes, with n the
numbers of the rest and r (a + b) for every other matrix. Kept are the errors (as large as the gradient) and Q.

All ranks have to get the same bits. Sums of messages are the same everywhere, but matrix products and the
orthonormalisation may differ in the last bit between processors. So where a group has several kinds, P of its first
rank is sent to all with the second message, and P Q^T is computed by single products and sums, which all processors
round alike; that takes several times longer.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from accelerate_lshdp.documents.plan_sections import POWERSGD_RANK, POWERSGD_WARMUP_STEPS, Communication
from accelerate_lshdp.engine.wire.reduction import GradientReduction, wire_format
from accelerate_lshdp.engine.wire.two_messages import LossyBuffer, TwoMessageReduction


#: Elements of a matrix that are decompressed together, so that they stay in the cache.
_PIECE = 64 * 1024


@dataclass(frozen=True)
class _Matrix:
    """A gradient of a buffer as a matrix: where it begins, in elements, and its shape."""

    offset: int
    rows: int
    columns: int

    @property
    def size(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True)
class _Layout:
    """The division of a buffer into matrices that are compressed and the rest, which travels exactly.

    Attributes:
        matrices: those that are, of equal numbers of rows together.
        rest: (offset, elements) of what travels exactly, neighbours as one.
    """

    matrices: tuple[_Matrix, ...]
    rest: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, size: int, shapes: Sequence[torch.Size], rank: int) -> _Layout:
        matrices: list[_Matrix] = []
        rest: list[tuple[int, int]] = []
        offset = 0
        # What the buffer has beyond its tensors (padding of shards) travels as a vector, exactly.
        for shape in (*shapes, torch.Size((size - sum(s.numel() for s in shapes),))):
            matrix = _as_matrix(offset, shape, rank)
            if matrix is not None:
                matrices.append(matrix)
            elif rest and sum(rest[-1]) == offset:
                rest[-1] = rest[-1][0], rest[-1][1] + shape.numel()
            elif shape.numel():
                rest.append((offset, shape.numel()))
            offset += shape.numel()
        # By rows, so that all P of equal size lie side by side and are orthonormalised in one batch.
        return cls(tuple(sorted(matrices, key=lambda matrix: matrix.rows)), tuple(rest))

    def numbers(self, rank: int) -> tuple[int, int, int]:
        """The numbers of elements in P, in Q, and in the rest."""
        rows, columns = sum(m.rows for m in self.matrices), sum(m.columns for m in self.matrices)
        return rank * rows, rank * columns, sum(length for _, length in self.rest)


def _as_matrix(offset: int, shape: torch.Size, rank: int) -> _Matrix | None:
    """A tensor as a matrix: its first dimension other than 1 by all others; None if it would not shrink."""
    sizes = [size for size in shape if size != 1]
    if len(sizes) < 2 or shape.numel() == 0:
        return None
    rows, columns = sizes[0], shape.numel() // sizes[0]
    return _Matrix(offset, rows, columns) if rank * (rows + columns) < rows * columns else None


class _PowerSGDBuffer(LossyBuffer):
    """One gradient buffer as thin matrices, with what PowerSGD keeps for the next step.

    ``kept`` holds ``error`` of all matrices one after the other, ``q`` of all of them, and the number of ``steps``.
    """

    def __init__(self, reduction: PowerSGDReduction, buffer: torch.Tensor, index: int, layout: _Layout) -> None:
        self._groups = reduction.group, reduction.second_group
        self._rank, self._warmup_steps = reduction.rank, reduction.warmup_steps
        self._sends_p = reduction.has_unlike_processors
        self._layout = layout
        p_numbers, q_numbers, rest = layout.numbers(self._rank)
        # Errors in 16 bits would lose what error feedback is there to keep; and QR needs at least fp32.
        dtype = buffer.dtype if buffer.dtype in (torch.float32, torch.float64) else torch.float32
        new = {"dtype": dtype, "device": buffer.device}
        self.kept = {
            "error": torch.zeros(sum(m.size for m in layout.matrices), **new),
            "q": _same_on_all_ranks(q_numbers, index).to(**new),
            "steps": torch.zeros((), dtype=torch.int64),
        }
        # P and what is not compressed lie in one tensor, Q (and P again) in another: two messages a step, whatever the
        # number of parameters. The lists below are views of them.
        self._first = torch.empty(rest + p_numbers, **new)
        self._second = torch.zeros(q_numbers + (p_numbers if self._sends_p else 0), **new)
        self._scratch = torch.empty(max([_PIECE, *(m.columns for m in layout.matrices)]), **new)
        self._rest = self._first[:rest]
        self._p = self._thin(self._first[rest:], [m.rows for m in layout.matrices])
        self._q = self._thin(self.kept["q"], [m.columns for m in layout.matrices])
        self._new_q = self._thin(self._second[:q_numbers], [m.columns for m in layout.matrices])
        self._errors = [
            piece.view(m.rows, m.columns)
            for piece, m in zip(
                self.kept["error"].split([m.size for m in layout.matrices]), layout.matrices, strict=True
            )
        ]
        self._working: torch.Tensor | None = None  # the gradient with the errors added, in the precision of these

    def _thin(self, numbers: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        """Transposed thin matrices, shape (r, length) each, one after the other."""
        pieces = numbers.split([self._rank * length for length in lengths])
        return [piece.view(self._rank, length) for piece, length in zip(pieces, lengths, strict=True)]

    def _matrices(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        return [buffer[m.offset : m.offset + m.size].view(m.rows, m.columns) for m in self._layout.matrices]

    @property
    def _is_exact(self) -> bool:
        return int(self.kept["steps"]) < self._warmup_steps or not self._layout.matrices

    def compress(self, buffer: torch.Tensor) -> dist.Work:
        if self._is_exact:
            return dist.all_reduce(buffer, group=self._groups[0], async_op=True)
        self._working = buffer.to(self.kept["error"].dtype)  # the buffer itself, but for 16-bit gradients
        for matrix, error, q, p in zip(self._matrices(self._working), self._errors, self._q, self._p, strict=True):
            # In place: `working` is the gradient with the errors until `combine` has taken the new errors from it.
            matrix.add_(error)
            torch.mm(q, matrix.t(), out=p)
        self._move_rest(self._working, into_message=True)
        return dist.all_reduce(self._first, group=self._groups[0], async_op=True)

    def combine(self, buffer: torch.Tensor) -> dist.Work | None:
        if self._is_exact:
            self.kept["steps"] += 1
            return None
        if not self._first.isfinite().all():
            # All ranks see it in the same message. What was kept stays as it was: such a step is skipped.
            buffer.fill_(float("nan"))
            self._working = None
            return None
        self._orthonormalise()
        for matrix, error, p, new_q in zip(
            self._matrices(self._working), self._errors, self._p, self._new_q, strict=True
        ):
            torch.mm(p, matrix, out=new_q)
            torch.addmm(matrix, p.t(), new_q, alpha=-1, out=error)
        if self._sends_p:
            whole, sent = self._first[self._rest.numel() :], self._second[self.kept["q"].numel() :]
            # A broadcast by the sum that is sent anyway: all ranks but the first add zeros.
            if self._groups[0].rank() == 0:
                sent.copy_(whole)
            else:
                sent.zero_()
        return dist.all_reduce(self._second, group=self._groups[1], async_op=True)

    def _orthonormalise(self) -> None:
        """Makes the columns of every P orthonormal: one batched QR decomposition for all of equal size."""
        # All ranks decompose the same sum; see the module on what their processors may make of it.
        first = 0
        rows = [p.shape[1] for p in self._p]
        numbers = self._first[self._rest.numel() :]
        for length in dict.fromkeys(rows):
            count = rows.count(length)
            stack = numbers[first : first + count * self._rank * length].view(count, self._rank, length)
            stack.copy_(torch.linalg.qr(stack.mT).Q.mT)
            first += stack.numel()

    def decompress(self, buffer: torch.Tensor) -> None:
        # Into the tensor that a checkpoint holds, whose views `_q` are; it is also where the next step starts.
        self.kept["q"].copy_(self._second[: self.kept["q"].numel()])
        if self._sends_p:
            self._first[self._rest.numel() :].copy_(self._second[self.kept["q"].numel() :])
        for matrix, p, q in zip(self._matrices(self._working), self._p, self._q, strict=True):
            self._multiply(p, q, matrix)
        self._move_rest(self._working, into_message=False)
        if self._working is not buffer:
            buffer.copy_(self._working)
        self._working = None
        self.kept["steps"] += 1

    def _multiply(self, p: torch.Tensor, q: torch.Tensor, product: torch.Tensor) -> None:
        """``product = p^T q``, to the same bits on all ranks."""
        height = max(1, self._scratch.numel() // product.shape[1])
        for first in range(0, product.shape[0], height):
            piece = product[first : first + height]
            scratch = self._scratch[: piece.numel()].view(piece.shape)
            columns = p[:, first : first + height]
            if not self._sends_p:
                # Not straight into the buffer: products may depend on where in memory that lies.
                torch.mm(columns.t(), q, out=scratch)
                piece.copy_(scratch)
                continue
            torch.mul(columns[0, :, None], q[0], out=piece)
            for number in range(1, self._rank):
                torch.mul(columns[number, :, None], q[number], out=scratch)
                piece.add_(scratch)

    def _move_rest(self, buffer: torch.Tensor, into_message: bool) -> None:
        pieces = self._rest.split([length for _, length in self._layout.rest])
        for (offset, length), piece in zip(self._layout.rest, pieces, strict=True):
            place = buffer[offset : offset + length]
            if into_message:
                piece.copy_(place)
            else:
                place.copy_(piece)


@wire_format("powersgd")
class PowerSGDReduction(TwoMessageReduction):
    """All-reduces of thin matrices with error feedback and warm start.

    Args:
        group: the ranks that sum.
        rank: of the approximations (r above).
        warmup_steps: steps at the start in which everything travels exactly.
    """

    @classmethod
    def make(
        cls, communication: Communication, group: dist.ProcessGroup, second_group: dist.ProcessGroup | None
    ) -> GradientReduction:
        return cls(group, second_group, communication.powersgd_rank, communication.powersgd_warmup_steps)

    @classmethod
    def wire_bytes(cls, communication: Communication, buffer: torch.Tensor, shapes: Sequence[torch.Size]) -> int:
        return powersgd_bytes(buffer.numel(), shapes, communication.powersgd_rank)

    def __init__(
        self,
        group: dist.ProcessGroup,
        second_group: dist.ProcessGroup,
        rank: int = POWERSGD_RANK,
        warmup_steps: int = POWERSGD_WARMUP_STEPS,
    ) -> None:
        super().__init__(group, second_group)
        self.rank = rank
        self.warmup_steps = warmup_steps
        # Asked once, and of all: every rank has to decide alike whether P travels.
        kinds: list[tuple | None] = [None] * group.size()
        dist.all_gather_object(kinds, _processors(), group=group)
        self.has_unlike_processors = len(set(kinds)) > 1

    def make_buffer(self, buffer: torch.Tensor, index: int, shapes: Sequence[torch.Size]) -> LossyBuffer:
        return _PowerSGDBuffer(self, buffer, index, _Layout.of(buffer.numel(), shapes, self.rank))


def powersgd_bytes(size: int, shapes: Sequence[torch.Size], rank: int) -> int:
    """Bytes of both messages for a buffer of so many elements, on processors of one kind, in fp32."""
    return sum(_Layout.of(size, shapes, rank).numbers(rank)) * torch.float32.itemsize


def _same_on_all_ranks(count: int, seed: int) -> torch.Tensor:
    # A generator of its own, on the CPU: the same numbers on every device, and none drawn from the script's generator.
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def _processors() -> tuple:
    """The versions and processors that the last bits of this rank's matrix products may depend on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next((line for line in lines if line.startswith("model name")), platform.processor())
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return torch.__version__, name, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), device
