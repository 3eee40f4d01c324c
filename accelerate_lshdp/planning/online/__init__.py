# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Automatic batch sizes: curves learned from training steps, and the controller that changes the sizes."""
