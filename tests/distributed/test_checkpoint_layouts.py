# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Saved under one layout, loaded under another: the same bits, on nodes that share no file system."""

from __future__ import annotations

import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import assert_same, full_state, layout, node_folder, objects, train, visible
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate_lshdp.checkpoint import stream as checkpoint_stream
from accelerate_lshdp.checkpoint.run_state import (
    TrainingObjects,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
    save_model_file,
    stream_full_state,
)
from accelerate_lshdp.checkpoint.tensors import SafetensorsWriter


LAYOUTS = {
    "one": ((1,), "replicated"),
    "ddp 1+1": ((1, 1), "ddp"),
    "flat 1+1": ((1, 1), "flat"),
    "node 1+2": ((1, 2), "node"),
    "node 2+2": ((2, 2), "node"),
    "hybrid 2+2": ((2, 2), "hybrid"),
    "flat 2+2": ((2, 2), "flat"),
}
# A ring, so that each layout saves for two others and loads from two others.
MOVES = [
    ("one", "node 2+2"),
    ("node 2+2", "flat 1+1"),
    ("flat 1+1", "node 1+2"),
    ("node 1+2", "hybrid 2+2"),
    ("hybrid 2+2", "ddp 1+1"),
    ("ddp 1+1", "flat 2+2"),
    ("flat 2+2", "one"),
    ("one", "flat 1+1"),
    ("node 2+2", "node 1+2"),
    ("flat 1+1", "one"),
    ("node 1+2", "flat 2+2"),
    ("flat 2+2", "node 2+2"),
]


def save(root, kind, step=3, name="checkpoint"):
    training = objects(kind, steps=step)
    training.loaders = [{"samples": 7}]
    training.extra = {"note": (1, "two")}
    save_checkpoint(
        node_folder(root) / name, training, layout(), plan_digest=kind, step=step, samples_seen=4 * step, seed=11
    )
    return full_state(training)


def load(root, kind, trained=1, name="checkpoint", digest=None):
    """Into an optimizer that has other state, or none yet."""
    training = objects(kind, seed=1, steps=trained)
    loaded = load_checkpoint(node_folder(root) / name, training, layout(), plan_digest=digest or kind)
    return full_state(training), loaded


@pytest.mark.parametrize(("source", "target"), MOVES)
def test_same_bits_under_another_layout(workers, tmp_path, source, target):
    nodes, kind = LAYOUTS[source]
    saved = workers(sum(nodes)).run(save, tmp_path, kind, nodes=nodes)
    for node in range(len(nodes)):
        assert visible(tmp_path / f"node{node}") == ["checkpoint"]
    nodes, kind = LAYOUTS[target]
    for trained in (0, 1):
        for state, loaded in workers(sum(nodes)).run(load, tmp_path, kind, trained, nodes=nodes):
            assert_same(state, saved[0])
            assert (loaded.step, loaded.samples_seen, loaded.seed) == (3, 12, 11)
            assert (loaded.loaders, loaded.extra) == ([{"samples": 7}], {"note": (1, "two")})
            assert not loaded.rng_restored
    for node in range(len(nodes)):
        assert visible(tmp_path / f"node{node}") == ["checkpoint"]


def test_every_node_has_all_of_it(workers, tmp_path):
    """Plain safetensors reads each node's copy alone: full tensors under the module's names, tied ones once."""
    state = workers(4).run(save, tmp_path, "flat", nodes=(2, 2))[0]
    expected = {name.removeprefix("model "): value for name, value in state.items() if name.startswith("model ")}
    del expected["head.weight"]  # tied to the embedding
    for node in range(2):
        folder = tmp_path / f"node{node}" / "checkpoint"
        assert_same(load_file(folder / "model_0.safetensors"), expected)
        assert not list(folder.glob("*.pickle"))


def count_full_tensors(root):
    """The number of gathered full tensors that are alive when the next one is gathered."""
    alive, counts, gather = [], [], checkpoint_stream.gather_full

    def gather_and_count(tensor):
        counts.append(sum(reference() is not None for reference in alive))
        full = gather(tensor)
        if isinstance(tensor, DTensor):
            alive.append(weakref.ref(full))
        return full

    with mock.patch.object(checkpoint_stream, "gather_full", gather_and_count):
        save(root, "flat")
    return max(counts), len(alive)


def test_one_full_tensor_at_a_time(workers, tmp_path):
    for most, gathered in workers(4).run(count_full_tensors, tmp_path, nodes=(2, 2)):
        assert most == 0 and gathered > 20


