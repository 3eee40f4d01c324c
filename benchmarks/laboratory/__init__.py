# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Trains the same model with every strategy on one cluster, in turns, and compares: ``accelerate-lshdp bench``."""
