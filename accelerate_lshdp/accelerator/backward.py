# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""One backward: the loss is weighted by its share of the step, and all ranks sum its gradients."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from accelerate.logging import get_logger

from accelerate_lshdp.accelerator.accumulation import Accumulation
from accelerate_lshdp.accelerator.accumulation_windows import INSIDE_WINDOW, LEFT_OPEN, LEFT_OUT
from accelerate_lshdp.accelerator.ranks_in_step import FAILED, require_same_step
from accelerate_lshdp.accelerator.session import Session
from accelerate_lshdp.accelerator.several_models import models_that_took_part, require_same_models
from accelerate_lshdp.data.place import MicroBatchPlace
from accelerate_lshdp.data.weighting import LossWeighting, weigh
from accelerate_lshdp.engine.empty_backward import gradients_of_zero
from accelerate_lshdp.engine.flow import Flow
from accelerate_lshdp.engine.prepared import PreparedModel
from accelerate_lshdp.engine.stores.shared.memory import NodeMemoryError
from accelerate_lshdp.runtime.agreement import all_meet_here
from accelerate_lshdp.runtime.failures import CommunicationError
from accelerate_lshdp.runtime.option_advice import option_advice
from accelerate_lshdp.runtime.step_exchange import PendingReports


logger = get_logger(__name__)


