# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Gradients as 8-bit integers with a scale for each block: a quarter of the bytes of fp32.

Each of N ranks owns a chunk of the buffer. Ranks quantise their gradients and send every chunk to its owner
(all-to-all); the owner sums in fp32, quantises the sum and sends it to all (all-gather). What either rounding leaves
over is kept where it arose and added in the next step (error feedback: Seide et al., 2014, "1-bit stochastic gradient
descent"; Karimireddy et al., 2019, "Error feedback fixes SignSGD"; server-side compression as in Tang et al., 2019,
"DoubleSqueeze"). All ranks decompress the same bytes with one multiplication, so they get the same bits, whatever
their processors.

Every rank sends 2 (N - 1) / N * (n + 4 n / 1024) bytes for n elements. Blocks have up to 1024 elements, of equal size
in a buffer. The memory kept is 4 n + 4 n / N bytes of errors, and 2 n + n / N bytes of messages.

On a CPU a step costs passes over memory, so all passes over a few blocks are done while these are in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from accelerate_lshdp.documents.plan_sections import Communication
from accelerate_lshdp.engine.wire import reduction as collectives
from accelerate_lshdp.engine.wire.reduction import wire_format
from accelerate_lshdp.engine.wire.two_messages import LossyBuffer, TwoMessageReduction


BLOCK = 1024
_LARGEST = 127
#: Blocks that are worked on together: 1 MB for each of the two scratch tensors.
_PIECE = 256
_SCALE_BYTES = 4


class _Message:
    """Integers and scales of some chunks, one chunk a row: first its scales, then its integers.

    Args:
        rows: number of chunks.
        blocks: in a chunk.
        block: elements of a block, a multiple of 4.
    """

    def __init__(self, rows: int, blocks: int, block: int, device: torch.device) -> None:
        # Scales come first: their place is a multiple of 4 bytes then (blocks have multiples of 4 elements), as a view
        # of fp32 needs. Zeros, so that the padding at the end of a short last chunk is sent as defined numbers.
        header = blocks * _SCALE_BYTES
        self.bytes = torch.zeros(rows, header + blocks * block, dtype=torch.int8, device=device)
        self.scales = self.bytes[:, :header].view(torch.float32).unflatten(1, (blocks, 1))
        self.values = self.bytes[:, header:].unflatten(1, (blocks, block))


