# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Trainings whose optimizer steps late, on the emulated device, and the same ones whose optimizer steps at once."""

from __future__ import annotations

import copy
import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import streamed_models as models
import torch
import torch.distributed as dist
import torch_device as device
from streamed_training import Case, backward, make_model, micro_batch, place
from torch import nn

from accelerate_lshdp.engine.clipping import clip_grad_norm
from accelerate_lshdp.engine.engine import Engine
from accelerate_lshdp.engine.prepared import PreparedModel
from accelerate_lshdp.engine.stores.streamed import late_step
from accelerate_lshdp.engine.stores.streamed.late_step import LateStep


PAUSE = 0.05
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "adamw fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, amsgrad=True),
    "adamw foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True, maximize=True),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd plain": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, fused=True),
    "groups": lambda model: torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim <= 1], "lr": 1e-3, "betas": (0.5, 0.9)},
        ],
        lr=1e-2,
    ),
    # Stepped at once, as nobody knows what they do.
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3),
    "tensor": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), fused=True),
}
AT_ONCE = ("rmsprop", "tensor")


class Run:
    """A model on the device, its optimizer, and steps of the two."""

    def __init__(self, case: Case, optimizer: str = "adamw") -> None:
        self.case = case
        self.model = make_model(case)
        self.engine, self.prepared = place(case, self.model)
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.steps = 0
        self.kept: list[dict[str, torch.Tensor]] = []  # entries of the optimizer's state
        self.earlier: dict[str, Any] = {}

    def backward(self) -> None:
        tokens = micro_batch(self.case, self.steps, 0).chunk(dist.get_world_size())[dist.get_rank()].to("emulated")
        loss = models.loss_of(self.model, tokens) / dist.get_world_size() * self.engine.loss_multiplier
        backward(self.prepared, loss)
        clip_grad_norm(self.model.parameters(), 1.0)

    def step(self) -> None:
        self.engine.before_step(self.optimizer)
        self.engine.hide_gradients_of_others(self.optimizer)
        self.optimizer.step()
        self.engine.after_step()
        self.steps += 1

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.backward()
            self.step()
            self.optimizer.zero_grad()

    @property
    def late(self) -> LateStep:
        return self.prepared.stores[0]._late

    def values(self) -> list[torch.Tensor]:
        """Parameters, this rank's states of the optimizer, and the number of their entries."""
        parameters = [p.detach().clone() for p in self.model.parameters()]
        states = list(self.optimizer.state.values())
        tensors = [value for state in states for _, value in sorted(state.items()) if isinstance(value, torch.Tensor)]
        return [*parameters, torch.tensor([len(states)]), *(t.clone() for t in sorted(tensors, key=_first_number))]


def _first_number(tensor: torch.Tensor) -> tuple[int, float]:
    """Sorts states, which were made in another order."""
    return tensor.numel(), float(tensor.flatten()[0])


@contextmanager
def at_once() -> Iterator[None]:
    """No step inside the block is late."""
    with mock.patch.object(late_step, "_is_known", lambda optimizer: False):
        yield


@contextmanager
def slowly(seconds: float = PAUSE) -> Iterator[None]:
    """Late steps inside the block take long."""
    whole = LateStep._step_part

    def paused(self: LateStep, *args: Any) -> None:
        time.sleep(seconds)
        whole(self, *args)

    with mock.patch.object(LateStep, "_step_part", paused):
        yield


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def has_the_same_bits(case: dict[str, Any], optimizer: str) -> dict[str, Any]:
    """Whether steps that are made late end with the bits of steps that are made at once."""
    device.join_device_world()
    with at_once():
        expected = Run(Case(**case), optimizer)
        expected.train(3)
    device.synchronize()
    device.reset()
    device.configure(**dict(Case(**case).delays))
    run, were_late = Run(Case(**case), optimizer), []
    with slowly(0.005):
        for _ in range(3):
            run.train(1)
            were_late.append(run.late.is_pending)
    found = run.values()
    device.synchronize()
    device.configure()
    return {"same": same(found, expected.values()), "late": were_late, "races": device.races()}


def overlaps() -> bool:
    """Whether a forward begins while the last parts of the step before are still to be made."""
    device.join_device_world()
    run = Run(Case(nodes=(1,)))
    run.train(1)
    run.late.settle()
    whole, has_begun, seen = LateStep._step_part, threading.Event(), []
    last = run.model.blocks[-1].down.weight
    run.model.blocks[0].register_forward_hook(lambda *_: has_begun.set())

    def step_part(late: LateStep, kind: type, groups: list, states: dict) -> None:
        if any(last is late._parameters[index] for _, mine in groups for index in mine):
            seen.append(has_begun.wait(timeout=20))
        whole(late, kind, groups, states)

    with mock.patch.object(LateStep, "_step_part", step_part):
        run.backward()
        has_begun.clear()
        run.step()
        run.backward()
    return seen == [True]


