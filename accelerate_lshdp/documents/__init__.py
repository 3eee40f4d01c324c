# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The files that users write and commands exchange, and the table of strategies. Needs no torch."""
