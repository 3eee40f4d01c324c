# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`TRAINER`: a script with a Trainer that trains until a signal ends it. Each node saves in a folder of its own.

Its argument, if there is one, is the number of steps after which it ends.
"""

TRAINER = """
import os, sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

rows = [{"input_ids": torch.arange(8) + i % 9, "labels": torch.arange(8) + i % 9} for i in range(64)]
out = f"out{os.environ.get('GROUP_RANK', '0')}"
options = {"output_dir": out, "num_train_epochs": 10000, "save_steps": 10**6, "logging_steps": 5}
options["max_steps"] = int(sys.argv[1]) if len(sys.argv) > 1 else -1
args = TrainingArguments(**options, per_device_train_batch_size=4, use_cpu=True, report_to=[], disable_tqdm=True)
model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2))
Trainer(model, args, train_dataset=rows).train()
print("training has ended", flush=True)
"""
