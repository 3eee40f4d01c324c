# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`TrialLosses`: losses that a Trainer computes of batches by way of trial, which leave no trace in it."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from accelerate.logging import get_logger
from torch import nn

from accelerate_lshdp.accelerator.losses.forwards import Forward
from accelerate_lshdp.accelerator.losses.parts import undisturbed


if TYPE_CHECKING:
    from transformers import Trainer

logger = get_logger(__name__)


class TrialLosses:
    """Computes losses of one Trainer, without dropout, gradients and metrics.

    Args:
        trainer: whose `compute_loss` is called.

    Attributes:
        have_auxiliary: whether the model is known to add a loss that balances a mixture of experts.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.have_auxiliary = False

    def of(self, *cases: tuple[Any, Any]) -> list[float]:
        """The losses of batches, each with the number of items that it is given; NaN for one that fails (collective).

        All cases have as many forwards, of which other ranks of a sharded model take part in each.
        """
        trainer = self._trainer
        forwards = _Forwards(trainer.model_wrapped)
        with undisturbed(trainer.model), _alone(trainer), trainer.compute_loss_context_manager(), forwards.noted():
            losses = [self._loss(forwards, *case) for case in cases]
        if forwards.have_auxiliary and not self.have_auxiliary:
            self.have_auxiliary = True
            logger.warning(
                "the model adds an auxiliary loss (aux_loss) that is no mean over samples or labels; it counts like "
                "the rest, so it is not exactly that of one process"
            )
        return losses

    def _loss(self, forwards: _Forwards, batch: Any, items: Any) -> float:
        trainer = self._trainer
        forwards.begin()
        try:
            inputs = {**trainer._prepare_inputs(batch)}
            loss = trainer.compute_loss(trainer.model_wrapped, inputs, num_items_in_batch=items)
            return loss.float().mean().item()
        except Exception as error:
            if trainer.accelerator.policies.is_sharded:
                forwards.complete()
            logger.warning_once(
                f"a trial of the loss failed, so it tells nothing: {type(error).__name__}: {error}. The training "
                "goes on; the loss is taken for what others of its kind are"
            )
            return math.nan


class _Forwards:
    """The forwards of a model in each case of a trial: a case that fails catches up on those that it still owes.

    Ranks of a sharded model make each forward together.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.have_auxiliary = False
        """Whether a loss of the model has a part that balances a mixture of experts."""
        self._calls: list[tuple[tuple, dict[str, Any]]] = []  # of the first case
        self._first = True
        self._started = self._ended = 0

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        handles = (
            self._model.register_forward_pre_hook(self._before, with_kwargs=True),
            self._model.register_forward_hook(self._after),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def begin(self) -> None:
        """The next case begins."""
        self._first = not self._calls
        self._started = self._ended = 0

    def complete(self) -> None:
        """Makes the forwards that this case has left out; one that broke off has left the others waiting."""
        if self._started == self._ended:
            for args, kwargs in self._calls[self._ended :]:
                self._model(*args, **kwargs)

    def _before(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._started += 1
        if self._first:
            self._calls.append((args, kwargs))

    def _after(self, model: nn.Module, args: tuple, output: Any) -> None:
        self._ended += 1
        # Small beside the rest, as its coefficient is, so that no comparison of losses shows it.
        self.have_auxiliary |= Forward(model, {}, output).auxiliary != 0


@contextlib.contextmanager
def _alone(trainer: Trainer) -> Iterator[None]:
    """Inside, what `compute_loss` gathers for its metrics is this rank's only, and leaves no trace in them.

    A rank whose trial fails would not take part.
    """
    own = vars(trainer.accelerator)
    names = ("gather", "gather_for_metrics", "reduce", "pad_across_processes")
    given = {name: own[name] for name in names if name in own}  # a script may have put some on the object itself
    metrics = copy.deepcopy(getattr(trainer, "_metrics", None))  # as TRL's Trainers keep them
    own.update(dict.fromkeys(names, _itself))
    try:
        yield
    finally:
        for name in names:
            del own[name]
        own.update(given)
        if metrics is not None:
            trainer._metrics = metrics


def _itself(*args: Any, **kwargs: Any) -> Any:
    """What would be gathered, by its place or by one of its names."""
    return args[0] if args else kwargs["input_data" if "input_data" in kwargs else "tensor"]
