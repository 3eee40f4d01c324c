# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""How well a language model predicts tokens of held-out text."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate_lshdp import LSHDPAccelerator


def evaluate_tokens(
    accelerator: LSHDPAccelerator, model: nn.Module, dataloader: DataLoader, *, next_token: bool
) -> dict[str, float]:
    """Mean loss a token and perplexity over the held-out text, each token with a label counted once.

    Args:
        accelerator: that has prepared the others.
        model: a language model of transformers.
        dataloader: batches with `input_ids` and `labels`.
        next_token: whether the logits at one position predict the next token, or the one that is there.
    """
    model.eval()
    total_loss, total_tokens = 0.0, 0
    for batch in dataloader:
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"]).logits
        targets = batch["labels"]
        if next_token:
            logits, targets = logits[:, :-1], targets[:, 1:]
        token_losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100, reduction="none"
        ).view_as(targets)
        # One loss sum and one token count a sample: so gather_for_metrics can drop the samples that were repeated to
        # fill the last batch, and samples with different numbers of tokens get the right weight.
        sample_losses, sample_tokens = accelerator.gather_for_metrics(
            (token_losses.double().sum(dim=1), (targets != -100).sum(dim=1))
        )
        total_loss += sample_losses.sum().item()
        total_tokens += sample_tokens.sum().item()
    loss = total_loss / total_tokens
    return {"eval_loss": loss, "perplexity": math.exp(loss)}
