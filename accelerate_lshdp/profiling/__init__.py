# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Measures what the planner needs to know about each rank."""

from accelerate_lshdp.profiling.documents import read_profiles, write_profiles
from accelerate_lshdp.profiling.emulation import Slowdown
from accelerate_lshdp.profiling.local_step import MicroBatchTrainer, measure_time_curve, probe_sizes


__all__ = [
    "MicroBatchTrainer",
    "Slowdown",
    "measure_time_curve",
    "probe_sizes",
    "read_profiles",
    "write_profiles",
]
