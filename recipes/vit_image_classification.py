# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Train a ViT image classifier with LSHDP.

By default it trains a small ViT on scikit-learn's handwritten digits, which needs no download:

    accelerate launch --config_file accelerate_configs/cpu_1x2.yaml \
        recipes/vit_image_classification.py --plan plan.json --output_dir outputs/vit

Other models: `--model_name_or_path google/vit-base-patch16-224-in21k`, or `--model_config vit-l-16` for the paper's.
Other images: `--dataset_name cifar10`, or `--train_dir DIR` with one sub-folder of images per class.

This file has the images and the model. `training_loop.py` trains.
"""

from __future__ import annotations

import argparse
import logging
from functools import partial

import torch
from classification import class_options, evaluate_classes, load_metric
from dataset_splits import with_columns, with_held_out
from datasets import ClassLabel, DatasetDict, Image, load_dataset
from embedded_data import digits_dataset
from hub import NO_MODEL, from_the_hub
from learning_rate import scaled_learning_rate
from training_arguments import (
    add_model_arguments,
    add_training_arguments,
    check_model_arguments,
    check_profiled_precision,
)
from training_loop import get_dataloaders, make_accelerator, train
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from accelerate_lshdp.profiling import Subject


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
    add_model_arguments(
        parser,
        MODEL_CONFIGS,
        named="A model of the Hub or a folder; its classifier is replaced.",
        new="A ViT with random weights instead: a small one, or the ViT-L/32 and ViT-L/16 of the paper",
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
    check_model_arguments(parser, args)
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
    return with_held_out(with_columns(dataset, image=image_column, label=label_column), 0.15)


def build_model(args: argparse.Namespace, labels: list[str]):
    """The model, and the image processor that makes its inputs."""
    names = class_options(labels)
    if args.model_name_or_path is not None:
        with from_the_hub(f"the model {args.model_name_or_path}", NO_MODEL):
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


def get_optimizer(args: argparse.Namespace, model, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr=learning_rate, weight_decay=args.weight_decay, eps=args.adam_epsilon
    )


def profiling_subject(argv: list[str]) -> Subject:
    """What `accelerate-lshdp profile` measures: model, data and optimizer of a training with these arguments."""
    args = parse_args(argv)
    check_profiled_precision(args)
    dataset, model, _ = load_data_and_model(args)
    train_dataloader, _ = get_dataloaders(args, dataset, collate)
    return Subject(model, train_dataloader, get_optimizer(args, model, args.learning_rate))


def training_function(args: argparse.Namespace) -> None:
    # Initialize the accelerator. It reads the plan, and does the rest of what accelerate's Accelerator does.
    accelerator = make_accelerator(args, "vit_image_classification")
    # Every node prepares the data once, and its other processes find it in the cache.
    with accelerator.local_main_process_first():
        dataset, model, image_processor = load_data_and_model(args)
    dataloaders = get_dataloaders(args, dataset, collate)
    optimizer = get_optimizer(args, model, scaled_learning_rate(args, accelerator))
    evaluate = partial(evaluate_classes, metric=load_metric(args))
    train(args, accelerator, model, optimizer, dataloaders, evaluate, image_processor)


def main() -> None:
    args = parse_args()
    # Make one log on every process with the configuration for debugging.
    logging.basicConfig(format="%(asctime)s - %(levelname)s - %(name)s - %(message)s", level=logging.INFO)
    training_function(args)


if __name__ == "__main__":
    main()
