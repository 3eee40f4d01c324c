# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The recipes as a user starts them: `accelerate launch --config_file ... recipes/X.py --plan PLAN`."""

from __future__ import annotations

import json
import math
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from datasets import config
from exactness import TOLERANCE
from launching import launch
from safetensors.torch import load_file
from training_cases import relative_error
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    OPTConfig,
    OPTForCausalLM,
)

from accelerate_lshdp import Plan, Strategy


ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "accelerate_configs" / "cpu_1x2.yaml"
VIT = ROOT / "recipes" / "vit_image_classification.py"
GPT2 = ROOT / "recipes" / "gpt2_causal_lm.py"
OPT = ROOT / "recipes" / "opt_causal_lm.py"
BERT = ROOT / "recipes" / "bert_text_tasks.py"
TIMEOUT_SECONDS = 110

sys.path.insert(0, str(VIT.parent))

import bert_text_tasks  # noqa: E402
import gpt2_causal_lm  # noqa: E402
import opt_causal_lm  # noqa: E402
import vit_image_classification  # noqa: E402
from embedded_data import byte_level_tokenizer, digits_dataset, standard_library_pieces  # noqa: E402


@pytest.fixture(scope="module")
def short_text(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One module as training text: less to evaluate than the embedded default."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(Path(textwrap.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    return {"train_file": file, "block_size": 32}


@pytest.fixture(scope="module")
def few_pieces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Pieces of some modules as text for a classifier: less to evaluate than the embedded default."""
    files = [tmp_path_factory.mktemp("pieces") / f"{split}.json" for split in ("train", "validation")]
    pieces = standard_library_pieces()["validation"].shuffle(seed=0)
    for file, rows in zip(files, [range(150), range(150, 250)], strict=True):
        pieces.select(rows).to_json(file)
    return {"task": "classification", "train_file": files[0], "validation_file": files[1], "block_size": 32}


@pytest.fixture(scope="module")
def smooth_opt(tmp_path_factory: pytest.TempPathFactory, short_text: dict[str, Any]) -> dict[str, Any]:
    """A folder with a small OPT whose activation has no kink.

    The gradient of ReLU jumps at 0: there a difference of one rounding, as between batches of two sizes, becomes that
    of a whole token, and two runs that are both exact may be 1e-5 apart.
    """
    folder = tmp_path_factory.mktemp("smooth_opt")
    tokenizer = byte_level_tokenizer([Path(short_text["train_file"]).read_text(encoding="utf-8")])
    sizes = {**opt_causal_lm.MODEL_CONFIGS["small"], "activation_function": "gelu", "pad_token_id": None}
    torch.manual_seed(0)
    OPTForCausalLM(OPTConfig(**sizes, vocab_size=len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"model_name_or_path": folder, **short_text}


@pytest.fixture
def little(request: pytest.FixtureRequest, training: str) -> tuple[Path, dict[str, Any]]:
    """The recipe of the training that a test names, and its options for little data."""
    if training == "vit":
        return VIT, {}
    data = {"bert classification": "few_pieces", "smooth opt": "smooth_opt"}.get(training, "short_text")
    recipe = {"gpt2": GPT2, "opt": OPT, "smooth opt": OPT}.get(training, BERT)
    return recipe, request.getfixturevalue(data)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))  # for the launched processes


def options(**values: Any) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def results(output_dir: Path) -> dict[str, Any]:
    return json.loads((output_dir / "all_results.json").read_text())


def run_alone(recipe: Path, output_dir: Path, **values: Any) -> dict[str, Any]:
    """One process without a launcher: this one, which has imported everything already."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    modules = {VIT: vit_image_classification, GPT2: gpt2_causal_lm, OPT: opt_causal_lm, BERT: bert_text_tasks}
    module = modules[recipe]
    module.training_function(module.parse_args(options(output_dir=output_dir, **values)))
    return results(output_dir)


def run_on_two(
    recipe: Path, output_dir: Path, sizes: list[Any] | None, strategy: str = "lsdp", **values: Any
) -> dict[str, Any]:
    """The documented command, in an environment that does not say that this is a CPU machine."""
    output_dir.mkdir(parents=True, exist_ok=True)
    if sizes is not None:
        values["plan"] = output_dir / "plan.json"
        Plan.from_batch_sizes(sizes, strategy=strategy).save(values["plan"])
    command = ["-m", "accelerate.commands.launch", "--config_file", CONFIG, recipe]
    done = launch(
        [*command, *options(output_dir=output_dir, **values)],
        0,
        env={"ACCELERATE_USE_CPU": None},
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return results(output_dir)


def same_losses(found: list[float], expected: list[float], tolerance: float) -> None:
    assert found == pytest.approx(expected, rel=0, abs=tolerance)


def parameters_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same_model(first: Path, second: Path) -> None:
    ours, theirs = parameters_of(first), parameters_of(second)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_vit_alone_writes_results_model_and_logs(tmp_path: Path) -> None:
    found = run_alone(
        VIT, tmp_path, max_train_steps=30, per_device_train_batch_size=32, report_to="tensorboard", num_warmup_steps=2
    )
    assert len(found["losses"]) == found["completed_steps"] == 30 and found["first_step"] == 0
    assert found["losses"][0] == pytest.approx(2.3, abs=0.25) and found["losses"][-1] < 2.0
    assert found["batch_sizes"] == [32]
    assert found["step_seconds"] > 0 and found["samples_per_second"] > 0 and found["idle_fraction"] == 0
    assert len(found["compute_seconds"]) == len(found["wait_seconds"]) == 1
    assert list(tmp_path.rglob("events.out.tfevents.*"))

    # Plain from_pretrained loads it, and it classifies the held-out digits as well as the run said.
    model = AutoModelForImageClassification.from_pretrained(tmp_path)
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    held_out = digits_dataset()["validation"]
    inputs = processor([image.convert("RGB") for image in held_out["image"]], return_tensors="pt")
    with torch.no_grad():
        predictions = model(**inputs).logits.argmax(dim=-1)
    accuracy = (predictions == torch.tensor(held_out["label"])).float().mean().item()
    assert found["accuracy"] == pytest.approx(accuracy, abs=1e-6)


@pytest.mark.slow
def test_gpt2_alone_writes_results_model_and_tokenizer(tmp_path: Path) -> None:
    found = run_alone(GPT2, tmp_path, max_train_steps=5, block_size=64, num_warmup_steps=2)
    assert len(found["losses"]) == 5
    assert found["losses"][0] == pytest.approx(6.93, abs=0.15) and found["losses"][-1] < found["losses"][0]
    assert found["perplexity"] == pytest.approx(torch.tensor(found["eval_loss"]).exp().item(), rel=1e-4)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == model.config.vocab_size == 1024
    assert model.lm_head.weight is model.transformer.wte.weight
    ids = tokenizer("import os\n", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0]) == "import os\n" and model(input_ids=ids).logits.isfinite().all()


@pytest.mark.slow
def test_opt_alone_writes_results_model_and_tokenizer(tmp_path: Path, short_text: dict[str, Any]) -> None:
    found = run_alone(OPT, tmp_path, max_train_steps=5, num_warmup_steps=2, **short_text)
    assert len(found["losses"]) == 5 and found["losses"][-1] < found["losses"][0]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == model.config.vocab_size
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight
    ids = tokenizer("import os\n", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0]) == "import os\n" and model(input_ids=ids).logits.isfinite().all()


