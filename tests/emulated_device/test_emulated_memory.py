# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Memory of the emulated device and pinned memory: limits, use again, and counts, as with CUDA's allocators."""

from __future__ import annotations

from collections.abc import Callable

import pytest


pytestmark = [
    pytest.mark.compiler,
    pytest.mark.slow,
    pytest.mark.timeout(300),  # the first test builds the device
]

MEBIBYTE = 2**20
OnDevice = Callable[..., list]


def test_limit(on_device: OnDevice) -> None:
    (found,) = on_device("device_programs", "limit_of_memory")
    assert f"Tried to allocate {2 * MEBIBYTE} bytes" in found["message"]
    assert found["after"] == 2 * MEBIBYTE


def test_memory_is_not_freed_under_work(on_device: OnDevice) -> None:
    """A thread may give memory back with work queued while another one empties the cache."""
    assert on_device("device_programs", "cache_emptied_beside_work") == [True]


def test_memory_is_used_again_by_its_stream_only(on_device: OnDevice) -> None:
    assert on_device("device_programs", "memory_used_again") == [
        {
            "other stream": False,
            "same stream": True,
            "while a recorded stream uses it": False,
            "after that": True,
        }
    ]


def test_pinned_memory(on_device: OnDevice) -> None:
    assert on_device("device_programs", "pinned_memory") == [
        {
            "used": 8 * MEBIBYTE,
            "is pinned": True,
            "used again while it is copied": False,
            "used again": True,
            "copied": True,
            "races": [],
        }
    ]


def test_counts_are_of_rounded_sizes(on_device: OnDevice) -> None:
    assert on_device("device_programs", "counted_memory") == [{"now": 1024, "peak": 2048}]


def test_storage_that_is_resized(on_device: OnDevice) -> None:
    assert on_device("device_programs", "resized_storage") == [{"freed": 0, "sum": 3 * 1024, "size": 8192}]
