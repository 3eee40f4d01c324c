# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The parts of the recipes that need no training: arguments, data, metric, models, messages."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

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
from datasets import Dataset, DatasetDict, config  # noqa: E402
from learning_rate import scaled_learning_rate  # noqa: E402
from masked_blocks import MaskedBlocks, NewlyMaskedBlocks  # noqa: E402
from token_evaluation import evaluate_tokens  # noqa: E402

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
