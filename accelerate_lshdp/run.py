# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""``python -m accelerate_lshdp.run``: see `accelerate_lshdp.shim.script`."""

from accelerate_lshdp.shim.script import main


if __name__ == "__main__":
    main()