@pytest.mark.slow
def test_bert_learns_masked_tokens_and_writes_its_model(tmp_path: Path) -> None:
    found = run_alone(BERT, tmp_path, max_train_steps=30, block_size=32, num_warmup_steps=2)
    knowing_nothing = math.log(1024)  # each token as likely as any other
    assert found["losses"][0] == pytest.approx(knowing_nothing, abs=0.25)
    assert found["perplexity"] == pytest.approx(torch.tensor(found["eval_loss"]).exp().item(), rel=1e-4)
    assert found["eval_loss"] < knowing_nothing - 0.4
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == model.config.vocab_size == 1024
    ids = tokenizer("import [MASK]\n", return_tensors="pt")["input_ids"]
    assert ids[0, 0] == tokenizer.cls_token_id and tokenizer.mask_token_id in ids[0]
    assert model(input_ids=ids).logits.isfinite().all()


@pytest.mark.slow
def test_bert_learns_to_tell_pieces_apart_and_writes_its_model(tmp_path: Path) -> None:
    found = run_alone(BERT, tmp_path, task="classification", max_train_steps=80, block_size=32, num_warmup_steps=2)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    held_out = standard_library_pieces()["validation"]
    labels = torch.tensor(held_out["label"][:])
    inputs = tokenizer(held_out["text"][:], truncation=True, max_length=32, padding=True, return_tensors="pt")
    with torch.no_grad():
        predictions = model(**inputs).logits.argmax(dim=-1)
    assert found["accuracy"] == pytest.approx((predictions == labels).float().mean().item(), abs=1e-6)
    most_frequent = labels.bincount().max().item() / len(labels)
    assert found["accuracy"] > most_frequent + 0.1
    assert [model.config.id2label[i] for i in range(3)] == held_out.features["label"].names


