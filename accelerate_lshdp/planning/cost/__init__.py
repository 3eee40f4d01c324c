# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Predicted seconds, bytes and memory of a training step."""
