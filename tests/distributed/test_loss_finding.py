# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What the losses of loops are means over is found out: each gives the gradient of one process, or an error."""

from __future__ import annotations

import contextlib
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exactness import full
from strategy_cells import SIZES_OF_4, cells
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from training_cases import Samples, collate, make_optimizer, relative_error

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator, Plan
from accelerate_lshdp.accelerator.losses.classes import loss_shifts_labels
from accelerate_lshdp.documents.placement import ModelPlacement, UnitPlacement, UnitStore


TAGS, LENGTH = 7, 6
SAMPLES = 22  # global batches of 4, and one of 2
#: Samples whose labels are all -100.
EMPTY = frozenset({3, 8, 9, 10, 17})
PLACES = [("ddp", (1, 1)), ("collectives", (1, 1)), ("lsdp", (2,)), ("fsdp", (2,))]


def tagged_rows(size: int = SAMPLES) -> Samples:
    """Rows of words, a tag for the first words of each, and -100 for the others."""

    def make(index: int, generator: torch.Generator) -> dict[str, Tensor]:
        words = torch.randint(1, TAGS, (LENGTH,), generator=generator)
        tags = torch.randint(0, TAGS, (LENGTH,), generator=generator)
        count = 0 if index in EMPTY else 1 + int(torch.randint(LENGTH, (), generator=generator))
        labels = torch.where(torch.arange(LENGTH) < count, tags, -100)
        return {"input_ids": torch.where(torch.arange(LENGTH) < count, words, 0), "labels": labels}

    return Samples(size, make)


