# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`StateKeeper`: keeps the state of an elastic run in the memory of its node when ranks are ended, without the others.

A rank whose peers are gone stands in a collective that never ends. Its parameters are those of the last step that all
have made: until an optimizer steps they do not change. What does change while a step is computed (the position in the
data, counters, buffers) is noted when the step's first forward begins. So another thread can write a checkpoint of the
last step at any moment but that of the optimizer's step itself, for which it waits.

Where the ranks of a node share parameters, and each of them has a part of the optimizer's state, they write it
together, over a process group of their node that nothing else uses. By a gate in front of each step all of them have
made the same ones (`runtime.step_gate`).

The checkpoint is an ordinary one, in a folder in memory: the next generation of ranks finds the newest that any node
has, and all continue from it (`checkpoint.run_state`).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.logging import get_logger
from torch import nn

from accelerate_lshdp.accelerator.run_checkpoints import positioned_loaders, training_objects
from accelerate_lshdp.accelerator.session import Session
from accelerate_lshdp.checkpoint.model import ModelTensors, unwrap
from accelerate_lshdp.checkpoint.run_state import NodeLayout, newest_checkpoint_everywhere, save_checkpoint
from accelerate_lshdp.engine.policies import Mechanism
from accelerate_lshdp.runtime.elastic_rank import KEEP, KEPT, PAUSE, ElasticRank, elastic_rank, listen, say
from accelerate_lshdp.runtime.failures import FOLLOWS_ANOTHER
from accelerate_lshdp.runtime.groups import world_timeout
from accelerate_lshdp.runtime.participants import alone, among
from accelerate_lshdp.runtime.step_gate import StepGate


logger = get_logger(__name__)

#: What is in a kept state beside the checkpoint of a run.
EXTRA_STATE = "elastic"
_STATE = "lshdp"
_BOUNDARY_SECONDS, _STEP_SECONDS = 1.0, 30.0


@dataclass
class _Moment:
    """What changes while a step is computed, as it was before."""

    loaders: list[dict[str, Any]]
    samples_seen: int
    step: int
    micro_batches: int
    buffers: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class _NodeParts:
    """How the ranks of this node keep its state where each of them has a part of it.

    Args:
        group: of these ranks, for nothing but keeping the state.
        gate: in front of each optimizer's step.
        others: their places on the node, without this rank's.
    """

    group: dist.ProcessGroup
    gate: StepGate
    others: tuple[int, ...]


