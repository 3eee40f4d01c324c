"""One training step: accumulation, weighted backward, clipping."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from torch import nn

from accelerate_lshdp.accelerator.accumulation_windows import INSIDE_WINDOW, LEFT_OPEN, LEFT_OUT
from accelerate_lshdp.accelerator.ranks_in_step import FAILED, require_same_step
from accelerate_lshdp.accelerator.several_models import models_that_took_part, require_same_models
from accelerate_lshdp.data.place import MicroBatchPlace
from accelerate_lshdp.data.weighting import LossWeighting, loss_share, weigh
from accelerate_lshdp.engine.clipping import clip_grad_norm, clip_grad_value
from accelerate_lshdp.engine.empty_backward import gradients_of_zero
from accelerate_lshdp.engine.module_state import exclude_hooks_from_pickles
from accelerate_lshdp.engine.prepared import PreparedModel
from accelerate_lshdp.engine.stores.shared.memory import NodeMemoryError
from accelerate_lshdp.runtime.agreement import all_fail_here
from accelerate_lshdp.runtime.failures import CommunicationError, failures_explained
from accelerate_lshdp.runtime.option_advice import option_advice
from accelerate_lshdp.runtime.step_exchange import PendingReports, RankReport


if TYPE_CHECKING:
    from accelerate import Accelerator

    _Base = Accelerator
else:
    _Base = object

logger = get_logger(__name__)


class _InputWatch:
    """A hook that tells an accelerator what its models are called with; it does not keep the accelerator alive."""

    def __init__(self, accelerator: Stepping) -> None:
        self._reference = weakref.ref(accelerator)

    @property
    def accelerator(self) -> Stepping | None:
        return self._reference()

    def __call__(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        # In a compiled graph there is no memory to look at; then the batch that is alive is taken.
        if not torch.compiler.is_compiling() and self.accelerator is not None:
            self.accelerator._forward_begins(model, (args, kwargs))


class Stepping(_Base):
    """The part of ``LSHDPAccelerator`` that trains."""

    _given_share: float | None = None
    _accumulated: Sequence[PreparedModel] = ()
    _steps_before = 0
    _out_of_step: Sequence[RankReport] | None = None
    _last_share: float = 1.0  # of the loss that the last backward was called on

    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        self._tracker.expect()
        self._windows.begin_block()
        self._accumulated = self._models_among(models) if models else list(self._prepared)
        before = [prepared.requires_synchronisation for prepared in self._accumulated]
        step = self.step
        self._tracker.accumulating = True
        try:
            self._enter_place(step)
            if self._exchange.counts is not None and self._tracker.within_window:
                # Another model, which has a block of its own, must not let this rank meet the others here: they may
                # be in another micro-batch. A forward of it inside the block sets this again, and is refused then.
                for prepared in self._prepared:
                    prepared.synchronise_next = prepared.synchronise_next and prepared in self._accumulated
            yield
        finally:
            passed_over = self._tracker.leave()
            if passed_over:
                self._windows.passed_over(passed_over)
            for prepared, synchronises in zip(self._accumulated, before, strict=True):
                prepared.requires_synchronisation = synchronises
            self._accumulated = ()

    def _models_among(self, models: Sequence[Any]) -> list[PreparedModel]:
        """The prepared models that `accumulate` was given; all there are, if it was given something else."""
        found = list(dict.fromkeys(prepared for model in models for prepared in PreparedModel.within(model)))
        if found:
            return found
        # With none, no window would be followed: gradients of one that is left open would go into the next step.
        if len(self._prepared) > 1:
            given = ", ".join(type(model).__name__ for model in models)
            logger.warning_once(
                f"accumulate() was given no prepared model (found {given}), so it accumulates for all prepared ones; "
                "give it those that prepare() returned"
            )
        return list(self._prepared)

    def _enter_place(self, step: int) -> None:
        """Lets gradients of this rank's micro-batch wait for others of its step, or not, as its place says.

        Args:
            step: micro-batches that were accumulated before it.
        """
        place = self._tracker.current
        self._steps_before = step
        if place is None:
            self._do_sync()
        else:
            self.step = 0 if place.last_in_pass and self._loader_context.sync_with_dataloader else step + 1
            self.gradient_state._set_sync_gradients(place.window_end)
            if place.accumulation_steps != self.gradient_accumulation_steps:
                logger.warning_once(
                    f"gradient_accumulation_steps was set to {self.gradient_accumulation_steps} in a pass that began "
                    f"with {place.accumulation_steps}; it is used from the next pass over a loader on"
                )
        every_batch = self.use_distributed and self.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        for prepared in self._accumulated:
            # Also for a model that has no forward in this micro-batch: what its last one had is of the past.
            prepared.requires_synchronisation = self.sync_gradients or every_batch
            prepared.synchronise_next = prepared.requires_synchronisation

    def _watch_inputs(self, model: nn.Module) -> None:
        """Lets the forwards of a prepared model tell which batch the script works on."""
        known = model._forward_pre_hooks.values()
        if any(isinstance(hook, _InputWatch) and hook.accelerator is self for hook in known):
            return
        # Before the hook of PreparedModel, which asks whether to synchronise.
        model.register_forward_pre_hook(_InputWatch(self), with_kwargs=True, prepend=True)
        exclude_hooks_from_pickles(model)

    def _forward_begins(self, model: nn.Module, inputs: tuple) -> None:
        """A prepared model is called."""
        trains = torch.is_grad_enabled()
        validates = not trains and not model.training
        if self._tracker.forward(inputs, trains, validates) and self._tracker.accumulating:
            self._enter_place(self._steps_before)

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
        with contextlib.ExitStack() as stack:
            for prepared in PreparedModel.within(model):
                stack.enter_context(prepared.no_sync())
            yield

    @staticmethod
    @contextlib.contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        for prepared in PreparedModel.within(model):
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
            RuntimeError: in an evaluation pass, or outside ``accumulate`` when the plan has accumulation; or another
                accelerator has prepared a model since.
        """
        for prepared in self._prepared:
            prepared.require_own()  # not in the step only: the other one may follow the optimizer's steps by now
        if self._out_of_step is not None:
            require_same_step(self._out_of_step, self.topology.name_of)
        place = self._take_batch()
        self._refuse_wrong_backward(place)
        left_open = self._check_windows()
        self.run_total.before_backward(place)
        if self._tracker.problem is not None and self.num_processes == 1:
            problem, self._tracker.problem = self._tracker.problem, None
            raise RuntimeError(f"accelerator.backward {problem}")
        if self._losses is not None:
            for prepared in self._prepared:
                prepared.collective_begins()  # ranks may tell each other what the loss is
        self._last_share = self._share(place, loss)
        if self._losses is not None:
            self._tracker.problem = self._tracker.problem or self._losses.problem
            self._losses.problem = None
        self._tracker.require_one_weight(self._losses is not None and self._losses.by_labels)
        weight = self._last_share * (self._prepared[0].loss_multiplier if self._prepared else 1.0)
        loss = weigh(loss, weight)
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        self._unstepped.backward_begins()
        for prepared in self._prepared:
            prepared.local.begin(prepared.has_gradients())
            prepared.begin_backward(prepared.synchronise_next)
        meeting = None
        if any(prepared.synchronise_next for prepared in self._prepared):
            meeting = self._exchange.announce("backward", self._tracker.within_window and not left_open)
        try:
            require_same_models(self._exchange, loss, self._prepared, self.policies.shard_groups)
            self._run_autograd(loss, kwargs)
            if meeting is not None:
                meeting.require_all()  # else gradients are waited for that do not come
            if self._losses is not None and any(prepared.synchronise_next for prepared in self._prepared):
                self._losses.require_same_looks()  # likewise
            took_part = models_that_took_part(self._exchange, self._prepared)
            synchronised = [prepared for prepared in took_part if prepared.synchronise_next]
            self._unstepped.produced(took_part)
            for prepared in took_part:
                prepared.deliver_backward()
            accumulated = [prepared for prepared in took_part if prepared in self._accumulated]
            self._windows.trained(accumulated, self._tracker.trained, beside=self._tracker.working_on)
            pending = self._report(synchronised)  # while the last gradients travel
            for prepared in self._prepared:
                prepared.finish_backward() if prepared in took_part else prepared.cancel_backward()
            alone = weight if place is None else 1 / (place.micro_batches * place.accumulation_steps)
            for prepared in took_part:
                prepared.local.clear() if prepared.synchronise_next else prepared.local.add(weight, alone)
        except BaseException:
            for prepared in self._prepared:
                prepared.abandon_backward()
            raise
        if pending is not None:
            reports, counts = pending.wait()
            require_same_step(reports, self.topology.name_of)
            self._timer.told(reports)
            if self._sizing is not None and not self._sizing.told(reports):
                self.check_agreement(
                    f"trained with batch sizes {self._sizing.trained_sizes}",
                    "the batch sizes of this step, which they decide on from the same numbers (install the same "
                    "versions of Python and all packages on all nodes, and let all ranks fetch the same batches)",
                )
            for prepared, count in zip(self._prepared, counts, strict=True):
                if prepared in synchronised:
                    prepared.drop_unused(count)
            self._share_statistics()

    def _take_batch(self) -> MicroBatchPlace | None:
        """The place of the batch that the backward is of, which also says whether this is the last one of its step."""
        before = self._tracker.current
        place = self._tracker.take()
        if self._tracker.accumulating and place is not before:
            self._enter_place(self._steps_before)
        return place

    def _check_windows(self) -> bool:
        """Whether this backward begins a step while this rank has gradients of another one.

        Then it synchronises, whatever its place: where every batch begins a step, ranks would never tell each other.
        Gradients that were dropped, but not to None, may be 0 on some ranks only, so these have to meet as well.
        """
        if not self._accumulated:
            return False
        batches = self._tracker.trained
        left = [
            prepared
            for prepared in self._accumulated
            if self._windows.is_left_open(prepared, batches) and prepared.has_gradients()
        ]
        if any(prepared.holds_gradients() for prepared in left):
            self._tracker.problem = self._tracker.problem or LEFT_OPEN
        elif self._windows.begins_inside(batches):
            self._tracker.problem = self._tracker.problem or INSIDE_WINDOW
        elif self._windows.leaves_out(batches):
            self._tracker.problem = self._tracker.problem or LEFT_OUT
        for prepared in left:
            prepared.synchronise_next = True
        return bool(left)

    def _share_statistics(self) -> None:
        """Of all models, so that all ranks share the same, whichever of them a rank's loss depends on (collective)."""
        if self.num_processes > 1:
            for prepared in self._prepared:
                prepared.statistics.broadcast()

    def _run_autograd(self, loss: torch.Tensor, kwargs: dict[str, Any]) -> None:
        """``loss.backward``; what fails on this rank is told to the others, which would wait for its gradients."""
        try:
            with contextlib.nullcontext() if self._last_share else gradients_of_zero(self._prepared):
                loss.backward(**kwargs)
        except (CommunicationError, NodeMemoryError):
            raise  # there is nobody to tell
        except Exception:
            if self.num_processes > 1:
                self._give_up_on_all_ranks()
            raise

    def _give_up_on_all_ranks(self) -> None:
        """Tells the others that a backward failed on this rank, while they wait in its collectives for this one.

        Where it can, this rank does its part in these. Else it can go on only if the backward failed on all ranks.

        Raises:
            RuntimeError: it did not; the others get an error of communication when this process ends.
        """
        if not all(prepared.can_be_completed for prepared in self._prepared):
            if not all_fail_here("lshdp/failed backward"):
                raise RuntimeError(
                    f"a backward failed on rank {self.process_index} and not on the others, which cannot go on "
                    f"without its part (strategy {self.strategy} gathers parameters in the middle of it): end this "
                    "process, they end with it. Go on from the last checkpoint"
                )
            return
        # The only model is that of the loss, also if the backward failed before it came to any of its gradients.
        models = self._prepared if len(self._prepared) == 1 else models_that_took_part(self._exchange, self._prepared)
        synchronised = [prepared for prepared in models if prepared.synchronise_next]
        if not synchronised:
            return
        for prepared in synchronised:
            prepared.took_part = True
            prepared.deliver_backward()
        report = self._rank_step.complete(self._timer.backward_ends(), FAILED)
        pending = self._exchange.after_backward(report, [prepared.no_usage() for prepared in self._prepared])
        for prepared in synchronised:
            prepared.finish_backward()
        reports, _ = pending.wait()
        if not all(report.problem for report in reports):
            self._out_of_step = reports  # the others have stopped: there will be nobody to go on with

    def _report(self, synchronised: list[PreparedModel]) -> PendingReports | None:
        """Begins to tell the other ranks what this one has computed, in the last backward of a step."""
        report = self._timer.backward_ends()
        for batch in self._tracker.first_time():
            place = batch.place
            loader = batch.loader()
            if loader is not None:
                loader.batch_trained(place, batch.reading)
            if place.ends_global_batch:
                self._rank_step.trained([place])
                self._timer.samples += place.total_samples
                self.samples_seen += place.total_samples
                if self._sizing is not None:
                    self._sizing.global_batch_trained(place)
        if not synchronised:
            return None
        if self._sizing is not None:
            report = self._sizing.complete(report)
        problem, self._tracker.problem = self._tracker.problem, None
        report = self._rank_step.complete(report, problem)
        return self._exchange.after_backward(
            report,
            [
                prepared.take_usage() if prepared in synchronised else prepared.no_usage()
                for prepared in self._prepared
            ],
        )

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

    def _share(self, place: MicroBatchPlace | None, loss: torch.Tensor) -> float:
        if self._given_share is not None:
            return self._given_share
        if self._losses is not None and place is not None:
            return self._losses.share(place, loss)
        weighting = LossWeighting(self.lsdp_plugin.loss_weighting)
        if weighting is LossWeighting.TOKENS and self._tracker.begins_window():
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