def _ema(run: Run) -> list[torch.Tensor]:
    averages = [torch.zeros(p.shape, dtype=p.dtype) for p in kept(run)]
    with torch.no_grad():
        torch._foreach_lerp_(averages, kept(run), 0.5)
    return averages


def _broadcast(parameter: nn.Parameter) -> torch.Tensor:
    found = torch.empty(parameter.shape, dtype=parameter.dtype)
    dist.all_gather(
        [found if rank == 0 else torch.empty_like(found) for rank in range(dist.get_world_size())], parameter
    )
    return found


def kept(run: Run) -> list[nn.Parameter]:
    """Parameters as something of the script has them, which asks no module for them."""
    return run.optimizer.param_groups[0]["params"]


def _saved(value: Any) -> list[torch.Tensor]:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, map_location="cpu", weights_only=True)
    return list(loaded.values()) if isinstance(loaded, dict) else loaded


def _state_of(state_dict: dict[str, Any]) -> list[torch.Tensor]:
    return [value for state in state_dict["state"].values() for _, value in sorted(state.items())]


#: What scripts read after a step.
READERS: dict[str, Callable[[Run], list[torch.Tensor]]] = {
    "data": lambda run: [p.data.clone() for p in kept(run)],
    "detach": lambda run: [p.detach().clone() for p in kept(run)],
    "numpy": lambda run: [torch.from_numpy(p.detach().numpy().copy()) for p in kept(run)],
    "norms": lambda run: list(torch._foreach_norm(kept(run))),
    "stacked": lambda run: [torch.cat([p for p in kept(run) if p.ndim == 1])],
    "tolist": lambda run: [torch.tensor(p.tolist()) for p in kept(run)],
    "average": _ema,
    "copied": lambda run: [torch.empty(p.shape, dtype=p.dtype).copy_(p) for p in kept(run)],
    "reduced": lambda run: [_broadcast(p) for p in kept(run)],
    "module": lambda run: [run.model.head.weight.sum()],
    "state_dict": lambda run: [value.clone() for value in run.model.state_dict().values()],
    "saved": lambda run: _saved(run.model.state_dict()),
    "saved parameters": lambda run: _saved([p.detach() for p in kept(run)]),
    "copy of a parameter": lambda run: [copy.deepcopy(kept(run)[0])],
    "gradients": lambda run: [p.grad.clone() for p in kept(run) if p.grad is not None],
    "optimizer": lambda run: _state_of(run.optimizer.state_dict()),
    "state": lambda run: [run.optimizer.state[p]["exp_avg"].clone() for p in kept(run) if p in run.optimizer.state],
    "kept state": lambda run: [value.clone() for state in run.kept for value in state.values()],
    "items": lambda run: [state["step"].clone() for state in dict(run.optimizer.state).values() if state],
    "copy of the optimizer": lambda run: _state_of(copy.deepcopy(run.optimizer).state_dict()),
    "evaluation": lambda run: [run.model.eval()(micro_batch(run.case, 0, 0).to("emulated")).detach().cpu()],
}


def readers_wait() -> list[str]:
    """The readers that have seen something else than after a step that was made at once, or no late step."""
    device.join_device_world()
    with at_once():
        run = _before_a_step()
        run.step()
        # The evaluation comes last: it leaves the model in another mode.
        expected = {name: _read(run, name) for name in READERS}
    wrong = []
    for name in READERS:
        run = _before_a_step()
        with slowly():
            run.step()
            if not run.late.is_pending:
                wrong.append(f"{name}: not late")
            found = _read(run, name)
            device.synchronize()
            run.late.settle()
        if not same(found, expected[name]):
            wrong.append(name)
    return wrong


def _before_a_step() -> Run:
    """A training whose second step is to be made; the states that an optimizer had after the first are kept."""
    run = Run(Case())
    run.train(1)
    run.late.settle()
    run.kept = [run.optimizer.state[p] for p in kept(run) if p in run.optimizer.state]
    run.backward()
    return run


def _read(run: Run, name: str) -> list[torch.Tensor]:
    with torch.no_grad() if name == "evaluation" else torch.enable_grad():
        return READERS[name](run)


def _change_rate(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] = 123.0


def _zero(run: Run) -> None:
    run.optimizer.zero_grad(set_to_none=False)


def _zero_by_hand(run: Run) -> None:
    for parameter in run.model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def _drop(run: Run) -> None:
    run.model.zero_grad()


def _freeze(run: Run) -> None:
    run.model.head.weight.requires_grad_(False)


def _load_state(run: Run) -> None:
    run.optimizer.load_state_dict(run.earlier)


def _clip(run: Run) -> None:
    clip_grad_norm(run.model.parameters(), 1e-3)


