# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A small transformer whose memory is measured, and the sizes of it that predictions start from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Causal attention and a perceptron, each behind a normalisation and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, tokens, width = x.shape
        parts = self.attention_in(self.before_attention(x)).view(samples, tokens, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(samples, tokens, width))
        return x + self.down(functional.gelu(self.up(self.before_perceptron(x))))


class Transformer(nn.Module):
    """A language model with blocks of one size.

    Args:
        blocks: their number.
        width: of the residual stream.
        vocabulary: rows of the embedding, and of the head, which is not tied to it.
        tokens: in a sample.
    """

    def __init__(self, blocks: int, width: int, vocabulary: int, tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads=8) for _ in range(blocks))
        self.normalisation = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.normalisation(x))
        return SimpleNamespace(loss=functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def batch(sizes: dict[str, Any], samples: int) -> dict[str, torch.Tensor]:
    """Token ids of some samples, the same in every call."""
    shape = samples, sizes["tokens"]
    ids = torch.randint(sizes["vocabulary"], shape, generator=torch.Generator().manual_seed(samples))
    return {"input_ids": ids, "labels": ids}
