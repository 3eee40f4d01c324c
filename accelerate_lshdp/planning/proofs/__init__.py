# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Certificates of plans, and a check of them that shares no code with the planner."""
