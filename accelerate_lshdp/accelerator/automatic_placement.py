# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""``placement="auto"``: when a model is prepared, what is needed is measured, and its blocks are placed by it.

Nothing was measured before, and training has not begun. So sizes of blocks come from forwards without content on the
first samples of the data set, limits from the memory that is free, links from a few messages, and speeds from a few
products of matrices. Random numbers and the order of the data stay as they are. All ranks get one placement, planned
from what all of them measured.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from accelerate.logging import get_logger
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from accelerate_lshdp.accelerator.session import Session
from accelerate_lshdp.data.random_numbers import kept_random_numbers
from accelerate_lshdp.documents.curves import RankProfile, TimeCurve
from accelerate_lshdp.documents.plan import Batch, Plan, RankBatch
from accelerate_lshdp.documents.profile_sections import HostRates, Network
from accelerate_lshdp.documents.unit_sizes import ModelUnits
from accelerate_lshdp.documents.wire_format import WIRE_FORMATS
from accelerate_lshdp.engine.module_state import parameters_of
from accelerate_lshdp.engine.stores.shared.memory import NodeMemory, NodeMemoryError
from accelerate_lshdp.planning import PlanningError
from accelerate_lshdp.planning.placement.host_costs import host_costs
from accelerate_lshdp.planning.placement.inputs import ModelSizes, PlacementCluster
from accelerate_lshdp.planning.placement.links import measured_links
from accelerate_lshdp.planning.placement.problem import Peak
from accelerate_lshdp.planning.placement.result import PlacementResult
from accelerate_lshdp.planning.placement.totals import place_sizes, plan_trainable
from accelerate_lshdp.planning.placement.unit_costs import UnitCosts
from accelerate_lshdp.profiling.host_rates import host_rates_of
from accelerate_lshdp.profiling.memory import meter_of, process_bytes
from accelerate_lshdp.profiling.network import measure_network
from accelerate_lshdp.profiling.rates import Rates, measure_rates
from accelerate_lshdp.profiling.subject import Samples
from accelerate_lshdp.profiling.unit_sizes import UnitsUnknown, measure_on_fakes
from accelerate_lshdp.runtime.object_exchange import all_objects
from accelerate_lshdp.runtime.option_advice import option_advice, variable_of


logger = get_logger(__name__)

#: Samples of the batch that is followed; of more, the longest one is rarely longer.
_SAMPLES = 8
#: The part of free memory that may be used; the rest is for fragments, and for what grows later.
_USABLE = 0.9
#: Seconds for messages, and bytes of the largest one.
_NETWORK_SECONDS, _LARGEST_MESSAGE = 1.0, 2**22
#: Of a sample's forward, forward and backward take three times.
_FORWARDS = 3
_DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: How a user asked for it.
_ASKED = f'placement="auto" ({variable_of("placement")}=auto)'
_ADVICE = (
    "Say where blocks go in the section placement of a plan, or let one be made: `accelerate-lshdp profile`, then"
    " `accelerate-lshdp plan --placement auto`"
)


class _Process(Protocol):
    """What of an accelerator is used here."""

    device: torch.device
    mixed_precision: str
    gradient_accumulation_steps: int

    def autocast(self) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True)
class _RankFacts:
    """What one rank measured: bytes that it may use and that its process needs, its rates, and those of its host.

    ``host`` is None where nothing can be streamed from it.
    """

    memory_limit: int
    process_bytes: int
    rates: Rates
    host: HostRates | None


