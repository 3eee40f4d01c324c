# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The trials of a Trainer's loss: batches with several rows a sample, trials that fail, and nothing left behind."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from trainer_runs import Sentences, arguments, collate, divided_loss, full_parameters, make_model
from training_cases import relative_error
from transformers import MixtralConfig, MixtralForCausalLM, Trainer
from workers import WorkerPools

from accelerate_lshdp import LSHDPTrainer, LSHDPTrainerMixin, Plan
from accelerate_lshdp.accelerator.losses.parts import halvings, undisturbed
from accelerate_lshdp.trainer.trial_losses import _alone


SIZES = [3, 2]
OPTIONS = {"max_steps": 4, "remove_unused_columns": False, "include_num_input_tokens_seen": "no", "max_grad_norm": 0.0}


class Pairs(torch.utils.data.Dataset):
    """A chosen and a rejected row each, and the margin between them."""

    def __init__(self, samples: int) -> None:
        self.rows = Sentences(2 * samples, "rows").rows

    def __len__(self) -> int:
        return len(self.rows) // 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"chosen": self.rows[2 * index], "rejected": self.rows[2 * index + 1], "margin": index % 3 / 10}


def collate_pairs(pairs: list[dict[str, Any]], layout: str) -> dict[str, torch.Tensor]:
    """As collators of preference data do: all chosen rows before all rejected ones, or each pair's together."""
    rows = [pair[name] for name in ("chosen", "rejected") for pair in pairs]
    if layout == "together":
        rows = [pair[name] for pair in pairs for name in ("chosen", "rejected")]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    margins = torch.tensor([pair["margin"] for pair in pairs], dtype=torch.float64)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "margin": margins}


class PairTrainer(Trainer):
    """Compares the scores of the two rows of each sample, and gathers metrics as it goes."""

    layout = "blocks"
    fails = ""

    def compute_loss(
        self, model: nn.Module, inputs: dict, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        fails = self.fails if not self.model.training and self.accelerator.process_index == 0 else ""
        if "before" in fails and len(inputs["margin"]) < SIZES[0]:
            raise ValueError("a batch of another size than in training")
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        if "after" in fails and len(inputs["margin"]) < SIZES[0]:
            raise ValueError("a batch of another size than in training")
        scores = outputs.logits[:, 0]
        chosen, rejected = scores.chunk(2) if self.layout == "blocks" else scores.view(-1, 2).unbind(1)
        loss = -nn.functional.logsigmoid(chosen - rejected - inputs["margin"]).mean()
        self._metrics["train" if self.model.training else "eval"].append(
            self.accelerator.gather_for_metrics(input_data=chosen.detach()).mean().item()
        )
        return (loss, outputs) if return_outputs else loss


def pair_trainer(folder: str, layout: str, strategy: str | None = None, fails: str = "") -> PairTrainer:
    """A plain Trainer without a strategy."""
    options = {**OPTIONS, "per_device_train_batch_size": sum(SIZES) if strategy is None else 1}
    kinds = (PairTrainer,) if strategy is None else (LSHDPTrainerMixin, PairTrainer)
    trainer = type("Pairing", kinds, {"layout": layout, "fails": fails})(
        model=make_model("rows").double(),
        args=arguments(folder, **options),
        data_collator=lambda pairs: collate_pairs(pairs, layout),
        train_dataset=Pairs(20),
        **({} if strategy is None else {"plan": Plan.from_batch_sizes(SIZES, strategy=strategy)}),
    )
    trainer._metrics = {"train": [], "eval": []}
    return trainer


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    log = logging.getLogger("accelerate_lshdp.trainer")
    log.addHandler(handler)
    try:
        yield told
    finally:
        log.removeHandler(handler)


def train_pairs(folder: str, layout: str, strategy: str | None = None, fails: str = "") -> tuple[dict, list, list]:
    trainer = pair_trainer(folder, layout, strategy, fails)
    with listening() as told:
        trainer.train()
    return full_parameters(trainer), trainer._metrics["eval"], told


@pytest.mark.parametrize(
    ("layout", "strategy", "nodes", "fails"),
    [
        ("blocks", "ddp", (1, 1), ""),
        ("together", "lsdp", (2,), ""),
        ("blocks", "fsdp", (2,), ""),
        ("blocks", "ddp", (1, 1), "after the forward"),
        ("blocks", "fsdp", (2,), "after the forward"),
        ("blocks", "fsdp", (2,), "before the forward"),
    ],
)
def test_batches_of_pairs_train_as_in_one_process(
    workers: WorkerPools, tmp_path: Path, layout: str, strategy: str, nodes: tuple[int, ...], fails: str
) -> None:
    [(expected, _, _)] = workers(1).run(train_pairs, str(tmp_path), layout, nodes=(1,))
    results = workers(2).run(train_pairs, str(tmp_path), layout, strategy, fails, nodes=nodes)
    for parameters, metrics, _ in results:
        assert relative_error(parameters, expected) <= 1e-12
        assert metrics == []  # of the trial, which ran in eval mode
    told = [text for _, _, texts in results for text in texts]
    assert any("a trial of the loss failed" in text for text in told) == bool(fails)
    assert not [text for text in told if "not give exactly" in text]


def partly_divided(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return divided_loss(outputs, labels, num_items_in_batch) + 5e-3 * outputs.logits.square().mean().exp()


def told_of_parts(folder: str, kind: str) -> list[str]:
    given = {"model": make_model("gpt2"), "args": arguments(folder, max_steps=1), "data_collator": collate}
    if kind == "experts":
        given["model"] = MixtralForCausalLM(
            MixtralConfig(
                vocab_size=23,
                hidden_size=8,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=2,
                intermediate_size=8,
                num_local_experts=4,
                output_router_logits=True,
                router_aux_loss_coef=1e-5,
            )
        )
    if kind == "part":
        given["compute_loss_func"] = partly_divided
    with listening() as told:
        LSHDPTrainer(
            **given, train_dataset=Sentences(8, "words"), plan=Plan.from_batch_sizes(SIZES, strategy="ddp")
        ).train()
    return told


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("plain", ""), ("experts", "an auxiliary loss (aux_loss)"), ("part", "only a part of it is divided")],
)
def test_parts_of_a_loss_that_are_no_mean_are_told_of(
    workers: WorkerPools, tmp_path: Path, kind: str, expected: str
) -> None:
    """Also small ones, as those of mixtures of experts are."""
    told, _ = workers(2).run(told_of_parts, str(tmp_path), kind, nodes=(1, 1))
    assert len(told) == bool(expected)
    assert all(expected in text for text in told)


