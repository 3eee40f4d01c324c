# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""From a model to gradients that are final on every rank. Imports nothing of accelerate or transformers."""
