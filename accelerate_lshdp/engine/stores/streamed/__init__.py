# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""One copy of the parameters for each node, in memory that its ranks share: `lsdp` and `group_sharding` on CPUs."""
