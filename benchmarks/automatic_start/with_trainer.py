# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""An ordinary script with the Trainer, which knows nothing of this package."""

from __future__ import annotations

from typing import Any

from digits import ADAM_EPS, LEARNING_RATE, Log, make_dataset, make_model, parse_arguments
from transformers import Trainer, TrainerCallback, TrainingArguments


class Watch(TrainerCallback):
    def __init__(self) -> None:
        self.log = Log()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.log.step()


def main() -> None:
    args = parse_arguments()
    watch = Watch()
    trainer = Trainer(
        make_model(args.layers),
        TrainingArguments(
            output_dir=str(args.output_dir),
            per_device_train_batch_size=args.batch_size,
            max_steps=args.max_steps,
            learning_rate=LEARNING_RATE,
            adam_epsilon=ADAM_EPS,
            logging_steps=args.max_steps,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=make_dataset(),
        callbacks=[watch],
    )
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        watch.log.save(args.output_dir)


if __name__ == "__main__":
    main()
