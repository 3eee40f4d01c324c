# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Trainings by the streamed store on the emulated device, and the same ones by plain torch in one process."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import streamed_models as models
import torch
import torch.distributed as dist
import torch_device as device
from device_training import whole
from torch import nn

from accelerate_lshdp import Strategy
from accelerate_lshdp.documents.placement import ModelPlacement, UnitPlacement, UnitStore
from accelerate_lshdp.documents.plan_sections import Communication
from accelerate_lshdp.engine.clipping import clip_grad_norm
from accelerate_lshdp.engine.engine import Engine
from accelerate_lshdp.engine.flow import Flow
from accelerate_lshdp.engine.mixed_policies import resolve_placement
from accelerate_lshdp.engine.placement import Placement
from accelerate_lshdp.engine.policies import resolve_policies
from accelerate_lshdp.engine.prepared import PreparedModel
from accelerate_lshdp.runtime.topology import Topology
from accelerate_lshdp.runtime.wait_clock import WaitClock


STEPS = 3
OPTIONS = {"lr": 1e-2, "weight_decay": 0.01, "eps": 1e-6}


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        model: a name of `streamed_models.MODELS`.
        nodes: ranks of each node.
        dtype: of the parameters.
        precision: mixed precision.
        strategy: of the plan.
        accumulation: backwards before a step, of which the last one synchronises.
        pairs: whether each backward is that of two forwards.
        delays: of the device.
        ahead: units fetched ahead.
        samples: of a global micro-batch.
        evaluates: whether the model is evaluated between the backward and the step.
        drops: whether the script drops the gradients of the first micro-batch of each step.
        devices: types of the devices of each node; empty: all are emulated.
        wire_format: of gradients between nodes.
        slices: in which what is in no unit has its large weights.
        blocks: where those are kept, if anything is said of single units.
    """

    model: str = "Plain"
    nodes: tuple[int, ...] = (2,)
    dtype: str = "float64"
    precision: str = "no"
    strategy: str = "lsdp"
    accumulation: int = 1
    pairs: bool = False
    delays: tuple[tuple[str, float], ...] = ()
    ahead: int = 1
    samples: int = 12
    evaluates: bool = False
    drops: bool = False
    devices: tuple[str, ...] = ()
    wire_format: str = "fp32"
    slices: int = 1
    blocks: str = "host"

    @property
    def placement(self) -> ModelPlacement | None:
        """What is said of single units."""
        if self.slices == 1 and self.blocks == "host":
            return None
        rest = UnitPlacement(UnitStore.HOST, slices=self.slices)
        return ModelPlacement({"": rest}, UnitPlacement(UnitStore(self.blocks)))

    @property
    def topology(self) -> Topology:
        return Topology(dist.get_rank(), self.nodes, self.devices)

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        own = self.devices[self.topology.node] if self.devices else "emulated"
        return torch.device("cpu") if own == "cpu" else torch.device(own, 0)


def loss_of(case: Case, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return (models.paired_loss if case.pairs else models.loss_of)(model, tokens)


def micro_batch(case: Case, step: int, number: int) -> torch.Tensor:
    return models.batch(step * case.accumulation + number, case.samples)


def evaluate(case: Case, model: nn.Module, tokens: torch.Tensor) -> None:
    """A forward without a backward, if the case has them, and work in memory as large as blocks."""
    if case.evaluates:
        with torch.no_grad():
            model(tokens)
        size = sum(parameter.numel() for parameter in model.blocks[0].parameters())
        # In the memory of all of them, whichever the device gives first.
        made = [torch.ones(size, dtype=torch.float64, device=tokens.device) for _ in model.blocks]
        torch._foreach_add_(made, 1.0)


def reference(case: Case, model: nn.Module) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **OPTIONS)
    for step in range(STEPS):
        for number in range(case.accumulation):
            (loss_of(case, model, micro_batch(case, step, number)) / case.accumulation).backward()
            if case.drops and number == 0:
                model.zero_grad()
        evaluate(case, model, micro_batch(case, step, 0))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def make_model(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return models.MODELS[case.model]().to(getattr(torch, case.dtype))


def place(case: Case, model: nn.Module, intra_node: str = "auto") -> tuple[Engine, PreparedModel]:
    topology = case.topology
    resolve = functools.partial(resolve_policies, Strategy(case.strategy))
    if case.placement is not None:
        resolve = functools.partial(resolve_placement, case.placement)
    placement = Placement(
        resolve(topology, device_type=case.device.type, mixed_precision=case.precision, intra_node=intra_node),
        topology,
        device=case.device,
        clock=WaitClock(),
        communication=Communication(case.wire_format),
        units=None,
        prefetch=case.ahead,
        bucket_bytes=4096,
        placement=case.placement,
    )
    engine = Engine(placement)
    engine.require_placeable(model)
    return engine, engine.place(model, dict(model.named_parameters(remove_duplicate=False)))


def backward(
    prepared: PreparedModel, loss: torch.Tensor, *, synchronise: bool = True, retain_graph: bool = False
) -> None:
    with Flow([prepared]) as flow:
        prepared.synchronise_next = synchronise
        flow.begin()
        loss.backward(retain_graph=retain_graph)
        flow.deliver([prepared])
        flow.finish([prepared])


def run(case: Case, model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters after some steps on this case's ranks."""
    engine, prepared = place(case, model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **OPTIONS)
    device.synchronize()
    device.reset()
    device.configure(**dict(case.delays))
    for step in range(STEPS):
        for number in range(case.accumulation):
            tokens = micro_batch(case, step, number).chunk(dist.get_world_size())[dist.get_rank()].to(case.device)
            loss = loss_of(case, model, tokens) / dist.get_world_size() / case.accumulation * engine.loss_multiplier
            backward(prepared, loss, synchronise=number == case.accumulation - 1)
            prepared.drop_unused(_used_anywhere(prepared))
            if case.drops and number == 0:
                model.zero_grad()
        evaluate(case, model, tokens)
        clip_grad_norm(model.parameters(), 1.0)
        engine.before_step()
        engine.hide_gradients_of_others(optimizer)
        optimizer.step()
        engine.after_step()
        optimizer.zero_grad()
    device.synchronize()
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def _used_anywhere(prepared: PreparedModel) -> torch.Tensor:
    usage = prepared.take_usage()
    dist.all_reduce(usage)
    return usage


