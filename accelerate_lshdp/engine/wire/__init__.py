# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""How gradients travel between ranks: exact, compressed, and in which buckets."""
