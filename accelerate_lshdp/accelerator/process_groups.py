# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The backend of the process groups that accelerate makes for an accelerator."""

from __future__ import annotations

from typing import Any

from accelerate.utils import InitProcessGroupKwargs

from accelerate_lshdp.runtime.launched_devices import choose_backend


def meet_other_devices(on_cpu: bool, keywords: dict[str, Any]) -> None:
    """Lets accelerate make process groups over gloo if ranks on processors are beside ranks with devices (collective).

    Args:
        on_cpu: whether this rank trains on its processor.
        keywords: of the accelerator; ``kwargs_handlers`` is replaced where the backend has to be another one.

    Raises:
        RuntimeError: on all ranks, if the script has chosen another backend, or ranks did not start in time.
    """
    handlers = list(keywords.get("kwargs_handlers") or ())
    own = next((handler for handler in handlers if isinstance(handler, InitProcessGroupKwargs)), None)
    # accelerate's own default cannot be told from the same name given by the script, and is replaced, too.
    default = InitProcessGroupKwargs().backend
    asked = None if own is None or own.backend == default else own.backend
    backend = choose_backend(on_cpu, asked, None if own is None else own.timeout)
    if backend == asked:
        return
    if own is None:
        keywords["kwargs_handlers"] = [*handlers, InitProcessGroupKwargs(backend=backend)]
    else:
        own.backend = backend
