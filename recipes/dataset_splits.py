# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The splits and columns of a data set, whatever it calls them."""

from __future__ import annotations

from datasets import DatasetDict


def with_held_out(dataset: DatasetDict, share: float) -> DatasetDict:
    """Splits `train` and `validation`: its own held-out split, or else a share of its training rows."""
    held_out = next((split for split in ("validation", "test") if split in dataset), None)
    if held_out is None:
        parts = dataset["train"].train_test_split(test_size=share, seed=0)
        return DatasetDict(train=parts["train"], validation=parts["test"])
    return DatasetDict(train=dataset["train"], validation=dataset[held_out])


def with_columns(dataset: DatasetDict, **columns: str) -> DatasetDict:
    """Only these columns, given as `new_name="old_name"`."""
    renamed = {old: new for new, old in columns.items() if old != new}
    return dataset.select_columns(list(columns.values())).rename_columns(renamed)
