# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Strategies compared in turns on one cluster, and the report of the comparison."""
