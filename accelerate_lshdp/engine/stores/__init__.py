# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""How a model keeps its parameters: whole on every rank, shared inside a node, or sharded by FSDP2."""