def interrupted(root, kind):
    here = layout()
    training = objects(kind, steps=2)
    torch.manual_seed(here.rank if kind == "replicated" else 5)
    training.extra_tensors = {"error feedback": torch.randn(here.rank + 2)}
    feedback = training.extra_tensors["error feedback"].clone()
    save_checkpoint(node_folder(root) / "a", training, here, plan_digest="p", step=2, samples_seen=8, seed=0)
    train(training, 2)
    uninterrupted = full_state(training)
    resumed = objects(kind, seed=9, steps=1)
    resumed.extra_tensors = {"error feedback": torch.zeros(here.rank + 2)}
    loaded = load_checkpoint(node_folder(root) / "a", resumed, here, plan_digest="p")
    assert loaded.same_plan and loaded.rng_restored
    torch.testing.assert_close(resumed.extra_tensors["error feedback"], feedback, rtol=0, atol=0)
    torch.testing.assert_close(loaded.extra_tensors["error feedback"], feedback, rtol=0, atol=0)
    train(resumed, 2)
    return uninterrupted, full_state(resumed)


@pytest.mark.parametrize(("nodes", "kind"), [((1, 1), "flat"), ((2, 2), "node"), ((1, 2), "node")])
def test_resuming_under_the_same_plan_is_bit_identical(workers, tmp_path, nodes, kind):
    for uninterrupted, resumed in workers(sum(nodes)).run(interrupted, tmp_path, kind, nodes=nodes):
        assert_same(resumed, uninterrupted)


def different_on_each_rank(root):
    here = layout()
    training = objects(steps=1)
    training.extra_tensors = {"mine": torch.full((2,), float(here.rank))}
    common = training.models[0].block[1].running_mean.clone()
    training.models[0].block[1].running_mean += here.rank
    torch.manual_seed(100 + here.rank)
    save_checkpoint(node_folder(root) / "a", training, here, plan_digest="p", step=1, samples_seen=4, seed=3)
    drawn = torch.rand(2)
    mean = training.models[0].block[1].running_mean.clone()
    same = objects(seed=1)
    load_checkpoint(node_folder(root) / "a", same, here, plan_digest="p")
    torch.testing.assert_close(torch.rand(2), drawn, rtol=0, atol=0)
    torch.testing.assert_close(same.models[0].block[1].running_mean, mean, rtol=0, atol=0)
    other = objects(seed=1)
    loaded = load_checkpoint(node_folder(root) / "a", other, here, plan_digest="q")
    assert not loaded.same_plan and not loaded.rng_restored and loaded.extra_tensors == {}
    torch.testing.assert_close(other.models[0].block[1].running_mean, common, rtol=0, atol=0)
    return torch.rand(2), drawn


def test_what_ranks_have_for_themselves(workers, tmp_path):
    """Generators, error feedback and local BatchNorm means come back to each rank, but only under the same plan."""
    streams = workers(2).run(different_on_each_rank, tmp_path, nodes=(1, 1))
    drawn = [stream for pair in streams for stream in pair]
    assert len({tuple(stream.tolist()) for stream in drawn}) == 4


class Average:
    """A registered object with tensors, one of them sharded like a parameter."""

    def __init__(self, training: TrainingObjects, factor: float) -> None:
        self.weight = training.models[0].block[0].weight.detach().clone() * factor
        self.decay = factor

    def state_dict(self):
        return {"weight": self.weight, "decay": self.decay, "by rank": torch.tensor(dist.get_rank())}

    def load_state_dict(self, state):
        self.weight, self.decay, self.by_rank = state["weight"], state["decay"], state["by rank"]


def average_of_shards(root, kind):
    training = objects(kind)
    average = Average(training, 3.0)
    training.custom = [average]
    save_checkpoint(node_folder(root) / "a", training, layout(), plan_digest="p", step=0, samples_seen=0, seed=0)
    other = objects(kind)
    other.custom = [Average(other, 1.0)]
    load_checkpoint(node_folder(root) / "a", other, layout(), plan_digest="p")
    restored = other.custom[0]
    assert type(restored.weight) is type(average.weight) and restored.decay == 3.0
    local, expected = (value.to_local() for value in (restored.weight, average.weight))
    torch.testing.assert_close(local, expected, rtol=0, atol=0)
    assert restored.by_rank == 0  # rank 0's state is the one that is saved
    return True


@pytest.mark.parametrize(("nodes", "kind"), [((1, 1), "flat"), ((2, 2), "node")])
def test_registered_objects_with_sharded_tensors(workers, tmp_path, nodes, kind):
    assert all(workers(sum(nodes)).run(average_of_shards, tmp_path, kind, nodes=nodes))


