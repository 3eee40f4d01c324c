# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""One process among the others: topology, process groups, agreement, failures, processor cores and shutdown."""