def train(case: Case) -> dict[str, Any]:
    """How far the parameters are from those of one process, what raced, and what was counted."""
    if not case.devices:  # else they meet in the world of gloo, on the hosts
        device.join_device_world()
    model = make_model(case)
    expected = reference(case, copy.deepcopy(model))
    found = run(case, model)
    races, counts = device.races(), device.counts()
    device.configure()
    error = max((found[name] - expected[name]).abs().max().item() for name in expected)
    sizes = [parameter.numel() for parameter in model.parameters()]
    gradients = {"gradients": len(sizes), "gradient_bytes": 4 * sum(sizes)}
    return {"error": error, "races": races, "counts": counts, "bytes": bytes_of(model, case), **gradients}


def bytes_of(model: nn.Module, case: Case) -> int:
    """Bytes of the parameters as they are computed with."""
    size = 2 if case.precision == "bf16" else torch.empty(0, dtype=getattr(torch, case.dtype)).itemsize
    return sum(parameter.numel() for parameter in model.parameters()) * size


def equals_resident(case: Case, resident: Case) -> bool:
    """Whether two cases, of which one keeps its parameters on the device, end with the same bits."""
    device.join_device_world()
    one = run(case, make_model(case))
    other = run(resident, make_model(resident))
    device.configure()
    return all(torch.equal(one[name], other[name]) for name in one)


def shares_groups_with_the_world() -> bool:
    """Whether any sum between nodes goes over the group of all ranks, which the training loop uses meanwhile."""
    device.join_device_world()
    _, prepared = place(Case(nodes=(1, 1)), make_model(Case()))
    return any(reduction.group is dist.group.WORLD for reduction in prepared.reductions)


def registered_after(closes: bool) -> list[int]:
    """Bytes that are registered with the device before a model is placed, then, and when it is dropped or closed."""
    device.join_device_world()
    pinned = [device.counts()["pinned_bytes"]]
    model = make_model(Case())
    engine, prepared = place(Case(nodes=(1, 1)), model)
    pinned.append(device.counts()["pinned_bytes"])
    if closes:
        engine.close()
    engine.release()
    del engine, prepared, model
    gc.collect()
    return [*pinned, device.counts()["pinned_bytes"]]


def step_of_another_model() -> float:
    """How far a GAN's generator is from that of one process: its backward comes after the critic's step."""
    device.join_device_world()
    tokens = models.batch(0)
    generator, critic = make_model(Case()), make_model(Case())
    expected = copy.deepcopy(generator), copy.deepcopy(critic)
    _gan_step(*expected, tokens, [torch.optim.AdamW(model.parameters(), **OPTIONS) for model in expected])
    engine, prepared = place(Case(nodes=(1,)), generator)
    prepared_critic = engine.place(critic, dict(critic.named_parameters()))
    optimizers = [torch.optim.AdamW(model.parameters(), **OPTIONS) for model in (generator, critic)]
    _gan_step(generator, critic, tokens.to("emulated"), optimizers, engine, [prepared, prepared_critic])
    pairs = zip(generator.parameters(), expected[0].parameters(), strict=True)
    return max((one.detach() - other.detach()).abs().max().item() for one, other in pairs)


