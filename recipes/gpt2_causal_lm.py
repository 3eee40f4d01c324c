# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Train a GPT-2 language model with LSHDP.

By default it trains a small GPT-2 on the source code of Python's standard library, which needs no download:

    accelerate launch --config_file accelerate_configs/cpu_1x2.yaml \
        recipes/gpt2_causal_lm.py --plan plan.json --output_dir outputs/gpt2

Fine-tune the real one with `--model_name_or_path gpt2`. Other text: `--dataset_name wikitext
--dataset_config_name wikitext-2-raw-v1`, or `--train_file FILE` (.txt, .json or .csv).
"""

from __future__ import annotations

import argparse
import logging
import math
from itertools import chain
from pathlib import Path

import torch
from accelerate.utils import set_seed
from datasets import DatasetDict, load_dataset
from embedded_data import byte_level_tokenizer, fingerprint, standard_library_dataset
from hub import from_the_hub
from learning_rate import scaled_learning_rate
from results import write_results
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from training_arguments import add_training_arguments, check_profiled_precision, positive_int
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    default_data_collator,
    get_scheduler,
)

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator
from accelerate_lshdp.profiling import Subject


# No dropout anywhere: then two runs with different plans draw the same loss curve, and can be laid over each other.
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODEL_CONFIGS = {
    "small": {"n_positions": 256, "n_embd": 128, "n_layer": 4, "n_head": 4, **NO_DROPOUT},
    "gpt2": {"n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, **NO_DROPOUT},
    "gpt2-medium": {"n_positions": 1024, "n_embd": 1024, "n_layer": 24, "n_head": 16, **NO_DROPOUT},
}
DEFAULT_BLOCK_SIZE = 128
TEXT_FORMATS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv"}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a GPT-2 language model with LSHDP.")
    parser.add_argument("--model_name_or_path", help="A causal language model of the Hub, e.g. gpt2, or a folder.")
    parser.add_argument(
        "--model_config",
        choices=list(MODEL_CONFIGS),
        help="A GPT-2 with random weights instead (default: small), with a tokenizer trained on the training text.",
    )
    parser.add_argument("--dataset_name", help="A dataset of the Hub. Default: the standard library's source code.")
    parser.add_argument("--dataset_config_name")
    parser.add_argument("--train_file", help="Training text: .txt (a line a row), .json, .jsonl or .csv.")
    parser.add_argument("--validation_file", help="The same for evaluation. Default: 5 %% of the training rows.")
    parser.add_argument("--text_column", help="Default: 'text', else the first column.")
    parser.add_argument(
        "--block_size",
        type=positive_int,
        help=f"Tokens in a sample. Default: {DEFAULT_BLOCK_SIZE}, or what the model takes if that is less.",
    )
    add_training_arguments(parser)
    parser.set_defaults(per_device_train_batch_size=8, learning_rate=1e-3, num_train_epochs=1)
    args = parser.parse_args(argv)

    if args.dataset_name is not None and args.train_file is not None:
        parser.error("--dataset_name and --train_file both say where the text is: give one of them.")
    if args.validation_file is not None and args.train_file is None:
        parser.error("--validation_file needs --train_file.")
    if args.model_name_or_path is not None and args.model_config is not None:
        parser.error("--model_name_or_path and --model_config both choose the model: give one of them.")
    for file in (args.train_file, args.validation_file):
        if file is not None and Path(file).suffix not in TEXT_FORMATS:
            parser.error(f"{file}: expected a file name that ends in {', '.join(TEXT_FORMATS)}.")
    return args


def load_text(args: argparse.Namespace) -> DatasetDict:
    """Splits `train` and `validation` with a column `text`."""
    if args.dataset_name is not None:
        with from_the_hub(
            f"the dataset {args.dataset_name}",
            "leave --dataset_name out to train on the embedded text, or give a file with --train_file",
        ):
            dataset = load_dataset(args.dataset_name, args.dataset_config_name)
    elif args.train_file is not None:
        data_files = {"train": args.train_file}
        if args.validation_file is not None:
            data_files["validation"] = args.validation_file
        dataset = load_dataset(TEXT_FORMATS[Path(args.train_file).suffix], data_files=data_files)
    else:
        return standard_library_dataset()

    columns = dataset["train"].column_names
    column = args.text_column or ("text" if "text" in columns else columns[0])
    if column not in columns:
        raise ValueError(f"No column {column!r} among {columns}. Name the one with the text in --text_column.")
    dataset = dataset.select_columns([column])
    if column != "text":
        dataset = dataset.rename_column(column, "text")

    held_out = next((split for split in ("validation", "test") if split in dataset), None)
    if held_out is None:
        parts = dataset["train"].train_test_split(test_size=0.05, seed=0)
        return DatasetDict(train=parts["train"], validation=parts["test"])
    return DatasetDict(train=dataset["train"], validation=dataset[held_out])


def build_model(args: argparse.Namespace, dataset: DatasetDict):
    """The model and its tokenizer."""
    if args.model_name_or_path is not None:
        with from_the_hub(
            f"the model {args.model_name_or_path}",
            "train one from scratch with --model_config, or give a local folder as --model_name_or_path",
        ):
            tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
            model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path)
        # Resize only when necessary: the embedding may be larger than the vocabulary for speed.
        if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
            model.resize_token_embeddings(len(tokenizer))
        return model, tokenizer
    tokenizer = byte_level_tokenizer(dataset["train"]["text"])
    config = GPT2Config(
        **MODEL_CONFIGS[args.model_config or "small"],
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return GPT2LMHeadModel(config), tokenizer


def choose_block_size(args: argparse.Namespace, model) -> int:
    """Tokens in a sample: what the user asked for, if the model has so many positions."""
    longest = getattr(model.config, "max_position_embeddings", None)
    if args.block_size is None:
        return min(DEFAULT_BLOCK_SIZE, longest or DEFAULT_BLOCK_SIZE)
    if longest is not None and args.block_size > longest:
        raise ValueError(f"--block_size {args.block_size} is longer than the model's {longest} positions. Lower it.")
    return args.block_size


def group_into_blocks(dataset: DatasetDict, tokenizer, block_size: int) -> DatasetDict:
    """Tokenize, join the documents with the end-of-text token between them, and cut into blocks of `block_size`.

    The remainder, shorter than a block, is dropped once a split (once every 1,000 rows of a longer one).
    """

    def tokenize_and_group(examples):
        documents = tokenizer(examples["text"], verbose=False)["input_ids"]
        ids = list(chain.from_iterable([*document, tokenizer.eos_token_id] for document in documents))
        blocks = [ids[i : i + block_size] for i in range(0, len(ids) - block_size + 1, block_size)]
        return {"input_ids": blocks, "labels": blocks}

    blocks = dataset.map(tokenize_and_group, batched=True, remove_columns=["text"])
    for split, rows in blocks.items():
        if len(rows) == 0:
            raise ValueError(f"The {split} text is shorter than one block of {block_size} tokens. Lower --block_size.")
    return blocks


def load_data_and_model(args: argparse.Namespace):
    """The text in blocks of tokens, the model and its tokenizer."""
    dataset = load_text(args)
    model, tokenizer = build_model(args, dataset)
    return group_into_blocks(dataset, tokenizer, choose_block_size(args, model)), model, tokenizer


def get_dataloaders(args: argparse.Namespace, dataset: DatasetDict) -> tuple[DataLoader, DataLoader]:
    """The loaders for training and evaluation."""
    train_dataloader = DataLoader(
        dataset["train"],
        shuffle=True,
        collate_fn=default_data_collator,
        batch_size=args.per_device_train_batch_size,
        num_workers=args.num_workers,
    )
    eval_dataloader = DataLoader(
        dataset["validation"],
        collate_fn=default_data_collator,
        batch_size=args.per_device_eval_batch_size,
        num_workers=args.num_workers,
    )
    return train_dataloader, eval_dataloader


def get_optimizer(args: argparse.Namespace, model, learning_rate: float) -> torch.optim.Optimizer:
    # Weight decay for the matrices, none for biases and layer norms.
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=learning_rate,
    )


def profiling_subject(argv: list[str]) -> Subject:
    """What `accelerate-lshdp profile` measures: model, data and optimizer of a training with these arguments."""
    args = parse_args(argv)
    check_profiled_precision(args)
    dataset, model, _ = load_data_and_model(args)
    train_dataloader, _ = get_dataloaders(args, dataset)
    return Subject(model, train_dataloader, get_optimizer(args, model, args.learning_rate))


def check_same_text(accelerator: LSHDPAccelerator, dataset: DatasetDict) -> None:
    """Stop every rank unless all have the same embedded text, which is that of each node's Python."""
    here = torch.tensor([fingerprint(dataset["train"]["input_ids"])], device=accelerator.device)
    if len(set(accelerator.gather(here).tolist())) > 1:
        raise RuntimeError(
            "The embedded text is the source code of Python's standard library, and the nodes have different ones. "
            "Use the same version of Python everywhere, or give the text with --train_file."
        )


