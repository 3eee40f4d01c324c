# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Runs unmodified scripts: replaces the Accelerator class before a script imports it."""
