# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`Flow`: the protocol of one backward, for all models that it may reach."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import TracebackType

from accelerate_lshdp.engine.prepared import PreparedModel


class Flow:
    """One backward of several models: begin, autograd, deliver, finish.

    It is a context; whatever fails inside, all models forget the backward, and the next one starts anew::

        with Flow(models) as flow:
            flow.begin()
            loss.backward()
            flow.deliver(took_part)
            flow.finish(took_part)

    Args:
        models: those whose gradients autograd may produce, in the same order on all ranks.
    """

    def __init__(self, models: Sequence[PreparedModel]) -> None:
        self._models = models

    def __enter__(self) -> Flow:
        return self

    def begin(self) -> None:
        """Makes all models ready for autograd; each synchronises as its last forward says."""
        for model in self._models:
            model.state.is_alone = len(self._models) == 1
            model.begin_backward(model.synchronise_next)

    def deliver(self, took_part: Collection[PreparedModel]) -> None:
        """Hands in what autograd did not produce on this rank but others wait for; does not wait itself.

        Args:
            took_part: models that the loss of any rank depends on.
        """
        # The order of models is that of `prepare`: all ranks start the collectives of several models alike.
        for model in self._models:
            if model in took_part:
                model.deliver_backward()

    def finish(self, took_part: Collection[PreparedModel]) -> None:
        """Completes the backward: gradients of models that synchronise are final on all ranks afterwards.

        Args:
            took_part: as for `deliver`; the backward of the others is undone.
        """
        for model in self._models:
            if model in took_part:
                model.finish_backward()
            else:
                model.cancel_backward()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            return
        for model in self._models:
            model.abandon_backward()
        for model in self._models:
            model.explain(error)