def evaluate_model(accelerator: LSHDPAccelerator, model, dataloader: DataLoader) -> tuple[float, float]:
    """Mean loss a token and perplexity over the held-out text, each token counted once."""
    model.eval()
    total_loss, total_tokens = 0.0, 0
    for batch in dataloader:
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"]).logits
        # The logits at one position predict the next token.
        targets = batch["labels"][:, 1:]
        token_losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), targets.flatten(), ignore_index=-100, reduction="none"
        ).view_as(targets)
        # One loss sum and one token count a sample: so gather_for_metrics can drop the samples that were repeated to
        # fill the last batch, and samples with different numbers of tokens get the right weight.
        sample_losses, sample_tokens = accelerator.gather_for_metrics(
            (token_losses.double().sum(dim=1), (targets != -100).sum(dim=1))
        )
        total_loss += sample_losses.sum().item()
        total_tokens += sample_tokens.sum().item()
    loss = total_loss / total_tokens
    return loss, math.exp(loss)


def training_function(args: argparse.Namespace) -> None:
    # Initialize the accelerator. It reads the plan, and does the rest of what accelerate's Accelerator does. Weighting
    # by tokens makes the gradient that of the mean over all tokens of the global batch, however the ranks share it.
    accelerator = LSHDPAccelerator(
        plan=args.plan,
        batch_sizes=args.batch_sizes,
        total_batch_size=args.total_batch_size,
        lsdp_plugin=LSDPPlugin(loss_weighting="tokens"),
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision,
        log_with=None if args.report_to == "none" else args.report_to,
        project_dir=args.output_dir,
    )
    if args.report_to != "none":
        accelerator.init_trackers("gpt2_causal_lm", config=vars(args))
    # The same seed on every rank: the shuffled order of the samples must not depend on the rank.
    set_seed(args.seed)

    # Every node prepares the data once, and its other processes find it in the cache.
    with accelerator.local_main_process_first():
        dataset, model, tokenizer = load_data_and_model(args)
    if args.dataset_name is None and args.train_file is None:
        check_same_text(accelerator, dataset)
    train_dataloader, eval_dataloader = get_dataloaders(args, dataset)
    learning_rate = scaled_learning_rate(args, accelerator)
    optimizer = get_optimizer(args, model, learning_rate)

    # Prepare everything. From here on, train_dataloader yields on each rank as many samples as the plan gives it.
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )

    # The number of steps is known only now: the plan decides how many samples a global batch has. (The loader's
    # total_batch_size and length are those of training while the model is in training mode.)
    model.train()
    global_batches = math.ceil(len(dataset["train"]) / train_dataloader.total_batch_size)
    steps_per_epoch = math.ceil(global_batches / accelerator.gradient_accumulation_steps)
    if args.max_train_steps is None:
        args.max_train_steps = args.num_train_epochs * steps_per_epoch
    args.num_train_epochs = math.ceil(args.max_train_steps / steps_per_epoch)
    # A prepared scheduler steps num_processes times in each optimizer step, so its lengths are multiplied by that.
    lr_scheduler = get_scheduler(
        args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.num_warmup_steps * accelerator.num_processes,
        num_training_steps=args.max_train_steps * accelerator.num_processes,
    )
    lr_scheduler = accelerator.prepare(lr_scheduler)

    # Potentially load in the weights and states from a previous save
    completed_steps = 0
    starting_epoch = 0
    if args.resume_from_checkpoint is not None:
        # Given a folder of checkpoints, load_state takes the newest one that is complete on some node.
        latest = args.resume_from_checkpoint == "latest"
        checkpoint = accelerator.load_state(args.output_dir if latest else args.resume_from_checkpoint)
        completed_steps = checkpoint.step
        starting_epoch = train_dataloader.position.epoch
        accelerator.print(f"Resumed from {checkpoint.path}: epoch {starting_epoch}, step {completed_steps}.")
    first_step = completed_steps

    losses, eval_loss = [], None
    progress_bar = tqdm(total=args.max_train_steps, initial=completed_steps, disable=not accelerator.is_main_process)
    # Now we train the model
    for epoch in range(starting_epoch, args.num_train_epochs):
        if completed_steps >= args.max_train_steps:
            break
        model.train()
        # Sums of this rank since the last optimizer step, to log the loss of the whole global batch.
        loss_sum = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
        resumed = args.resume_from_checkpoint is not None and epoch == starting_epoch
        # After load_state, skip_first_batches without a number continues behind the samples that were already seen.
        active_dataloader = accelerator.skip_first_batches(train_dataloader) if resumed else train_dataloader
        for batch in active_dataloader:
            with accelerator.accumulate(model):
                # The mean over this rank's tokens, as always: the accelerator weights it by the number of tokens.
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients and args.max_grad_norm > 0:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

            tokens = torch.tensor(float(accelerator.batch_place.tokens), dtype=torch.float64, device=loss.device)
            # The mean over no token is NaN, and counts for nothing.
            token_loss = torch.where(tokens > 0, loss.detach().double() * tokens, 0.0)
            loss_sum += torch.stack([token_loss, tokens])
            if accelerator.sync_gradients:
                total_loss, total_tokens = accelerator.reduce(loss_sum, reduction="sum").tolist()
                losses.append(total_loss / total_tokens)
                loss_sum.zero_()
                completed_steps += 1
                progress_bar.set_postfix(loss=f"{losses[-1]:.4f}", refresh=False)
                progress_bar.update(1)
                accelerator.log(
                    {"train_loss": losses[-1], "learning_rate": lr_scheduler.get_last_lr()[0]}, step=completed_steps
                )
                if isinstance(args.checkpointing_steps, int) and completed_steps % args.checkpointing_steps == 0:
                    accelerator.save_state(f"{args.output_dir}/step_{completed_steps}")
                if completed_steps >= args.max_train_steps:
                    break

        if args.checkpointing_steps == "epoch":
            accelerator.save_state(f"{args.output_dir}/step_{completed_steps}")
        eval_loss, perplexity = evaluate_model(accelerator, model, eval_dataloader)
        # Use accelerator.print to print only on the main process.
        accelerator.print(f"epoch {epoch}: evaluation loss {eval_loss:.4f}, perplexity {perplexity:.2f}")
        accelerator.log({"eval_loss": eval_loss, "perplexity": perplexity, "epoch": epoch}, step=completed_steps)
    progress_bar.close()
    if eval_loss is None:  # resumed from the last checkpoint of a run that had nothing left to train
        eval_loss, perplexity = evaluate_model(accelerator, model, eval_dataloader)

    # The final model, as from_pretrained expects it
    accelerator.save_model(model, args.output_dir)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).config.save_pretrained(args.output_dir)
        tokenizer.save_pretrained(args.output_dir)
    write_results(
        accelerator,
        args.output_dir,
        {
            "eval_loss": eval_loss,
            "perplexity": perplexity,
            "batch_sizes": accelerator.plan.batch_sizes
            or [args.per_device_train_batch_size] * accelerator.num_processes,
            "first_step": first_step,
            "completed_steps": completed_steps,
            "learning_rate": learning_rate,
            "losses": losses,
        },
    )
    accelerator.end_training()


def main() -> None:
    args = parse_args()
    # Make one log on every process with the configuration for debugging.
    logging.basicConfig(format="%(asctime)s - %(levelname)s - %(name)s - %(message)s", level=logging.INFO)
    training_function(args)


if __name__ == "__main__":
    main()
