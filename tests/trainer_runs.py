# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Small Trainers on tiny models, for tests in the worker pool: what one process gives, and what ranks give."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    set_seed,
)

from accelerate_lshdp import LSHDPTrainerMixin, Plan
from accelerate_lshdp.documents.placement import ModelPlacement


WORDS = 23
BERT = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


class Sentences(torch.utils.data.Dataset):
    """Rows of 3 to 12 words; one label a word ("words") or a row ("rows")."""

    def __init__(self, samples: int, labels: str) -> None:
        draw = random.Random(5)
        self.labels = labels
        self.rows = [[draw.randint(1, WORDS - 1) for _ in range(draw.randint(3, 12))] for _ in range(samples)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        return {"input_ids": row, "labels": row if self.labels == "words" else sum(row) % 2}


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)

    def pad(values: list[int], filler: int) -> list[int]:
        return values + [filler] * (longest - len(values))

    ids = torch.tensor([pad(row["input_ids"], 0) for row in rows])
    labels = [pad(row["labels"], -100) if isinstance(row["labels"], list) else row["labels"] for row in rows]
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.tensor(labels)}


def make_model(kind: str) -> nn.Module:
    set_seed(3)
    if kind == "gpt2":
        sizes = {"vocab_size": WORDS, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
        drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0))
    classes = {"rows": BertForSequenceClassification, "words": BertForTokenClassification, "masked": BertForMaskedLM}
    labels = {"num_labels": WORDS} if kind == "words" else {}
    return classes[kind](BertConfig(**BERT, **labels))


def arguments(folder: str | Path, **changes: Any) -> Seq2SeqTrainingArguments:
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 1,
        "report_to": [],
        "learning_rate": 3e-3,
        "warmup_steps": 2,
        "max_grad_norm": 1.0,
        "weight_decay": 0.05,
        "num_train_epochs": 2,
        "logging_steps": 2,
        "save_strategy": "no",
        "disable_tqdm": True,
        "include_num_input_tokens_seen": "non_padding",
        "per_device_eval_batch_size": 4,
    }
    return Seq2SeqTrainingArguments(**{**options, **changes})


def full_parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in trainer.model.named_parameters()
    }


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, dataset: Sentences) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.dataset[index] for index in range(len(self.dataset)))


def word_losses(logits: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction=reduction)


def divided_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return word_losses(outputs.logits, labels, "sum") / num_items_in_batch


def mean_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return word_losses(outputs.logits, labels, "mean")


class OwnLossTrainer(Trainer):
    """Overrides `compute_loss` as users do, with a mean that leaves the number of items aside."""

    def compute_loss(
        self, model: nn.Module, inputs: dict, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        loss = mean_loss(outputs, inputs["labels"])
        return (loss, outputs) if return_outputs else loss


class OwnStepTrainer(Trainer):
    """Overrides `training_step` without the Trainer's own."""

    def training_step(self, model: nn.Module, inputs: dict, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


#: What a user may change: the Trainer's class, and its keywords.
VARIANTS: dict[str, tuple[type[Trainer], dict[str, Any]]] = {
    "": (Trainer, {}),
    "sequence to sequence": (Seq2SeqTrainer, {}),
    "own compute_loss": (OwnLossTrainer, {}),
    "own training_step": (OwnStepTrainer, {}),
    "divided loss": (Trainer, {"compute_loss_func": divided_loss}),
    "mean loss": (Trainer, {"compute_loss_func": mean_loss}),
    "stream": (Trainer, {"train_dataset": Stream(Sentences(53, "words"))}),
}


def make_trainer(
    folder: str,
    sizes: list[Any] | None,
    kind: str,
    options: dict[str, Any],
    strategy: str = "ddp",
    variant: str = "",
    samples: int = 53,
    placement: ModelPlacement | None = None,
) -> Trainer:
    """A plain Trainer if there are no sizes."""
    dataset = Sentences(samples, "rows" if kind == "rows" else "words")
    base, changes = VARIANTS[variant]
    given = {
        "model": make_model(kind),
        "args": arguments(folder, **options),
        "data_collator": collate,
        "train_dataset": dataset,
        "eval_dataset": Sentences(11, dataset.labels),
        **changes,
    }
    if sizes is None:
        return base(**given)
    unequal = len({size[1] for size in sizes if isinstance(size, tuple)}) > 1
    plan = Plan.from_batch_sizes(sizes, strategy=strategy, allow_unequal_accumulation=unequal, placement=placement)
    return type(f"LSHDP{base.__name__}", (LSHDPTrainerMixin, base), {})(**given, plan=plan)


def train(*given: Any) -> dict[str, Any]:
    """Trains what `make_trainer` gives; returns parameters and all that the Trainer says of the run."""
    return report(make_trainer(*given))


def report(trainer: Trainer, resume: bool = False) -> dict[str, Any]:
    result = trainer.train(resume_from_checkpoint=resume)
    return {
        "parameters": full_parameters(trainer),
        "log": trainer.state.log_history,
        "step": trainer.state.global_step,
        "max_steps": trainer.state.max_steps,
        "epoch": trainer.state.epoch,
        "tokens": trainer.state.num_input_tokens_seen,
        "total": trainer.get_total_train_batch_size(trainer.args),
        "train_loss": result.training_loss,
        "steps_argument": trainer.args.gradient_accumulation_steps,
        "placed": _placed(trainer),
    }


def _placed(trainer: Trainer) -> list[str]:
    """Names of the units that a placement of the plan says something about."""
    placement = getattr(getattr(trainer.accelerator, "plan", None), "placement", None)
    return [] if placement is None else list(placement.to_dict()["units"])


def error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """||p - p_ref|| / ||p_ref|| over all parameters."""
    difference = sum((found[name].double() - expected[name].double()).norm() ** 2 for name in expected) ** 0.5
    return float(difference / sum(value.double().norm() ** 2 for value in expected.values()) ** 0.5)