def place_model(session: Session, process: _Process, prepared: Sequence[Any], loaders: Sequence[Any]) -> None:
    """Plans where the blocks of the model go that is about to be prepared, and tells the session (collective).

    Args:
        session: whose plan leaves the placement to the run.
        process: device, precision, and global batches of an optimizer step.
        prepared: the arguments of `prepare`.
        loaders: training loaders that were prepared before.

    Raises:
        RuntimeError: on all ranks, if something cannot be known, or nothing fits; of one rank alone the error itself.
    """
    models = [thing for thing in prepared if isinstance(thing, nn.Module) and _trains(thing)]
    if not models:
        return
    error: Exception | None = None
    units = facts = None
    try:
        _require_format(session.options.communication_dtype)
        model, loader = _the_only(models), _training_loader([*prepared, *loaders])
        facts = _measure_rank(session, process, model)
        if session.rank == 0:
            units = _measure_units(session, process, model, loader)
    except Exception as found:  # the data set of the script may raise anything, on rank 0 alone
        error = found
    session.raise_everywhere(error)
    network = _measure_network(session)
    everyone = all_objects((facts, units))
    try:
        # The same on all ranks: from what all measured, by the same code.
        units, steps = everyone[0][1], process.gradient_accumulation_steps
        cluster = _cluster(session, [rank for rank, _ in everyone], ModelSizes.of(units), network, loader)
        result, batch = _plan(session.plan, ModelSizes.of(units), cluster, loader, steps)
    except (ValueError, PlanningError) as found:
        error = ValueError(f"{_ASKED}: {found}")
    session.raise_everywhere(error)
    placement = units.with_all_modules(result.placement)
    session.check_agreement(repr((placement, batch)), "the placement of the model's blocks")
    most = _largest_micro_batch(ModelSizes.of(units), cluster, result, session.rank)
    session.place(placement, batch, most, process.mixed_precision)
    logger.info(f"placement, {result.predicted.step_seconds:.3g} s a step (predicted): {placement}")


def _largest_micro_batch(model: ModelSizes, cluster: PlacementCluster, result: PlacementResult, rank: int) -> int:
    """The largest micro-batch of a rank that its limit has room for: no moment's memory grows faster with it."""
    costs, needed, recomputed = UnitCosts(model, cluster), model.working_bytes, 0
    for unit in model.everything:
        chosen = result.placement.of(unit.name)
        cost = next(cost for cost in costs.of(unit, False) if cost.placement == chosen)
        needed += cost.memory.sample_bytes + cost.memory.head.at_loss + cost.memory.head.held
        recomputed = max(recomputed, cost.memory.peaks[Peak.RECOMPUTED])
    predicted = result.predicted
    room = predicted.memory_limit_bytes[rank] - predicted.memory_bytes[rank]
    return result.micro_batches[rank][0] + int(room // max(1.0, needed + recomputed))


def _trains(model: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in parameters_of(model))


def _require_format(dtype: str) -> None:
    if WIRE_FORMATS[dtype].between_nodes_only:
        raise ValueError(
            f"found communication_dtype={dtype!r} with {_ASKED}, expected a format that blocks of all ranks"
            f" can have, too: which blocks these are is planned. Give"
            f" {option_advice('communication_dtype', 'fp32')}, or 'bf16'"
        )


def _the_only(models: Sequence[nn.Module]) -> nn.Module:
    if len(models) > 1:
        raise ValueError(
            f"found {len(models)} models with {_ASKED}, expected one: their blocks share the memory. {_ADVICE}"
        )
    return models[0]


def _training_loader(things: Sequence[Any]) -> DataLoader:
    """The loader by which the model is measured: of those of the script, the first one with the largest batches.

    Which of them the model is trained with is not known before it is.
    """
    loaders = [thing for thing in things if isinstance(thing, DataLoader)]
    if not loaders:
        raise ValueError(
            f"found a model without a loader with {_ASKED}, expected the training loader in the same"
            f" `prepare`, or before: samples say what blocks keep. {_ADVICE}"
        )
    loader = max((getattr(loader, "base_dataloader", loader) for loader in loaders), key=_batch_size)
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            f"found a stream of samples with {_ASKED}, expected a data set with an index: to measure with the"
            f" samples of a stream would use them up. {_ADVICE}"
        )
    return loader


def _batch_size(loader: DataLoader) -> int:
    """The samples of a loader's batches, by its sampler where it is prepared; 0: nothing says how many."""
    return loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 0


def _measure_rank(session: Session, process: _Process, model: nn.Module) -> _RankFacts:
    meter = meter_of(process.device)
    if meter is None:
        raise ValueError(f"found the device {process.device}, expected one whose memory is known. {_ADVICE}")
    needed = process_bytes(meter, model, process.device)
    local = session.topology.node_sizes[session.topology.node]
    limit = int(meter.default_limit(local) * _USABLE)
    rates = measure_rates(process.device, _DTYPES[process.mixed_precision])
    return _RankFacts(limit, needed, rates, _measure_host(session, process, model))


