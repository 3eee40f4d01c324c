# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Lets every Python process of a run of the suite answer Hub names and record its training.

Python imports a module of this name at its start when its folder is on PYTHONPATH. Without the suite's variables, and
in processes that never import the libraries, it does nothing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


if os.environ.get("WILD_HUB"):
    folder = Path(__file__).resolve().parent.parent
    sys.path += [str(folder), str(folder.parent)]

    from import_hooks import after_import

    def _answer(what: str) -> None:
        import hub_stand_in

        getattr(hub_stand_in, what)()

    def _end_quietly() -> None:
        import quiet_end

        quiet_end.install()

    def _record() -> None:
        import recorder

        recorder.install()

    after_import("accelerate", lambda: _answer("name_retired_device"))
    after_import("datasets", lambda: _answer("answer_data_sets"))
    after_import("evaluate", lambda: _answer("answer_metrics"))
    after_import("timm", lambda: _answer("answer_image_models"))
    after_import("torch", lambda: _answer("declare_image_operators"))
    if os.environ.get("WILD_RECORD"):
        after_import("torch.optim", _record)
    if os.environ.get("WILD_PLAIN"):
        after_import("torch.nn.parallel", _end_quietly)
