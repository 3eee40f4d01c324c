# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Weights that all ranks share and that are gathered slice by slice: operator splitting."""