def stream(root, kind):
    here = layout()
    training = objects(kind, steps=1)
    expected = {name: value for name, value in full_state(training).items() if name.startswith("model ")}
    streamed = dict(stream_full_state(training.models[0], wanted=here.rank == 0))
    save_model_file(node_folder(root) / "model.safetensors", training.models[0], here, is_writer=here.rank == 0)
    return {name.removeprefix("model "): value for name, value in expected.items()}, streamed


def test_full_state_is_streamed_to_those_who_want_it(workers, tmp_path):
    for node in range(2):
        (tmp_path / f"node{node}").mkdir()
    answers = workers(3).run(stream, tmp_path, "flat", nodes=(1, 2))
    expected, streamed = answers[0]
    assert_same(streamed, expected)
    for _, others in answers[1:]:
        assert others == dict.fromkeys(expected)
    assert visible(tmp_path / "node0") == ["model.safetensors"] and visible(tmp_path / "node1") == []
    del expected["head.weight"]
    assert_same(load_file(tmp_path / "node0" / "model.safetensors"), expected)


def save_on_each_node(root):
    """Both writers begin before either ends; then one of them may not write there."""
    training, begins = objects(steps=1), SafetensorsWriter.__init__

    def together(*args, **options):
        begins(*args, **options)
        dist.barrier()

    with mock.patch.object(SafetensorsWriter, "__init__", together):
        save_model_file(root / "new" / "model.safetensors", training.models[0], layout(), is_writer=True)
    expected = {name.removeprefix("model "): value for name, value in full_state(training).items()}
    blocked = root / f"blocked{dist.get_rank()}"
    if dist.get_rank() == 1:
        blocked.touch()  # a file, where a folder is to be made
    try:
        save_model_file(blocked / "model.safetensors", training.models[0], layout(), is_writer=True)
    except RuntimeError as error:
        return {name: expected[name] for name, _ in training.models[0].named_parameters()}, str(error)
    return None


def test_nodes_that_save_a_model_into_one_folder(workers, tmp_path):
    answers = workers(2).run(save_on_each_node, tmp_path, nodes=(1, 1))
    assert visible(tmp_path / "new") == ["model.safetensors"]
    saved = load_file(tmp_path / "new" / "model.safetensors")
    for parameters, message in answers:
        assert message.startswith("rank 1: saving the model to ") and "FileExistsError" in message
        assert_same({name: saved[name] for name in parameters}, parameters)


def one_folder_for_all(root):
    here = layout()
    training = objects(steps=1)
    save_checkpoint(root / "a", training, here, plan_digest="p", step=1, samples_seen=4, seed=0)
    found = newest_checkpoint(root, here)
    loaded = load_checkpoint(root, objects(seed=1), here, plan_digest="p")
    return found, loaded.path


def test_nodes_with_a_shared_folder(workers, tmp_path):
    answers = workers(4).run(one_folder_for_all, tmp_path, nodes=(2, 2))
    assert answers == [(str(tmp_path / "a"), str(tmp_path / "a"))] * 4
    assert visible(tmp_path) == ["a"]


def drift(root):
    here = layout()
    training = objects()
    with torch.no_grad():
        training.models[0].scale += here.rank
    if here.rank == 0:
        with pytest.warns(UserWarning, match=r"different contents of model_0\.safetensors .*drifted"):
            save_checkpoint(node_folder(root) / "a", training, here, plan_digest="p", step=0, samples_seen=0, seed=0)
    else:
        save_checkpoint(node_folder(root) / "a", training, here, plan_digest="p", step=0, samples_seen=0, seed=0)
    return True


def test_replicas_that_drifted_apart_are_reported(workers, tmp_path):
    assert workers(2).run(drift, tmp_path, nodes=(1, 1)) == [True, True]


class Plain(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3, outputs)


def models_that_differ(root):
    training = TrainingObjects(models=[Plain(outputs=2 + layout().rank)])
    save_checkpoint(node_folder(root) / "a", training, layout(), plan_digest="p", step=0, samples_seen=0, seed=0)


def test_ranks_with_different_models_write_nothing(workers, tmp_path):
    errors = workers(2).run(models_that_differ, tmp_path, nodes=(1, 1), expect_failure=True)
    assert all("ranks 0 and 1 differ in" in error.message for error in errors)
    assert len({error.message for error in errors}) == 1
    assert visible(tmp_path) == []
