# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The parts of the recipes that load, cut, mask and evaluate text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import bert_text_tasks as bert  # noqa: E402
import embedded_data  # noqa: E402
import gpt2_causal_lm as gpt2  # noqa: E402
import text_data  # noqa: E402
from datasets import Dataset, DatasetDict, config  # noqa: E402
from masked_blocks import MaskedBlocks, NewlyMaskedBlocks  # noqa: E402
from token_evaluation import evaluate_tokens  # noqa: E402


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def test_text_is_the_standard_library_with_whole_modules_held_out() -> None:
    assert not set(embedded_data.TRAIN_MODULES) & set(embedded_data.HELD_OUT_MODULES)
    dataset = embedded_data.standard_library_dataset()
    assert len(dataset["train"]) == len(embedded_data.TRAIN_MODULES)
    import textwrap

    assert dataset["validation"]["text"][-1] == Path(textwrap.__file__).read_text(encoding="utf-8")
    assert not set(dataset["train"]["text"]) & set(dataset["validation"]["text"])


def test_missing_standard_library_sources_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_data.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match="argparse.py.*--train_file"):
        embedded_data.standard_library_dataset()


def test_tokenizer_is_the_same_on_every_rank_and_lossless() -> None:
    texts = embedded_data.standard_library_dataset()["train"]["text"][:6]
    first, second = (embedded_data.byte_level_tokenizer(texts, vocab_size=512) for _ in range(2))
    assert len(first) == 512 and first.eos_token_id == first.bos_token_id == 0
    assert first.get_vocab() == second.get_vocab()
    text = "def naïve(x):\n\treturn x  # 漢字"
    assert first.decode(first(text)["input_ids"]) == text
    ids = [tokenizer(texts, verbose=False)["input_ids"] for tokenizer in (first, second)]
    assert embedded_data.fingerprint(ids[0]) == embedded_data.fingerprint(ids[1])


def test_fingerprint_sees_every_token_and_every_row_boundary() -> None:
    data = ([[1, 2], [3]], [[1, 2], [4]], [[1], [2, 3]], [[1, 2]])
    fingerprints = [embedded_data.fingerprint(rows) for rows in data]
    assert len(set(fingerprints)) == 4
    assert all(0 <= fingerprint < 2**63 for fingerprint in fingerprints)


def test_ranks_with_different_texts_are_stopped() -> None:
    rows = [[1, 2, 3]]
    embedded, own = (gpt2.parse_args(["--output_dir", "out", *more]) for more in ([], ["--train_file", "x.txt"]))
    same = SimpleNamespace(device="cpu", gather=lambda here: torch.cat([here, here]))
    text_data.check_same_text(embedded, same, rows)
    other = SimpleNamespace(device="cpu", gather=lambda here: torch.cat([here, here + 1]))
    with pytest.raises(RuntimeError, match="same version of Python"):
        text_data.check_same_text(embedded, other, rows)
    text_data.check_same_text(own, other, rows)


@pytest.mark.parametrize("suffix", [".txt", ".json", ".jsonl", ".csv"])
def test_files_of_text(tmp_path: Path, suffix: str) -> None:
    lines = [f"line number {i}" for i in range(40)]
    file = tmp_path / f"train{suffix}"
    if suffix == ".txt":
        file.write_text("\n".join(lines))
    elif suffix == ".csv":
        file.write_text("\n".join(["content", *lines]))
    else:
        file.write_text("\n".join(json.dumps({"content": line}) for line in lines))
    dataset = text_data.load_text(gpt2.parse_args(["--output_dir", "out", "--train_file", str(file)]))
    assert (len(dataset["train"]), len(dataset["validation"])) == (38, 2)
    assert sorted([*dataset["train"]["text"], *dataset["validation"]["text"]]) == sorted(lines)
    args = gpt2.parse_args(["--output_dir", "out", "--train_file", str(file), "--text_column", "body"])
    with pytest.raises(ValueError, match="--text_column"):
        text_data.load_text(args)