class StateKeeper:
    """Keeps the state of one process's training.

    Args:
        rank: what the launcher has told this process.
        local_rank: its place on its node; the first one writes the node's state.

    Attributes:
        pause_wanted: whether this rank was told to leave after the step that all are in.
        pause_agreed: whether some rank was, which all know since their last exchange.
        trainings: of Trainers that have begun in this process.
        is_loaded: whether this process goes on from a state that was kept, or from a checkpoint, if there is any.
        about_script: what a script's own part of the state is, as text; called when the state is kept.
        also_saved: objects of a script that its checkpoints have as well: ``custom``, ``gradient_accumulation_steps``.
        own_failure: the exit code of an error of the script's own on this rank, which is not that of another one.
    """

    def __init__(self, rank: ElasticRank, local_rank: int) -> None:
        self._rank = rank
        self._local_rank = local_rank
        self._accelerator: Callable[[], Any] = lambda: None
        self._before_step: _Moment | None = None  # while a step is computed
        self._steps = threading.Lock()  # held while an optimizer steps, and while the state is written
        self._is_stepping = False
        self._node: _NodeParts | None = None  # None: this rank has the whole state
        self._has_groups = False
        # By the gate of the node: the last step that this rank has made, and the last one that all of them make.
        self._stepped = self._last_step = 0
        self._has_begun = self._has_stepped = False  # a step of this process, and its end
        self._asked = threading.Event()
        self._at_boundary = threading.Event()
        self._writing = threading.Lock()
        self.pause_wanted = self.pause_agreed = self.is_loaded = False
        self.trainings = 0
        self.own_failure: int | None = None
        self._buffer_names: weakref.WeakKeyDictionary[nn.Module, list[str]] = weakref.WeakKeyDictionary()
        self.about_script: Callable[[], str | None] = lambda: None
        self.also_saved: Callable[[], dict[str, Any]] = dict
        listen(rank.memory.control(local_rank), self._hear)

    # What the training says

    def follow(self, accelerator: Any) -> None:
        """From now on the state is that of this accelerator's training (collective: makes process groups)."""
        self._accelerator = weakref.ref(accelerator)
        session = accelerator.session
        topology = session.topology
        if self._has_groups or not _is_shared_by_node(session) or max(topology.node_sizes) == 1:
            return
        self._has_groups = True  # on all ranks: they have to make the same groups
        made = [session.engine.placement.groups.on_host(ranks, "kept state") for ranks in topology.node_groups]
        size = topology.node_sizes[topology.node]
        if size > 1:
            path, seconds = self._rank.memory.gate(self._rank.generation), world_timeout().total_seconds()
            gate = StepGate(path, self._local_rank, size, seconds)
            others = tuple(each for each in range(size) if each != self._local_rank)
            self._node = _NodeParts(made[topology.node], gate, others)

    def forward_begins(self) -> None:
        """A forward of a model in training begins."""
        if self._before_step is not None:
            return
        self._require_loaded()
        if self._cannot_keep():
            self._has_begun = self._accelerator() is not None  # the launcher has to see that steps are made
            return
        if self._is_stepping:  # the last step has failed, and left what nobody knows
            self._is_stepping, self._has_begun = False, False
            if self._node is not None:
                self._stepped = self._node.gate.arrived
            self._steps.release()
        if self.pause_agreed:
            self._leave(self._now())
        if self._asked.is_set():
            self._at_boundary.set()
            threading.Event().wait()  # the other thread ends this process
        self._before_step = self._now()
        self._has_begun = True

    def _cannot_keep(self) -> bool:
        """Whether this run's state cannot be kept; then there is nothing to note, and its ranks end with a step."""
        accelerator = self._accelerator()
        if accelerator is None:
            return True
        if why_not_kept(accelerator) is None:
            return False
        if self.pause_agreed or self._asked.is_set():
            self._end(KEPT)
        return True

    def _require_loaded(self) -> None:
        if self._has_begun or self.is_loaded or self._rank.generation == 1:
            return
        raise RuntimeError(
            "found a training that begins from its first step, expected one that continues: nodes of this elastic run"
            " have come or gone, and its ranks were started again. A Trainer continues by itself; a loop of your own"
            " has to call accelerator.load_state(...) before its first step if accelerator.continues_run"
        )

    def step_begins(self) -> None:
        """An optimizer is about to change parameters."""
        if self._is_stepping:
            return
        if self._node is not None and not self._node.gate.let_through():
            threading.Event().wait()  # not all ranks of the node make this step; the other thread ends this process
        self._steps.acquire()
        self._is_stepping = True

    def step_ends(self) -> None:
        """The optimizer has changed them, or has left out a step whose gradients have overflowed."""
        self._before_step = None
        if self._has_begun and not self._has_stepped:
            self._first_step_made()
        if self._is_stepping:
            self._is_stepping = False
            if self._node is not None:
                self._stepped = self._node.gate.arrived
            self._steps.release()

    def _first_step_made(self) -> None:
        """What was kept of the generation before is old from now on, and the launcher sees that this one trains."""
        self._has_stepped = True
        if not self._local_rank:
            shutil.rmtree(self._rank.memory.state, ignore_errors=True)
        self._rank.memory.stepped(self._rank.generation).touch()

    def _now(self) -> _Moment:
        accelerator = self._accelerator()
        session = accelerator.session
        # Not by `accelerator.unwrap_model`, which looks for packages of other engines: 0.15 ms of each step.
        models = [unwrap(model) for model in accelerator._models]
        buffers = [(each, each.detach().clone()) for model in models for each in self._buffers_of(model)]
        return _Moment(
            [loader.state_dict() for loader in positioned_loaders(accelerator)],
            session.samples_seen,
            session.completed_steps,
            accelerator.step,
            buffers,
        )

    def _buffers_of(self, model: nn.Module) -> list[torch.Tensor]:
        """The buffers of a model that checkpoints have. Their names are asked for once: most models have none."""
        if model not in self._buffer_names:
            self._buffer_names[model] = list(ModelTensors.of(model).buffers)
        return [attrgetter(name)(model) for name in self._buffer_names[model]]  # wrappers inside forward attributes

    # What the launcher says

    def _hear(self, word: bytes) -> None:
        if word == PAUSE:
            self.pause_wanted = True
        elif word == KEEP:
            self._keep_and_leave()

    def _keep_and_leave(self) -> None:
        self._asked.set()
        if not self._closes():
            self._end(KEPT)
        if self._before_step is None and not self._at_boundary.is_set():
            # Between two steps: the script's own books of the last one may not be closed yet.
            self._at_boundary.wait(_BOUNDARY_SECONDS)
        self._wait_for_steps()
        if self._before_step is None and not self._at_boundary.is_set():
            # A step has just ended: its books are closed when the next one begins, or the script waits for others.
            self._steps.release()
            self._at_boundary.wait(_BOUNDARY_SECONDS)
            self._wait_for_steps()
        self._leave(self._before_step or self._now())

    def _closes(self) -> bool:
        """Ends the steps of this node's ranks; whether there is anything to keep."""
        accelerator = self._accelerator()
        if accelerator is None or why_not_kept(accelerator) is not None:
            return False
        if self._node is None:
            return self._has_begun
        # Before their first step all nodes have what they have loaded still.
        self._last_step = self._node.gate.close()
        return self._last_step > 0

    def _wait_for_steps(self) -> None:
        """Waits until this rank is in no step, and has made that of all ranks of its node; holds ``_steps`` then."""
        deadline = time.monotonic() + _STEP_SECONDS
        while self._stepped < self._last_step and time.monotonic() < deadline:
            time.sleep(0.001)  # all were let through to it, and some may not have begun
        if self._stepped < self._last_step or not self._steps.acquire(timeout=max(0.0, deadline - time.monotonic())):
            logger.error(f"an optimizer's step has not ended in {_STEP_SECONDS:g} s, so this rank's state is lost")
            self._end(KEPT)

    def wait_if_leaving(self) -> None:
        """Waits for the end of this process if another thread keeps its state, while the main thread has failed."""
        if not self._asked.is_set():
            return
        if self._is_stepping:  # that thread would wait for the step's end
            self._end(FOLLOWS_ANOTHER)
        threading.Event().wait()

    def script_ends(self) -> None:
        """The script has ended; but a part of the state that others of this node need may be kept still."""
        if self._node is not None or self.own_failure is not None:
            self.wait_if_leaving()

    def leave_after_failure(self) -> None:
        """Keeps the state and ends this process, whose main thread calls this: other ranks were lost."""
        if not self._is_stepping and self._closes():
            for other in () if self._node is None else self._node.others:
                # Its part of the state is needed, and it may wait where nothing fails.
                say(self._rank.memory.control(other), KEEP)
            self._write(self._before_step or self._now())
        self._end(FOLLOWS_ANOTHER)

    # The state

    def _leave(self, moment: _Moment) -> None:
        self._write(moment)
        self._end(KEPT)

    def _end(self, code: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        code = code if self.own_failure is None else self.own_failure
        os._exit(code)  # groups of ranks that are gone cannot be left in order

    def _write(self, moment: _Moment) -> None:
        """Writes the state, once a process; together with the other ranks of the node where each has a part of it."""
        if not self._writing.acquire(blocking=False):
            threading.Event().wait()  # another thread does, and ends this process
        accelerator, group = self._accelerator(), None if self._node is None else self._node.group
        if group is None and self._local_rank:
            return
        session = accelerator.session
        place, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        try:
            with torch.no_grad(), alone() if group is None else among(group):
                objects = training_objects(accelerator, session)
                objects.values = {id(buffer): before for buffer, before in moment.buffers}
                objects.loaders = moment.loaders
                also = self.also_saved()
                objects.custom += also.pop("custom", [])
                objects.extra |= {**also, "accelerate_step": moment.micro_batches, EXTRA_STATE: self.about_script()}
                save_checkpoint(
                    self._rank.memory.state / _STATE,
                    objects,
                    NodeLayout(place, size, 0, 1, place, session.device),
                    plan_digest="",
                    step=moment.step,
                    samples_seen=moment.samples_seen,
                    seed=session.seed,
                    trust_checkpoint=accelerator.trust_checkpoint,
                    order=self._rank.generation,
                    save_id=self._identity(moment.step),
                    keeps_random_numbers=False,
                )
        except Exception:  # a script's own objects may raise anything; others may have the state
            traceback.print_exc()
            logger.error("the state of the run could not be kept on this node")

    def _identity(self, step: int) -> str:
        # All nodes have the same state after a step of a generation, and need not send it to each other.
        text = f"{self._rank.origin} {self._rank.generation} {step}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    # The next generation

    @property
    def continues_run(self) -> bool:
        """Whether ranks have trained before these, which continue what they have done."""
        return self._rank.generation > 1

    @property
    def since(self) -> float:
        """Seconds since the epoch at which this node's launcher began: see `ElasticRank`."""
        return self._rank.since

    def bring(self, layout: NodeLayout) -> Path | None:
        """The newest state that any node has kept, now also on this one (collective); None: nobody has any."""
        found = newest_checkpoint_everywhere(self._rank.memory.state / _STATE, layout)
        return None if found is None else Path(found)


@cache
def state_keeper() -> StateKeeper | None:
    """The keeper of this process; None: it is no rank of an elastic run."""
    rank = elastic_rank()
    return None if rank is None else StateKeeper(rank, int(os.environ.get("LOCAL_RANK", "0")))


def keeper_in_use() -> StateKeeper | None:
    """The keeper of this process if an accelerator has made it; a script may fail before."""
    return state_keeper() if state_keeper.cache_info().currsize else None


def why_not_kept(accelerator: Any) -> str | None:
    """Why a node cannot keep the state of a run without the others; None: it can."""
    session = accelerator.session
    topology, policies = session.topology, session.policies
    whole = policies.mechanism is Mechanism.REPLICATED
    of_one_rank = all(len(group) == 1 for group in policies.shard_groups)
    if not whole and not of_one_rank and not _is_shared_by_node(session):
        return f"strategy {session.strategy} spreads it over ranks ({topology.node_sizes} on the nodes)"
    if policies.mechanism is Mechanism.STREAMED:
        return f"strategy {session.strategy} ends a step while the next one is computed"
    if len(session.optimizers) > 1:
        return f"{len(session.optimizers)} optimizers step one after the other"
    if accelerator._save_model_state_pre_hook:
        return "hooks of save_state save a part of it themselves"
    return None


def _is_shared_by_node(session: Session) -> bool:
    """Whether the ranks of each node have the state together, as each has a part of the optimizer's alone."""
    # Beside nodes with devices, those without have their parameters so, too; but the others' state cannot be kept.
    return session.policies.mechanism is Mechanism.NODE_SHARED and not session.topology.mixes_devices
