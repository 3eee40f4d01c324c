# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Train a ViT image classifier with LSHDP.

By default it trains a small ViT on scikit-learn's handwritten digits, which needs no download:

    accelerate launch --config_file accelerate_configs/cpu_1x2.yaml \
        recipes/vit_image_classification.py --plan plan.json --output_dir outputs/vit

Other models: `--model_name_or_path google/vit-base-patch16-224-in21k`, or `--model_config vit-l-16` for the paper's.
Other images: `--dataset_name cifar10`, or `--train_dir DIR` with one sub-folder of images per class.
"""

from __future__ import annotations

import argparse
import logging
import math

import evaluate
import torch
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from accuracy import Accuracy
from datasets import ClassLabel, DatasetDict, Image, load_dataset
from embedded_data import digits_dataset
from hub import from_the_hub
from learning_rate import scaled_learning_rate
from results import write_results
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from training_arguments import add_training_arguments, check_profiled_precision
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    get_scheduler,
)

from accelerate_lshdp import LSHDPAccelerator
from accelerate_lshdp.profiling import Subject


logger = get_logger(__name__)

VIT_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
# No dropout anywhere: then two runs with different plans draw the same loss curve, and can be laid over each other.
MODEL_CONFIGS = {
    # The four patches of a digit are its quarters: smaller ones learn much more slowly from 1,500 images.
    "small": {
        "image_size": 32,
        "patch_size": 16,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 512,
    },
    "vit-l-32": {"image_size": 224, "patch_size": 32, **VIT_LARGE},
    "vit-l-16": {"image_size": 224, "patch_size": 16, **VIT_LARGE},
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a ViT image classifier with LSHDP.")
    parser.add_argument("--model_name_or_path", help="A model of the Hub or a folder; its classifier is replaced.")
    parser.add_argument(
        "--model_config",
        choices=list(MODEL_CONFIGS),
        help="A ViT with random weights instead: small (the default), or the ViT-L/32 and ViT-L/16 of the paper.",
    )
    parser.add_argument("--dataset_name", help="A dataset of the Hub, e.g. cifar10. Default: the embedded digits.")
    parser.add_argument("--dataset_config_name")
    parser.add_argument("--train_dir", help="Folder with one sub-folder of training images per class.")
    parser.add_argument("--validation_dir", help="The same for evaluation. Default: 15 %% of the training images.")
    parser.add_argument("--image_column", help="Default: the first column of images.")
    parser.add_argument("--label_column", help="Default: the first column of class labels.")
    add_training_arguments(parser)
    parser.set_defaults(per_device_train_batch_size=16, learning_rate=1e-3)
    args = parser.parse_args(argv)

    if args.dataset_name is not None and args.train_dir is not None:
        parser.error("--dataset_name and --train_dir both say where the images are: give one of them.")
    if args.validation_dir is not None and args.train_dir is None:
        parser.error("--validation_dir needs --train_dir.")
    if args.model_name_or_path is not None and args.model_config is not None:
        parser.error("--model_name_or_path and --model_config both choose the model: give one of them.")
    return args


def load_images(args: argparse.Namespace) -> DatasetDict:
    """Splits `train` and `validation` with columns `image` and `label`."""
    if args.dataset_name is not None:
        with from_the_hub(
            f"the dataset {args.dataset_name}",
            "leave --dataset_name out to train on the embedded digits, or give a folder of images with --train_dir",
        ):
            dataset = load_dataset(args.dataset_name, args.dataset_config_name)
    elif args.train_dir is not None:
        data_files = {"train": f"{args.train_dir}/**"}
        if args.validation_dir is not None:
            data_files["validation"] = f"{args.validation_dir}/**"
        dataset = load_dataset("imagefolder", data_files=data_files)
    else:
        return digits_dataset()

    features = dataset["train"].features
    image_column = args.image_column or next((n for n, f in features.items() if isinstance(f, Image)), None)
    label_column = args.label_column or next((n for n, f in features.items() if isinstance(f, ClassLabel)), None)
    for column, kind, option in [(image_column, Image, "image"), (label_column, ClassLabel, "label")]:
        if column not in features or not isinstance(features[column], kind):
            raise ValueError(
                f"No {option} column ({column or 'none found'}) of type {kind.__name__} among the columns "
                f"{dict(features)}. Name it with --{option}_column; a folder of images needs one sub-folder per class."
            )
    dataset = dataset.select_columns([image_column, label_column])
    dataset = dataset.rename_columns(
        {k: v for k, v in {image_column: "image", label_column: "label"}.items() if k != v}
    )

    held_out = next((split for split in ("validation", "test") if split in dataset), None)
    if held_out is None:
        parts = dataset["train"].train_test_split(test_size=0.15, seed=0)
        return DatasetDict(train=parts["train"], validation=parts["test"])
    return DatasetDict(train=dataset["train"], validation=dataset[held_out])


def build_model(args: argparse.Namespace, labels: list[str]):
    """The model, and the image processor that makes its inputs."""
    names = {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels)),
        "label2id": {label: i for i, label in enumerate(labels)},
    }
    if args.model_name_or_path is not None:
        with from_the_hub(
            f"the model {args.model_name_or_path}",
            "train one from scratch with --model_config, or give a local folder as --model_name_or_path",
        ):
            image_processor = AutoImageProcessor.from_pretrained(args.model_name_or_path)
            model = AutoModelForImageClassification.from_pretrained(
                args.model_name_or_path, ignore_mismatched_sizes=True, **names
            )
        return model, image_processor
    config = ViTConfig(**MODEL_CONFIGS[args.model_config or "small"], **names)
    size = {"height": config.image_size, "width": config.image_size}
    return ViTForImageClassification(config), ViTImageProcessor(size=size)


def load_data_and_model(args: argparse.Namespace):
    """The images as the model takes them, the model, and the image processor."""
    dataset = load_images(args)
    model, image_processor = build_model(args, dataset["train"].features["label"].names)

    def preprocess(examples):
        images = [image.convert("RGB") for image in examples["image"]]
        pixel_values = image_processor(images, return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixel_values, "label": examples["label"]}

    return dataset.with_transform(preprocess), model, image_processor


def collate(examples):
    return {
        "pixel_values": torch.stack([example["pixel_values"] for example in examples]),
        "labels": torch.tensor([example["label"] for example in examples]),
    }


def get_dataloaders(args: argparse.Namespace, dataset: DatasetDict) -> tuple[DataLoader, DataLoader]:
    """The loaders for training and evaluation."""
    train_dataloader = DataLoader(
        dataset["train"],
        shuffle=True,
        collate_fn=collate,
        batch_size=args.per_device_train_batch_size,
        num_workers=args.num_workers,
    )
    eval_dataloader = DataLoader(
        dataset["validation"],
        collate_fn=collate,
        batch_size=args.per_device_eval_batch_size,
        num_workers=args.num_workers,
    )
    return train_dataloader, eval_dataloader


def get_optimizer(args: argparse.Namespace, model, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=args.weight_decay)


def profiling_subject(argv: list[str]) -> Subject:
    """What `accelerate-lshdp profile` measures: model, data and optimizer of a training with these arguments."""
    args = parse_args(argv)
    check_profiled_precision(args)
    dataset, model, _ = load_data_and_model(args)
    train_dataloader, _ = get_dataloaders(args, dataset)
    return Subject(model, train_dataloader, get_optimizer(args, model, args.learning_rate))


def load_metric(args: argparse.Namespace):
    """The Hub's accuracy, or the same from this folder when the Hub is not reachable or not needed otherwise."""
    if args.dataset_name is None and args.model_name_or_path is None:
        return Accuracy(keep_in_memory=True)
    try:
        return evaluate.load("accuracy", keep_in_memory=True)
    except OSError:
        logger.warning("evaluate's accuracy cannot be loaded from the Hub: using the one in recipes/accuracy.py.")
        return Accuracy(keep_in_memory=True)