@pytest.mark.slow
def test_a_masked_model_is_fine_tuned_as_a_classifier(
    tmp_path: Path, short_text: dict[str, Any], few_pieces: dict[str, Any]
) -> None:
    """From its folder, as from a name on the Hub. Without a learning rate the encoder stays as it was."""
    run_alone(BERT, tmp_path / "masked", max_train_steps=2, **short_text)
    run_alone(
        BERT,
        tmp_path / "classifier",
        model_name_or_path=tmp_path / "masked",
        max_train_steps=2,
        learning_rate=0.0,
        **few_pieces,
    )
    before, after = (parameters_of(tmp_path / name) for name in ("masked", "classifier"))
    encoder = [name for name in before if name.startswith("bert.")]
    assert len(encoder) > 60 and all(torch.equal(before[name], after[name]) for name in encoder)
    assert after["classifier.weight"].shape == (3, 128)
    tokens = [AutoTokenizer.from_pretrained(tmp_path / name).get_vocab() for name in ("masked", "classifier")]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("training", "values"),
    [
        ("vit", {"per_device_train_batch_size": 300, "max_train_steps": 8, "checkpointing_steps": 3}),
        pytest.param("gpt2", {"max_train_steps": 4, "checkpointing_steps": 2}, marks=pytest.mark.slow),
        # An epoch has 3 steps: the masks of the second one, in the middle of which the run goes on, are others.
        ("bert masked", {"per_device_train_batch_size": 80, "max_train_steps": 6, "checkpointing_steps": 4}),
        pytest.param("opt", {"max_train_steps": 4, "checkpointing_steps": 2}, marks=pytest.mark.slow),
        pytest.param("bert classification", {"max_train_steps": 4, "checkpointing_steps": 2}, marks=pytest.mark.slow),
    ],
)
def test_resumed_run_is_the_uninterrupted_one(
    training: str, values: dict[str, Any], tmp_path: Path, little: tuple[Path, dict[str, Any]]
) -> None:
    """Invariant 5. An epoch of the ViT has 5 steps here: step 3 is inside the first, step 6 inside the second."""
    recipe, data = little
    values = {**values, **data}
    whole = run_alone(recipe, tmp_path / "whole", **values)
    first = values["checkpointing_steps"]
    resumed = run_alone(
        recipe, tmp_path / "resumed", resume_from_checkpoint=tmp_path / "whole" / f"step_{first}", **values
    )
    assert resumed["first_step"] == first and resumed["completed_steps"] == whole["completed_steps"]
    assert resumed["losses"] == whole["losses"][first:]
    same_model(tmp_path / "whole", tmp_path / "resumed")


@pytest.mark.slow
def test_resuming_at_the_end_of_an_epoch_and_of_the_training(tmp_path: Path) -> None:
    values = {"per_device_train_batch_size": 300, "num_train_epochs": 2, "checkpointing_steps": "epoch"}
    whole = run_alone(VIT, tmp_path / "whole", **values)
    second = run_alone(VIT, tmp_path / "second", resume_from_checkpoint=tmp_path / "whole" / "step_5", **values)
    assert second["losses"] == whole["losses"][5:] and len(second["losses"]) == 5
    same_model(tmp_path / "whole", tmp_path / "second")
    nothing = run_alone(VIT, tmp_path / "nothing", resume_from_checkpoint=tmp_path / "whole" / "step_10", **values)
    assert nothing["losses"] == [] and nothing["step_seconds"] is None
    assert nothing["accuracy"] == whole["accuracy"]


@pytest.mark.parametrize(
    "sizes", [[11, 5], pytest.param([(5, 2), (3, 2)], marks=pytest.mark.slow)], ids=["unequal", "accumulated"]
)
def test_vit_on_two_ranks_follows_one_process(sizes: list[Any], tmp_path: Path) -> None:
    """Invariant 2: the logged loss is that of the global batch, so curves of two plans lie on each other."""
    values = {"max_train_steps": 6, "num_warmup_steps": 0}
    alone = run_alone(VIT, tmp_path / "alone", per_device_train_batch_size=16, **values)
    two = run_on_two(VIT, tmp_path / "two", sizes, **values)
    same_losses(two["losses"], alone["losses"], 1e-5)
    assert two["accuracy"] == pytest.approx(alone["accuracy"], abs=2 / 297)
    assert sum(two["batch_sizes"]) == 16 and len(two["compute_seconds"]) == 2


@pytest.mark.slow
def test_automatic_batch_sizes_and_a_scaled_learning_rate_follow_one_process(tmp_path: Path) -> None:
    """Without a plan the script would train on 2 x 4 samples; with 16 the learning rate is doubled."""
    values = {"max_train_steps": 6, "num_warmup_steps": 0}
    alone = run_alone(VIT, tmp_path / "alone", per_device_train_batch_size=16, learning_rate=0.002, **values)
    asked = {"batch_sizes": "auto", "total_batch_size": 16, "lr_scaling": "linear", "learning_rate": 0.001}
    two = run_on_two(VIT, tmp_path / "two", None, per_device_train_batch_size=4, **asked, **values)
    assert two["learning_rate"] == pytest.approx(0.002)
    same_losses(two["losses"], alone["losses"], 1e-5)
    assert sum(two["batch_sizes"]) == 16