def _gan_step(
    generator: nn.Module,
    critic: nn.Module,
    tokens: torch.Tensor,
    optimizers: Sequence[torch.optim.Optimizer],
    engine: Engine | None = None,
    prepared: Sequence[PreparedModel] = (),
) -> None:
    fake = generator(tokens)
    for loss, optimizer in ((lambda: critic(fake.argmax(-1)).square().mean(), 1), (lambda: fake.square().mean(), 0)):
        with Flow(prepared) as flow:
            flow.begin()
            loss().backward()
            flow.deliver([model for model in prepared if model.took_part])
            flow.finish([model for model in prepared if model.took_part])
        if engine is not None:
            engine.before_step(optimizers[optimizer])
        optimizers[optimizer].step()
        optimizers[optimizer].zero_grad()
        if engine is not None:
            engine.after_step()


def hooked_gradients() -> list[float]:
    """The largest gradients of weights whose hooks set them to zero, registered before and after placing."""
    device.join_device_world()
    model = make_model(Case())
    model.head.weight.register_hook(lambda gradient: gradient * 0)
    _, prepared = place(Case(nodes=(1,)), model)
    model.blocks[0].up.weight.register_hook(lambda gradient: gradient * 0)
    backward(prepared, models.loss_of(model, models.batch(0).to("emulated")))
    return [float(p.grad.abs().max()) for p in (model.head.weight, model.blocks[0].up.weight, model.head.bias)]


def misused(how: str, slices: int = 1) -> str:
    """What an error says about a use that cannot be right."""
    device.join_device_world()
    model = make_model(Case())
    if how == "hook":
        model.head.weight.register_hook(lambda gradient: gradient)
    if how == "other operator":
        model.head.register_forward_hook(lambda head, args, output: output + head.weight.sum())
    if how == "two losses":
        model.head.bias = None  # whose gradient comes last, and the bucket of the weight would wait for it
    if how == "post hook":
        model.head.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    tokens = models.batch(0).to("emulated")
    try:
        _, prepared = place(Case(nodes=(1,), slices=slices), model, "collectives" if how == "collectives" else "auto")
        if how == "functional_call":
            zeros = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
            torch.func.functional_call(model, zeros, (tokens,))
        elif how == "replaced":
            model.head.weight = nn.Parameter(torch.zeros_like(model.head.weight))
        elif how == "penalty":
            penalty = sum(parameter.square().sum() for parameter in model.parameters())
            backward(prepared, models.loss_of(model, tokens) + penalty.to("emulated"))
        elif how == "changed":
            model.blocks[0].register_forward_hook(lambda block, *_: block.up.weight.data.add_(1))
            model.blocks[0].register_forward_pre_hook(lambda block, _: block.down.bias.detach().zero_())
        elif how == "two losses":
            losses = [models.loss_of(model, each) for each in (tokens, tokens.flip(1))]
            backward(prepared, losses[0], retain_graph=True)
            backward(prepared, losses[0] + losses[1])
        elif how == "stale":
            loss = models.loss_of(model, tokens)
            prepared.before_step()
            prepared.after_step()
            backward(prepared, loss)
        backward(prepared, models.loss_of(model, tokens))
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "no error"


def embeds_unknown_index(slices: int) -> tuple[list[bool], bool]:
    """Whether rows of an embedding are NaN, the second one's index being too large; whether its gradient is none."""
    device.join_device_world()
    model = make_model(Case())
    _, prepared = place(Case(nodes=(1,), slices=slices), model)
    seen: list[torch.Tensor] = []
    model.embed.register_forward_hook(lambda embed, args, output: seen.append(output))
    model(torch.tensor([[1, models.WORDS]]).to("emulated"))
    rows = seen[0][0]
    backward(prepared, rows.nan_to_num().sum())
    return [bool(each.isnan().any()) for each in rows.cpu()], bool(model.embed.weight.grad.isfinite().all())


def kept_after_interrupt() -> list[str]:
    """The types of what a state dict has after an interrupt in the middle of a forward in bf16."""
    device.join_device_world()
    model = make_model(Case(dtype="float32"))
    place(Case(nodes=(1,), dtype="float32", precision="bf16"), model)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.blocks[1].up.register_forward_hook(interrupt)
    try:
        model(models.batch(0).to("emulated"))
    except KeyboardInterrupt:
        handle.remove()
    return sorted({str(tensor.dtype) for tensor in model.state_dict().values()})


