# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Exact batch sizes: cuts of a global batch over unequal ranks."""
