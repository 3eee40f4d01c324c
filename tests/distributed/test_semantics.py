# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What the documents promise, on real ranks: evaluation, accumulation, weighting, unused parameters, gathering."""

from __future__ import annotations

import time

import pytest
import torch
from accelerate import Accelerator
from exactness import full, prepared
from safetensors.torch import load_file
from torch.utils.data import Dataset
from training_cases import CASES, collate, make_optimizer, reference_run, relative_error, text_dataset, tiny_gpt2

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator, Plan


# Evaluation passes (4.4)


def pass_kinds() -> list[tuple]:
    case = CASES["vit"]
    plan = Plan.from_batch_sizes([3, 1], strategy="lsdp")
    accelerator, model, _, loader = prepared(plan, case.model(), case.dataset(7, torch.float32))
    seen = []
    model.train()
    seen.append((len(loader), [len(batch["labels"]) for batch in loader]))
    model.eval()
    seen.append((len(loader), [len(batch["labels"]) for batch in loader]))
    model.train()
    with accelerator.evaluation():
        seen.append((len(loader), [len(batch["labels"]) for batch in loader]))
        gathered = [accelerator.gather_for_metrics(batch["labels"]) for batch in loader]
    seen.append(torch.cat(gathered).tolist())
    return seen


def test_a_pass_is_for_training_or_evaluation_by_the_models_mode(workers):
    first, second = workers(2).run(pass_kinds, nodes=(1, 1))
    labels = [int(CASES["vit"].dataset(7, torch.float32)[index]["labels"]) for index in range(7)]
    assert first[0] == (2, [3, 2]) and second[0] == (2, [1, 1])  # 4 samples, then the 3 left as 2 and 1
    assert first[1] == second[1] == (2, [2, 2])
    assert first[2] == second[2] == (2, [2, 2])
    assert first[3] == second[3] == labels


def gather_in_training() -> list:
    """Metrics of training batches: every sample once, although ranks repeat one where they have none."""
    case = CASES["vit"]
    plan = Plan.from_batch_sizes([(2, 2), (1, 2), (1, 2)], strategy="ddp")
    accelerator, model, _, loader = prepared(plan, case.model(), case.dataset(11, torch.float32))
    model.train()
    seen, named = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(case.loss(model, batch))
            seen.append(accelerator.gather_for_metrics(batch["labels"]))
            named += accelerator.gather_for_metrics([f"{v:d}" for v in batch["labels"].tolist()], True)
    return [sorted(torch.cat(seen).tolist()), sorted(map(int, named))]


def test_gather_for_metrics_in_a_training_pass_drops_repeated_samples(workers):
    labels = sorted(int(CASES["vit"].dataset(11, torch.float32)[index]["labels"]) for index in range(11))
    for tensors, objects in workers(3).run(gather_in_training, nodes=(1, 2)):
        assert tensors == labels
        assert objects == labels


def gather_shapes(rank_sizes: list[int]) -> tuple:
    accelerator = LSHDPAccelerator(plan=Plan.equal(strategy="ddp"))
    rank = accelerator.process_index
    gathered = accelerator.gather(
        {
            "matrix": torch.full((rank_sizes[rank], 2), float(rank)),
            "flags": torch.tensor([bool(rank)] * rank_sizes[rank], dtype=torch.bool),
            "scalar": torch.tensor(rank),
        }
    )
    return gathered["matrix"].tolist(), gathered["flags"].tolist(), gathered["scalar"].tolist()


def test_gather_concatenates_unequal_shapes(workers):
    expected = ([[0.0, 0.0], [2.0, 2.0], [2.0, 2.0], [2.0, 2.0]], [False, True, True, True], [0, 1, 2])
    assert workers(3).run(gather_shapes, [1, 0, 3]) == [expected] * 3


def gather_mismatch() -> None:
    accelerator = LSHDPAccelerator(plan=Plan.equal(strategy="ddp"))
    accelerator.gather(torch.zeros(2, 2 + accelerator.process_index))


def test_gather_of_other_mismatches_is_an_error_on_all_ranks(workers):
    errors = workers(2).run(gather_mismatch, expect_failure=True)
    assert all("only the first dimension may differ" in error.message for error in errors)


# Weighting (4.5)


