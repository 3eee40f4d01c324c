# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Trains a tiny GPT-2 on lines of text, padded, with the Trainer."""

from dataclasses import dataclass, field

from datasets import Dataset
from transformers import (
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)


PAD = "<pad>"


@dataclass
class DataArguments:
    samples: int = field(default=55, metadata={"help": "lines to train on"})


def make_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    characters = {PAD: 0, **{chr(code): code - 31 for code in range(32, 127)}}
    tokenizer = Tokenizer(models.WordLevel(characters, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD)


def make_dataset(tokenizer: PreTrainedTokenizerFast, samples: int) -> Dataset:
    lines = [f"{i * i} is {i} times {i}"[: 4 + 5 * i % 17] for i in range(samples)]
    return Dataset.from_dict({"text": lines}).map(
        lambda row: tokenizer(row["text"]), batched=True, remove_columns=["text"]
    )


def main() -> None:
    data_args, training_args = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses()
    training_args.include_num_input_tokens_seen = "non_padding"  # on a command line it is only yes or no
    set_seed(training_args.seed)
    tokenizer = make_tokenizer()
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=training_args,
        train_dataset=make_dataset(tokenizer, data_args.samples),
        eval_dataset=make_dataset(tokenizer, 16),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
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
