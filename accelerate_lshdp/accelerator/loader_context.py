"""What prepared loaders ask of the accelerator and tell it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accelerate_lshdp.data.cut import GlobalBatchCut
from accelerate_lshdp.data.place import PlacedBatch
from accelerate_lshdp.documents.plan import RankBatch


if TYPE_CHECKING:
    from accelerate_lshdp.accelerator.accelerator import LSHDPAccelerator


class AcceleratorLoaderContext:
    """``LoaderContext`` of an accelerator (see ``accelerate_lshdp.data.context``)."""

    def __init__(self, accelerator: LSHDPAccelerator) -> None:
        self._reference = weakref.ref(accelerator)  # which holds its loaders: dropped, it should be freed at once
        self.rank = accelerator.process_index
        self.world_size = accelerator.num_processes
        self.token_counter: Callable[[Any], int] | None = None
        self.seed = 0
        self.training_passes: list[Any] = []
        """The loaders with a training pass in progress; twice, if one has two."""
        self._newest_cut: GlobalBatchCut | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_reference": self._reference()}  # a pickle of an accelerator has no weak references

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _reference=weakref.ref(state["_reference"]))

    @property
    def _accelerator(self) -> LSHDPAccelerator:
        accelerator = self._reference()
        if accelerator is None:
            raise RuntimeError(
                "the accelerator that prepared this loader is gone; keep it as long as you use what it prepared"
            )
        return accelerator

    def agree_on_seed(self, data_seed: int | None) -> None:
        """Takes rank 0's seed (collective), so that all ranks and all world sizes shuffle alike.

        Args:
            data_seed: accelerate's ``DataLoaderConfiguration.data_seed``; None: the seed of torch.
        """
        own = torch.initial_seed() if data_seed is None else data_seed
        seed = torch.tensor([own % 2**63], dtype=torch.int64, device=self._accelerator.device)
        if self.world_size > 1:
            dist.broadcast(seed, src=0)
        self.seed = int(seed.item())

    @property
    def rank_batches(self) -> tuple[RankBatch, ...] | None:
        batch = self._accelerator.plan.batch
        return None if batch is None else batch.ranks

    @property
    def follows_script(self) -> bool:
        return self._accelerator.run_total.follows_script

    @property
    def expects_training(self) -> bool:
        return bool(self._accelerator._optimizers) and not self._accelerator._evaluation_depth

    @property
    def gradient_accumulation_steps(self) -> int:
        return self._accelerator.gradient_accumulation_steps

    @property
    def sync_with_dataloader(self) -> bool:
        return self._accelerator.gradient_state.sync_with_dataloader

    def is_evaluation_pass(self) -> bool:
        return self._accelerator.is_evaluating

    def reports_training(self) -> bool:
        return bool(self._accelerator._trained_models())

    def trains_several_samples(self) -> bool:
        """Whether a rank has micro-batches of more than one sample in a full global batch, as of the newest one."""
        cut = self._newest_cut
        return cut is not None and any(size > steps for size, steps in zip(cut.sizes, cut.steps, strict=True))

    def check_agreement(self, digest: str, what: str) -> None:
        self._accelerator.check_agreement(digest, what)

    def begin_pass(self, loader: Any) -> None:
        self._accelerator._tracker.begin_pass(loader, loader.is_evaluating)
        self._accelerator._timer.interrupt()
        if loader.is_evaluating:
            return
        self.training_passes.append(loader)
        if self._accelerator._sizing is not None:
            self._accelerator._sizing.begin_pass(loader, self._accelerator._tracker.is_waiting)

    def end_pass(self, loader: Any) -> None:
        if self._reference() is None:
            return  # the pass of a loader that outlives its accelerator is closed
        self._accelerator._tracker.end_pass(loader)
        if loader.is_evaluating:
            return
        self.training_passes.remove(loader)
        if self._accelerator._sizing is not None:
            self._accelerator._sizing.end_pass(loader)

    def batch_yielded(self, loader: Any, placed: PlacedBatch) -> None:
        self._newest_cut = placed.place.cut
        self._accelerator._tracker.batch_yielded(loader, placed)
        self._accelerator._timer.fetched(loader.fetch_clock.take())
