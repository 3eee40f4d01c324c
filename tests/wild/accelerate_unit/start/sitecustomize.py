# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Python imports this at the start of every process that has this folder on its path, launched ones included.

Every `Accelerator` of such a process is ours, as under `accelerate_lshdp.run`.
"""

from accelerate_lshdp.shim.after_import import after_import
from accelerate_lshdp.shim.changes import change_accelerate


after_import("accelerate", change_accelerate)
