# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A Hub cache with tiny models of fixed random weights under the names that scripts use.

Transformers find them by themselves when the Hub is offline, so its real code for loading runs. Dropout is 0: with it
no two ways of cutting a batch draw alike, and nothing could be compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_data import sentences


REVISION = "0" * 40
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'] + ' ' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant ' }}{% endif %}"
)


def write_models(hub: Path, dtype: Any) -> None:
    """Writes every model of the suite into the Hub cache at ``hub`` (what ``HF_HUB_CACHE`` names).

    Args:
        hub: a folder that may be missing.
        dtype: torch's floating-point type, in which the libraries then load them.
    """
    import torch
    import transformers

    words = word_tokenizer()
    pieces = piece_tokenizer()
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    bert = transformers.BertConfig(
        **small,
        vocab_size=len(words),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=256,
        pad_token_id=words.pad_token_id,
    )
    gpt2 = transformers.GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=256,
        vocab_size=len(pieces),
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=pieces.bos_token_id,
        eos_token_id=pieces.eos_token_id,
        pad_token_id=pieces.pad_token_id,
    )
    text = {**small, "num_key_value_heads": 2, "vocab_size": len(pieces), "max_position_embeddings": 256}
    ends = {name: getattr(pieces, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    encoder_decoder = {"decoder_start_token_id": pieces.pad_token_id, **ends}
    t5 = transformers.T5Config(
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        vocab_size=len(pieces),
        dropout_rate=0.0,
        **encoder_decoder,
    )
    marian = transformers.MarianConfig(
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        vocab_size=len(pieces),
        dropout=0.0,
        max_position_embeddings=256,
        **encoder_decoder,
    )
    vit = transformers.ViTConfig(**small, image_size=32, patch_size=8)
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    made: list[tuple[str, Any, Any, Any]] = [
        ("bert-base-cased", transformers.BertForMaskedLM, bert, words),
        ("openai-community/gpt2", transformers.GPT2LMHeadModel, gpt2, pieces),
        ("HuggingFaceTB/SmolLM-360M", transformers.LlamaForCausalLM, transformers.LlamaConfig(**text, **ends), pieces),
        ("Qwen/Qwen2.5-0.5B", transformers.Qwen2ForCausalLM, transformers.Qwen2Config(**text, **ends), pieces),
        ("google-t5/t5-small", transformers.T5ForConditionalGeneration, t5, pieces),
        ("Helsinki-NLP/opus-mt-en-ro", transformers.MarianMTModel, marian, pieces),
        ("google/vit-base-patch16-224-in21k", transformers.ViTForImageClassification, vit, processor),
    ]
    for name, kind, config, companion in made:
        folder = hub / ("models--" + name.replace("/", "--"))
        snapshot = folder / "snapshots" / REVISION
        torch.manual_seed(0)
        kind(config).to(dtype).save_pretrained(snapshot)
        companion.save_pretrained(snapshot)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(REVISION)


def word_tokenizer() -> Any:
    """A WordPiece tokenizer with BERT's special tokens."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(sentences(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=128, model_input_names=inputs, **names)


def piece_tokenizer() -> Any:
    """A byte-level BPE tokenizer with ends of text, padding and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(sentences(), trainer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=128,
        model_input_names=["input_ids", "attention_mask"],
        **dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True)),
    )
    made.chat_template = CHAT_TEMPLATE
    return made