@pytest.mark.slow
@pytest.mark.timeout(240)  # two launches
def test_gpt2_on_two_ranks_follows_one_process_and_resumes(tmp_path: Path, short_text: dict[str, Any]) -> None:
    values = {**short_text, "max_train_steps": 6, "checkpointing_steps": 4}
    alone = run_alone(GPT2, tmp_path / "alone", per_device_train_batch_size=8, **values)
    two = run_on_two(GPT2, tmp_path / "two", [6, 2], **values)
    same_losses(two["losses"], alone["losses"], 1e-5)
    assert two["eval_loss"] == pytest.approx(alone["eval_loss"], abs=1e-5)
    # From the newest checkpoint, after step 4, in the same folder and under the same plan
    resumed = run_on_two(GPT2, tmp_path / "two", [6, 2], resume_from_checkpoint="latest", **values)
    assert resumed["first_step"] == 4
    assert resumed["losses"] == two["losses"][4:]
    assert resumed["eval_loss"] == two["eval_loss"]


@pytest.mark.slow
def test_masks_do_not_depend_on_the_processes_that_load(tmp_path: Path, short_text: dict[str, Any]) -> None:
    """Two epochs, in each of which workers are started anew with the masks of that epoch."""
    values = {**short_text, "per_device_train_batch_size": 80, "num_train_epochs": 2}
    here, workers = (run_alone(BERT, tmp_path / str(n), num_workers=n, **values) for n in (0, 2))
    assert here["losses"] == workers["losses"] and here["eval_loss"] == workers["eval_loss"]


#: Two epochs of 3 steps; the checkpoint is inside the second. The gradient of a key bias is mathematically zero: with
#: a smaller epsilon AdamW makes steps of its rounding errors.
EXACT = {"max_train_steps": 6, "num_warmup_steps": 0, "adam_epsilon": 1e-6, "checkpointing_steps": 4}


@pytest.fixture(scope="module")
def alone_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folders of trainings in one process, each of which is made once."""
    made: dict[str, Path] = {}

    def of(training: str, recipe: Path, values: dict[str, Any]) -> Path:
        if training not in made:
            made[training] = tmp_path_factory.mktemp("alone")
            run_alone(recipe, made[training], per_device_train_batch_size=64, **values)
        return made[training]

    return of


@pytest.mark.timeout(240)  # a launch, and one process
@pytest.mark.parametrize(
    ("training", "strategy"),
    [
        pytest.param(
            training,
            str(strategy),
            marks=pytest.mark.slow,
        )
        for training in ("bert masked", "bert classification", "smooth opt")
        for strategy in Strategy
    ],
)
def test_text_on_two_ranks_follows_one_process(
    training: str, strategy: str, tmp_path: Path, little: tuple[Path, dict[str, Any]], alone_of: Callable[..., Path]
) -> None:
    """Invariants 1 and 2 with every strategy and unequal batches, of which BERT's have different numbers of masks."""
    recipe, data = little
    values = {**EXACT, **data}
    alone = alone_of(training, recipe, values)
    two = run_on_two(recipe, tmp_path, [44, 20], strategy, **values)
    one = results(alone)
    same_losses(two["losses"], one["losses"], 1e-5)
    assert relative_error(parameters_of(tmp_path), parameters_of(alone)) <= TOLERANCE["float32"][1]
    measured = "accuracy" if training == "bert classification" else "eval_loss"
    assert two[measured] == pytest.approx(one[measured], abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(240)  # two launches
@pytest.mark.parametrize("training", ["bert masked", "bert classification", "opt"])
def test_text_on_two_ranks_resumes(
    training: str, tmp_path: Path, little: tuple[Path, dict[str, Any]], alone_of: Callable[..., Path]
) -> None:
    """Invariant 5: from the newest checkpoint, after step 4, in the same folder and under the same plan."""
    recipe, data = little
    two = run_on_two(recipe, tmp_path, [44, 20], **EXACT, **data)
    same_losses(two["losses"], results(alone_of(training, recipe, {**EXACT, **data}))["losses"], 1e-5)
    before = parameters_of(tmp_path)
    resumed = run_on_two(recipe, tmp_path, [44, 20], resume_from_checkpoint="latest", **EXACT, **data)
    assert resumed["first_step"] == 4 and resumed["losses"] == two["losses"][4:]
    after = parameters_of(tmp_path)
    assert all(torch.equal(before[name], after[name]) for name in before)
    measured = "accuracy" if training == "bert classification" else "eval_loss"
    assert resumed[measured] == two[measured]
