# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The parts of the recipes that need no training: arguments, data, metric, models, messages."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits


RECIPES = Path(__file__).resolve().parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))

import bert_text_tasks as bert  # noqa: E402
import classification  # noqa: E402
import embedded_data  # noqa: E402
import evaluate  # noqa: E402
import gpt2_causal_lm as gpt2  # noqa: E402
import opt_causal_lm as opt  # noqa: E402
import text_data  # noqa: E402
import vit_image_classification as vit  # noqa: E402
from accuracy import Accuracy  # noqa: E402
from datasets import config  # noqa: E402
from learning_rate import scaled_learning_rate  # noqa: E402

from accelerate_lshdp import LSHDPAccelerator, Plan  # noqa: E402


ALL = [vit, gpt2, opt, bert]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("recipe", ALL)
def test_defaults_need_no_download(recipe) -> None:
    args = recipe.parse_args(["--output_dir", "out"])
    assert args.dataset_name is None and args.model_name_or_path is None and args.plan is None
    assert args.report_to == "none" and args.checkpointing_steps is None and args.seed == 42


@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize(("text", "parsed"), [("epoch", "epoch"), ("25", 25)])
def test_checkpointing_steps(recipe, text: str, parsed: int | str) -> None:
    assert recipe.parse_args(["--output_dir", "out", "--checkpointing_steps", text]).checkpointing_steps == parsed