@pytest.mark.parametrize("labels", [["no", "yes"] * 20, [1, 5] * 20], ids=["names", "numbers"])
def test_files_of_labelled_text(tmp_path: Path, labels: list) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(json.dumps({"kind": label, "words": f"line {i}"}) for i, label in enumerate(labels)))
    args = bert.parse_args(["--output_dir", "out", "--train_file", str(file), "--label_column", "kind"])
    dataset = text_data.load_labelled_text(args)
    assert (len(dataset["train"]), len(dataset["validation"])) == (38, 2)
    # The two classes stand in turns in the file, the one that is sorted first first.
    found = {row["text"]: row["label"] for split in dataset.values() for row in split}
    assert found == {f"line {i}": i % 2 for i in range(40)}
    assert dataset["train"].features["label"].names == [str(label) for label in labels[:2]]
    args.label_column = None
    with pytest.raises(ValueError, match="No label column .none found.*--label_column"):
        text_data.load_labelled_text(args)


TEXTS = ["import os\n", "print(1)\n" * 9, "x = 2\n"]


def test_blocks_join_the_documents_and_lose_only_the_rest() -> None:
    tokenizer = embedded_data.byte_level_tokenizer(TEXTS, vocab_size=260)
    split = Dataset.from_dict({"text": TEXTS})
    dataset, end = DatasetDict(train=split, validation=split), tokenizer.eos_token_id
    blocks = text_data.group_into_blocks(dataset, tokenizer, 8, separator=end)["train"]
    joined = [token for text in TEXTS for token in [*tokenizer(text)["input_ids"], end]]
    assert [token for row in blocks["input_ids"] for token in row] == joined[: len(joined) // 8 * 8]
    with pytest.raises(ValueError, match="shorter than one block of 4000"):
        text_data.group_into_blocks(dataset, tokenizer, 4000, separator=end)


def test_blocks_for_bert_have_their_ends() -> None:
    tokenizer = embedded_data.bert_tokenizer(TEXTS, vocab_size=263)
    split = Dataset.from_dict({"text": TEXTS})
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    dataset = DatasetDict(train=split, validation=split)
    blocks = text_data.group_into_blocks(dataset, tokenizer, 8, separator=last, first=[first], last=[last])
    rows = blocks["train"]["input_ids"][:]
    assert all(len(row) == 8 and row[0] == first and row[-1] == last for row in rows)
    joined = [token for text in TEXTS for token in tokenizer(text)["input_ids"][1:]]  # each ends with a separator
    assert [token for row in rows for token in row[1:-1]] == joined[: len(joined) // 6 * 6]
    assert tokenizer.decode(tokenizer(TEXTS[1])["input_ids"], skip_special_tokens=True) == TEXTS[1]
    with pytest.raises(ValueError, match="--block_size 2 has no room"):
        text_data.group_into_blocks(dataset, tokenizer, 2, separator=last, first=[first], last=[last])


class MaskingTokenizer:
    """What masks need of a tokenizer of 1,000 tokens."""

    mask_token_id = 3
    all_special_ids = [0, 1, 2, 3]

    def __len__(self) -> int:
        return 1000


def masked(blocks: type = MaskedBlocks, *, rows: int = 20, probability: float = 0.2, seed: int = 7) -> MaskedBlocks:
    """Blocks of 64 tokens, the first and the last of which are special."""
    ids = np.random.default_rng(0).integers(4, 1000, (rows, 64))
    ids[:, 0], ids[:, -1] = 1, 2
    return blocks(Dataset.from_dict({"input_ids": ids.tolist()}), MaskingTokenizer(), probability, seed)


def test_masks_are_those_of_bert() -> None:
    blocks = masked(rows=500)
    before = torch.tensor(blocks.rows["input_ids"][:])
    ids, labels = (torch.stack([blocks[i][name] for i in range(500)]) for name in ("input_ids", "labels"))
    chosen = labels != -100
    assert torch.equal(labels[chosen], before[chosen]) and torch.equal(ids[~chosen], before[~chosen])
    assert not chosen[:, 0].any() and not chosen[:, -1].any()
    assert chosen[:, 1:-1].float().mean().item() == pytest.approx(0.2, abs=0.01)
    assert len(chosen.sum(dim=1).unique()) > 5  # samples have different numbers of tokens
    hidden, kept = ids[chosen] == 3, ids[chosen] == before[chosen]
    assert hidden.float().mean().item() == pytest.approx(0.8, abs=0.02)
    assert kept.float().mean().item() == pytest.approx(0.1, abs=0.02)
    others = ids[chosen][~hidden & ~kept]
    assert len(others.unique()) > len(others) / 2


def test_masks_depend_on_seed_epoch_and_index_alone() -> None:
    """Invariant 2: not on the order in which a rank reads its samples, nor on what it has read before."""

    def read(blocks: MaskedBlocks, order: list[int]) -> dict[int, list[int]]:
        return {index: blocks[index]["input_ids"].tolist() for index in order}

    indices = list(range(20))
    blocks = masked(NewlyMaskedBlocks)
    first = read(blocks, indices)
    torch.manual_seed(1)
    assert read(masked(NewlyMaskedBlocks), indices[::-1]) == first
    blocks.set_epoch(1)
    second, other = read(blocks, indices), read(masked(seed=8), indices)
    assert all(first[index] not in (second[index], other[index]) for index in indices)
    blocks.set_epoch(0)
    assert read(blocks, [5, 5, 3]) == {5: first[5], 3: first[3]}
    assert not hasattr(masked(), "set_epoch")  # of evaluation: the loader would give it other masks each time


def test_every_block_has_something_to_predict() -> None:
    blocks = masked(probability=1e-9)
    assert [int((blocks[i]["labels"] != -100).sum()) for i in range(20)] == [1] * 20


SOURCE = """\
'''Module text.'''
import os  # not a piece

# A comment
# of two lines.

def outer(x):
    '''What it does.'''
    # inside
    def inner():
        '''More.'''
    return os.getcwd() + '''
    # no comment
    ''' + str(x)
"""


def test_pieces_are_what_their_labels_say() -> None:
    inner = "def inner():\n    pass"
    in_outer = "\n    def inner():\n        pass"
    last_line = r"    return os.getcwd() + '\n    # no comment\n    ' + str(x)"
    assert sorted(embedded_data._pieces(SOURCE)) == [
        ("A comment\nof two lines.", "comment"),
        ("Module text.", "docstring"),
        ("More.", "docstring"),
        ("What it does.", "docstring"),
        (inner, "code"),
        (f"def outer(x):\n{in_outer}\n{last_line}", "code"),
        ("inside", "comment"),
    ]


def test_pieces_have_all_kinds_and_held_out_modules() -> None:
    dataset = embedded_data.standard_library_pieces()
    for split in dataset.values():
        shares = np.bincount(split["label"][:], minlength=3) / len(split)
        assert len(shares) == 3 and shares.min() > 0.1
        assert shares.max() < 0.6  # or a classifier that has learned nothing would be right most of the time
    train, held_out = (set(split["text"][:]) for split in dataset.values())
    assert len(train & held_out) < len(held_out) / 20  # such as a comment that several modules have


def test_block_longer_than_the_model_is_refused() -> None:
    args = gpt2.parse_args(["--output_dir", "out", "--block_size", "257"])
    with pytest.raises(ValueError, match="257 is longer than the model's 256 positions"):
        text_data.choose_block_size(args, SimpleNamespace(config=gpt2.GPT2Config(n_positions=256)))


def test_evaluation_loss_is_weighted_by_tokens() -> None:
    torch.manual_seed(0)
    model = gpt2.GPT2LMHeadModel(gpt2.GPT2Config(n_positions=8, n_embd=16, n_layer=1, n_head=2, vocab_size=32))
    ids = torch.randint(32, (5, 8))
    labels = ids.clone()
    for row, real in enumerate([8, 5, 1, 3, 2]):  # the third sample has no token to predict
        labels[row, real:] = -100
    batches = [{"input_ids": ids[:2], "labels": labels[:2]}, {"input_ids": ids[2:], "labels": labels[2:]}]
    alone = SimpleNamespace(gather_for_metrics=lambda values: values)
    found = evaluate_tokens(alone, model, batches, next_token=True)
    # transformers' own mean over all tokens of the one big batch
    expected = model(input_ids=ids, labels=labels).loss.item()
    assert found == pytest.approx({"eval_loss": expected, "perplexity": np.exp(expected)}, rel=1e-6)


def test_evaluation_loss_of_masked_tokens_is_that_of_the_model() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = bert.BertForMaskedLM(bert.BertConfig(**sizes, vocab_size=32, **bert.NO_DROPOUT))
    ids, labels = torch.randint(32, (5, 8)), torch.full((5, 8), -100)
    labels[0, 3], labels[1], labels[4, :2] = 7, 5, 9
    batches = [{"input_ids": ids[:2], "labels": labels[:2]}, {"input_ids": ids[2:], "labels": labels[2:]}]
    alone = SimpleNamespace(gather_for_metrics=lambda values: values)
    found = evaluate_tokens(alone, model, batches, next_token=False)
    assert found["eval_loss"] == pytest.approx(model(input_ids=ids, labels=labels).loss.item(), rel=1e-6)
