# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Estimates of memory, bytes and step times for models and clusters without measurements, weights or devices."""