def _measure_host(session: Session, process: _Process, model: nn.Module) -> HostRates | None:
    """What streaming from this rank's host takes; None where units of store ``host`` would not be streamed."""
    if session.options.communication.intra_node == "collectives" or NodeMemory.missing() is not None:
        return None
    threads = torch.get_num_threads()
    try:
        return host_rates_of(process.device, model, process.mixed_precision)
    except NodeMemoryError as error:
        logger.warning(
            f"no block is placed in host memory, as rank {session.rank} cannot copy from it: {error}",
            main_process_only=False,
        )
        return None
    finally:
        torch.set_num_threads(threads)  # a run that places no block there keeps its own


def _measure_units(session: Session, process: _Process, model: nn.Module, loader: DataLoader) -> ModelUnits:
    # Data sets may draw random numbers for their samples.
    with kept_random_numbers(process.device):
        samples = Samples(loader)
        count = samples.available(_SAMPLES)
        if not count:
            raise ValueError(f"found no sample in the data set, expected some, by which {_ASKED} measures")
        batches = [samples.repeated(count, times) for times in (1, 2)]
    try:
        return measure_on_fakes(
            model,
            batches,
            (count, 2 * count),
            stand_in_loss,
            device=process.device,
            mixed_precision=process.mixed_precision,
            autocast=process.autocast,
            block_names=session.options.units,
        )
    except UnitsUnknown as error:
        raise ValueError(
            f"found a model whose blocks cannot be measured for {_ASKED}. It was called with"
            f" {_describe_call(model, batches[0])}: {error}. If the script calls it in another way, write a function"
            " `profiling_subject(argv)` that says how (docs/custom_loops.md). " + _ADVICE
        ) from error


def stand_in_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """What a backward begins with: the model's own loss, or a stand-in that keeps as much as the script's.

    A model takes those entries of a mapping that its forward names, or else the first one, as it does of a list.
    """
    named = _named_inputs(model, batch)
    if named:
        output = model(**named)
    else:
        values = list(batch.values()) if isinstance(batch, Mapping) else batch
        output = model(values[0] if isinstance(values, (list, tuple)) else values)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is not None:
        return loss
    # A cross-entropy keeps logarithms of probabilities, as many as there are outputs.
    return sum(torch.log_softmax(values, -1).sum() for values in _float_tensors(output))


def _named_inputs(model: nn.Module, batch: Any) -> dict[str, Any]:
    """The entries of a batch that a model's forward has parameters for; empty if the batch is no mapping."""
    if not isinstance(batch, Mapping):
        return {}
    parameters = inspect.signature(model.forward).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return dict(batch)
    return {name: value for name, value in batch.items() if name in parameters}


def _describe_call(model: nn.Module, batch: Any) -> str:
    """How `stand_in_loss` calls a model."""
    names = list(_named_inputs(model, batch))
    if names:
        return f"the entries {names} of a batch"
    return "the first entry of a batch" if isinstance(batch, (Mapping, list, tuple)) else "a batch"


def _float_tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        if output.is_floating_point() and output.requires_grad:
            yield output
        return
    for value in output.values() if isinstance(output, Mapping) else output:
        if isinstance(value, (torch.Tensor, Mapping, list, tuple)):
            yield from _float_tensors(value)


def _measure_network(session: Session) -> Network | None:
    if session.world_size == 1:
        return None
    return measure_network(session.topology, session.device, [_LARGEST_MESSAGE], _NETWORK_SECONDS)


def _given_sizes(plan: Plan, loader: DataLoader, world_size: int) -> Sequence[tuple[int, int]] | None:
    """(samples, number in a global batch) of each rank's micro-batches; None: the placement's planner chooses them.

    Raises:
        ValueError: nothing says how many samples a micro-batch has.
    """
    if plan.automatic is None and plan.batch is not None:
        return plan.micro_batches
    if plan.total_batch_size is not None:
        return None
    if not (batch_size := _batch_size(loader)):
        raise ValueError(
            "found a loader without a batch size and a plan without one, expected either: memory depends on it."
            ' Give batch_sizes=..., or batch_sizes="auto" with total_batch_size=...'
        )
    return [(batch_size, 1)] * world_size


