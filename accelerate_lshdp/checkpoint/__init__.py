# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints of a run: one format for all strategies, complete on every node, never half-written."""