def test_a_trial_gives_back_what_a_script_has_put_on_the_accelerator() -> None:
    accelerator = SimpleNamespace(gather=len)
    with _alone(SimpleNamespace(accelerator=accelerator)):
        assert accelerator.gather("abc") == "abc" and accelerator.reduce(reduction="sum", tensor=3) == 3
        assert accelerator.gather_for_metrics(input_data="abc", use_gather_object=True) == "abc"
    assert vars(accelerator) == {"gather": len}


def test_halves_of_a_batch() -> None:
    batch = {"ids": torch.arange(10), "nested": {"one": torch.arange(5)}, "text": list("abcde"), "scale": 2.0}
    blocks, together = halvings(batch, 5)
    (first, of_first), (second, of_second) = blocks
    assert (of_first, of_second) == (2, 3)
    assert first["ids"].tolist() == [0, 1, 5, 6] and second["ids"].tolist() == [2, 3, 4, 7, 8, 9]
    assert first["nested"]["one"].tolist() == [0, 1] and second["text"] == list("cde") and second["scale"] == 2.0
    assert [half["ids"].tolist() for half, _ in together] == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]]
    assert [len(half["ids"]) for half, _ in halvings({"ids": torch.arange(6)}, None)[0]] == [3, 3]


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        ({"ids": torch.arange(5)}, 1),
        ({"ids": torch.arange(5)}, 2),  # a row too many
        ({"ids": torch.zeros(1, 12)}, 4),  # packed
        ({"ids": torch.arange(6), "pixels": torch.arange(4)}, None),
        (torch.arange(6), 6),
        ({}, 4),
    ],
)
def test_a_batch_that_cannot_be_halved(batch: Any, samples: int | None) -> None:
    assert halvings(batch, samples) == []


class Counting(nn.Module):
    """Counts its forwards and keeps a running mean, also in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))
        self.register_buffer("unset", torch.full((2,), float("nan")))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        self.unset.fill_(1.0)
        random.random(), np.random.rand()
        return self.drop(self.norm(self.layer(x))) + torch.rand(3)


def test_a_trial_leaves_nothing_behind() -> None:
    model = Counting().train()
    model.layer.eval()  # as a script may
    x = torch.randn(4, 3)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    versions = {name: buffer._version for name, buffer in model.norm.named_buffers()}
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with undisturbed(model):
        assert not model.drop.training and not model(x).requires_grad
    assert [module.training for module in model.modules()] == [True, False, True, True]
    assert all(torch.equal(b, before[name]) or b.isnan().all() for name, b in model.named_buffers())
    assert {name: buffer._version for name, buffer in model.norm.named_buffers()} == versions
    assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]
    assert np.random.get_state()[1].tolist() == generators[2]
