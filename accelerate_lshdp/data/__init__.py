# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""From a user's loader to each rank's micro-batches, and back from a batch to its place in the data."""
