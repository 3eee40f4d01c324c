# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The ``accelerate-lshdp`` command line, one file a subcommand."""
