# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The table of formats in which gradients travel between nodes. Needs no torch.

Plans, the planner, estimates, benchmarks and the command line read it; the engine's part of a format is one file of
``engine/wire``, registered under the same name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WireFormat:
    """The properties of one format.

    Args:
        wire_share: bytes on the wire for each byte of a gradient in fp32; None: they depend on the parameters' shapes.
        kept_share: bytes that a rank keeps for each byte of its gradient in fp32: copies that travel, and errors.
        kept_owner_share: bytes that it keeps for each byte of the part whose sum it makes for all ranks; that part is
            the gradient divided by their number.
        conversion_seconds: CPU seconds on one core for compressing and decompressing a byte of fp32, for estimates.
            Assumed, not measured.
        remembers: whether a rank keeps what it has left out of a step for the next ones (error feedback).
        between_nodes_only: whether it needs the same ranks to reduce the same buffers between nodes, so that the
            reduce-scatter of world-sharded strategies cannot use it.
        is_added: whether values can be added as they travel, each sum rounded to the format by the backend; else they
            are exchanged, added and sent again.
        merges_buckets: whether it sends so little that the latency of small messages would cost more than overlapping
            them gains.
        options: names of the options of ``communication`` that belong to it alone.
    """

    wire_share: float | None
    kept_share: float
    conversion_seconds: float
    remembers: bool = False
    between_nodes_only: bool = False
    is_added: bool = True
    merges_buckets: bool = False
    options: tuple[str, ...] = ()
    kept_owner_share: float = 0.0

    def kept_bytes(self, gradient_bytes: float, ranks: int) -> float:
        """Bytes that a rank keeps beside its gradient.

        Args:
            gradient_bytes: of the gradient in fp32.
            ranks: those that reduce it. One alone sends nothing, and keeps nothing.
        """
        if ranks == 1:
            return 0.0
        return gradient_bytes * (self.kept_share + self.kept_owner_share / ranks)


#: Bytes of int8 for each byte of fp32: integers, and one scale of 4 bytes for each block of 1024 values.
_INT8_SHARE = 0.25 * (1 + 4 / 1024)

WIRE_FORMATS: dict[str, WireFormat] = {
    "fp32": WireFormat(wire_share=1.0, kept_share=0.0, conversion_seconds=0.0),
    "bf16": WireFormat(wire_share=0.5, kept_share=0.5, conversion_seconds=0.3e-9),
    "int8": WireFormat(
        wire_share=_INT8_SHARE,
        # Errors in fp32 and the messages to and from the owners; the same of the part that the rank owns, sent once.
        kept_share=1 + 2 * _INT8_SHARE,
        kept_owner_share=1 + _INT8_SHARE,
        conversion_seconds=0.8e-9,
        remembers=True,
        between_nodes_only=True,
        is_added=False,  # ranks have different scales
    ),
    "powersgd": WireFormat(
        wire_share=None,
        kept_share=1.0,
        conversion_seconds=1.0e-9,
        remembers=True,
        between_nodes_only=True,
        merges_buckets=True,
        options=("powersgd_rank", "powersgd_warmup_steps"),
    ),
}
