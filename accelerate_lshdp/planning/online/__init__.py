# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Batch sizes while a run trains: curves learned from its steps, and when new sizes pay."""
