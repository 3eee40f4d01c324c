# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Trains a tiny GPT-2 on blocks of text with a loop of its own around accelerate."""

import argparse
import json
import os

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler


BLOCK = 12


class Progress:
    """Optimizer steps, and where the run is in its data; saved with the checkpoints."""

    def __init__(self) -> None:
        self.step, self.epoch, self.batches = 0, 0, 0

    def state_dict(self) -> dict[str, int]:
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--samples", type=int, default=55)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--max_steps", type=int, default=10)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--weight_decay", type=float, default=0.05)
    parser.add_argument("--adam_epsilon", type=float, default=1e-8)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--warmup_steps", type=int, default=0)
    parser.add_argument("--save_steps", type=int, default=0, help="0: no checkpoints")
    parser.add_argument("--resume_from_checkpoint")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def make_blocks(samples: int) -> list[dict[str, torch.Tensor]]:
    text = " ".join(f"{i} and {i + 1} make {2 * i + 1}." for i in range(samples)).encode()
    blocks = torch.tensor(list(text[: samples * BLOCK])).view(samples, BLOCK)
    return [{"input_ids": block, "labels": block.clone()} for block in blocks]


def main() -> None:
    args = parse_arguments()
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    set_seed(args.seed)
    config = GPT2Config(
        vocab_size=128,
        n_positions=BLOCK,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    loader = DataLoader(make_blocks(args.samples), batch_size=args.per_device_train_batch_size, shuffle=True)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay, eps=args.adam_epsilon
    )
    scheduler = get_scheduler(
        "linear",
        optimizer,
        # accelerate steps a prepared scheduler once for every process.
        num_warmup_steps=args.warmup_steps * accelerator.num_processes,
        num_training_steps=args.max_steps * accelerator.num_processes,
    )
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
    log = []
    model.train()
    while progress.step < args.max_steps:
        loader.set_epoch(progress.epoch)
        batches = accelerator.skip_first_batches(loader, progress.batches) if progress.batches else loader
        losses = []
        for batch in batches:
            progress.batches += 1
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                losses.append(accelerator.gather_for_metrics(loss.detach().repeat(len(batch["labels"]))))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                progress.step += 1
                mean = torch.cat(losses).mean().item()
                losses = []
                log.append({"step": progress.step, "loss": mean, "grad_norm": float(norm), "epoch": progress.epoch})
                if args.save_steps and progress.step % args.save_steps == 0:
                    accelerator.save_state(os.path.join(args.output_dir, f"checkpoint-{progress.step}"))
                if progress.step == args.max_steps:
                    break
        progress.epoch, progress.batches = progress.epoch + 1, 0

    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        args.output_dir,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    if accelerator.is_main_process:
        with open(os.path.join(args.output_dir, "log.json"), "w") as file:
            json.dump(log, file)


if __name__ == "__main__":
    main()