def between_forward_and_backward() -> float:
    """How far a gradient is off when a block whose output cannot be seen waits for its backward in an evaluation."""
    device.join_device_world()
    model = make_model(Case(model="InPlace"))
    alone = copy.deepcopy(model)
    models.loss_of(alone, models.batch(0)).backward()
    _, prepared = place(Case(nodes=(1,)), model)
    loss = models.loss_of(model, models.batch(0).to("emulated"))
    with torch.no_grad():
        model(models.batch(1).to("emulated"))
    backward(prepared, loss)
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max((one.grad - other.grad).abs().max().item() for one, other in pairs)


def reads_logits_on_one_rank() -> float:
    """How far gradients are off if one rank alone looks at logits of a head in slices, after the loss."""
    device.join_device_world()
    case = Case(model="ReturnsLogits", nodes=(2,), slices=3)
    model = make_model(case)
    alone = copy.deepcopy(model)
    tokens = models.batch(0)
    expected = alone(tokens)
    expected[0].backward()
    engine, prepared = place(case, model)
    own = tokens.chunk(2)[dist.get_rank()]
    loss, logits = model(own.to("emulated"))
    error = 0.0
    if dist.get_rank() == 1:
        error = (logits.detach().cpu() - expected[1].chunk(2)[1]).abs().max().item()
    backward(prepared, loss / 2 * engine.loss_multiplier)
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max(error, *((one.grad - other.grad).abs().max().item() for one, other in pairs))


def two_losses_of_one_graph(slices: int, model_name: str = "Tied") -> float:
    """How far gradients are off after a backward of the loss, and one of something else in the same graph."""
    device.join_device_world()
    case = Case(model=model_name, nodes=(1,), slices=slices)
    model = make_model(case)
    alone = copy.deepcopy(model)

    def losses(net: nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        hook = net.blocks[1].register_forward_hook(lambda block, args, output: seen.append(output))
        loss = models.loss_of(net, tokens)
        hook.remove()
        if model_name == "Plain":  # both losses, of two forwards
            return [loss, loss + models.loss_of(net, tokens.flip(1))]
        return [loss, seen[0].square().mean()]

    first, second = losses(alone, models.batch(0))
    first.backward(retain_graph=True)
    second.backward()
    _, prepared = place(case, model)
    first, second = losses(model, models.batch(0).to("emulated"))
    backward(prepared, first, retain_graph=True)
    backward(prepared, second)
    pairs = [pair for pair in zip(model.parameters(), alone.parameters(), strict=True) if pair[1].grad is not None]
    return max((one.grad - other.grad).abs().max().item() for one, other in pairs)


def handed_in_before_the_embedding(model_name: str, slices: int) -> int:
    """Buckets that the node's thread has been given when a backward comes to the embedding."""
    device.join_device_world()
    model = make_model(Case(model=model_name))
    _, prepared = place(Case(model=model_name, nodes=(1,), slices=slices), model)
    seen: list[int] = []
    store = prepared.stores[0]

    def look(embed: nn.Module, args: tuple, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: seen.append(len(store._delivered)))

    model.embed.register_forward_hook(look)
    backward(prepared, models.loss_of(model, models.batch(0).to("emulated")))
    return seen[0]


def backward_twice(model_name: str, slices: int = 1) -> float:
    """How far gradients are off after two backwards through the same forward."""
    device.join_device_world()
    device.configure(copy_delay=0.002)
    model = make_model(Case(model=model_name))
    alone = copy.deepcopy(model)
    loss = models.loss_of(alone, models.batch(0))
    loss.backward(retain_graph=True)
    loss.backward()
    _, prepared = place(Case(nodes=(1,), slices=slices), model)
    loss = models.loss_of(model, models.batch(0).to("emulated"))
    backward(prepared, loss, retain_graph=True)
    backward(prepared, loss)
    device.configure()
    assert device.races() == []
    pairs = [pair for pair in zip(model.parameters(), alone.parameters(), strict=True) if pair[1].grad is not None]
    return max((one.grad - other.grad).abs().max().item() for one, other in pairs)


def train_in_pieces() -> dict[str, Any]:
    """`train` of two ranks whose own memory for gradients takes a few numbers at a time."""
    with mock.patch("accelerate_lshdp.engine.stores.streamed.store.LARGEST_BYTES", 64):
        return train(Case(accumulation=2))
