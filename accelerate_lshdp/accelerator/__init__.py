# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""LSHDPAccelerator: accelerate's Accelerator with unequal batches and a strategy for parameters."""
