# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Estimates for models and clusters that nobody has measured: no weights, no device, no network."""