def train_without_tokens(strategy: str) -> dict:
    """Some samples have no token after the shift, so the mean loss of some micro-batches is NaN."""
    plan = Plan.from_batch_sizes([(1, 2), (1, 2)], strategy=strategy)
    plugin = LSDPPlugin(loss_weighting="tokens")
    data = text_dataset(9, without_tokens=(0, 1, 5))
    accelerator, model, optimizer, loader = prepared(plan, tiny_gpt2().double(), data, plugin=plugin)
    case = CASES["gpt2"]
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(case.loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    return {name: full(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("strategy", "nodes"), [("ddp", (1, 1)), ("lsdp", (1, 1)), ("lsdp", (2,)), ("fsdp", (2,))])
def test_micro_batches_without_a_loss_token_contribute_an_exact_zero(workers, strategy, nodes):
    reference = reference_run(
        "gpt2",
        torch.float64,
        [[0, 1, 2, 3], [4, 5, 6, 7], [8]],
        weighting="tokens",
        steps=3,
        lr=1e-2,
        weight_decay=0.0,
        max_grad_norm=None,
        dataset=text_dataset(9, without_tokens=(0, 1, 5)),
    )
    for parameters in workers(2).run(train_without_tokens, strategy, nodes=nodes):
        assert relative_error(parameters, reference.parameters) <= 1e-12


# Look-ahead, several losses of a batch, no_sync (4.3)


def train_with_look_ahead(ahead: bool) -> dict:
    case = CASES["vit"]
    plan = Plan.from_batch_sizes([(2, 2), (1, 2)], strategy="lsdp")
    accelerator, model, optimizer, loader = prepared(plan, case.model().double(), case.dataset(15, torch.float64))
    model.train()
    batches = list(loader) if ahead else loader
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(case.loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.completed_steps == 3 and accelerator.samples_seen == 15
    return {name: full(parameter) for name, parameter in model.named_parameters()}


def test_looking_ahead_changes_nothing(workers):
    plain = workers(2).run(train_with_look_ahead, False, nodes=(1, 1))
    ahead = workers(2).run(train_with_look_ahead, True, nodes=(1, 1))
    assert all(torch.equal(ahead[0][name], plain[0][name]) for name in plain[0])


def train_with_two_losses(strategy: str) -> dict:
    """Two backward calls for each batch, gradients kept over two batches by sync_each_batch-like steps."""
    case = CASES["vit"]
    plan = Plan.from_batch_sizes([3, 1], strategy=strategy)
    accelerator, model, optimizer, loader = prepared(plan, case.model().double(), case.dataset(8, torch.float64))
    model.train()
    for number, batch in enumerate(loader):
        accelerator.backward(0.25 * case.loss(model, batch))
        accelerator.backward(0.75 * case.loss(model, batch))
        if number == 1:  # gradients of both batches are summed: the step is for mean loss x 2
            optimizer.step()
    return {name: full(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("strategy", "nodes"), [("ddp", (1, 1)), ("lsdp", (1, 1)), ("lsdp", (2,)), ("fsdp", (2,))])
def test_several_synchronised_backwards_add_up(workers, strategy, nodes):
    case = CASES["vit"]
    model = case.model().double()
    optimizer = make_optimizer(model, 1e-2, 0.0)
    data = case.dataset(8, torch.float64)
    for start in (0, 4):
        case.loss(model, collate([data[i] for i in range(start, start + 4)])).backward()
    optimizer.step()
    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for parameters in workers(2).run(train_with_two_losses, strategy, nodes=nodes):
        assert relative_error(parameters, expected) <= 1e-12


# Saving models


def save_model(strategy: str, folder: str) -> dict:
    accelerator, model, *_ = prepared(Plan.from_batch_sizes([2, 1], strategy=strategy), tiny_gpt2(), text_dataset(4))
    accelerator.save_model(model, folder)
    accelerator.save_model(model, f"{folder}/pieces", max_shard_size="20KB")
    if accelerator.is_main_process:
        model.config.save_pretrained(folder)
        model.config.save_pretrained(f"{folder}/pieces")
    state = accelerator.get_state_dict(model)
    return {name: tensor.clone() for name, tensor in state.items()}


@pytest.mark.parametrize(("strategy", "nodes"), [("ddp", (1, 1)), ("lsdp", (2,)), ("fsdp", (1, 1))])
def test_saved_models_load_with_plain_from_pretrained(workers, tmp_path, strategy, nodes):
    from transformers import GPT2LMHeadModel

    states = workers(2).run(save_model, strategy, str(tmp_path), nodes=nodes)
    expected = dict(tiny_gpt2().named_parameters())
    for folder in (tmp_path, tmp_path / "pieces"):
        loaded = dict(GPT2LMHeadModel.from_pretrained(folder).named_parameters())
        assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    assert all(torch.equal(states[0][name], value) for name, value in expected.items())


def save_on_the_main_process_alone(strategy: str, folder: str) -> dict:
    plan = Plan.from_batch_sizes([2, 1], strategy=strategy)
    accelerator, model, optimizer, loader = prepared(plan, tiny_gpt2(), text_dataset(9))
    saved = {}
    for step, batch in enumerate(loader):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and accelerator.is_main_process:
            accelerator.save_model(model, folder)
            saved = {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}
    assert accelerator.completed_steps == 3
    return saved


@pytest.mark.parametrize(("strategy", "nodes"), [("ddp", (1, 1)), ("lsdp", (1, 1)), ("lsdp", (2,))])
def test_the_main_process_saves_a_whole_model_alone(workers, tmp_path, strategy, nodes):
    """As in scripts that save under `if accelerator.is_main_process`, which stock Accelerate allows."""
    saved, _ = workers(2).run(save_on_the_main_process_alone, strategy, str(tmp_path), nodes=nodes)
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded and all(torch.equal(saved[name], value) for name, value in loaded.items())


def save_into_a_file(folder: str) -> None:
    accelerator, model, *_ = prepared(Plan.from_batch_sizes([2, 1], strategy="ddp"), tiny_gpt2(), text_dataset(4))
    if accelerator.is_main_process:
        accelerator.save_model(model, folder)


def test_a_main_process_that_cannot_save_says_so(workers, tmp_path):
    (tmp_path / "taken").touch()
    error, _ = workers(2).run(save_into_a_file, str(tmp_path / "taken"), expect_failure=True, nodes=(1, 1))
    assert error.message.startswith("saving the model to ") and "FileExistsError" in error.message


# One process without a launcher


def test_one_process_without_a_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    case = CASES["vit"]
    accelerator, model, optimizer, loader = prepared(
        Plan.from_batch_sizes([4]), case.model().double(), case.dataset(8, torch.float64)
    )
    model.train()
    for batch in loader:
        accelerator.backward(case.loss(model, batch))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    expected = reference_run(
        "vit",
        torch.float64,
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        weighting="sample",
        steps=2,
        lr=1e-2,
        weight_decay=0.0,
        max_grad_norm=1.0,
    )
    assert relative_error(dict(model.named_parameters()), expected.parameters) <= 1e-12
    assert isinstance(accelerator, Accelerator) and accelerator.step_statistics.steps == 2


# Statistics


def train_and_report() -> tuple:
    case = CASES["vit"]
    plan = Plan.from_batch_sizes([6, 2], strategy="lsdp")
    accelerator, model, optimizer, loader = prepared(plan, case.model(), case.dataset(48, torch.float32))
    assert accelerator.step_statistics is None
    model.train()
    for batch in loader:
        accelerator.backward(case.loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.step_statistics


def test_step_statistics_tell_every_rank_the_same_of_all_ranks(workers):
    first, second = workers(2).run(train_and_report, nodes=(1, 1))
    assert first.steps == second.steps == 6
    assert first.compute_seconds == second.compute_seconds and len(first.compute_seconds) == 2
    assert first.wait_seconds == second.wait_seconds
    assert 0 <= first.idle_fraction < 1 and first.idle_fraction == second.idle_fraction
    assert first.samples_per_second == pytest.approx(8 / first.seconds)
    for rank in (0, 1):
        assert 0 < first.compute_seconds[rank] and 0 <= first.wait_seconds[rank]
        assert first.compute_seconds[rank] + first.wait_seconds[rank] <= 1.5 * max(first.seconds, second.seconds)
        assert 0 < first.optimizer_seconds[rank] < max(first.seconds, second.seconds)


class SlowSamples(Dataset):
    """Each sample takes 5 ms to read."""

    def __init__(self, samples: Dataset) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict:
        time.sleep(0.005)
        return self.samples[index]


def train_on_slow_data() -> tuple[float, ...]:
    case = CASES["vit"]
    dataset = SlowSamples(case.dataset(48, torch.float32))
    plan = Plan.from_batch_sizes([6, 2], strategy="ddp")
    accelerator, model, optimizer, loader = prepared(plan, case.model(), dataset)
    model.train()
    for batch in loader:
        accelerator.backward(case.loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.step_statistics.data_seconds


def test_step_statistics_tell_how_long_data_takes(workers):
    for seconds in workers(2).run(train_on_slow_data, nodes=(1, 1)):
        assert seconds[0] >= 6 * 0.005 and seconds[1] >= 2 * 0.005
