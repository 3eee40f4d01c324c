# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The recipes as a user starts them: `accelerate launch --config_file ... recipes/X.py --plan PLAN`."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from datasets import config
from launching import launch
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModelForCausalLM, AutoModelForImageClassification, AutoTokenizer

from accelerate_lshdp import Plan


ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "accelerate_configs" / "cpu_1x2.yaml"
VIT = ROOT / "recipes" / "vit_image_classification.py"
GPT2 = ROOT / "recipes" / "gpt2_causal_lm.py"
TIMEOUT_SECONDS = 110

sys.path.insert(0, str(VIT.parent))

import gpt2_causal_lm  # noqa: E402
import vit_image_classification  # noqa: E402
from embedded_data import digits_dataset  # noqa: E402


@pytest.fixture(scope="module")
def short_text(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One module as training text: less to evaluate than the embedded default."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(Path(textwrap.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    return {"train_file": file, "block_size": 32}


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
    module = {VIT: vit_image_classification, GPT2: gpt2_causal_lm}[recipe]
    module.training_function(module.parse_args(options(output_dir=output_dir, **values)))
    return results(output_dir)


def run_on_two(recipe: Path, output_dir: Path, sizes: list[Any] | None, **values: Any) -> dict[str, Any]:
    """The documented command, in an environment that does not say that this is a CPU machine."""
    output_dir.mkdir(parents=True, exist_ok=True)
    if sizes is not None:
        values["plan"] = output_dir / "plan.json"
        Plan.from_batch_sizes(sizes, strategy="lsdp").save(values["plan"])
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


def same_model(first: Path, second: Path) -> None:
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (first, second))
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


@pytest.mark.parametrize(
    ("recipe", "values"),
    [
        (VIT, {"per_device_train_batch_size": 300, "max_train_steps": 8, "checkpointing_steps": 3}),
        (GPT2, {"max_train_steps": 4, "checkpointing_steps": 2}),
    ],
    ids=["vit", "gpt2"],
)
def test_resumed_run_is_the_uninterrupted_one(
    recipe: Path, values: dict[str, Any], tmp_path: Path, short_text: dict[str, Any]
) -> None:
    """Invariant 5. An epoch of the ViT has 5 steps here: step 3 is inside the first, step 6 inside the second."""
    values = {**values, **(short_text if recipe == GPT2 else {})}
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