class _Int8Buffer(LossyBuffer):
    """One gradient buffer as int8, with the rounding errors that it keeps for the next step.

    ``kept`` holds ``error`` of this rank's own gradient, shape (N, blocks, block), and ``owner_error`` of the sum of
    the chunk that this rank owns, shape (blocks, block). A block with values that are not finite loses its error.
    """

    def __init__(self, reduction: Int8Reduction, size: int, device: torch.device) -> None:
        self._groups = reduction.group, reduction.second_group
        ranks = reduction.group.size()
        chunk = -(-size // ranks)
        self.blocks = max(1, -(-chunk // BLOCK))
        self.block = max(4, -(-chunk // self.blocks // 4) * 4)
        self.chunk = self.blocks * self.block
        self._sent = _Message(ranks, self.blocks, self.block, device)
        self._received = _Message(ranks, self.blocks, self.block, device)
        self._sum = _Message(1, self.blocks, self.block, device)
        # One for the thread of the backward, one for that of the messages.
        self._scratch = torch.empty(2, min(_PIECE, self.blocks), self.block, device=device)
        self.kept = {
            "error": torch.zeros(ranks, self.blocks, self.block, device=device),
            "owner_error": torch.zeros(self.blocks, self.block, device=device),
        }

    def compress(self, buffer: torch.Tensor) -> dist.Work:
        # The error becomes the gradient with the error added, is quantised, and is what that leaves over again: one
        # tensor, changed in place. The buffer itself stays as it is until `decompress`.
        error = self.kept["error"]
        pieces = error.view(-1)
        for row in range(error.shape[0]):
            for first, last in self._pieces():
                begin, end = self._elements(row, first, last, buffer)
                if begin < end:
                    pieces[begin:end].add_(buffer[begin:end])
                self._quantise(error[row, first:last], self._sent, (row, first, last), self._scratch[0])
        self._forget_errors_of_infinities(error, self._sent.scales)
        return dist.all_to_all_single(self._received.bytes, self._sent.bytes, group=self._groups[0], async_op=True)

    def combine(self, buffer: torch.Tensor) -> dist.Work:
        # In the order of the ranks, by one rank for all: nobody else adds up this chunk, so its bits are the same
        # everywhere.
        total = self.kept["owner_error"]
        for first, last in self._pieces():
            numbers = self._scratch[1, : last - first]
            piece = total[first:last]
            for row in range(self._received.bytes.shape[0]):
                numbers.copy_(self._received.values[row, first:last])
                piece.addcmul_(numbers, self._received.scales[row, first:last])
            self._quantise(piece, self._sum, (0, first, last), self._scratch[1])
        self._forget_errors_of_infinities(total, self._sum.scales[0])
        # The all-to-all is over, so its buffer is free; it is this rank's own, and other ranks have what they need.
        return collectives._all_gather(
            self._sent.bytes.view(-1), self._sum.bytes.view(-1), group=self._groups[1], async_op=True
        )

    def decompress(self, buffer: torch.Tensor) -> None:
        for row in range(self._sent.bytes.shape[0]):
            for first, last in self._pieces():
                begin, end = self._elements(row, first, last, buffer)
                numbers = self._scratch[1, : last - first]
                numbers.copy_(self._sent.values[row, first:last])
                numbers.mul_(self._sent.scales[row, first:last])
                if begin < end:
                    buffer[begin:end].copy_(numbers.view(-1)[: end - begin])

    def _pieces(self) -> list[tuple[int, int]]:
        """Blocks of a chunk that are worked on together: (first, after the last)."""
        return [(first, min(first + _PIECE, self.blocks)) for first in range(0, self.blocks, _PIECE)]

    def _elements(self, row: int, first: int, last: int, buffer: torch.Tensor) -> tuple[int, int]:
        """Where blocks of a chunk lie in the buffer; the last ones may be beyond its end."""
        begin, end = (row * self.chunk + block * self.block for block in (first, last))
        return min(begin, buffer.numel()), min(end, buffer.numel())

    @staticmethod
    def _quantise(values: torch.Tensor, message: _Message, place: tuple[int, int, int], scratch: torch.Tensor) -> None:
        """Writes blocks into a message; ``values``, shape (blocks, block), become what the integers leave over.

        Args:
            place: row of the message, first block, block after the last.
        """
        row, first, last = place
        numbers = scratch[: last - first]
        scales = message.scales[row, first:last]
        torch.abs(values, out=numbers)
        # Of a block with NaN this is NaN, so such blocks arrive as NaN.
        torch.mul(numbers.amax(dim=1, keepdim=True), 1 / _LARGEST, out=scales)
        # A block of zeros, or of numbers too small for a scale, is sent as zeros.
        inverse = scales.reciprocal().nan_to_num_(nan=0.0, posinf=0.0)
        torch.mul(values, inverse, out=numbers)
        # To the nearest: at most 127, as the largest value of the block is 127 scales, so nothing has to be clamped.
        numbers.round_()
        message.values[row, first:last].copy_(numbers)
        values.addcmul_(numbers, scales, value=-1)

    @staticmethod
    def _forget_errors_of_infinities(errors: torch.Tensor, scales: torch.Tensor) -> None:
        # NaN that were kept would come back in every later step; the scaler skips this one step only.
        infinite = ~scales.isfinite()
        if infinite.any():
            errors.masked_fill_(infinite, 0.0)


@wire_format("int8")
class Int8Reduction(TwoMessageReduction):
    """All-to-all and all-gather of 8-bit integers with error feedback."""

    @classmethod
    def wire_bytes(cls, communication: Communication, buffer: torch.Tensor, shapes: Sequence[torch.Size]) -> int:
        return int8_bytes(buffer.numel())

    def make_buffer(self, buffer: torch.Tensor, index: int, shapes: Sequence[torch.Size]) -> LossyBuffer:
        return _Int8Buffer(self, buffer.numel(), buffer.device)


def int8_bytes(size: int) -> int:
    """Bytes of the integers and scales that stand for ``size`` elements."""
    return size + -(-size // BLOCK) * _SCALE_BYTES
