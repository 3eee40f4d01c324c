# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Trains a tiny BERT to tell sorted sequences of digits from others, with the Trainer."""

import random
from dataclasses import dataclass, field

import numpy as np
import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification


@dataclass
class DataArguments:
    samples: int = field(default=55, metadata={"help": "sequences to train on"})


class Sequences(torch.utils.data.Dataset):
    """Sequences of 3 to 9 tokens between 1 and 20; label 1 where they are sorted."""

    def __init__(self, samples: int, seed: int) -> None:
        draw = random.Random(seed)
        self.rows = []
        for index in range(samples):
            tokens = [draw.randint(1, 20) for _ in range(draw.randint(3, 9))]
            self.rows.append((sorted(tokens) if index % 3 == 0 else tokens, int(index % 3 == 0)))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        tokens, label = self.rows[index]
        return {"input_ids": tokens, "label": label}


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    labels = torch.tensor([row["label"] for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def accuracy(prediction: transformers.EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((np.argmax(prediction.predictions, axis=1) == prediction.label_ids).mean())}


def main() -> None:
    parser = transformers.HfArgumentParser((DataArguments, transformers.TrainingArguments))
    data_args, training_args = parser.parse_args_into_dataclasses()
    transformers.set_seed(training_args.seed)
    config = BertConfig(
        vocab_size=21,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )
    trainer = transformers.Trainer(
        model=BertForSequenceClassification(config),
        args=training_args,
        train_dataset=Sequences(data_args.samples, seed=1),
        eval_dataset=Sequences(16, seed=2),
        data_collator=collate,
        compute_metrics=accuracy,
    )
    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if training_args.do_eval:
        trainer.save_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