@pytest.mark.parametrize(
    ("recipe", "arguments", "message"),
    [
        (vit, [], "--output_dir"),
        (gpt2, [], "--output_dir"),
        (vit, ["--checkpointing_steps", "sometimes"], "a number of optimizer steps (at least 1) or 'epoch'"),
        (vit, ["--checkpointing_steps", "0"], "found '0'"),
        (vit, ["--per_device_train_batch_size", "-1"], "at least 1"),
        (gpt2, ["--max_train_steps", "many"], "at least 1, found 'many'"),
        (vit, ["--lr_scaling", "cubic"], "choose from"),
        (gpt2, ["--batch_sizes", "8,8"], "choose from"),
        (gpt2, ["--total_batch_size", "0"], "at least 1"),
        (vit, ["--dataset_name", "cifar10", "--train_dir", "x"], "give one of them"),
        (vit, ["--validation_dir", "x"], "needs --train_dir"),
        (vit, ["--model_name_or_path", "x", "--model_config", "small"], "give one of them"),
        (gpt2, ["--dataset_name", "wikitext", "--train_file", "x.txt"], "give one of them"),
        (gpt2, ["--validation_file", "x.txt"], "needs --train_file"),
        (gpt2, ["--train_file", "x.docx"], "expected a file name that ends in .txt"),
        (opt, ["--model_name_or_path", "x", "--model_config", "opt-125m"], "give one of them"),
        (bert, ["--task", "translation"], "choose from"),
        (bert, ["--mask_probability", "0"], "above 0 and at most 1, found '0'"),
        (bert, ["--mask_probability", "15%"], "above 0 and at most 1, found '15%'"),
        (bert, ["--validation_file", "x.txt"], "needs --train_file"),
    ],
)
def test_bad_arguments_are_refused(recipe, arguments: list[str], message: str, capsys) -> None:
    if message != "--output_dir":
        arguments = ["--output_dir", "out", *arguments]
    with pytest.raises(SystemExit) as exit_:
        recipe.parse_args(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_digits_are_all_there_and_held_out_ones_are_not_trained_on() -> None:
    dataset = embedded_data.digits_dataset()
    assert len(dataset["train"]) == 1500 and len(dataset["validation"]) == 297

    def rows(split: str) -> list[tuple[bytes, int]]:
        return [(np.asarray(row["image"]).tobytes(), row["label"]) for row in dataset[split]]

    digits = load_digits()
    pixels = np.round(digits.images * 255 / 16).astype(np.uint8)
    everything = [(image.tobytes(), int(label)) for image, label in zip(pixels, digits.target, strict=True)]
    # Together they are the original data, each row once: so no row can be in both.
    assert sorted(rows("train") + rows("validation")) == sorted(everything)
    assert sorted(set(dataset["validation"]["label"])) == list(range(10))
    again = embedded_data.digits_dataset()
    assert rows("train") == [(np.asarray(row["image"]).tobytes(), row["label"]) for row in again["train"]]


def test_accuracy_counts_equal_ids() -> None:
    for metric in (Accuracy(keep_in_memory=True), evaluate.load(str(RECIPES / "accuracy.py"))):
        metric.add_batch(predictions=torch.tensor([1, 2, 3]), references=torch.tensor([1, 2, 0]))
        metric.add_batch(predictions=[7], references=[7])
        assert metric.compute() == {"accuracy": 0.75}


@pytest.mark.parametrize(
    ("recipe", "load", "hint"),
    [
        (vit, vit.load_images, "--train_dir"),
        (gpt2, text_data.load_text, "--train_file"),
        (bert, text_data.load_labelled_text, "--train_file"),
    ],
    ids=["images", "text", "labelled text"],
)
def test_dataset_of_an_unreachable_hub_is_explained(recipe, load, hint: str) -> None:
    args = recipe.parse_args(["--output_dir", "out", "--dataset_name", "cifar10"])
    with pytest.raises(ConnectionError, match=f"the dataset cifar10 .*Without the Hub: .*{hint}"):
        load(args)


@pytest.mark.parametrize("recipe", ALL)
def test_model_of_an_unreachable_hub_is_explained(recipe) -> None:
    args = recipe.parse_args(["--output_dir", "out", "--model_name_or_path", "some/model"])
    with pytest.raises(ConnectionError, match="the model some/model .*Without the Hub: .*--model_config"):
        recipe.build_model(args, ["a", "b"])


def test_metric_without_the_hub_is_the_own_one_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(classification.logger, "warning", lambda message: said.append(message))
    assert isinstance(classification.load_metric(vit.parse_args(["--output_dir", "out"])), Accuracy)
    assert said == []  # nothing of the embedded default comes from the Hub
    metric = classification.load_metric(vit.parse_args(["--output_dir", "out", "--dataset_name", "cifar10"]))
    assert isinstance(metric, Accuracy)
    assert "recipes/accuracy.py" in said[0]


def image_folder(root: Path, per_class: int) -> Path:
    from PIL.Image import fromarray

    for index, label in enumerate(("cat", "dog")):
        (root / label).mkdir(parents=True)
        for i in range(per_class):
            pixels = np.full((10, 12, 3), 40 * index + i, dtype=np.uint8)
            fromarray(pixels).save(root / label / f"{i}.png")
    return root


def test_folders_of_images(tmp_path: Path) -> None:
    train, held_out = image_folder(tmp_path / "train", 10), image_folder(tmp_path / "held_out", 2)
    dataset = vit.load_images(vit.parse_args(["--output_dir", "out", "--train_dir", str(train)]))
    assert dataset["train"].features["label"].names == ["cat", "dog"]
    assert (len(dataset["train"]), len(dataset["validation"])) == (17, 3)
    both = vit.parse_args(["--output_dir", "out", "--train_dir", str(train), "--validation_dir", str(held_out)])
    dataset = vit.load_images(both)
    assert (len(dataset["train"]), len(dataset["validation"])) == (20, 4)
    both.label_column = "breed"
    with pytest.raises(ValueError, match="No label column .breed.*--label_column"):
        vit.load_images(both)


@pytest.mark.parametrize(("name", "millions"), [("vit-l-32", 305.5), ("vit-l-16", 303.3), ("small", 0.894)])
def test_vit_sizes(name: str, millions: float) -> None:
    """304 M for ViT-L/16 and 306 M for ViT-L/32 with 1,000 classes; here 10, 1 M less."""
    args = vit.parse_args(["--output_dir", "out", "--model_config", name])
    with torch.device("meta"):
        model, _ = vit.build_model(args, [str(i) for i in range(10)])
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, rel=2e-3)


class TokenizerOf:
    """A tokenizer with so many tokens as the Hub's of a model."""

    bos_token_id = eos_token_id = pad_token_id = 0

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return self.tokens


