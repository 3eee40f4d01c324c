# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""One copy of the parameters for each node in host memory, streamed through devices: `lsdp`, and store `host`."""