class Backward:
    """Makes the backwards of one process.

    Args:
        session: with the models and what ranks tell each other.
        accumulation: which batches are accumulated.
    """

    def __init__(self, session: Session, accumulation: Accumulation) -> None:
        self._session = session
        self._accumulation = accumulation

    def run(
        self,
        loss: torch.Tensor,
        kwargs: dict[str, Any],
        *,
        accumulation_steps: int,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        """Adds a loss's share to the gradients; after the last one of a step they are final on all ranks.

        Args:
            loss: of this rank.
            kwargs: of ``Tensor.backward``.
            accumulation_steps: global batches of a step, for a loss of no batch.
            scaler: of fp16 losses.

        Raises:
            RuntimeError: see ``LSHDPAccelerator.backward``.
        """
        session = self._session
        models, tracker, losses = session.engine.models, session.tracker, session.losses
        for prepared in models:
            prepared.require_own()  # not in the step only: the other one may follow the optimizer's steps by now
        if session.out_of_step is not None:
            require_same_step(session.out_of_step, session.topology.name_of)
        place = self._accumulation.take_batch()
        self._refuse_wrong_backward(place)
        left_open = self._check_windows()
        self._settle_total(place)
        if tracker.problem is not None and session.world_size == 1:
            problem, tracker.problem = tracker.problem, None
            raise RuntimeError(f"accelerator.backward {problem}")
        finder = losses.finder
        if finder is not None:
            session.engine.collective_begins()  # ranks may tell each other what the loss is
        share = losses.take(place, loss, tracker, accumulation_steps)
        if finder is not None:
            tracker.problem = tracker.problem or finder.problem
            finder.problem = None
        tracker.require_one_weight(finder is not None and finder.by_labels)
        weight = share * session.engine.loss_multiplier
        loss = weigh(loss, weight)
        if scaler is not None:
            loss = scaler.scale(loss)
        session.unstepped.backward_begins()
        for prepared in models:
            prepared.local.begin(prepared.has_gradients())
        with Flow(models) as flow:
            flow.begin()
            meeting = None
            if any(prepared.synchronise_next for prepared in models):
                meeting = session.exchange.announce("backward", tracker.within_window and not left_open)
            require_same_models(session.exchange, loss, models, session.policies.shard_groups)
            self._run_autograd(loss, kwargs)
            if meeting is not None:
                meeting.require_all()  # else gradients are waited for that do not come
            if finder is not None and any(prepared.synchronise_next for prepared in models):
                finder.require_same_looks()  # likewise
            took_part = models_that_took_part(session.exchange, models)
            synchronised = [prepared for prepared in took_part if prepared.synchronise_next]
            session.unstepped.produced(took_part)
            flow.deliver(took_part)
            accumulated = [prepared for prepared in took_part if prepared in self._accumulation.models]
            session.windows.trained(accumulated, tracker.trained, beside=tracker.working_on)
            pending = self._report(synchronised)  # while the last gradients travel
            flow.finish(took_part)
            alone = weight if place is None else 1 / (place.micro_batches * place.accumulation_steps)
            for prepared in took_part:
                prepared.local.clear() if prepared.synchronise_next else prepared.local.add(weight, alone)
            # As finishing has left them.
            session.held_gradients.added(accumulated, tracker.trained, is_alone=session.world_size == 1)
            session.held_gradients.reached(prepared for prepared in took_part if prepared not in accumulated)
        if pending is not None:
            self._take_reports(pending, synchronised)

    def _settle_total(self, place: MicroBatchPlace | None) -> None:
        session = self._session
        begins = session.engine.collective_begins
        total = session.total.before_backward(place, session.plan, session.world_size, begins)
        if total is not None:
            session.settle_total(total)

    def _check_windows(self) -> bool:
        """Whether this backward begins a step while this rank has gradients of another one.

        Then it synchronises, whatever its place: where every batch begins a step, ranks would never tell each other.
        Gradients that were dropped, but not to None, may be 0 on some ranks only, so these have to meet as well.
        """
        models, windows, tracker = self._accumulation.models, self._session.windows, self._session.tracker
        if not models:
            return False
        held = self._session.held_gradients
        batches = tracker.trained
        left = [
            prepared for prepared in models if windows.is_left_open(prepared, batches) and prepared.has_gradients()
        ]
        if any(prepared.holds_gradients() for prepared in left):
            tracker.problem = tracker.problem or LEFT_OPEN
        elif found := next(filter(None, (held.find_problem(prepared, batches) for prepared in models)), None):
            tracker.problem = tracker.problem or found
        elif windows.begins_inside(batches):
            tracker.problem = tracker.problem or INSIDE_WINDOW
        elif windows.leaves_out(batches):
            tracker.problem = tracker.problem or LEFT_OUT
        for prepared in left:
            prepared.synchronise_next = True
        return bool(left)

    def _run_autograd(self, loss: torch.Tensor, kwargs: dict[str, Any]) -> None:
        """``loss.backward``; what fails on this rank is told to the others, which would wait for its gradients."""
        session = self._session
        try:
            with contextlib.nullcontext() if session.losses.last else gradients_of_zero(session.engine.models):
                loss.backward(**kwargs)
        except (CommunicationError, NodeMemoryError):
            raise  # there is nobody to tell
        except Exception:
            if session.world_size > 1:
                self._give_up_on_all_ranks()
            raise

    def _give_up_on_all_ranks(self) -> None:
        """Tells the others that a backward failed on this rank, while they wait in its collectives for this one.

        Where it can, this rank does its part in these. Else it can go on only if the backward failed on all ranks.

        Raises:
            RuntimeError: it did not; the others get an error of communication when this process ends.
        """
        session = self._session
        models = session.engine.models
        if not all(prepared.can_be_completed for prepared in models):
            if not all_meet_here("lshdp/failed backward"):
                raise RuntimeError(
                    f"a backward failed on rank {session.rank} and not on the others, which cannot go on "
                    f"without its part (strategy {session.strategy} gathers parameters in the middle of it): end this "
                    "process, they end with it. Go on from the last checkpoint"
                )
            return
        # The only model is that of the loss, also if the backward failed before it came to any of its gradients.
        of_loss = models if len(models) == 1 else models_that_took_part(session.exchange, models)
        synchronised = [prepared for prepared in of_loss if prepared.synchronise_next]
        if not synchronised:
            return
        for prepared in synchronised:
            prepared.took_part = True
            prepared.deliver_backward()
        report = session.rank_step.complete(session.timer.backward_ends(), FAILED)
        pending = session.exchange.after_backward(report, [prepared.no_usage() for prepared in models])
        for prepared in synchronised:
            prepared.finish_backward()
        reports, _ = pending.wait()
        if not all(report.problem for report in reports):
            session.out_of_step = reports  # the others have stopped: there will be nobody to go on with

    def _report(self, synchronised: list[PreparedModel]) -> PendingReports | None:
        """Begins to tell the other ranks what this one has computed, in the last backward of a step."""
        session = self._session
        report = session.timer.backward_ends()
        for batch in session.tracker.first_time():
            session.batch_trained(batch)
        if not synchronised:
            return None
        if session.sizing is not None:
            report = session.sizing.complete(report)
        problem, session.tracker.problem = session.tracker.problem, None
        keeper = session.keeper
        report = session.rank_step.complete(report, problem)._replace(
            stop_signal=session.stop_requests.received, pauses=int(keeper is not None and keeper.pause_wanted)
        )
        return session.exchange.after_backward(
            report,
            [
                prepared.take_usage() if prepared in synchronised else prepared.no_usage()
                for prepared in session.engine.models
            ],
        )

    def _take_reports(self, pending: PendingReports, synchronised: list[PreparedModel]) -> None:
        """Ends a step's last backward with what all ranks have told of it (collective).

        Raises:
            RuntimeError: on all ranks, if they are not in step, or one found a problem.
        """
        session = self._session
        reports, used = pending.wait()
        require_same_step(reports, session.topology.name_of)
        session.stop_requests.agree([report.stop_signal for report in reports])
        if session.keeper is not None:
            session.keeper.pause_agreed |= any(report.pauses for report in reports)
        session.timer.take_reports(reports)
        if session.sizing is not None and not session.sizing.take_reports(reports):
            session.check_agreement(
                f"trained with batch sizes {session.sizing.trained_sizes}",
                "the batch sizes of this step, which they decide on from the same numbers (install the same "
                "versions of Python and all packages on all nodes, and let all ranks fetch the same batches)",
            )
        for prepared, used_parameters in zip(session.engine.models, used, strict=True):
            if prepared in synchronised:
                prepared.drop_unused(used_parameters)
        session.engine.share_statistics()

    def _refuse_wrong_backward(self, place: MicroBatchPlace | None) -> None:
        session = self._session
        tracker, plan = session.tracker, session.plan
        if session.world_size > 1 and session.was_freed and not session.engine.models:
            raise RuntimeError(
                "found accelerator.backward after accelerator.free_memory(), which has forgotten all models: no rank "
                "would get the gradients of the others. Call prepare() again, or free_memory() after the last step"
            )
        if session.within_evaluation or (tracker.in_evaluation_pass and session.trained_models()):
            raise RuntimeError(
                "backward was called on a batch of an evaluation pass (the models were in eval mode when the pass "
                "began, as models of from_pretrained are at first): call model.train() before the loop over the loader"
            )
        if plan.has_accumulation and not tracker.accumulating:
            raise RuntimeError(
                "the plan accumulates gradients over several micro-batches, but backward was called outside "
                "accelerator.accumulate(); put the training step in `with accelerator.accumulate(model):`"
            )
        sizes = plan.batch_sizes
        unequal = sizes is not None and (session.sizing is not None or len(set(plan.micro_batches)) > 1)
        if place is None and unequal:
            if tracker.in_evaluation_pass and session.engine.models and session.optimizers:
                raise RuntimeError(
                    "none of the prepared optimizers updates a prepared model, so the pass over the loader counts as "
                    "an evaluation pass, whose batches have no weight. Make the optimizer from the parameters of the "
                    "model that prepare() gets"
                )
            if session.options.loss_weighting is not LossWeighting.NONE:
                raise RuntimeError(
                    f"the plan's batch sizes {sizes} are unequal or may become so, but the loss is of no batch of a "
                    "prepared loader, so its weight is unknown. Iterate over the loader that prepare() returned, or "
                    f"weight losses yourself with {option_advice('loss_weighting', 'none')}"
                )
        if place is None and session.world_size > 1 and not session.samples_seen:
            self._tell_that_sizes_do_nothing()

    def _tell_that_sizes_do_nothing(self) -> None:
        plan = self._session.plan
        if plan.batch_sizes is not None or plan.leaves_total_open:
            what = "automatic batch sizes" if plan.leaves_total_open else f"the plan's batch sizes {plan.batch_sizes}"
            logger.warning_once(
                f"the loss is of no batch of a DataLoader that prepare() returned, so {what} change nothing: each "
                "rank trains on what the script gives it, and gradients are means over the ranks. Give prepare() the "
                "DataLoader itself, and not a generator that reads it"
            )
