"""One training step: accumulation, weighted backward, clipping."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from torch import nn

from accelerate_lshdp.data_places import MicroBatchPlace
from accelerate_lshdp.engine.clipping import clip_grad_norm, clip_grad_value
from accelerate_lshdp.engine.failures import failures_explained
from accelerate_lshdp.engine.prepared import PreparedModel
from accelerate_lshdp.option_advice import option_advice
from accelerate_lshdp.step_exchange import PendingReports
from accelerate_lshdp.weighting import LossWeighting, loss_share, weigh


if TYPE_CHECKING:
    from accelerate import Accelerator

    _Base = Accelerator
else:
    _Base = object

logger = get_logger(__name__)


class Stepping(_Base):
    """The part of ``LSHDPAccelerator`` that trains."""

    _given_share: float | None = None

    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        place = self._tracker.take()
        if place is None:
            self._do_sync()
        else:
            self.step = 0 if place.last_in_pass and self._loader_context.sync_with_dataloader else self.step + 1
            self.gradient_state._set_sync_gradients(place.window_end)
            if place.accumulation_steps != self.gradient_accumulation_steps:
                logger.warning_once(
                    f"gradient_accumulation_steps was set to {self.gradient_accumulation_steps} in a pass that began "
                    f"with {place.accumulation_steps}; it is used from the next pass over a loader on"
                )
        every_batch = self.use_distributed and self.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        quiet = not (self.sync_gradients or every_batch)
        self._tracker.accumulating = True
        try:
            with contextlib.ExitStack() as stack:
                for model in models or [prepared.module for prepared in self._prepared]:
                    stack.enter_context(self.no_sync(model) if quiet else contextlib.nullcontext())
                yield
        finally:
            self._tracker.accumulating = False

    @contextlib.contextmanager
    def counting_losses(self, share: float) -> Iterator[None]:
        """Losses inside count by this share in their step, instead of that of their batch; shares of ranks are summed.

        For callers that know what their losses are means over, such as the Trainer.
        """
        self._given_share = share
        try:
            yield
        finally:
            self._given_share = None

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        prepared = PreparedModel.of(model)
        if prepared is None:
            yield
            return
        before = prepared.requires_synchronisation
        prepared.requires_synchronisation = False
        try:
            yield
        finally:
            prepared.requires_synchronisation = before

    @staticmethod
    @contextlib.contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        prepared = PreparedModel.of(model)
        if prepared is not None:
            prepared.synchronise_next = True
        yield

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Does nothing: with prepared loaders all ranks make the same number of steps."""
        if even_batches is not None:
            warnings.warn("join_uneven_inputs(even_batches=...) has no effect with LSHDPAccelerator", stacklevel=3)
        yield

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Adds this loss's share to the gradients; after the last call of a step ``.grad`` is final on all ranks.

        Args:
            loss: this rank's loss, a mean over its own micro-batch (see ``LSDPPlugin.loss_weighting``).
            **kwargs: for ``Tensor.backward``.

        Raises:
            RuntimeError: in an evaluation pass, or outside ``accumulate`` when the plan has accumulation.
        """
        place = self._tracker.current if self._tracker.accumulating else self._tracker.take()
        self._refuse_wrong_backward(place)
        loss = weigh(loss, self._share(place) * (self._prepared[0].loss_multiplier if self._prepared else 1.0))
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        for prepared in self._prepared:
            prepared.begin_backward(prepared.synchronise_next)
        meeting = None
        if any(prepared.synchronise_next for prepared in self._prepared):
            meeting = self._exchange.meet("backward", self._tracker.within_window)
        try:
            loss.backward(**kwargs)
            if meeting is not None:
                meeting.require_all()  # else gradients are waited for that do not come
            took_part = [prepared for prepared in self._prepared if prepared.took_part]
            synchronised = [prepared for prepared in took_part if prepared.synchronise_next]
            for prepared in took_part:
                prepared.deliver_backward()
            pending = self._report(place, synchronised)  # while the last gradients travel
            for prepared in self._prepared:
                prepared.finish_backward() if prepared in took_part else prepared.cancel_backward()
        except BaseException:
            for prepared in self._prepared:
                prepared.abandon_backward()
            raise
        if pending is not None:
            reports, counts = pending.wait()
            self._timer.told(reports)
            if self._sizing is not None and not self._sizing.told(reports):
                self.check_agreement(
                    f"trained with batch sizes {self._sizing.trained_sizes}",
                    "the batch sizes of this step, which they decide on from the same numbers (install the same "
                    "versions of Python and all packages on all nodes, and let all ranks fetch the same batches)",
                )
            for prepared, count in zip(synchronised, counts, strict=True):
                prepared.drop_unused(count)

    def _report(self, place: MicroBatchPlace | None, synchronised: list[PreparedModel]) -> PendingReports | None:
        """Begins to tell the other ranks what this one has computed, in the last backward of a step."""
        report = self._timer.backward_ends()
        if place is not None and self._tracker.first_time() and place.ends_global_batch:
            self._timer.samples += place.total_samples
            self.samples_seen += place.total_samples
            if self._sizing is not None:
                self._sizing.global_batch_trained(place)
        if not synchronised:
            return None
        if self._sizing is not None:
            report = self._sizing.complete(report)
        return self._exchange.after_backward(report, [prepared.take_usage() for prepared in synchronised])

    def _refuse_wrong_backward(self, place: MicroBatchPlace | None) -> None:
        if self._evaluation_depth or (self._tracker.in_evaluation_pass and self._trained_models()):
            raise RuntimeError(
                "backward was called on a batch of an evaluation pass (the models were in eval mode when the pass "
                "began, as models of from_pretrained are at first): call model.train() before the loop over the loader"
            )
        if self.plan.has_accumulation and not self._tracker.accumulating:
            raise RuntimeError(
                "the plan accumulates gradients over several micro-batches, but backward was called outside "
                "accelerator.accumulate(); put the training step in `with accelerator.accumulate(model):`"
            )
        sizes = self.plan.batch_sizes
        unequal = sizes is not None and (self._sizing is not None or len(set(self.plan.micro_batches)) > 1)
        if place is None and unequal:
            if self._tracker.in_evaluation_pass and self._prepared and self._optimizers:
                raise RuntimeError(
                    "none of the prepared optimizers updates a prepared model, so the pass over the loader counts as "
                    "an evaluation pass, whose batches have no weight. Make the optimizer from the parameters of the "
                    "model that prepare() gets"
                )
            if self.lsdp_plugin.loss_weighting is not LossWeighting.NONE:
                raise RuntimeError(
                    f"the plan's batch sizes {sizes} are unequal or may become so, but the loss is of no batch of a "
                    "prepared loader, so its weight is unknown. Iterate over the loader that prepare() returned, or "
                    f"weight losses yourself with {option_advice('loss_weighting', 'none')}"
                )

    def _share(self, place: MicroBatchPlace | None) -> float:
        if self._given_share is not None:
            return self._given_share
        weighting = LossWeighting(self.lsdp_plugin.loss_weighting)
        if weighting is LossWeighting.TOKENS and place is not None and place.window_start:
            counted = torch.tensor([float(place.window_tokens or 0)], dtype=torch.float64)
            self._window_tokens = self._exchange.sum(counted).item()
        return loss_share(
            place,
            weighting,
            world_size=self.num_processes,
            accumulation_steps=self.gradient_accumulation_steps if place is None else place.accumulation_steps,
            global_window_tokens=self._window_tokens,
        )

    @failures_explained()
    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clips the joint norm of all gradients, wherever their shards are (collective); returns the norm before."""
        self.unscale_gradients()
        return clip_grad_norm(_as_list(parameters), max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamps every element of the gradients to [-clip_value, clip_value]."""
        self.unscale_gradients()
        clip_grad_value(_as_list(parameters), clip_value)


def _as_list(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
