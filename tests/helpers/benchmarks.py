"""Small benchmarks in the layout of clip-benchmark/wds_..., of SugarCrepe, SugarCrepe++ and XM3600."""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from .pictures import file_of
from .shards import write_tar

NAMES = ["c", "d e", "", "f", "g", "h i j"]
TEMPLATES = ["a {c}.", "the {c}"]


def coloured(number: int) -> bytes:
    """An image that differs from the others in more than a pixel."""
    return file_of(Image.fromarray(np.random.default_rng(number).integers(0, 256, (16, 16, 3), np.uint8)))


def write_benchmark(folder: Path, texts: Mapping[str, str], samples: Sequence[Sequence[Mapping[str, bytes]]]) -> Path:
    """Writes text files, and shards of samples, each with its files by extension."""
    for name, text in {**texts, "test/nshards.txt": f"{len(samples)}\n"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    number = 0
    for shard, rows in enumerate(samples):
        members = []
        for row in rows:
            members += [(f"s{number:07d}.{extension}", data) for extension, data in row.items()]
            number += 1
        write_tar(folder / f"test/{shard}.tar", members)
    return folder


def write_classes(folder: Path, rows: int = 9, several: bool = False) -> torch.Tensor:
    """Writes labelled images, ordered by class, in two shards; the labels [N], or [N, C] if ``several``."""
    texts = {"classnames.txt": "\n".join(NAMES) + "\n"}
    texts["zeroshot_classification_templates.txt"] = "\n".join(TEMPLATES) + "\n"
    samples = []
    labels = [row * len(NAMES) // rows for row in range(rows)]
    flags = np.random.default_rng(0).integers(0, 2, (rows, len(NAMES)), np.int64)
    for row, label in enumerate(labels):
        file = io.BytesIO()
        np.save(file, flags[row])
        samples.append({"png": coloured(row)} | ({"npy": file.getvalue()} if several else {"cls": str(label).encode()}))
    if several:
        texts["dataset_type.txt"] = "multilabel\n"
    write_benchmark(folder, texts, [samples[:5], samples[5:]])
    return torch.from_numpy(flags) if several else torch.tensor(labels)


def write_retrieval(folder: Path, rows: int = 6) -> list[list[str]]:
    """Writes images with five captions each, one of which has a newline written out; the captions."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    captions = [
        [" ".join(letters[(row + 5 * n + k) % 26] for k in range(1 + n)) for n in range(5)] for row in range(rows)
    ]
    captions[0][1] = r"b \n c"
    samples = [{"jpg": coloured(100 + row), "txt": "\n".join(captions[row]).encode()} for row in range(rows)]
    write_benchmark(folder, {"dataset_type.txt": "retrieval\n"}, [samples[:4], samples[4:]])
    return captions


def write_sugarcrepe(folder: Path, subsets: Sequence[str], rows: int = 5) -> list[list[str]]:
    """Writes the same entries as every subset, with keys that are not contiguous; the captions, of which one is wrong.

    As in SugarCrepe++, there is a second right caption if the folder is called so.
    """
    (folder / "data").mkdir(parents=True)
    (folder / "val2017").mkdir()
    letters, entries, captions = "abcdefghijklmnopqrstuvwxyz", {}, []
    for row in range(rows):
        captions.append([f"{letters[row]} {letters[2 * row]}", f"{letters[row + 7]} c"])
        if folder.name == "sugarcrepe++":
            captions[-1].insert(1, f"{letters[3 * row]} {letters[row]}")
        (folder / f"val2017/{row:012d}.jpg").write_bytes(coloured(200 + row))
        entry = {"filename": f"{row:012d}.jpg", "caption": captions[-1][0], "negative_caption": captions[-1][-1]}
        entries[str(3 * row)] = entry | ({"caption2": captions[-1][1]} if len(captions[-1]) > 2 else {})
    for subset in subsets:
        (folder / f"data/{subset}.json").write_text(json.dumps(entries))
    return captions


def write_xm3600(folder: Path, languages: Sequence[str], rows: int = 6) -> dict[str, list[list[str]]]:
    """Writes the tables of languages, whose images have one to three captions; the captions."""
    import datasets

    letters, captions = "abcdefghijklmnopqrstuvwxyz", {}
    for shift, language in enumerate(languages):
        captions[language] = [
            [f"{letters[row + 3 * n + shift]} {letters[2 * row + n]}" for n in range(1 + row % 3)]
            for row in range(rows)
        ]
        table = {
            "image_id": [f"{row:04x}" for row in range(rows)],
            "captions": captions[language],
            "image": [{"bytes": coloured(300 + row), "path": None} for row in range(rows)],
        }
        (folder / "data").mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_dict(table).to_parquet(folder / f"data/{language}-00000-of-00001.parquet")
    return captions
