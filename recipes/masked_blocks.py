# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Masks for masked language models that are the same whatever the plan, the rank and the order of reading."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from datasets import Dataset as Rows
from torch.utils.data import Dataset


IGNORED_LABEL = -100


class MaskedBlocks(Dataset):
    """Blocks of tokens of which some are to be predicted; the masks depend on the seed and on the block's index.

    As for BERT, a token is chosen with `probability`. Of the chosen ones 80 % become the mask token, 10 % a random
    one, and 10 % stay; the labels of all others are -100. A collator that masks would draw one random number after
    another, and a sample would have other masks on another rank or with another batch size.

    Args:
        rows: a data set with a column `input_ids`.
        tokenizer: with a mask token; special tokens are never chosen.
        probability: of a token to be chosen. At least one of each block is, so that a batch always has a loss.
        seed: of the masks.
    """

    def __init__(self, rows: Rows, tokenizer: Any, probability: float, seed: int) -> None:
        self.rows = rows
        self.probability = probability
        self.seed = seed
        self.epoch = 0
        self.mask_token = tokenizer.mask_token_id
        self.special_tokens = tokenizer.all_special_ids
        self.vocabulary = len(tokenizer)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = np.array(self.rows[index]["input_ids"])
        random = np.random.default_rng((self.seed, self.epoch, index))
        places = np.flatnonzero(~np.isin(ids, self.special_tokens))
        chosen = places[random.random(len(places)) < self.probability]
        if len(chosen) == 0 and len(places) > 0:
            chosen = random.choice(places, size=1)
        labels = np.full_like(ids, IGNORED_LABEL)
        labels[chosen] = ids[chosen]

        becomes = random.random(len(chosen))
        ids[chosen[becomes < 0.8]] = self.mask_token
        replaced = chosen[becomes >= 0.9]
        ids[replaced] = random.integers(self.vocabulary, size=len(replaced))
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}


class NewlyMaskedBlocks(MaskedBlocks):
    """Blocks with other masks in every epoch, for training.

    The prepared loader calls `set_epoch` before each pass, also where a run is resumed in the middle of an epoch.
    """

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