@pytest.mark.parametrize(
    ("name", "millions"),
    [("opt-125m", 125.2), ("opt-350m", 331.2), ("opt-1.3b", 1315.8), ("bert-base", 109.5), ("bert-large", 335.2)],
)
def test_sizes_of_models_of_text(name: str, millions: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the Hub shows for the models of these names; BERT as a masked language model."""
    recipe, made, tokens = (opt, "byte_level_tokenizer", 50272) if "opt" in name else (bert, "bert_tokenizer", 30522)
    monkeypatch.setattr(recipe, made, lambda texts: TokenizerOf(tokens))
    args = recipe.parse_args(["--output_dir", "out", "--model_config", name])
    with torch.device("meta"):
        model, _ = recipe.build_model(args, {"train": {"text": []}})
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, rel=2e-3)


@pytest.mark.parametrize(
    ("scaling", "total", "accumulation", "expected", "said"),
    [
        ("none", None, 1, 0.001, None),
        ("linear", None, 2, 0.001, None),
        ("linear", 16, 1, 0.001, None),  # what the script would train on anyway
        ("linear", 64, 1, 0.004, "64 samples under the plan, 16 without it: 4 times as many"),
        ("linear", 64, 2, 0.004, "128 samples under the plan, 32 without it: 4 times"),
        ("sqrt", 64, 1, 0.002, "--lr_scaling sqrt makes the learning rate 0.002, from 0.001."),
        ("sqrt", 4, 1, 0.0005, "0.25 times as many"),
        ("none", 64, 1, 0.001, "The learning rate stays 0.001 (--lr_scaling none; linear or sqrt would change it)"),
    ],
)
def test_the_learning_rate_follows_the_total_as_asked(
    scaling: str, total: int | None, accumulation: int, expected: float, said: str | None, caplog
) -> None:
    plan = Plan.equal() if total is None else Plan.from_batch_sizes([total])
    args = vit.parse_args(
        ["--output_dir", "out", "--lr_scaling", scaling, "--gradient_accumulation_steps", str(accumulation)]
    )
    accelerator = LSHDPAccelerator(cpu=True, plan=plan, gradient_accumulation_steps=accumulation)
    with caplog.at_level("INFO"):
        assert scaled_learning_rate(args, accelerator) == pytest.approx(expected)
    messages = [record.message for record in caplog.records if record.name == "learning_rate"]
    assert messages == [] if said is None else said in messages[0]


@pytest.mark.parametrize(
    ("recipe", "options", "millions"),
    [
        (vit, [], 0.894),
        (gpt2, [], 0.957),
        pytest.param(opt, [], 0.957, marks=pytest.mark.slow),
        pytest.param(bert, [], 0.976, marks=pytest.mark.slow),
        pytest.param(bert, ["--task", "classification"], 0.976, marks=pytest.mark.slow),
    ],
    ids=["vit", "gpt2", "opt", "bert masked", "bert classification"],
)
def test_what_is_profiled_is_what_is_trained(recipe, options: list[str], millions: float) -> None:
    LSHDPAccelerator(cpu=True)
    subject = recipe.profiling_subject(["--output_dir", "out", "--learning_rate", "0.5", *options])
    parameters = list(subject.model.parameters())
    assert sum(parameter.numel() for parameter in parameters) / 1e6 == pytest.approx(millions, rel=2e-3)
    updated = [parameter for group in subject.optimizer.param_groups for parameter in group["params"]]
    assert {id(parameter) for parameter in updated} == {id(parameter) for parameter in parameters}
    assert all(group["lr"] == 0.5 for group in subject.optimizer.param_groups)
    batch = next(iter(subject.train_dataloader))
    assert len(batch["labels"]) == subject.train_dataloader.batch_size
    assert subject.loss(subject.model, batch).isfinite()


@pytest.mark.parametrize("recipe", ALL)
def test_profiling_another_precision_than_that_of_the_training_is_refused(recipe) -> None:
    LSHDPAccelerator(cpu=True)
    with pytest.raises(ValueError, match="would measure 'no'.*--mixed-precision bf16"):
        recipe.profiling_subject(["--output_dir", "out", "--mixed_precision", "bf16"])
