# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The backend of the process groups of a run whose plan says that its nodes have different devices."""

from __future__ import annotations

from typing import Any

from accelerate.utils import InitProcessGroupKwargs

from accelerate_lshdp.documents.plan import Plan


def meet_on_hosts(plan: Plan, keywords: dict[str, Any]) -> None:
    """Lets accelerate make process groups over gloo if the plan's nodes mix processors and devices.

    accelerate would use NCCL on nodes with GPUs, which ranks on processors cannot join.

    Args:
        plan: of the run.
        keywords: of the accelerator; its ``kwargs_handlers`` are changed, unless the script has chosen gloo itself.

    Raises:
        ValueError: the script has chosen another backend.
    """
    if plan.cluster is None or not plan.cluster.mixes_devices:
        return
    handlers = list(keywords.get("kwargs_handlers") or ())
    own = next((handler for handler in handlers if isinstance(handler, InitProcessGroupKwargs)), None)
    if own is None:
        keywords["kwargs_handlers"] = [*handlers, InitProcessGroupKwargs(backend="gloo")]
    elif own.backend in (None, InitProcessGroupKwargs().backend):  # given for the time-out, say
        own.backend = "gloo"
    elif own.backend != "gloo":
        raise ValueError(
            f"found InitProcessGroupKwargs(backend={own.backend!r}) with a plan whose nodes train on "
            f"{', '.join(str(node.device) for node in plan.cluster.nodes)}, expected backend='gloo', in which "
            "processors and devices can meet, or none"
        )
