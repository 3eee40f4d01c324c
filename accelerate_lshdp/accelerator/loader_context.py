# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What prepared loaders ask of the session and tell it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import GradientState

from accelerate_lshdp.accelerator.session import Session
from accelerate_lshdp.data.place import PlacedBatch
from accelerate_lshdp.documents.plan import RankBatch
from accelerate_lshdp.runtime.groups import carried


class SessionLoaderContext:
    """``LoaderContext`` of a session (see ``accelerate_lshdp.data.context``).

    Args:
        session: its accelerator holds the loaders, which hold this: it is not kept alive.
        gradient_state: accelerate's, with the script's own accumulation.
    """

    def __init__(self, session: Session, gradient_state: GradientState) -> None:
        self._reference = weakref.ref(session)
        self._gradient_state = gradient_state
        self.rank = session.rank
        self.world_size = session.world_size

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_reference": self._reference()}  # a pickle has no weak references

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _reference=weakref.ref(state["_reference"]))

    @property
    def _session(self) -> Session:
        session = self._reference()
        if session is None:
            raise RuntimeError(
                "the accelerator that prepared this loader is gone; keep it as long as you use what it prepared"
            )
        return session

    def agree_on_seed(self, data_seed: int | None) -> None:
        """Takes rank 0's seed (collective), so that all ranks and all world sizes shuffle alike.

        Args:
            data_seed: accelerate's ``DataLoaderConfiguration.data_seed``; None: the seed of torch.
        """
        own = torch.initial_seed() if data_seed is None else data_seed
        seed = torch.tensor([own % 2**63], dtype=torch.int64, device=self._session.device)
        if self.world_size > 1:
            seed = carried(seed)
            dist.broadcast(seed, src=0)
        self._session.seed = int(seed.item())

    @property
    def seed(self) -> int:
        return self._session.seed

    @property
    def token_counter(self) -> Callable[[Any], int] | None:
        return self._session.losses.token_counter

    @property
    def rank_batches(self) -> tuple[RankBatch, ...] | None:
        batch = self._session.plan.batch
        return None if batch is None else batch.ranks

    @property
    def follows_script(self) -> bool:
        return self._session.total.follows_script

    @property
    def expects_training(self) -> bool:
        return bool(self._session.optimizers) and not self._session.within_evaluation

    @property
    def gradient_accumulation_steps(self) -> int:
        return self._gradient_state.num_steps

    @property
    def sync_with_dataloader(self) -> bool:
        return self._gradient_state.sync_with_dataloader

    def is_evaluation_pass(self) -> bool:
        return self._session.is_evaluating

    def reports_training(self) -> bool:
        return bool(self._session.trained_models())

    def trains_several_samples(self) -> bool:
        """Whether a rank has micro-batches of more than one sample in a full global batch, as of the newest one."""
        cut = self._session.newest_cut
        return cut is not None and any(size > steps for size, steps in zip(cut.sizes, cut.steps, strict=True))

    def check_agreement(self, digest: str, what: str) -> None:
        self._session.check_agreement(digest, what)

    def begin_pass(self, loader: Any) -> None:
        session = self._session
        session.tracker.begin_pass(loader, loader.is_evaluating)
        session.timer.interrupt()
        if loader.is_evaluating:
            return
        session.training_passes.append(loader)
        if session.sizing is not None:
            session.sizing.begin_pass(loader, session.tracker.is_waiting)

    def end_pass(self, loader: Any) -> None:
        session = self._reference()
        if session is None:
            return  # the pass of a loader that outlives its accelerator is closed
        session.tracker.end_pass(loader)
        if loader.is_evaluating:
            return
        session.training_passes.remove(loader)
        if session.sizing is not None:
            session.sizing.end_pass(loader)

    def batch_yielded(self, loader: Any, placed: PlacedBatch) -> None:
        session = self._session
        session.newest_cut = placed.place.cut
        session.tracker.batch_yielded(loader, placed)
        session.timer.fetched(loader.fetch_clock.take())
