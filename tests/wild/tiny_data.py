# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Tiny data sets under Hub names, with the columns and splits that the scripts expect.

Texts are sentences of Python's own documentation, images scikit-learn's handwritten digits; what is labelled is
arbitrary, since the suite compares parameters, not scores. Lengths vary, so that padding and token counts do.
"""

from __future__ import annotations

import re
from itertools import cycle, islice
from pathlib import Path
from typing import Any


ROWS = {"train": 600, "validation": 12, "test": 12}
NER_LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


def sentences() -> list[str]:
    """Sentences of 4 to 30 words in a fixed order."""
    from pydoc_data.topics import topics

    found = []
    for topic in sorted(topics):
        for sentence in re.split(r"(?<=[.:])\s+", " ".join(topics[topic].split())):
            words = re.findall(r"[A-Za-z]+", sentence)
            if 4 <= len(words) <= 30:
                found.append(" ".join(words).lower())
    return found


def write_data(folder: Path) -> None:
    """Writes every data set of the suite, each into the sub-folder that `hub_stand_in` looks for."""
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Sequence, Value

    text = sentences()

    def taken(start: int, count: int) -> list[str]:
        return list(islice(cycle(text), start % len(text), start % len(text) + count))

    def store(name: str, columns: Any, features: Features | None = None) -> None:
        data = DatasetDict(
            {
                part: Dataset.from_dict(columns(1000 * number, rows), features=features)
                for number, (part, rows) in enumerate(ROWS.items())
            }
        )
        data.save_to_disk(str(folder / name))

    def pairs(start: int, rows: int) -> dict[str, list]:
        return {
            "sentence1": taken(start, rows),
            "sentence2": taken(start + 7, rows),
            "label": [len(s) % 2 for s in taken(start, rows)],
            "idx": list(range(rows)),
        }

    labels = ClassLabel(names=["not_equivalent", "equivalent"])
    texts = {"sentence1": Value("string"), "sentence2": Value("string")}
    store("nyu-mll--glue--mrpc", pairs, Features({**texts, "label": labels, "idx": Value("int32")}))

    def entailed(start: int, rows: int) -> dict[str, list]:
        premises = taken(start, rows)
        return {
            "premise": premises,
            "hypothesis": taken(start + 9, rows),
            "label": [len(s) % 3 for s in premises],
        }

    kinds = ClassLabel(names=["entailment", "neutral", "contradiction"])
    texts = {"premise": Value("string"), "hypothesis": Value("string")}
    store("xnli--en", entailed, Features({**texts, "label": kinds}))

    def tagged(start: int, rows: int) -> dict[str, list]:
        words = [s.split() for s in taken(start, rows)]
        return {
            "id": [str(i) for i in range(rows)],
            "tokens": words,
            "ner_tags": [[len(w) % len(NER_LABELS) for w in sentence] for sentence in words],
        }

    tags = Sequence(ClassLabel(names=NER_LABELS))
    columns = {"id": Value("string"), "tokens": Sequence(Value("string")), "ner_tags": tags}
    store("eriktks--conll2003", tagged, Features(columns))

    def questions(start: int, rows: int) -> dict[str, list]:
        contexts = [" ".join(taken(start + 3 * i, 3)) for i in range(rows)]
        answers = [context.split()[len(context) % 5] for context in contexts]
        return {
            "id": [f"{start}-{i}" for i in range(rows)],
            "title": ["python"] * rows,
            "context": contexts,
            "question": ["where is " + s for s in taken(start + 11, rows)],
            "answers": [{"text": [a], "answer_start": [c.index(a)]} for a, c in zip(answers, contexts, strict=True)],
        }

    store("rajpurkar--squad", questions)

    def choices(start: int, rows: int) -> dict[str, list]:
        endings = {f"ending{i}": taken(start + 13 * (i + 1), rows) for i in range(4)}
        sent2 = [s.split()[0] for s in taken(start + 5, rows)]
        return {
            "sent1": taken(start, rows),
            "sent2": sent2,
            **endings,
            "label": [len(s) % 4 for s in endings["ending0"]],
        }

    for name in ("swag", "allenai--swag"):  # its old name and its present one
        store(f"{name}--regular", choices)
    store("Salesforce--wikitext--wikitext-2-raw-v1", lambda start, rows: {"text": taken(start, rows)})
    # Most lines of the real one are empty too, and accelerate's example takes the first 500.
    sparse = [s if i % 25 == 0 else "" for i, s in enumerate(taken(0, 500))]
    store("Salesforce--wikitext--wikitext-2-v1", lambda start, rows: {"text": sparse})

    def translated(start: int, rows: int) -> dict[str, list]:
        return {"translation": [{"en": a, "ro": " ".join(reversed(a.split()[:-1]))} for a in taken(start, rows)]}

    store("wmt--wmt16--ro-en", translated)

    def message(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}

    def conversations(start: int, rows: int) -> dict[str, list]:
        asked, answered = taken(start, rows), taken(start + 1, rows)
        talks = [[message("user", a), message("assistant", b)] for a, b in zip(asked, answered, strict=True)]
        return {"messages": talks}

    store("trl-lib--Capybara", conversations)

    def preferences(start: int, rows: int) -> dict[str, list]:
        asked, good, bad = (taken(start + shift, rows) for shift in (0, 1, 2))
        return {
            "chosen": [[message("user", a), message("assistant", b)] for a, b in zip(asked, good, strict=True)],
            "rejected": [[message("user", a), message("assistant", b)] for a, b in zip(asked, bad, strict=True)],
        }

    store("trl-lib--ultrafeedback_binarized", preferences)

    def unpaired(start: int, rows: int) -> dict[str, list]:
        return {
            "prompt": [[message("user", s)] for s in taken(start, rows)],
            "completion": [[message("assistant", s)] for s in taken(start + 1, rows)],
            "label": [len(s) % 2 == 0 for s in taken(start, rows)],
        }

    store("trl-lib--kto-mix-14k", unpaired)

    images, digits = digit_images()

    def pictured(start: int, rows: int) -> dict[str, list]:
        chosen = [(start + i) % len(images) for i in range(rows)]
        return {"image": [images[i] for i in chosen], "label": [digits[i] for i in chosen]}

    names = ClassLabel(names=[str(digit) for digit in range(10)])
    store("ylecun--mnist", pictured, Features({"image": Image(), "label": names}))


def digit_images() -> tuple[list[Any], list[int]]:
    """Handwritten digits as colour images of 32 pixels, and which digits they are."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    grey = [Image.fromarray((16 * picture).clip(0, 255).astype(np.uint8)) for picture in digits.images]
    return [picture.resize((32, 32)).convert("RGB") for picture in grey], digits.target.tolist()


def write_pets(folder: Path, count: int) -> None:
    """Writes ``count`` images named as accelerate's image examples expect: ``CLASS_NUMBER.jpg``."""
    folder.mkdir(parents=True)
    images, digits = digit_images()
    for i in range(count):
        images[i].save(folder / f"digit{digits[i] % 3}_{i}.jpg")
