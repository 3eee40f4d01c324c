# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""OSDP without torch: which store each unit of a model gets, under the memory limit of each rank."""