def evaluate_model(accelerator: LSHDPAccelerator, model, dataloader: DataLoader, metric) -> float:
    """Accuracy over the held-out images, each counted once."""
    model.eval()
    for batch in dataloader:
        with torch.no_grad():
            predictions = model(**batch).logits.argmax(dim=-1)
        # Gathers from all ranks and drops the samples that were repeated to fill the last batch.
        predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
        metric.add_batch(predictions=predictions, references=references)
    return metric.compute()["accuracy"]


def training_function(args: argparse.Namespace) -> None:
    # Initialize the accelerator. It reads the plan, and does the rest of what accelerate's Accelerator does.
    accelerator = LSHDPAccelerator(
        plan=args.plan,
        batch_sizes=args.batch_sizes,
        total_batch_size=args.total_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision,
        log_with=None if args.report_to == "none" else args.report_to,
        project_dir=args.output_dir,
    )
    if args.report_to != "none":
        accelerator.init_trackers("vit_image_classification", config=vars(args))
    # The same seed on every rank: the shuffled order of the samples must not depend on the rank.
    set_seed(args.seed)

    # Every node prepares the data once, and its other processes find it in the cache.
    with accelerator.local_main_process_first():
        dataset, model, image_processor = load_data_and_model(args)
    train_dataloader, eval_dataloader = get_dataloaders(args, dataset)
    learning_rate = scaled_learning_rate(args, accelerator)
    optimizer = get_optimizer(args, model, learning_rate)
    metric = load_metric(args)

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

    losses, accuracy = [], None
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
                # The mean over this rank's samples, as always: the accelerator weights it by the number of samples.
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients and args.max_grad_norm > 0:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

            # Not len(batch): a rank left without a sample repeats one, which does not count.
            samples = accelerator.batch_place.samples
            loss_sum += torch.stack([loss.detach().double() * samples, torch.full_like(loss_sum[0], samples)])
            if accelerator.sync_gradients:
                total_loss, total_samples = accelerator.reduce(loss_sum, reduction="sum").tolist()
                losses.append(total_loss / total_samples)
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
        accuracy = evaluate_model(accelerator, model, eval_dataloader, metric)
        # Use accelerator.print to print only on the main process.
        accelerator.print(f"epoch {epoch}: accuracy {accuracy:.4f}")
        accelerator.log({"accuracy": accuracy, "epoch": epoch}, step=completed_steps)
    progress_bar.close()
    if accuracy is None:  # resumed from the last checkpoint of a run that had nothing left to train
        accuracy = evaluate_model(accelerator, model, eval_dataloader, metric)

    # The final model, as from_pretrained expects it
    accelerator.save_model(model, args.output_dir)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).config.save_pretrained(args.output_dir)
        image_processor.save_pretrained(args.output_dir)
    write_results(
        accelerator,
        args.output_dir,
        {
            "accuracy": accuracy,
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
