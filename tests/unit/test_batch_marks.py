# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Marks of batches that are copied or pickled with what holds them."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch

from accelerate_lshdp.data.batch_marks import TensorMark


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_is_the_same_mark(copied):
    mark = TensorMark(torch.ones(3))
    assert copied([mark])[0] is mark


def test_memory_outlives_a_copy():
    """In a process of its own: where the memory is freed under the tensor, the process ends."""
    code = (
        "import copy, torch\n"
        "from accelerate_lshdp.data.batch_marks import TensorMark\n"
        "for _ in range(200):\n"
        "    tensor = torch.ones(100)\n"
        "    mark = TensorMark(tensor)\n"
        "    copies = copy.deepcopy([mark] * 1), copy.deepcopy([mark] * 1)\n"
        "    del copies, mark\n"
        "    other = torch.zeros(100)\n"
        "    assert tensor.sum() == 100\n"
        "    del tensor, other\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_another_process_gets_a_mark_of_nothing():
    tensor = torch.ones(3)
    mark = TensorMark(tensor)
    read = pickle.loads(pickle.dumps(mark))
    assert mark.alive and not read.alive
    assert read.key != mark.key and not read.covers(tensor)
