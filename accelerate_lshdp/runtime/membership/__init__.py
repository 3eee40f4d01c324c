# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Who is in an elastic run: launchers agree on its members without one of them that must not be lost. No torch."""
