# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A model is measured on fake tensors as real ones would show it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification

from accelerate_lshdp.estimation.model_measurement import measure_config
from accelerate_lshdp.estimation.model_sources import KNOWN_CONFIGS, load_config, model_class_of


def tiny_gpt2(**changes) -> GPT2Config:
    return GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=50, n_positions=16, **changes)


def tiny_vit() -> ViTConfig:
    return ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, image_size=16, patch_size=4
    )


def real_saved_bytes(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> int:
    """What a real forward keeps, counted by addresses of real memory."""
    known = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers(), *inputs.values()]}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(**inputs).loss
    total = sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in known)
    assert loss.requires_grad
    return total


@pytest.mark.parametrize("kind", ["gpt2", "vit"])
def test_activations_are_those_of_a_real_forward(kind: str) -> None:
    def inputs(samples: int) -> dict[str, torch.Tensor]:
        if kind == "gpt2":
            tokens = torch.zeros(samples, 16, dtype=torch.long)
            return {"input_ids": tokens, "labels": tokens}
        return {"pixel_values": torch.zeros(samples, 3, 16, 16), "labels": torch.zeros(samples, dtype=torch.long)}

    config = tiny_gpt2() if kind == "gpt2" else tiny_vit()
    model = (GPT2LMHeadModel if kind == "gpt2" else ViTForImageClassification)(config).train()
    measured = measure_config(config)
    real = real_saved_bytes(model, inputs(4)) - real_saved_bytes(model, inputs(2))
    assert measured.activation_bytes == pytest.approx(real / 2, rel=0.01)
    assert measured.activation_bytes > 0
    assert measured.activations(3) == 3 * (measured.activation_bytes + measured.transient_bytes)
    assert measured.counts.parameters == sum(p.numel() for p in model.parameters())


def test_parameters_units_and_operations_by_hand() -> None:
    measured = measure_config(tiny_gpt2())
    block = 2 * 64 + (32 * 96 + 96) + (32 * 32 + 32) + (32 * 128 + 128) + (128 * 32 + 32)
    assert measured.counts.units == (block, block)
    # Embeddings, tied to the head, and the last norm.
    assert measured.counts.root == 50 * 32 + 16 * 32 + 64
    assert measured.counts.trainable == measured.counts.parameters == sum(r * c for r, c in measured.matrices)
    # Per token: twice every weight of a matrix in the forward, and the two products of attention with 16 tokens.
    weights = 2 * (32 * 96 + 32 * 32 + 2 * 32 * 128) + 32 * 50
    forward = 16 * (2 * weights + 2 * 2 * 2 * 16 * 32)
    assert measured.flops == pytest.approx(3 * forward, rel=0.01)
    # Attention counts where torch fuses it, too.
    fused = measure_config(tiny_gpt2(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0))
    assert fused.flops == pytest.approx(measured.flops, rel=0.03)
    assert fused.activation_bytes < measured.activation_bytes


def test_half_precision_keeps_fewer_bytes_and_shorter_samples_too() -> None:
    whole, half = measure_config(tiny_vit()), measure_config(tiny_vit(), mixed_precision="bf16")
    assert 0.45 * whole.activation_bytes < half.activation_bytes < 0.75 * whole.activation_bytes
    assert torch.get_default_dtype() == torch.float32
    short, long = (measure_config(tiny_gpt2(), sequence_length=length) for length in (4, 16))
    assert short.activation_bytes < long.activation_bytes / 3
    with pytest.raises(ValueError, match="at most 16"):
        measure_config(tiny_gpt2(), sequence_length=17)


def test_the_benchmarks_model_has_as_many_parameters_as_it_says() -> None:
    assert measure_config(load_config("vit-14m")).counts.parameters == 14_296_706


def test_sources(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    tiny_vit().to_json_file(file)
    assert load_config(str(file)).hidden_size == 32
    tiny_gpt2().save_pretrained(tmp_path)
    assert load_config(str(tmp_path)).n_embd == 32
    assert all(load_config(name).model_type == kind for name, (kind, _) in KNOWN_CONFIGS.items())
    assert model_class_of(load_config("gpt2")).__name__ == "GPT2LMHeadModel"
    assert model_class_of(load_config("bert-base-uncased")).__name__ == "BertForMaskedLM"
    named = tiny_gpt2(architectures=["GPT2ForSequenceClassification"], pad_token_id=0)
    assert measure_config(named).name.startswith("GPT2ForSequenceClassification")


def test_what_is_no_configuration_is_named(tmp_path: Path) -> None:
    no_model, no_json = tmp_path / "a.json", tmp_path / "b.json"
    no_model.write_text(json.dumps({"hidden_size": 3}))
    no_json.write_text("{")
    for source, message in (
        (str(no_model), 'no "model_type"'),
        (str(no_json), "no JSON document"),
        (str(tmp_path), "no config.json"),
        (str(tmp_path / "c.json"), "no file or folder"),
        ("somebody/some-model", "Hugging Face Hub gave no configuration"),
    ):
        with pytest.raises(ValueError, match=message):
            load_config(source)
    no_model.write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(ValueError, match="cannot make a configuration"):
        load_config(str(no_model))
