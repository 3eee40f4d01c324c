# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The machines of a run from one of them: reached over ssh, and examined before a run is started on them."""