#: What scripts do straight after a step.
CHANGES: dict[str, Callable[[Run], None]] = {
    "lr": _change_rate,
    "zero_grad to zeros": _zero,
    "zero_": _zero_by_hand,
    "zero_grad": _drop,
    "freeze": _freeze,
    "load_state_dict": _load_state,
    "clip": _clip,
}


def changes_come_after_the_step() -> list[str]:
    """The changes after which a late step differs from one that was made at once."""
    device.join_device_world()
    wrong = []
    for name, change in CHANGES.items():
        found = []
        for context in (at_once, slowly):
            with context():
                run = Run(Case())
                run.train(1)
                run.earlier = copy.deepcopy(run.optimizer.state_dict())
                run.backward()
                run.step()
                change(run)
                run.late.settle()
                found.append(run.values())
        if not same(found[1], found[0]):
            wrong.append(name)
    return wrong


WAYS_TO_LOOK: dict[str, Callable[[nn.Parameter], Any]] = {
    "data": lambda p: p.data,
    "numpy": lambda p: p.detach().numpy(),
    "view": lambda p: p.detach().view(-1),
}


def seen_by_aliases(way: str, counts_uses: bool) -> dict[str, bool]:
    """Whether a step is late while the script looks at parameters in its own way, and it sees the new values."""
    device.join_device_world()
    run = Run(Case(nodes=(1,)))
    run.train(1)
    run.backward()
    aliases = [WAYS_TO_LOOK[way](p) for p in run.model.parameters()]
    counted = nullcontext() if counts_uses else mock.patch.object(LateStep, "_count_uses", lambda self: self._uses)
    with slowly(), counted:
        run.step()
        late = run.late.is_pending
        seen = [torch.as_tensor(alias).flatten().clone() for alias in aliases]
        values = [p.detach().flatten().clone() for p in run.model.parameters()]
    return {"late": late, "right": same(seen, values)}


def held_gradients_are_kept() -> bool:
    """Whether a step is late while the script has a view of a gradient, which it may change."""
    device.join_device_world()
    run = Run(Case(nodes=(1,)))
    run.train(1)
    run.backward()
    held = run.model.head.weight.grad.detach()
    run.step()
    return run.late.is_pending and held is not None


def failures(where: str) -> str:
    """What ranks say if the step of the last one fails, late or in the script's own optimizer."""
    device.join_device_world()
    run = Run(Case(nodes=(dist.get_world_size(),)))
    run.train(1)
    initial = {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}
    run.backward()

    def fail(*_: Any) -> None:
        raise ValueError("no memory for this")

    fails = dist.get_rank() == dist.get_world_size() - 1
    try:
        if fails and where == "late":
            with mock.patch.object(LateStep, "_step_part", fail):
                run.step()
                run.late.settle()
        elif fails:
            run.optimizer.register_step_post_hook(fail)
            run.step()
        else:
            run.step()
        run.backward()
        said = "no error"
    except (RuntimeError, ValueError) as error:
        run.engine.step_is_over()  # as what `prepare` returns for an optimizer does
        said = str(error)
    # As after any error, a checkpoint is the way on.
    run.engine.give_up_failed_steps()
    state = {name: torch.ones(value.shape, dtype=value.dtype) for name, value in initial.items()}
    for number in range(2):
        run.prepared.loading_begins(state)
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.copy_(torch.ones(parameter.shape) + number)
        run.prepared.parameters_loaded()
    closes = all((p.detach() == 2).all() for p in run.model.parameters())
    run.engine.close()
    return f"{said}; {'goes on' if closes else 'does not go on'}"


def gan() -> dict[str, Any]:
    """Two models of one engine that are stepped in turns, and both by one optimizer."""
    device.join_device_world()
    results = []
    for context in (at_once, slowly):
        with context():
            first, second = make_model(Case()), make_model(Case())
            engine, one = place(Case(nodes=(1,)), first)
            two = engine.place(second, dict(second.named_parameters()))
            optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (first, second)]
            both = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1, momentum=0.5)
            for number in range(2):
                for prepared, optimizer in ((one, optimizers[0]), (two, optimizers[1])):
                    _train(engine, [prepared], optimizer, number)
                _train(engine, [one, two], both, number)
            results.append([p.detach().clone() for m in (first, second) for p in m.parameters()])
            states = [type(each.state).__name__ for each in (*optimizers, both)]
    return {"same": same(*results), "states": states}


def _train(engine: Engine, models_: list[PreparedModel], optimizer: torch.optim.Optimizer, number: int) -> None:
    for prepared in models_:
        backward(prepared, models.loss_of(prepared.module, models.batch(number).to("emulated")))
    engine.before_step(optimizer)
    engine.hide_gradients_of_others(optimizer)
    optimizer.step()
    engine.after_step()
    optimizer.zero_grad()
