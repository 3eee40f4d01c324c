# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""An ordinary loop on accelerate, which knows nothing of this package."""

from __future__ import annotations

from accelerate import Accelerator, DataLoaderConfiguration
from digits import Log, make_dataset, make_model, make_optimizer, parse_arguments
from torch.utils.data import DataLoader
from transformers import get_scheduler


def main() -> None:
    args = parse_arguments()
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    model = make_model(args.layers)
    optimizer = make_optimizer(model)
    loader = DataLoader(make_dataset(), batch_size=args.batch_size, shuffle=True)
    scheduler = get_scheduler("linear", optimizer, 0, args.max_steps * accelerator.num_processes)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    log, epoch = Log(), 0
    model.train()
    while len(log.ends) < args.max_steps:
        loader.set_epoch(epoch)
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            log.step()
            if len(log.ends) == args.max_steps:
                break
        epoch += 1
    accelerator.wait_for_everyone()
    accelerator.save_model(model, args.output_dir)
    if accelerator.is_main_process:
        log.save(args.output_dir)


if __name__ == "__main__":
    main()