def _cluster(
    session: Session, ranks: Sequence[_RankFacts], model: ModelSizes, network: Network | None, loader: DataLoader
) -> PlacementCluster:
    """The ranks of the run, with speeds that go by the operations of a sample."""
    nodes, plan = tuple(session.topology.node_sizes), session.plan
    given = _given_sizes(plan, loader, session.world_size)
    largest = max(size for size, _ in given) if given is not None else plan.total_batch_size
    sample = [_FORWARDS * max(model.flops, 1.0) / rank.rates.flops for rank in ranks]
    points = (1, largest) if largest > 1 else (1,)
    profiles = tuple(
        RankProfile(
            TimeCurve(points, [size * seconds for size in points]),
            largest,
            fixed_seconds=rank.rates.optimizer_seconds(model.trainable),
        )
        for seconds, rank in zip(sample, ranks, strict=True)
    )
    link, inside = measured_links(network, nodes)
    return PlacementCluster(
        nodes,
        profiles,
        tuple(rank.memory_limit for rank in ranks),
        link,
        inside,
        process_bytes=max(rank.process_bytes for rank in ranks),
        streams=session.device.type != "cpu",
        **host_costs([rank.host for rank in ranks], nodes, model.trainable),
    )


def _plan(
    plan: Plan, model: ModelSizes, cluster: PlacementCluster, loader: DataLoader, accumulation_steps: int
) -> tuple[PlacementResult, Batch | None]:
    """The placement, and the batch sizes that go with it; None: those that the plan or the loader has.

    Args:
        plan: of the run.
        model: sizes of its units.
        cluster: with measured costs.
        loader: by which the model was measured.
        accumulation_steps: global batches of an optimizer step. Between them world-sharded units keep gradients.

    Raises:
        PlanningError: nothing fits, or the total cannot be cut.
        ValueError: nothing says how many samples a micro-batch has.
    """
    given = _given_sizes(plan, loader, cluster.world)
    if given is not None:
        return place_sizes(model, cluster, _in_a_step(given, accumulation_steps)), None
    try:
        # What a micro-batch takes beside its samples is not known, so there is one where memory has room for it.
        result = plan_trainable(model, cluster, total_batch_size=plan.total_batch_size, most_steps=1)
    except PlanningError:
        # One process weights its losses as if it never accumulated: that was settled when it began.
        if cluster.world == 1:
            raise
        result = plan_trainable(model, cluster, total_batch_size=plan.total_batch_size)
    chosen = result.micro_batches
    if accumulation_steps > 1:
        result, chosen = _place_accumulating(model, cluster, chosen, accumulation_steps)
    return result, Batch(tuple(RankBatch(rank, size, steps) for rank, (size, steps) in enumerate(chosen)))


def _place_accumulating(
    model: ModelSizes, cluster: PlacementCluster, sizes: Sequence[tuple[int, int]], accumulation_steps: int
) -> tuple[PlacementResult, Sequence[tuple[int, int]]]:
    """The placement of global batches of which several make a step, and their sizes.

    Gradients that are kept between them take memory that the sizes were planned without. Where that is missing, the
    global batch is cut into more micro-batches.

    Args:
        model: sizes of its units.
        cluster: with measured costs.
        sizes: (samples, micro-batches) of each rank in a global batch.
        accumulation_steps: global batches of an optimizer step.

    Raises:
        PlanningError: nothing fits.
    """
    try:
        return place_sizes(model, cluster, _in_a_step(sizes, accumulation_steps)), sizes
    except PlanningError:
        # As in `_plan`: one process weights its losses as if it never accumulated.
        if cluster.world == 1:
            raise
        total, done = sum(size * count for size, count in sizes), sizes[0][1]
        for steps in range(done + 1, total // cluster.world + 1):
            if total % steps == 0:
                with contextlib.suppress(PlanningError):
                    cut = plan_trainable(model, cluster, total_batch_size=total // steps, most_steps=1).micro_batches
                    smaller = [(size, steps) for size, _ in cut]
                    return place_sizes(model, cluster, _in_a_step(smaller, accumulation_steps)), smaller
        raise


def _in_a_step(sizes: Sequence[tuple[int, int]], accumulation_steps: int) -> list[tuple[int, int]]:
    return [(size, count * accumulation_steps) for size, count in sizes]