class Tagger(nn.Module):
    """Computes its loss itself, in its own precision, unlike the models of transformers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.words = nn.Embedding(TAGS, 8)
        self.hidden = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.tags = nn.Linear(8, TAGS)

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, num_items_in_batch: Any = None
    ) -> SimpleNamespace | dict:
        logits = self.tags(self.hidden(self.words(input_ids)))
        if labels is None:
            return {"logits": logits}
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = tag_loss(logits, labels, self.kind, reduction)
        if num_items_in_batch is not None:
            loss = loss / num_items_in_batch
        return {"loss": loss, "logits": logits}


def tag_loss(logits: Tensor, labels: Tensor, kind: str, reduction: str = "mean") -> Tensor:
    if kind == "shifted":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction=reduction)


def make_tagger(kind: str) -> Tagger:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Tagger(kind).double()


def loss_of(pattern: str, model: nn.Module, batch: dict) -> Tensor:
    """What a script gives to `backward`."""
    if pattern in ("labels", "shifted"):
        return model(**batch)["loss"]
    if pattern == "a multiple":
        return 0.3 * model(**batch)["loss"]
    if pattern == "own cross entropy":
        return tag_loss(model(batch["input_ids"])["logits"], batch["labels"], "labels")
    if pattern == "own sum":
        return tag_loss(model(batch["input_ids"])["logits"], batch["labels"], "labels", "sum")
    if pattern == "own mean over rows":
        logits = model(batch["input_ids"])["logits"]
        return cross_entropy(logits.mean(dim=1), batch["input_ids"][:, 0])
    if pattern == "labels made in the loop":
        return model(batch["input_ids"], torch.where(batch["input_ids"] == 0, -100, batch["input_ids"]))["loss"]
    raise ValueError(pattern)


def data_of(pattern: str) -> Samples:
    data = tagged_rows()
    if pattern not in ("labels made in the loop", "own mean over rows"):
        return data
    return Samples(len(data), lambda index, generator: {"input_ids": data[index]["input_ids"]})


def placing_of(strategy: str) -> dict:
    return {"strategy": "lsdp", "intra_node": "collectives"} if strategy == "collectives" else {"strategy": strategy}


def one_process(pattern: str, accumulation: int = 1) -> dict:
    kind = "shifted" if pattern == "shifted" else "labels"
    model, data = make_tagger(kind), data_of(pattern)
    optimizer = make_optimizer(model, 1e-2, 0.0)
    batches = [range(start, min(start + 4, SAMPLES)) for start in range(0, SAMPLES, 4)]
    for first in range(0, len(batches), accumulation):
        for batch in batches[first : first + accumulation]:
            (loss_of(pattern, model, collate([data[index] for index in batch])) / accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@contextlib.contextmanager
def listening():
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("accelerate_lshdp.accelerator.losses.notices").addHandler(handler)
    try:
        yield told
    finally:
        logging.getLogger("accelerate_lshdp.accelerator.losses.notices").removeHandler(handler)


def train(pattern: str, strategy: str, sizes: list, accumulation: int = 1, **options: Any) -> tuple[dict, list, dict]:
    plan = Plan.from_batch_sizes(sizes, allow_unequal_accumulation=True, **placing_of(strategy))
    accelerator = LSHDPAccelerator(
        plan=plan, gradient_accumulation_steps=accumulation, lsdp_plugin=LSDPPlugin(**options)
    )
    model = make_tagger("shifted" if pattern == "shifted" else "labels")
    optimizer = make_optimizer(model, 1e-2, 0.0)
    loader = DataLoader(data_of(pattern), batch_size=2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    with listening() as told:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(pattern, model, batch))
                optimizer.step()
                optimizer.zero_grad()
    found = {name: finding["composition"] for name, finding in accelerator.session.losses.findings["loop"].items()}
    return {name: full(parameter) for name, parameter in model.named_parameters()}, told, found


FOUND = {
    "labels": "LABELS",
    "shifted": "SHIFTED_LABELS",
    "a multiple": "LABELS",
    "own cross entropy": "LABELS",
    "own sum": "SUM",
    "labels made in the loop": "LABELS",
}


@pytest.mark.parametrize("number", range(len(FOUND) * 2))
def test_losses_are_weighted_by_what_they_are_means_over(workers, number):
    pattern = list(FOUND)[number % len(FOUND)]
    strategy, nodes = PLACES[(number + number // len(FOUND)) % len(PLACES)]
    sizes = [3, 1] if number < len(FOUND) or "made" in pattern else [(1, 2), (1, 2)]
    expected = one_process(pattern)
    for parameters, told, found in workers(2).run(train, pattern, strategy, sizes, nodes=nodes):
        assert relative_error(parameters, expected) <= 1e-12
        # Micro-batches of one row fit means over rows as well, so nothing is settled yet.
        assert found == {"loss 0": FOUND[pattern]} or (not found and sizes == [(1, 2), (1, 2)])
        assert len([text for text in told if "was found to be" in text]) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("pattern", FOUND)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_losses_are_weighted_by_what_they_are_means_over_everywhere(workers, pattern, ranks):
    shapes = {1: ((1,),), 2: ((2,), (1, 1)), 3: ((1, 2),), 4: ((2, 2),)}[ranks]
    splits = [{1: [4], 2: [3, 1], 3: [2, 1, 1], 4: [1, 1, 1, 1]}[ranks]]
    if "made" not in pattern:
        splits.append([(1, 4)] if ranks == 1 else [(1, 2), (1, 2)] if ranks == 2 else [])
    expected = one_process(pattern)
    for nodes in shapes:
        for strategy in ("ddp", "lsdp", "collectives", "fsdp"):
            for sizes in filter(None, splits):
                for parameters, _, _ in workers(ranks).run(train, pattern, strategy, sizes, nodes=nodes):
                    assert relative_error(parameters, expected) <= 1e-12, (nodes, strategy, sizes)


@pytest.mark.parametrize("sizes", [[3, 1], [(1, 3), (1, 1)]], ids=["plain", "unequal accumulation"])
def test_accumulated_global_batches_count_as_in_one_process(workers, sizes):
    expected = one_process("labels", 2)
    for parameters, _, _ in workers(2).run(train, "labels", "lsdp", sizes, 2, nodes=(1, 1)):
        assert relative_error(parameters, expected) <= 1e-12


# Losses that are divided by the labels of all ranks already


def train_by_recipe(strategy: str, steps: int) -> tuple[dict, dict]:
    """As in accelerate's example of accumulation for language models: the script counts, and undoes what divides."""
    ranks = LSHDPAccelerator(plan=Plan.equal(strategy="ddp")).num_processes
    plan = Plan.from_batch_sizes(SIZES_OF_4[ranks], **placing_of(strategy))
    accelerator = LSHDPAccelerator(plan=plan, gradient_accumulation_steps=steps)
    model = make_tagger("shifted")
    optimizer = make_optimizer(model, 1e-2, 0.0)
    loader = DataLoader(tagged_rows(16), batch_size=2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    batches = iter(loader)
    for _ in range(4 // steps):
        window = [next(batches) for _ in range(steps)]
        own = sum(batch["labels"].ne(-100).sum() for batch in window)
        items = accelerator.gather(own).sum().item()
        for number, batch in enumerate(window):
            with accelerator.no_sync(model) if number < steps - 1 else contextlib.nullcontext():
                loss = model(**batch, num_items_in_batch=items)["loss"]
                accelerator.backward(loss * steps * accelerator.num_processes)
        optimizer.step()
        optimizer.zero_grad()
    found = {name: finding["composition"] for name, finding in accelerator.session.losses.findings["loop"].items()}
    return {name: full(parameter) for name, parameter in model.named_parameters()}, found


@cells(("ddp", (1, 1)), ("lsdp", (2,)), ("fsdp", (2,)))
def test_losses_divided_by_all_labels_are_not_weighted_again(workers, strategy, nodes):
    steps = 1 if nodes == (1, 1) else 2
    model, data = make_tagger("shifted"), tagged_rows(16)
    optimizer = make_optimizer(model, 1e-2, 0.0)
    for start in range(0, 16, 4 * steps):
        batch = collate([data[index] for index in range(start, start + 4 * steps)])
        model(**batch, num_items_in_batch=batch["labels"].ne(-100).sum())["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for parameters, found in workers(sum(nodes)).run(train_by_recipe, strategy, steps, nodes=nodes):
        assert found == {"loss 0": "GLOBAL"}
        assert relative_error(parameters, expected) <= 1e-12


# Losses that cannot be recognised


def train_on_rows(sizes: list, weighting: str | None, labels: bool) -> tuple[list, dict]:
    """A loss that compares the rows of a batch with each other, with labels in the batch or without."""
    accelerator = LSHDPAccelerator(
        plan=Plan.from_batch_sizes(sizes, strategy="ddp"), lsdp_plugin=LSDPPlugin(loss_weighting=weighting)
    )
    model = make_tagger("labels")
    loader = DataLoader(data_of("labels" if labels else "own mean over rows"), batch_size=2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model, 1e-2, 0.0), loader)
    model.train()
    with listening() as told:
        for batch in loader:
            rows = model(batch["input_ids"])["logits"].flatten(1)
            accelerator.backward(cross_entropy(rows @ rows.T, torch.arange(len(rows))))
            optimizer.step()
            optimizer.zero_grad()
    return told, accelerator.session.losses.findings["loop"]


def test_a_loss_that_cannot_be_recognised_is_told_of_once(workers):
    (told, found), _ = workers(2).run(train_on_rows, [3, 1], None, False, nodes=(1, 1))
    assert len(told) == 1 and "is not one that can be recognised" in told[0] and "LSDP_LOSS_WEIGHTING" in told[0]
    assert found["loss 0"]["composition"] == "UNKNOWN"
    (told, _), _ = workers(2).run(train_on_rows, [2, 2], None, False, nodes=(1, 1))
    # It is not exact under equal sizes either.
    assert len(told) == 1 and "is not one that can be recognised" in told[0]
    assert workers(2).run(train_on_rows, [3, 1], "sample", False, nodes=(1, 1))[0][0] == []


def test_uneven_labels_under_such_a_loss_are_an_error_on_all_ranks(workers):
    errors = workers(2).run(train_on_rows, [3, 1], None, True, nodes=(1, 1), expect_failure=True)
    assert len({error.message for error in errors}) == 1
    assert "different numbers of labels other than -100" in errors[0].message
    assert "LSDP_LOSS_WEIGHTING" in errors[0].message
    assert workers(2).run(train_on_rows, [3, 1], "none", True, nodes=(1, 1))[0][1] == {}


def test_labels_made_in_the_loop_are_refused_where_they_are_needed_in_advance(workers):
    arguments = ("labels made in the loop", "ddp", [(2, 2), (1, 2)])
    errors = workers(2).run(train, *arguments, nodes=(1, 1), expect_failure=True)
    assert all("Put the labels that the model is given into the batches" in error.message for error in errors)


# Models of transformers


def tiny_model(name: str) -> tuple[nn.Module, dict]:
    """A model, and a batch for it."""
    import transformers as t

    torch.manual_seed(0)
    small = {"vocab_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    bert = {**small, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    bart = {"d_model": 8, "decoder_start_token_id": 1, "max_position_embeddings": 16}
    for side in ("encoder", "decoder"):
        bart.update({f"{side}_layers": 1, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 8})
    moe = {"num_key_value_heads": 2, "num_local_experts": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}
    configs = {
        "BertForTokenClassification": lambda: t.BertConfig(**bert, num_labels=16),
        "BertForMaskedLM": lambda: t.BertConfig(**bert),
        "BertForSequenceClassification": lambda: t.BertConfig(**bert, num_labels=4),
        "BertForQuestionAnswering": lambda: t.BertConfig(**bert),
        "GPT2LMHeadModel": lambda: t.GPT2Config(**small, n_embd=8, n_layer=1, n_head=2, n_positions=16),
        "LlamaForCausalLM": lambda: t.LlamaConfig(**bert),
        "MixtralForCausalLM": lambda: t.MixtralConfig(**bert, **moe),
        "XLNetLMHeadModel": lambda: t.XLNetConfig(vocab_size=16, d_model=8, n_layer=1, n_head=2, d_inner=8),
        "MarianMTModel": lambda: t.MarianConfig(**small, **bart),
        "BartForConditionalGeneration": lambda: t.BartConfig(**small, **bart),
        "T5ForConditionalGeneration": lambda: t.T5Config(
            vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0
        ),
    }
    model = getattr(t, name)(configs[name]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    data = tagged_rows(8)
    batch = collate([data[index] for index in range(8)])
    batch["input_ids"] = batch["input_ids"].clamp(min=1)
    if name == "BertForSequenceClassification":
        batch["labels"] = torch.arange(8) % 4
    if name == "BertForQuestionAnswering":
        del batch["labels"]
        batch |= {"start_positions": torch.arange(8) % 5, "end_positions": torch.arange(8) % 6}
    return model.train(), batch


TRANSFORMERS = {
    "BertForTokenClassification": "LABELS",
    "BertForMaskedLM": "LABELS",
    "BertForSequenceClassification": "SAMPLES",
    "BertForQuestionAnswering": "SAMPLES",
    "GPT2LMHeadModel": "SHIFTED_LABELS",
    "LlamaForCausalLM": "SHIFTED_LABELS",
    "XLNetLMHeadModel": "LABELS",
    "MarianMTModel": "LABELS",
    "BartForConditionalGeneration": "LABELS",
    "T5ForConditionalGeneration": "LABELS",
}


def train_transformers(
    name: str, weighting: str | None, dtype: torch.dtype = torch.float64, strategy: str = "ddp"
) -> tuple[dict, str | None, list]:
    """One step, on unequal parts of a batch."""
    model, batch = tiny_model(name)
    rows = [{key: values[index] for key, values in batch.items()} for index in range(8)]
    # With heads in slices, whose losses need no logits.
    placing = (
        {"placement": ModelPlacement({"": UnitPlacement(UnitStore.WORLD, False, 3)}, UnitPlacement(UnitStore.WORLD))}
        if strategy == "osdp"
        else {}
    )
    plan = Plan.from_batch_sizes([6, 2], strategy=strategy, **placing)
    accelerator = LSHDPAccelerator(plan=plan, lsdp_plugin=LSDPPlugin(loss_weighting=weighting))
    loader = DataLoader(rows, batch_size=4, collate_fn=collate)
    model, _, loader = accelerator.prepare(model.to(dtype), torch.optim.SGD(model.parameters(), 0.1), loader)
    turn_dropout_off(model.train())
    with listening() as told:
        for part in loader:
            accelerator.backward(model(**part).loss)
    gradients = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    found = accelerator.session.losses.findings["loop"].get("loss 0", {}).get("composition")
    return gradients, found, told


def turn_dropout_off(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if name.endswith("dropout") and isinstance(value, float):
                setattr(module, name, 0.0)


@pytest.mark.parametrize(
    ("name", "weighting", "strategy", "nodes"),
    [(name, None, "ddp", (1, 1)) for name in TRANSFORMERS]
    # A head of two rows has no slices.
    + [(name, None, "osdp", (1, 1)) for name in TRANSFORMERS if name != "BertForQuestionAnswering"]
    + [
        (name, "tokens", strategy, nodes)
        for name, found in TRANSFORMERS.items()
        if found != "SAMPLES"
        for strategy, nodes in (("ddp", (1, 1)), ("lsdp", (2,)))
    ],
)
def test_models_of_transformers_count_as_in_one_process(workers, name, weighting, strategy, nodes):
    model, batch = tiny_model(name)
    turn_dropout_off(model.double())
    model(**batch).loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    arguments = (train_transformers, name, weighting, torch.float64, strategy)
    for gradients, found, _ in workers(2).run(*arguments, nodes=nodes):
        # One label a sample fits means over both.
        assert found == TRANSFORMERS[name] or (found is None and name == "BertForSequenceClassification")
        assert relative_error(gradients, expected) <= 1e-6  # transformers computes losses in fp32


@pytest.mark.parametrize(
    ("kind", "encoder_decoder", "shifts"),
    [
        ("ForCausalLM", False, True),
        (None, False, True),
        (None, True, False),  # as Marian and VisionEncoderDecoder
        ("ForConditionalGeneration", False, True),  # as Llava
        ("ForConditionalGeneration", True, False),  # as T5
        ("ForTokenClassification", False, False),
    ],
)
def test_classes_that_predict_each_label_from_the_one_before(kind, encoder_decoder, shifts):
    model = SimpleNamespace(loss_type=kind, config=SimpleNamespace(is_encoder_decoder=encoder_decoder))
    import transformers.loss.loss_utils  # noqa: F401 - as for whoever has such a model

    assert loss_shifts_labels(model) == shifts


def test_an_auxiliary_loss_is_told_of(workers):
    results = workers(2).run(train_transformers, "MixtralForCausalLM", None, torch.float32, nodes=(1, 1))
    assert [found for _, found, _ in results] == ["SHIFTED_LABELS"] * 2
    assert [text for text in results[0][2] if "auxiliary loss (aux_loss)" in text]


# Checkpoints


def train_and_resume(folder: str) -> tuple[dict, dict, dict]:
    def start(strategy: str = "ddp") -> tuple:
        accelerator = LSHDPAccelerator(plan=Plan.from_batch_sizes([3, 1], strategy=strategy))
        model = make_tagger("labels")
        loader = DataLoader(tagged_rows(), batch_size=2, collate_fn=collate)
        return accelerator, *accelerator.prepare(model, make_optimizer(model, 1e-2, 0.0), loader)

    def train(accelerator: LSHDPAccelerator, model: nn.Module, optimizer: Any, loader: DataLoader) -> None:
        model.train()
        for batch in loader:
            accelerator.backward(loss_of("labels", model, batch))
            optimizer.step()
            optimizer.zero_grad()

    accelerator, *training = start()
    train(accelerator, *training)
    accelerator.save_state(f"{folder}/state")
    resumed, *_ = start()
    resumed.load_state(f"{folder}/state")
    sharded, *training = start("fsdp")
    sharded.load_state(f"{folder}/state")
    train(sharded, *training)
    return tuple(each.session.losses.findings for each in (accelerator, resumed, sharded))


def test_a_checkpoint_keeps_what_was_found(workers, tmp_path):
    for before, after, sharded in workers(2).run(train_and_resume, str(tmp_path), nodes=(2,)):
        assert before["loop"]["loss 0"]["composition"] == "LABELS"
        assert after == before
        # FSDP2 gives the model a class of its own, by which the same loss must not look like another one.
        assert sharded == before
