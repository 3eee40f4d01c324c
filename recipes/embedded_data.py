# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Real data that needs no download, so that every recipe runs on a machine without internet.

Images are scikit-learn's `load_digits`: 1,797 handwritten digits of 8 x 8 pixels (UCI "Optical Recognition of
Handwritten Digits"). Text is the source code of Python's own standard library, with a byte-level BPE tokenizer
trained on it; for classifiers it is taken to pieces, which are code, comments or docstrings. All have a fixed held-out
split, the same in every run and on every rank.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value


HELD_OUT_DIGITS = 297
# Modules that are one plain .py file in every Python since 3.10: only their text depends on the version.
TRAIN_MODULES = (
    "argparse ast bdb calendar codecs configparser contextlib csv dataclasses doctest enum fractions ftplib "
    "functools gettext gzip heapq imaplib inspect ipaddress locale mailbox mimetypes optparse os pdb pickle "
    "pickletools platform plistlib pprint pstats selectors smtplib socket socketserver ssl statistics "
    "subprocess tarfile tempfile threading tokenize trace traceback turtle typing uuid weakref webbrowser"
).split()
HELD_OUT_MODULES = "difflib random shutil textwrap".split()
PIECE_KINDS = ["code", "comment", "docstring"]
SHORTEST_PIECE = 40  # characters; shorter ones say too little
END_OF_TEXT = "<|endoftext|>"
BERT_TOKENS = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}


def digits_dataset() -> DatasetDict:
    """Handwritten digits as a `datasets.DatasetDict` with columns `image` (8 x 8, grey) and `label`.

    Returns:
        Splits `train` (1,500 images) and `validation` (297 images), disjoint.
    """
    from PIL.Image import fromarray
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)  # load_digits counts ink from 0 to 16
    # The file is ordered by writer: without a permutation the last writers alone would be held out.
    order = np.random.RandomState(0).permutation(len(pixels))
    features = Features({"image": Image(), "label": ClassLabel(names=[str(digit) for digit in range(10)])})

    def split(indices: np.ndarray) -> Dataset:
        columns = {"image": [fromarray(pixels[i]) for i in indices], "label": [int(digits.target[i]) for i in indices]}
        return Dataset.from_dict(columns, features=features)

    return DatasetDict(train=split(order[HELD_OUT_DIGITS:]), validation=split(order[:HELD_OUT_DIGITS]))


def standard_library_dataset() -> DatasetDict:
    """Source code of the running Python's standard library, one row (column `text`) a module.

    Whole modules are held out, so no line of a validation text is trained on. The text depends on the Python version:
    compare `fingerprint` over the ranks when nodes may run different ones.

    Raises:
        FileNotFoundError: this Python was installed without the sources of its standard library.
    """

    def split(modules: list[str]) -> Dataset:
        return Dataset.from_dict({"text": _sources(modules)}, features=Features({"text": Value("string")}))

    return DatasetDict(train=split(TRAIN_MODULES), validation=split(HELD_OUT_MODULES))


def standard_library_pieces() -> DatasetDict:
    """Functions, comments and docstrings of the standard library: a task for classifiers of text.

    A row has a `text` and as its `label` the kind of the piece (`PIECE_KINDS`). What would give it away is left out:
    the `#` of comments, the quotes of docstrings, and both of these inside functions. Modules are held out as in
    `standard_library_dataset`.

    Raises:
        FileNotFoundError: this Python was installed without the sources of its standard library.
    """
    features = Features({"text": Value("string"), "label": ClassLabel(names=PIECE_KINDS)})

    def split(modules: list[str]) -> Dataset:
        pieces = [piece for source in _sources(modules) for piece in _pieces(source)]
        texts, kinds = zip(*[piece for piece in pieces if len(piece[0]) >= SHORTEST_PIECE], strict=True)
        return Dataset.from_dict({"text": texts, "label": kinds}, features=features)

    return DatasetDict(train=split(TRAIN_MODULES), validation=split(HELD_OUT_MODULES))


def _sources(modules: list[str]) -> list[str]:
    library = Path(sysconfig.get_path("stdlib"))
    missing = [name for name in modules if not (library / f"{name}.py").is_file()]
    if missing:
        raise FileNotFoundError(
            f"The embedded text is the source code of Python's standard library, but {library} has no "
            f"{missing[0]}.py. Use another Python, or pass your own text with --train_file."
        )
    return [(library / f"{name}.py").read_text(encoding="utf-8") for name in modules]


def _pieces(source: str) -> Iterator[tuple[str, str]]:
    """The pieces of a module, each with its kind."""
    tree = ast.parse(source)
    functions, strings = (ast.FunctionDef, ast.AsyncFunctionDef), (ast.Constant, ast.JoinedStr)
    # Lines that begin inside a string; a # there begins no comment.
    spans = [(node.lineno, node.end_lineno) for node in ast.walk(tree) if isinstance(node, strings)]
    inside_strings = {line for first, last in spans for line in range(first + 1, last + 1)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *functions)) and ast.get_docstring(node):
            yield ast.get_docstring(node), "docstring"
            node.body = node.body[1:] or [ast.Pass()]
    for node in ast.walk(tree):
        if isinstance(node, functions):
            yield ast.unparse(node), "code"  # without comments
    comment: list[str] = []
    for number, line in enumerate([*source.split("\n"), ""], start=1):
        if line.lstrip().startswith("#") and number not in inside_strings:
            comment.append(line.strip().lstrip("#").strip())
        elif comment:
            yield "\n".join(comment), "comment"
            comment = []


def byte_level_tokenizer(texts: list[str], vocab_size: int = 1024):
    """Train a byte-level BPE tokenizer in the manner of GPT-2 on `texts`.

    Args:
        texts: training documents. The result depends on nothing else, so every rank trains the same tokenizer.
        vocab_size: number of tokens, with the 256 bytes and the end-of-text token.

    Returns:
        A `transformers.PreTrainedTokenizerFast` that `save_pretrained` and `AutoTokenizer` understand.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer = _byte_level_bpe(texts, vocab_size, [END_OF_TEXT])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)


def bert_tokenizer(texts: list[str], vocab_size: int = 1024):
    """Train a byte-level BPE tokenizer with the special tokens of BERT on `texts`.

    As `byte_level_tokenizer`, but a text gets a [CLS] before it and a [SEP] behind it, and there are tokens for what
    is masked and for padding.
    """
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    tokenizer = _byte_level_bpe(texts, vocab_size, list(BERT_TOKENS.values()))
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **BERT_TOKENS)


def _byte_level_bpe(texts: list[str], vocab_size: int, special_tokens: list[str]):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def fingerprint(rows: Iterable[list[int]]) -> int:
    """A 63-bit hash of token ids, to check that all ranks hold the same data (it fits an int64 tensor)."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(np.asarray([len(row), *row], dtype="<i8").tobytes())
    return int.from_bytes(digest.digest()[:8], "big") >> 1
